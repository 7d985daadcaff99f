"""What one run of `client.load` does, and what its sessions say."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import numpy as np

from client.media import audible_span
from client.paced import Chunk
from shared.audio import Samples
from shared.clips import Clip
from shared.limits import INPUT_SAMPLE_RATE_HZ
from shared.playback import DEFAULT_BUFFER_S

Mode = Literal["audio", "omni", "half_duplex", "chat"]

CHUNK_S: Final[Mapping[Mode, float]] = {
    "audio": 1.0,
    "omni": 1.0,
    "half_duplex": 0.5,
    "chat": 1.0,
}
"""Seconds of a chunk, as the pages send them. Questions of chat begin within one."""

MODES: Final = tuple(CHUNK_S)


@dataclass(frozen=True)
class Plan:
    """What one run does."""

    url: str
    sessions: Mapping[Mode, int]
    """How many of each mode, at the same time."""
    duration_s: float
    chunk_s: float | None = None
    """None = what is usual in the mode."""
    is_together: bool = False
    max_wait_s: float = 60.0
    pause_s: float = 10.0
    buffer_s: float = DEFAULT_BUFFER_S
    chat_speaks: bool = False
    api_key: str | None = None
    ca_file: Path | None = None

    def chunk_of(self, mode: Mode) -> float:
        return CHUNK_S[mode] if self.chunk_s is None else self.chunk_s

    def n_chunks(self, mode: Mode) -> int:
        return max(1, round(self.duration_s / self.chunk_of(mode)))

    def phases_s(self, mode: Mode) -> list[float]:
        """For each session of a mode, when it begins within a chunk."""
        n = self.sessions[mode]
        return [0.0 if self.is_together else self.chunk_of(mode) * i / n for i in range(n)]


class Track:
    """What the sessions say: a clip again and again with a pause after each, or nothing."""

    def __init__(self, clip: Clip, pause_s: float) -> None:
        pause = np.zeros(round(pause_s * INPUT_SAMPLE_RATE_HZ), np.float32)
        self._loop = np.concatenate([clip.audio, pause]) if clip.audio.size else None
        self._frames = clip.frames
        self.said: Samples = clip.audio
        """One repetition, without its pause."""
        self.pause_s = pause_s
        self.speech_end_s = audible_span(clip.audio)[1] / INPUT_SAMPLE_RATE_HZ
        """Where its last audible sample is."""

    @property
    def period_s(self) -> float:
        """From one repetition to the next; 0 without a clip."""
        return self._loop.size / INPUT_SAMPLE_RATE_HZ if self._loop is not None else 0.0

    def chunks(self, n_chunks: int, chunk_s: float, *, has_frames: bool) -> Iterator[Chunk]:
        size = round(chunk_s * INPUT_SAMPLE_RATE_HZ)
        silence = np.zeros(size, np.float32)
        for index in range(n_chunks):
            start = index * size
            samples = silence
            if self._loop is not None:
                samples = self._loop.take(range(start, start + size), mode="wrap")
            yield samples, self._frames_of(start, start + size) if has_frames else ()

    def _frames_of(self, start: int, end: int) -> Sequence[bytes]:
        """One frame a second; the clip's pictures go round too."""
        seconds = range(start // INPUT_SAMPLE_RATE_HZ, end // INPUT_SAMPLE_RATE_HZ)
        return [self._frames[second % len(self._frames)] for second in seconds]

    def speech_ends_s(self, duration_s: float) -> list[float]:
        """Where the last audible sample of each repetition is that fits with its pause."""
        if self._loop is None or not self.speech_end_s:
            return []
        n_whole = int(duration_s / self.period_s)
        return [self.speech_end_s + i * self.period_s for i in range(n_whole)]
