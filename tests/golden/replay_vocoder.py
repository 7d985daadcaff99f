"""The vocoder part of the `token2wav_*` traces: mel frames -> samples."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from tests.golden.compare import Trace
from worker.models.minicpmo45.voice_config import read_hift_config
from worker.nn.causal_vocoder import CausalVocoder
from worker.nn.hift import Hift, HiftConfig, hift_weights, legacy_config
from worker.nn.legacy_vocoder import LegacyVocoder
from worker.nn.vocoder import Vocoder

ASSETS = {
    "legacy": Path("checkpoint/assets/token2wav"),
    "causal": Path("checkpoint/assets_causal/token2wav"),
}
WAVE_STATS_REL = 0.02
"""RMS of a chunk, as its RMS error (README, 3)."""
PEAK_REL = 0.05
"""Largest sample of a chunk: single samples may deviate more."""


def replay_vocoder(trace: Trace, folder: Path, mels: Mapping[str, Tensor]) -> None:
    """Check everything behind the mel.

    Args:
        trace: `token2wav_legacy` or `token2wav_causal`.
        folder: the golden folder.
        mels: our mel `[1, 80, F]` of each chunk by its name ("t0.c0"), and of "whole".
    """
    layout = trace.fields["layout"]
    assets = folder / ASSETS[layout]
    if layout == "causal":
        vocoder = _causal(trace, assets)
        _check_causal_net(trace, vocoder)
    else:
        vocoder = _legacy(assets / "hift.pt")
        _check_legacy_net(trace, vocoder)
    _check_chunks(trace, vocoder, mels)
    _check_wave(trace, "whole", "wav_zero", vocoder.whole(mels["whole"]))


def _check_chunks(trace: Trace, vocoder: Vocoder, mels: Mapping[str, Tensor]) -> None:
    """All turns of the trace on one row, which holds NaN before each."""
    turn = None
    for i, chunk in enumerate(trace.fields["chunks"]):
        path, name = f"chunks[{i}]", chunk["name"]
        if chunk["turn"] != turn:
            vocoder.poison(0)
            vocoder.start_turn(0)
            turn = chunk["turn"]
        (samples,) = vocoder.chunk([0], mels[name], is_last=chunk["last"])
        _check_wave(trace, name, "wav", samples[None])
        trace.equal(f"{path}.samples", samples.numel())
        peak, rms = chunk["wav_absmax"], chunk["wav_rms"]
        trace.equal(f"{path}.wav_absmax", float(samples.abs().max()), abs_=PEAK_REL * peak)
        ours = float(samples.double().pow(2).mean().sqrt())
        trace.equal(f"{path}.wav_rms", ours, abs_=WAVE_STATS_REL * rms)
        saved = vocoder.save(0).tensors
        shapes = {key: list(tensor.shape) for key, tensor in saved.items()}
        trace.equal(f"{path}.vocoder_cache", shapes)


def _check_wave(trace: Trace, name: str, kind: str, samples: Tensor) -> None:
    """Compare a waveform that the trace holds whole or as every K-th sample."""
    stem = f"{name}.{kind}"
    for found in [key for key in trace.tensors if key == stem or key.startswith(f"{stem}_sub")]:
        step = int(found.removeprefix(f"{stem}_sub")) if found != stem else 1
        trace.check_wave(found, samples[..., ::step])


def _check_legacy_net(trace: Trace, vocoder: LegacyVocoder) -> None:
    hift, mel = vocoder.hift, trace.take("hift.mel")
    f0 = hift.f0(mel)
    trace.check("hift.f0", f0)
    zero = vocoder.source_of(f0)
    trace.check_wave("hift.source_zero", zero)
    # With their source in place of ours the phase is out of play, so this one is tight.
    theirs = hift(mel, trace.tensors["hift.source_zero"])
    trace.check_every("hift.wav_from_source_zero", theirs)

    trace.take("in.legacy_phase")  # has no effect, see LegacyVocoder
    recorded = LegacyVocoder(hift, n_rows=1, noise=trace.take("in.legacy_noise")[0])
    source = recorded.source_of(f0)
    _check_wave(trace, "hift", "source_recorded", source)
    _check_wave(trace, "hift", "wav_recorded", hift(mel, source))


def _check_causal_net(trace: Trace, vocoder: CausalVocoder) -> None:
    trace.check("hift.f0", vocoder.hift.f0(trace.take("hift.mel")))


def _load(path: Path, config: HiftConfig) -> Hift:
    with torch.device("meta"):
        hift = Hift(config)
    source = torch.load(path, weights_only=True, map_location="cpu")
    hift.load_state_dict(hift_weights(source, config), strict=True, assign=True)
    return hift


def _legacy(path: Path) -> LegacyVocoder:
    config = legacy_config(torch.load(path, weights_only=True, map_location="cpu"))
    silent = torch.zeros(1, config.n_harmonics)
    return LegacyVocoder(_load(path, config), n_rows=1, noise=silent)


def _causal(trace: Trace, assets: Path) -> CausalVocoder:
    hift = _load(assets / "hift.pt", read_hift_config(assets / "config.yaml"))
    original = _legacy(assets / "hift_original.pt")
    noise = trace.take("in.sine_noise_table")[0]
    return CausalVocoder(hift, n_rows=1, noise=noise, original=original)
