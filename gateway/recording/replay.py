"""A finished full-duplex recording as one listener had it: `merged_replay.wav` and `.mp4`.

The user is on the left, the assistant on the right, 16 kHz. Chunks stand back to back, each at
least one second long. The assistant's sound is played as a client plays it: it starts with its
chunk, or once the sound before it has ended, and a barge-in cuts off what has not been played.
"""

from __future__ import annotations

import wave
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from gateway.recording.assets import pcm16, read_wav
from gateway.recording.downsampling import To16Khz
from gateway.recording.film import Film, open_picture
from shared.audio import Samples
from shared.limits import INPUT_SAMPLE_RATE_HZ

RATE: Final = INPUT_SAMPLE_RATE_HZ
WAV: Final = "merged_replay.wav"
MP4: Final = "merged_replay.mp4"
MIN_SEGMENT: Final = RATE
"""Samples of the shortest segment."""

MAX_REPLAY_S: Final = 4 * 3600
"""A chunk of one sample takes a second here too, and a WAV file ends at 4 GiB (18 hours)."""


class ReplayTooLong(Exception):
    """The session is longer than `MAX_REPLAY_S`; its chunks can be heard one by one."""


@dataclass(frozen=True, slots=True)
class Segment:
    """One chunk on the timeline. `user` and `ai`: float32 16 kHz, equally long."""

    chunk: dict[str, Any]
    begin: int
    """Samples from the begin of the replay."""
    user: Samples
    ai: Samples


class _Playback:
    """The assistant's sound that has not been played."""

    def __init__(self) -> None:
        self._waiting: deque[Samples] = deque()
        self._to_16_khz = To16Khz()

    def push(self, samples: Samples) -> None:
        """Add 24 kHz samples."""
        self._waiting.append(self._to_16_khz.take(samples))

    def end_turn(self) -> None:
        """The next sound belongs to another turn."""
        self._to_16_khz = To16Khz()

    def drop(self) -> None:
        self._waiting.clear()
        self.end_turn()

    def pull(self, n: int) -> Samples:
        """Return the next 16 kHz samples, silence where there are none."""
        out = _silence(n)
        at = 0
        while self._waiting and at < n:
            head = self._waiting.popleft()
            taken = head[: n - at]
            out[at : at + len(taken)] = taken
            at += len(taken)
            if len(taken) < len(head):
                self._waiting.appendleft(head[len(taken) :])
        return out

    @property
    def n_waiting(self) -> int:
        return sum(map(len, self._waiting))


def merge(folder: Path, chunks: Sequence[dict[str, Any]], with_film: bool) -> dict[str, str]:
    """Write the replay of a recording and note in each chunk where it begins (`replay_ms`).

    Args:
        folder: of the recording; the files that the chunks name are in it.
        with_film: also the MP4, if there is a picture.

    Returns:
        the entries of `recording.json`.

    Raises:
        ReplayTooLong: nothing is written.
        OSError: a file cannot be read or written.
        av.error.FFmpegError: the film cannot be encoded.
    """
    if not chunks:
        return {}
    if len(chunks) * MIN_SEGMENT > MAX_REPLAY_S * RATE:
        raise ReplayTooLong
    # Dots in front: nobody is shown a half of them.
    sound_part, film_part = folder / f".{WAV}", folder / f".{MP4}"
    for part in (sound_part, film_part):
        part.unlink(missing_ok=True)
    film = _film(film_part, folder, chunks) if with_film else None
    try:
        with wave.open(str(sound_part), "wb") as writer:
            writer.setnchannels(2)
            writer.setsampwidth(2)
            writer.setframerate(RATE)
            for segment in _segments(folder, chunks):
                segment.chunk["replay_ms"] = round(1000.0 * segment.begin / RATE, 1)
                stereo = np.stack([segment.user, segment.ai], axis=1)
                writer.writeframesraw(pcm16(stereo))
                if film is not None:
                    _show(film, folder, segment, stereo)
        if film is not None:
            film.close()
            film_part.replace(folder / MP4)
        sound_part.replace(folder / WAV)
    finally:
        if film is not None:
            film.abandon()
        for part in (sound_part, film_part):
            part.unlink(missing_ok=True)
    return {"merged_replay": WAV} | ({"merged_replay_video": MP4} if film is not None else {})


def _film(path: Path, folder: Path, chunks: Sequence[dict[str, Any]]) -> Film | None:
    for chunk in chunks:
        if "user_frame" in chunk:
            first = open_picture(folder / chunk["user_frame"])
            if first is not None:
                return Film(path, first, RATE)
    return None


def _show(film: Film, folder: Path, segment: Segment, stereo: Samples) -> None:
    if "user_frame" in segment.chunk:
        film.picture(folder / segment.chunk["user_frame"], segment.begin)
    result = segment.chunk.get("result", {})
    film.caption(
        segment.begin,
        len(stereo),
        heard=result.get("heard", ""),
        said=result.get("text", ""),
        is_open=result.get("mode") == "SPEAK" and not result.get("end_of_turn"),
    )
    film.sound(stereo)


def _segments(folder: Path, chunks: Sequence[dict[str, Any]]) -> Iterator[Segment]:
    playback = _Playback()
    begin = 0
    for chunk in chunks:
        result = chunk.get("result", {})
        user = read_wav(folder / chunk["user_audio"]) if "user_audio" in chunk else _silence(0)
        if result.get("interrupted"):
            playback.drop()
        if "ai_audio" in result:
            playback.push(read_wav(folder / result["ai_audio"]))
        if result.get("end_of_turn") or result.get("mode") == "LISTEN":
            playback.end_turn()
        length = max(MIN_SEGMENT, len(user))
        if chunk is chunks[-1]:
            length = max(length, playback.n_waiting)
        padded = np.concatenate([user, _silence(length - len(user))])
        if begin + length > MAX_REPLAY_S * RATE:
            raise ReplayTooLong
        yield Segment(chunk, begin, padded, playback.pull(length))
        begin += length


def _silence(n: int) -> Samples:
    return np.zeros(n, np.float32)
