"""Sound and video files -> what a session takes: 16 kHz mono float32 and one JPEG per second."""

from __future__ import annotations

import io
from collections.abc import Iterator
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


class MediaError(Exception):
    """A file that is missing or holds nothing to send."""


@dataclass(frozen=True, slots=True)
class Clip:
    """`audio`: float32 16 kHz mono, may be empty. `frames[i]`: JPEG file of second i."""

    audio: Samples
    frames: tuple[bytes, ...]


def read_clip(path: Path, max_s: float | None = None) -> Clip:
    """Decode sound and one frame per second in one pass.

    Args:
        max_s: what comes later than this is not decoded; None = all of it.

    Raises:
        MediaError: no such file, or no format that FFmpeg reads.
    """
    try:
        with av.open(str(path)) as container:
            return _decode(container, max_s)
    except FileNotFoundError as error:
        raise MediaError(f"{path}: no such file") from error
    except (av.error.FFmpegError, OSError) as error:
        raise MediaError(f"{path}: cannot be read as audio or video") from error


def _decode(container: av.container.InputContainer, max_s: float | None) -> Clip:
    resampler = av.AudioResampler(format="flt", layout="mono", rate=INPUT_SAMPLE_RATE_HZ)
    pieces: list[Samples] = []
    frames: list[bytes] = []
    for frame, at_s in _decoded(container, max_s):
        if isinstance(frame, av.AudioFrame):
            pieces += [out.to_ndarray()[0] for out in resampler.resample(frame)]
        elif at_s >= len(frames):
            frames.append(_jpeg(frame))
    if pieces:
        pieces += [out.to_ndarray()[0] for out in resampler.resample(None)]
    samples = np.concatenate(pieces) if pieces else np.zeros(0, np.float32)
    if max_s is not None:
        samples = samples[: round(max_s * INPUT_SAMPLE_RATE_HZ)]
    return Clip(samples, tuple(frames))


def _decoded(
    container: av.container.InputContainer, max_s: float | None
) -> Iterator[tuple[av.AudioFrame | av.VideoFrame, float]]:
    """Yield sound and pictures with their times; a stream that has come to `max_s` is over."""
    best = (container.streams.best("audio"), container.streams.best("video"))
    streams = [stream for stream in best if stream is not None]
    running = {stream.index for stream in streams}
    for packet in container.demux(streams):
        if not running:
            return
        if packet.stream.index not in running:
            continue
        for frame in packet.decode():
            # Only these two are asked for; the types know of subtitles as well.
            assert isinstance(frame, av.AudioFrame | av.VideoFrame)
            at_s = frame.time or 0.0
            if max_s is None or at_s < max_s:
                yield frame, at_s
            else:
                running.discard(packet.stream.index)


def _jpeg(frame: av.VideoFrame) -> bytes:
    image = Image.fromarray(frame.to_ndarray(format="rgb24"))
    image.thumbnail((MAX_FRAME_SIDE, MAX_FRAME_SIDE))
    file = io.BytesIO()
    image.save(file, "JPEG", quality=JPEG_QUALITY)
    return file.getvalue()
