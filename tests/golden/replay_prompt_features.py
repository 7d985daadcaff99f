"""What a reference voice becomes: speech tokens, speaker features, mel."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import Tensor

from tests.golden.compare import Trace, clip
from worker.models.minicpmo45.voice import fbank, prompt_mel24k
from worker.nn.mel import window_mel
from worker.nn.s3_tokenizer import S3Tokenizer, codes_of, s3_config, s3_weights

DIGITS_REL = 5e-4
"""The original's own rounding noise is 9.3e-5 of the largest digit; codes have to be equal."""


def replay(trace: Trace, folder: Path) -> None:
    base_pcm = load_file(folder / "traces" / "audio.safetensors")["base_pcm"].numpy()
    # The text names two ranges of base_pcm: that of S3 and fbank, then that of the 24 kHz mel.
    ranges = re.findall(r"base_pcm\[(\d+):(\d+)\]", trace.given("inputs"))
    samples, samples_24k = (clip(base_pcm, int(a), int(b) - int(a)) for a, b in ranges)
    _check_tokenizer(trace, base_pcm, samples)

    features = fbank(torch.from_numpy(samples))
    trace.equal("fbank_frames", len(features))
    trace.check_every("fbank_minus_mean", features - features.mean(dim=0), dim=0)
    mel = prompt_mel24k(torch.from_numpy(samples_24k))
    trace.equal("prompt_mel24k_frames", mel.shape[1])
    trace.check_every("prompt_mel24k", mel)


def _check_tokenizer(
    trace: Trace, base_pcm: NDArray[np.int16], samples: NDArray[np.float32]
) -> None:
    tokenizer = _tokenizer(trace)
    n_mels = tokenizer.config.n_mels
    mel = window_mel(samples, len(samples), n_mels)
    trace.check_every("s3.mel", mel)
    n_short = trace.fields["s3_short"]["mel_frames"]
    for name, part in (("full", mel), ("short", mel[:, :n_short])):
        digits = tokenizer.unrounded(part[None])[0]
        trace.check(f"s3.{name}.digits_before_round", digits, rel=DIGITS_REL)
        trace.check(f"s3.{name}.codes", codes_of(digits)[None])
        trace.equal(f"s3_{name}.mel_frames", part.shape[1])
        trace.equal(f"s3_{name}.codes", len(digits))
        distance = float(((digits % 1) - 0.5).abs().min())
        trace.equal(f"s3_{name}.min_distance_to_rounding_edge", distance, abs_=DIGITS_REL)
    trace.given("s3_long.source")
    n_long = trace.given("s3_long.samples")
    codes = tokenizer(window_mel(clip(base_pcm, 0, n_long), n_long, n_mels))
    trace.check("s3.long.codes", codes[None])
    trace.equal("s3_long.codes", len(codes))


def _tokenizer(trace: Trace) -> S3Tokenizer:
    source: dict[str, Tensor] = {
        name.removeprefix("s3.w."): trace.take(name).float()
        for name in list(trace.tensors)
        if name.startswith("s3.w.")
    }
    config = s3_config(source)
    with torch.device("meta"):
        tokenizer = S3Tokenizer(config)
    tokenizer.load_state_dict(s3_weights(source, config), strict=True, assign=True)
    return tokenizer
