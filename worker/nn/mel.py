"""Log-mel features as Whisper takes them: of whole clips, and of a stream second by second.

Written from Radford et al. 2022 (2.2) and MiniCPM-o 4.5's reference audio processor: 25 ms Hann
windows every 10 ms, centred and reflected at both ends, Slaney mel filters, log10, a floor below
the loudest value, and `(x + 4) / 4`.

The reference computes a stream's features anew over up to 30 s for every second. Here every frame
is computed once: the floor needs no more of the past than the loudest value of each frame.
"""

from __future__ import annotations

import copy
import math
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

SAMPLE_RATE_HZ = 16_000
HOP = 160
N_FFT = 400
FRAMES_PER_S = SAMPLE_RATE_HZ // HOP
TOP_HZ = 8000.0
"""Where the highest filter ends."""

CLIP_SAMPLES = 30 * SAMPLE_RATE_HZ
"""A longer clip is cut into pieces of this length."""

_MARGIN = N_FFT // 2
_QUIETEST = 1e-10
_RANGE = 8.0
"""The dynamic floor lies this far (log10) below the loudest value."""


@lru_cache(maxsize=4)
def mel_filters(
    n_mels: int, n_fft: int = N_FFT, sample_rate_hz: int = SAMPLE_RATE_HZ
) -> NDArray[np.float32]:
    """Return triangular filters `[n_mels, n_fft / 2 + 1]`, Slaney scale and area, 0 to 8 kHz."""
    # Slaney's scale: linear to 1 kHz (3 mels per 200 Hz), then 27 steps per factor of 6.4.
    per_mel, knee_hz, step = 200.0 / 3, 1000.0, math.log(6.4) / 27.0
    knee_mel = knee_hz / per_mel
    top_mel = knee_mel + math.log(TOP_HZ / knee_hz) / step
    mels = np.linspace(0.0, top_mel, n_mels + 2)
    corners = np.where(
        mels < knee_mel, mels * per_mel, knee_hz * np.exp(step * (mels - knee_mel))
    )  # Hz
    bins = np.linspace(0.0, sample_rate_hz / 2, n_fft // 2 + 1)
    low, centre, high = corners[:-2, None], corners[1:-1, None], corners[2:, None]
    rising = (bins - low) / (centre - low)
    falling = (high - bins) / (high - centre)
    triangles = np.maximum(0.0, np.minimum(rising, falling))
    return (triangles * 2.0 / (high - low)).astype(np.float32)


def raw_log_mel(samples: NDArray[np.float32], n_mels: int) -> Tensor:
    """Return log10 mel energies `[n_mels, F]` without floor and scale.

    Args:
        samples: the windows' samples, margins of 200 at both ends included; F is
            `1 + (len(samples) - 400) // 160`.
    """
    spectrum = torch.stft(
        torch.from_numpy(samples),
        N_FFT,
        HOP,
        window=torch.hann_window(N_FFT),
        center=False,
        return_complex=True,
    )  # [bins, F]
    energies = torch.from_numpy(mel_filters(n_mels)) @ spectrum.abs() ** 2
    return energies.clamp(min=_QUIETEST).log10()


def scaled(log_mel: Tensor, floor: float) -> Tensor:
    """What the encoder takes: raised to the floor, then centred and scaled."""
    return (log_mel.clamp(min=floor) + 4.0) / 4.0


def window_mel(samples: NDArray[np.float32], n_samples: int, n_mels: int = 80) -> Tensor:
    """Return features `[n_mels, n_samples / HOP]` of samples padded with silence or cut.

    The floor is that of the padded window.
    """
    padded = np.zeros(n_samples, np.float32)
    padded[: min(n_samples, len(samples))] = samples[:n_samples]
    # The frame centred behind the last sample is dropped, and so is the hop that it needs.
    log_mel = raw_log_mel(np.pad(padded, _MARGIN, mode="reflect")[:-HOP], n_mels)
    return scaled(log_mel, float(log_mel.max()) - _RANGE)


def clip_mel(samples: NDArray[np.float32], n_mels: int = 80) -> tuple[Tensor, tuple[int, ...]]:
    """Return a clip's features `[B, n_mels, F]` and the length of each row in frames.

    Rows are the pieces of 30 s; shorter rows are padded with 0.0. Each piece has its own floor,
    that of the piece padded to 30 s with silence.

    Args:
        samples: float32 `[L]`, 16 kHz.

    Raises:
        ValueError: the clip is empty.
    """
    if not len(samples):
        raise ValueError("an audio clip without samples has no features")
    rows, lens = [], []
    for start in range(0, len(samples), CLIP_SAMPLES):
        piece = samples[start : start + CLIP_SAMPLES]
        lens.append(-(-len(piece) // HOP))
        # Frames of mere silence cannot be the loudest ones: two hops of it behind the piece, whose
        # frames still see the end of the sound, give the same floor as 30 s.
        rows.append(window_mel(piece, min(CLIP_SAMPLES, (lens[-1] + 2) * HOP), n_mels))
    mel = torch.zeros(len(rows), n_mels, max(lens))
    for row, (features, length) in enumerate(zip(rows, lens, strict=True)):
        mel[row, :, :length] = features[:, :length]
    return mel, tuple(lens)


class StreamingMel:
    """Features of a session's audio, one second at a time. Lies on the host; `copy` saves it.

    Equals MiniCPM-o 4.5's reference in its "exact" mode, which holds up to 30 s of samples (the
    buffer) and emits the end of the buffer's features: before the first second lie 560 samples of
    silence; the last 80 samples wait for the next second; two frames on either side of a second
    are emitted with its neighbours as well, for the encoder's convolutions. What was emitted is
    never revised, although the floor moves with the buffer's loudest value.

    Held are the samples of unfinished frames, the last four frames, and the loudest value of every
    frame of the buffer.
    """

    UNIT_SAMPLES = SAMPLE_RATE_HZ
    OVERLAP = 2
    """Frames of each neighbouring second that are emitted with a second."""

    _LEAD = 560
    """Silence before the first second: 16560 samples, of which 16480 are used at once."""
    _HELD_BACK = 80
    _DYNAMIC_FROM = 5 * SAMPLE_RATE_HZ
    """Samples in the buffer from which the floor follows the loudest value."""
    _FIXED_FLOOR = -10.0
    _SLIDE_FRAMES = 1000
    """What leaves the buffer when it has grown to 30 s."""

    def __init__(self, n_mels: int = 80) -> None:
        self.n_mels = n_mels
        self.n_units = 0
        """Seconds taken so far."""
        self.base_frames = 0
        """Frames that have left the buffer (`base_T` in the reference)."""
        self._n_finished = 0
        """Frames that no later sample changes."""
        # From the window of the first unfinished frame on; at first the reflected beginning of
        # the stream, which is silence as well.
        self._samples = np.zeros(_MARGIN + self._LEAD, np.float32)
        self._recent = np.zeros((n_mels, 0), np.float32)
        self._loudest = np.zeros(CLIP_SAMPLES // HOP, np.float32)
        self._edges: tuple[float, ...] = ()
        """Loudest value of the first two frames at every coming start of the buffer."""

    @property
    def emitted_frames(self) -> int:
        """Frames of the seconds so far, 100 each, without those of neighbours."""
        return self.n_units * FRAMES_PER_S

    @property
    def buffer_samples(self) -> int:
        """Samples in the reference's buffer."""
        # The one unfinished frame in it is the one at its end.
        return (self._n_finished + 1 - self.base_frames) * HOP if self._n_finished else 0

    @property
    def dynamic_floor(self) -> bool:
        """Whether the last second's floor followed the loudest value."""
        return self.buffer_samples >= self._DYNAMIC_FROM

    def copy(self) -> StreamingMel:
        """Return an independent state that goes on from here."""
        return copy.deepcopy(self)

    def push(self, samples: NDArray[np.float32]) -> Tensor:
        """Take one second; return its features `[n_mels, F]`, fp32.

        F is 102 for the first second (frames 0 to 101), then 104 (from two frames before the
        second to two behind it).

        Args:
            samples: float32 `[16000]`, 16 kHz.

        Raises:
            ValueError: another shape or type.
        """
        if samples.shape != (self.UNIT_SAMPLES,) or samples.dtype != np.float32:
            raise ValueError(
                f"a second of audio is {samples.dtype} {list(samples.shape)}, must be float32 "
                f"[{self.UNIT_SAMPLES}]"
            )
        stream = np.concatenate((self._samples, samples))
        live = stream[: -self._HELD_BACK]
        # The last frame sees the buffer's end reflected; it counts for the floor only.
        reflected = live[-2 : -2 - (_MARGIN - HOP) : -1]
        log_mel = raw_log_mel(np.concatenate((live, reflected)), self.n_mels).numpy()
        fresh, last = log_mel[:, :-1], log_mel[:, -1]

        self._note_edge(live, fresh.shape[1])
        self._note_loudest(fresh)
        self._samples = stream[fresh.shape[1] * HOP :].copy()
        floor = self._FIXED_FLOOR
        if self.dynamic_floor:
            in_buffer = self._loudest[: self._n_finished - self.base_frames]
            floor = max(float(in_buffer.max()), float(last.max())) - _RANGE

        window = np.concatenate((self._recent, fresh), axis=1)
        self._recent = window[:, -2 * self.OVERLAP :].copy()
        self.n_units += 1
        return scaled(torch.from_numpy(window), floor)

    def _note_edge(self, live: NDArray[np.float32], n_fresh: int) -> None:
        """Note what the first frames would be if the buffer started at one of the fresh frames.

        Frame 1000 is the first of the buffer after one slide, frame 2000 after two, …; there
        frames 0 and 1 see the start reflected. The samples are at hand only now.
        """
        offset = -self._n_finished % self._SLIDE_FRAMES
        if offset >= n_fresh or not self._n_finished:
            return
        start = offset * HOP + _MARGIN
        behind = live[start : start + HOP + _MARGIN]
        before = behind[_MARGIN:0:-1]
        two = raw_log_mel(np.concatenate((before, behind)), self.n_mels)
        self._edges += (float(two.max()),)

    def _note_loudest(self, fresh: NDArray[np.float32]) -> None:
        """Append the fresh frames to the buffer; slide it when it has grown to 30 s."""
        n_before = self._n_finished - self.base_frames
        self._n_finished += fresh.shape[1]
        if self.buffer_samples >= CLIP_SAMPLES:
            self.base_frames += self._SLIDE_FRAMES
            n_before -= self._SLIDE_FRAMES
            self._loudest[:n_before] = self._loudest[self._SLIDE_FRAMES :][:n_before].copy()
            self._loudest[:2], self._edges = self._edges[0], self._edges[1:]
        self._loudest[n_before : n_before + fresh.shape[1]] = fresh.max(axis=0)
