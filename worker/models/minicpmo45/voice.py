"""A reference voice becomes what the speech decoder takes: codes, a mel, a speaker vector.

As MiniCPM-o 4.5's reference prepares a prompt (Token2Wav, `prompt_wav`), once per voice. The two
networks are the published ONNX files, run on one CPU thread. They are optional: without them a
server speaks in a neutral voice and takes none from clients.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import onnxruntime
import torch
from numpy.typing import NDArray
from onnxruntime.capi import onnxruntime_pybind11_state as onnx_errors
from torch import Tensor
from torch.nn import functional

from shared.errors import BadAudio, ModelLoadError
from shared.limits import INPUT_SAMPLE_RATE_HZ, MAX_REFERENCE_VOICE_S
from worker.nn.mel import mel_filters, window_mel

log = logging.getLogger(__name__)

TOKENIZER_FILE = "speech_tokenizer_v2_25hz.onnx"
SPEAKER_FILE = "campplus.onnx"

MAX_USED_S = 17
"""The speech decoder has room for 1000 mel frames, 150 of them for what is being said."""
MIN_S = 1.0
QUIETEST_RMS = 3e-4
"""-70 dB: quieter than the noise of a room, nobody speaks there."""

SILENT_CODE = 4218
N_NEUTRAL_CODES = 50
SPEAKER_SIZE = 192
N_S3_MELS = 128
N_CACHED = 16
"""Voices that are kept: 100 kB each."""


@dataclass(frozen=True, slots=True, eq=False)
class VoiceFeatures:
    """One voice, on the host."""

    codes: Tensor
    """25 Hz speech tokens, int64 `[n]`."""
    mel24k: Tensor
    """Log-mel of the same clip at 50 Hz, fp32 `[2 n, 80]`."""
    speaker: Tensor
    """fp32 `[192]`."""
    cut_from_s: float | None = None
    """Length of the clip if it was longer than `MAX_USED_S`, the part that is used."""


class Session(Protocol):
    """The part of `onnxruntime.InferenceSession` that is used here."""

    def get_inputs(self) -> Sequence[Any]: ...

    def run(
        self, output_names: Sequence[str] | None, input_feed: Mapping[str, Any]
    ) -> Sequence[Any]: ...


def neutral_voice(n_codes: int = N_NEUTRAL_CODES) -> VoiceFeatures:
    """Return a voice made of silence and of no speaker in particular; always the same."""
    silence = prompt_mel24k(torch.zeros(n_codes * 24_000 // 25)).T
    speaker = torch.full((SPEAKER_SIZE,), SPEAKER_SIZE**-0.5)  # length 1, no direction preferred
    return VoiceFeatures(torch.full((n_codes,), SILENT_CODE), silence, speaker)


class VoiceEncoder:
    """Makes voices of clips, and remembers the last ones by their content."""

    def __init__(self, tokenizer: Session, speaker: Session) -> None:
        """
        Args:
            tokenizer: log-mel `[1, 128, F]` and its length int32 `[1]` -> codes.
            speaker: Kaldi features `[1, F, 80]` -> speaker vector.
        """
        self._tokenizer = tokenizer
        self._speaker = speaker
        self._cache: OrderedDict[bytes, VoiceFeatures] = OrderedDict()

    @classmethod
    def for_assets(cls, folder: Path) -> VoiceEncoder | None:
        """Return the encoder of an asset folder; None if its ONNX files are missing.

        Raises:
            ModelLoadError: a file is there and cannot be loaded.
        """
        missing = [name for name in (TOKENIZER_FILE, SPEAKER_FILE) if not (folder / name).is_file()]
        if missing:
            log.info("voices of clients are off missing=%s", ",".join(missing))
            return None
        return cls(_session(folder / TOKENIZER_FILE), _session(folder / SPEAKER_FILE))

    def encode(self, samples: NDArray[np.float32]) -> VoiceFeatures:
        """Return the voice of a clip.

        Of a longer one the first `MAX_USED_S` are used; `cut_from_s` says so.

        Args:
            samples: float32 `[L]`, 16 kHz.

        Raises:
            BadAudio: the clip is too short, too long, silent or not finite.
        """
        check_clip(samples)
        key = hashlib.sha256(np.ascontiguousarray(samples).tobytes()).digest()
        known = self._cache.get(key)
        if known is None:
            known = self._cache[key] = self._encode(samples)
            if len(self._cache) > N_CACHED:
                self._cache.popitem(last=False)
        self._cache.move_to_end(key)
        return known

    def _encode(self, samples: NDArray[np.float32]) -> VoiceFeatures:
        given_s = len(samples) / INPUT_SAMPLE_RATE_HZ
        cut_from_s = given_s if given_s > MAX_USED_S else None
        if cut_from_s is not None:
            log.info("voice is cut given_s=%.1f used_s=%d", given_s, MAX_USED_S)
            samples = samples[: MAX_USED_S * INPUT_SAMPLE_RATE_HZ]
        codes = self._codes(samples)
        if not len(codes):
            raise BadAudio("no speech was found in the reference voice; record a few sentences")
        mel = fitted(prompt_mel24k(resampled_24k(torch.from_numpy(samples))).T, 2 * len(codes))
        return VoiceFeatures(codes, mel, self._speaker_of(samples), cut_from_s)

    def _speaker_of(self, samples: NDArray[np.float32]) -> Tensor:
        features = fbank(torch.from_numpy(samples))
        fed = (features - features.mean(dim=0)).numpy()[None]
        (vector,) = self._speaker.run(None, {self._speaker.get_inputs()[0].name: fed})[:1]
        return torch.from_numpy(np.asarray(vector, np.float32).reshape(-1))

    def _codes(self, samples: NDArray[np.float32]) -> Tensor:
        # At most one window of the tokenizer (30 s), so nothing has to be joined.
        mel = window_mel(samples, len(samples), N_S3_MELS).numpy()[None]
        names = [each.name for each in self._tokenizer.get_inputs()]
        length = np.array([mel.shape[2]], np.int32)
        (codes,) = self._tokenizer.run(None, dict(zip(names, (mel, length), strict=True)))[:1]
        return torch.from_numpy(np.asarray(codes).reshape(-1).astype(np.int64))


def check_clip(samples: NDArray[np.float32]) -> None:
    """Raise BadAudio if a clip cannot be a reference voice (16 kHz samples `[L]`)."""
    seconds = len(samples) / INPUT_SAMPLE_RATE_HZ
    if not MIN_S <= seconds <= MAX_REFERENCE_VOICE_S:
        raise BadAudio(
            f"reference voice: {seconds:.2f} s, must be {MIN_S:g} to {MAX_REFERENCE_VOICE_S:g} s"
        )
    if not np.isfinite(samples).all():
        raise BadAudio("reference voice: some samples are not finite")
    if float(np.sqrt(np.mean(np.square(samples, dtype=np.float64)))) < QUIETEST_RMS:
        raise BadAudio("reference voice: the clip is silent; record a few sentences")


def fitted(mel: Tensor, n_frames: int) -> Tensor:
    """Cut a mel `[T, 80]` to `n_frames`, or repeat its last frame."""
    missing = max(0, n_frames - len(mel))
    return torch.cat((mel[:n_frames], mel[-1:].expand(missing, -1)))


def _session(path: Path) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3
    failures = (
        onnx_errors.Fail,
        onnx_errors.InvalidGraph,
        onnx_errors.InvalidProtobuf,
        onnx_errors.NotImplemented,
        onnx_errors.RuntimeException,
    )
    try:
        return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except failures as error:
        raise ModelLoadError(
            f"{path} cannot be loaded ({error}): copy it again, or remove it to serve without "
            "voices of clients"
        ) from error


# ---- features

_TAPS_PER_SIDE = 32
"""Of the low pass, in samples of 16 kHz."""


@lru_cache(maxsize=1)
def _low_pass() -> Tensor:
    """Low pass for 48 kHz that keeps what 16 kHz samples hold: `[1, 1, taps]`, sum 3."""
    half = 3 * _TAPS_PER_SIDE
    time = np.arange(-half, half + 1) / 3.0
    rolloff = 0.96
    taps = rolloff * np.sinc(rolloff * time) * np.kaiser(2 * half + 1, 9.0)
    return torch.from_numpy(3.0 * taps / taps.sum()).float()[None, None]


def resampled_24k(samples: Tensor) -> Tensor:
    """Return 16 kHz samples `[L]` at 24 kHz, `[3 L / 2]` rounded up: up by 3, down by 2."""
    half = 3 * _TAPS_PER_SIDE
    at_48k = functional.conv_transpose1d(samples[None, None], _low_pass(), stride=3)[0, 0]
    n = -(-3 * len(samples) // 2)
    return functional.pad(at_48k[half::2], (0, n))[:n]


def prompt_mel24k(samples: Tensor) -> Tensor:
    """Return the log-mel `[80, T]` that the flow knows: 24 kHz samples `[L]`, T = L / 480."""
    n_fft, hop = 1920, 480
    margin = (n_fft - hop) // 2
    padded = functional.pad(samples[None], (margin, margin), mode="reflect")
    spectrum = torch.stft(
        padded, n_fft, hop, window=torch.hann_window(n_fft), center=False, return_complex=True
    )[0]
    magnitude = (torch.view_as_real(spectrum).square().sum(-1) + 1e-9).sqrt()  # [bins, T]
    mel = torch.from_numpy(mel_filters(80, n_fft, 24_000)) @ magnitude
    return mel.clamp(min=1e-5).log()


_KALDI_FRAME, _KALDI_HOP, _KALDI_FFT = 400, 160, 512


@lru_cache(maxsize=1)
def _kaldi_filters() -> Tensor:
    """Triangles `[80, bins]` on HTK's mel scale, evenly between 20 Hz and 8 kHz."""
    n_bins = _KALDI_FFT // 2
    mel = 1127.0 * np.log1p(np.arange(n_bins) * INPUT_SAMPLE_RATE_HZ / _KALDI_FFT / 700.0)
    low, high = (1127.0 * math.log1p(hz / 700.0) for hz in (20.0, INPUT_SAMPLE_RATE_HZ / 2))
    corners = np.linspace(low, high, 82)
    left, centre, right = corners[:-2, None], corners[1:-1, None], corners[2:, None]
    rising, falling = (mel - left) / (centre - left), (right - mel) / (right - centre)
    return torch.from_numpy(np.maximum(0.0, np.minimum(rising, falling))).float()


def fbank(samples: Tensor) -> Tensor:
    """Return Kaldi's filter bank features `[T, 80]` of 16 kHz samples `[L]` in [-1, 1].

    Defaults of `compute-fbank-feats` but 80 bins and no dither: whole frames only, mean of each
    frame removed, pre-emphasis 0.97, Povey window, log of the power.
    """
    frames = samples.unfold(0, _KALDI_FRAME, _KALDI_HOP)  # [T, 400]
    frames = frames - frames.mean(dim=1, keepdim=True)
    frames = frames - 0.97 * functional.pad(frames[None], (1, 0), mode="replicate")[0, :, :-1]
    window = torch.hann_window(_KALDI_FRAME, periodic=False) ** 0.85
    spectrum = torch.fft.rfft(frames * window, _KALDI_FFT).abs().square()
    energies = spectrum[:, :-1] @ _kaldi_filters().T
    return energies.clamp(min=torch.finfo(torch.float32).eps).log()
