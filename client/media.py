"""Files -> what a session takes: 16 kHz mono float32 and one JPEG per second."""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path

import av
import numpy as np
from PIL import Image

from shared.audio import Samples
from shared.limits import INPUT_SAMPLE_RATE_HZ

JPEG_QUALITY = 80
MAX_FRAME_SIDE = 1024
"""Longer sides are scaled down: the model sees 448 pixel slices, uploads cost every second."""


AUDIBLE = 0.01
"""Sample magnitude (-40 dBFS) below which sound counts as silence."""


class MediaError(Exception):
    """A file that is missing or holds nothing to send."""


@dataclass(frozen=True, slots=True)
class Clip:
    """`audio`: float32 16 kHz mono, may be empty. `frames[i]`: JPEG file of second i."""

    audio: Samples
    frames: tuple[bytes, ...]


def read_audio(path: Path) -> Samples:
    """Return the sound of a WAV or any audio or video file as float32 16 kHz mono.

    Raises:
        MediaError: no such file, unreadable, or without sound.
    """
    audio = read_clip(path).audio
    if not audio.size:
        raise MediaError(f"{path}: holds no sound")
    return audio


def read_clip(path: Path) -> Clip:
    """Decode sound and one frame per second in one pass.

    Raises:
        MediaError: no such file, or no format that FFmpeg reads.
    """
    try:
        with av.open(str(path)) as container:
            return _decode(container)
    except FileNotFoundError as error:
        raise MediaError(f"{path}: no such file") from error
    except (av.error.FFmpegError, OSError) as error:
        raise MediaError(f"{path}: cannot be read as audio or video") from error


def audible_span(samples: Samples) -> tuple[int, int]:
    """Return the index of the first audible sample and the one after the last; 0, 0 if none is."""
    audible = np.flatnonzero(np.abs(samples) > AUDIBLE)
    return (int(audible[0]), int(audible[-1]) + 1) if audible.size else (0, 0)


def _decode(container: av.container.InputContainer) -> Clip:
    audio, video = container.streams.best("audio"), container.streams.best("video")
    resampler = av.AudioResampler(format="flt", layout="mono", rate=INPUT_SAMPLE_RATE_HZ)
    pieces: list[Samples] = []
    frames: list[bytes] = []
    for packet in container.demux([stream for stream in (audio, video) if stream is not None]):
        for frame in packet.decode():
            if isinstance(frame, av.AudioFrame):
                pieces += [out.to_ndarray()[0] for out in resampler.resample(frame)]
            elif isinstance(frame, av.VideoFrame) and (frame.time or 0.0) >= len(frames):
                frames.append(_jpeg(frame))
    if pieces:
        pieces += [out.to_ndarray()[0] for out in resampler.resample(None)]
    return Clip(np.concatenate(pieces) if pieces else np.zeros(0, np.float32), tuple(frames))


def _jpeg(frame: av.VideoFrame) -> bytes:
    image = Image.fromarray(frame.to_ndarray(format="rgb24"))
    image.thumbnail((MAX_FRAME_SIDE, MAX_FRAME_SIDE))
    file = io.BytesIO()
    image.save(file, "JPEG", quality=JPEG_QUALITY)
    return file.getvalue()
