"""Trace `audio`: log-mel features and the audio encoder, of whole clips and of a stream."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tests.golden.compare import Trace, clip, wave
from tests.golden.loaded import load_parts
from worker.nn.audio_encoder import AudioCache, AudioEncoder
from worker.nn.decoder import Rows
from worker.nn.mel import SAMPLE_RATE_HZ, StreamingMel, clip_mel

LONG_STRIDE = 7
"""Of the rows kept of a long clip's first piece (README, 4.1)."""
FIELD_ABS = 1e-4
"""Of the features' extremes, which lie near 1."""
INPUTS = frozenset({"name", "start", "samples", "source"})


def replay(trace: Trace, folder: Path) -> None:
    encoder = load_parts(folder).audio
    base_pcm = trace.take("base_pcm").numpy()
    trace.equal("sample_rate", SAMPLE_RATE_HZ)
    for index in range(len(trace.fields["offline"])):
        check_clip(trace, encoder, base_pcm, index)
    check_stream(trace, encoder, base_pcm)


def check_clip(
    trace: Trace, encoder: AudioEncoder, base_pcm: NDArray[np.int16], index: int
) -> None:
    fields, path = trace.fields["offline"][index], f"offline[{index}]"
    for key in INPUTS & fields.keys():
        trace.given(f"{path}.{key}")
    samples = clip(base_pcm, fields["start"], fields["samples"])
    mel, lens = clip_mel(samples, encoder.config.n_mels)

    counts = [encoder.config.n_embeddings(length) for length in lens]
    ours = {
        "mel_frames": mel.shape[2],
        "shape": list(mel.shape),
        "lens": list(lens),
        "tokens": sum(counts),
    }
    for key in fields.keys() - INPUTS:
        trace.equal(f"{path}.{key}", ours[key])
    for name in names(trace, f"offline.{fields['name']}."):
        part = name.rsplit(".", 1)[1]
        if part.startswith("mel"):
            trace.check(name, thinned(part, mel))
            continue
        embeddings = encoder.encode_clip(
            mel, lens, is_chunked="chunked" in part, hears_padding=True
        )
        piece = re.search(r"_(\d+)$", part)
        if piece is None:
            trace.check(name, thinned(part, embeddings))
            continue
        number = int(piece[1])
        rows = embeddings.split(counts)[number]
        trace.check(name, rows[::LONG_STRIDE] if number == 0 else rows)


def check_stream(trace: Trace, encoder: AudioEncoder, base_pcm: NDArray[np.int16]) -> None:
    gains = trace.given("gains")
    mel_state = StreamingMel(encoder.config.n_mels)
    cache = AudioCache.allocate(encoder.config, n_slots=2)
    slot, past = 1, 0
    cache.poison(slot)
    for index, fields in enumerate(trace.fields["streaming"]):
        unit = trace.given(f"streaming[{index}].unit")
        mel = mel_state.push(wave(base_pcm, gains, unit))
        kv_before = past
        if encoder.config.reset_due(past, mel.shape[1]):
            past = 0
        n_frames = encoder.config.stream_frames(mel.shape[1], is_first=index == 0)
        embeddings = encoder.stream(
            cache,
            mel[None],
            torch.tensor([slot]),
            torch.tensor([past]),
            is_first=index == 0,
            reach=Rows((slot,), (past + n_frames,)),
        )[0]
        past += n_frames
        ours = {
            "mel_frames": mel.shape[1],
            "mel_min": float(mel.min()),
            "mel_max": float(mel.max()),
            "tokens": len(embeddings),
            "kv_before": kv_before,
            "kv_after": past,
            "dynamic_floor": mel_state.dynamic_floor,
            "buffer_samples": mel_state.buffer_samples,
            "base_T": mel_state.base_frames,
        }
        for key in fields.keys() - {"unit"}:
            trace.equal(f"streaming[{index}].{key}", ours[key], FIELD_ABS)
        for name in names(trace, f"stream.u{unit:02d}."):
            part = name.rsplit(".", 1)[1]
            trace.check(name, thinned(part, mel[None] if part.startswith("mel") else embeddings))
    for name in names(trace, "stream.last_kv."):
        layer, side = re.search(r"layer(\d+)\.(key|value)$", name).groups()
        tensors = cache.keys if side == "key" else cache.values
        trace.check(name, tensors[int(layer)][slot : slot + 1, :, :past])


def names(trace: Trace, prefix: str) -> list[str]:
    return [name for name in trace.tensors if name.startswith(prefix)]


def thinned(part: str, ours: Tensor) -> Tensor:
    """What a name with `_subK` (last axis) or `_rowsK` (first axis) keeps."""
    every = re.search(r"_(sub|rows)(\d+)$", part)
    if every is None:
        return ours
    step = int(every[2])
    return ours[..., ::step] if every[1] == "sub" else ours[::step]
