"""Bytes of an `Input` -> samples and images, checked, on a few threads beside the event loop."""

from __future__ import annotations

import asyncio
import io
import struct
import zlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from PIL import ExifTags, Image

from shared.audio import Samples, check_f32_length, samples_from_f32
from shared.errors import BadAudio, BadImage, BadMessage
from shared.limits import (
    INPUT_SAMPLE_RATE_HZ,
    MAX_CHUNK_S,
    MAX_IMAGE_PIXELS,
    MAX_IMAGES_PER_CHUNK,
    MAX_REFERENCE_VOICE_S,
)
from shared.protocol import Input
from worker.sessions.inbox import Chunk, Frame

INLINE_AUDIO_BYTES = 256 * 1024
"""Four seconds: checking that much takes less time than handing it to another thread."""

_UNREADABLE = (
    OSError,
    SyntaxError,
    ValueError,
    TypeError,
    KeyError,
    IndexError,
    EOFError,
    OverflowError,
    struct.error,
    zlib.error,
    Image.DecompressionBombError,
    Image.DecompressionBombWarning,
)
"""What Pillow raises on damaged files, by experience and by its source."""

_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""EXIF orientation -> what makes the image upright."""


class MediaDecoder:
    """Decodes for all sessions of a worker."""

    def __init__(self, n_threads: int = 2) -> None:
        self._pool = ThreadPoolExecutor(n_threads, thread_name_prefix="omni-media")

    async def chunk(self, message: Input) -> Chunk:
        """Raises BadAudio, BadImage."""
        if not message.frames and len(message.audio) <= INLINE_AUDIO_BYTES:
            return decode_chunk(message)
        return await asyncio.get_running_loop().run_in_executor(self._pool, decode_chunk, message)

    async def voice(self, data: bytes) -> Samples:
        """Raises BadAudio."""
        if not data:
            return np.zeros(0, np.float32)
        return await asyncio.get_running_loop().run_in_executor(self._pool, decode_voice, data)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


def decode_voice(data: bytes) -> Samples:
    """Return the samples of a reference voice. Raises BadAudio."""
    check_f32_length(data, MAX_REFERENCE_VOICE_S, INPUT_SAMPLE_RATE_HZ)
    return samples_from_f32(data)


def decode_chunk(message: Input) -> Chunk:
    """Return the chunk that a message holds.

    Raises:
        BadAudio: empty, too long, or no audio.
        BadImage: too many frames, or one that is damaged or too large.
    """
    if not message.audio:
        raise BadAudio("audio is empty, expected float32 samples at 16 kHz")
    if message.max_slice_nums is not None and message.max_slice_nums < 1:
        raise BadMessage(f"max_slice_nums is {message.max_slice_nums}, must be at least 1")
    check_f32_length(message.audio, MAX_CHUNK_S, INPUT_SAMPLE_RATE_HZ)
    samples = samples_from_f32(message.audio)
    n_frames = len(message.frames)
    if n_frames > MAX_IMAGES_PER_CHUNK:
        raise BadImage(f"{n_frames} frames in one chunk, at most {MAX_IMAGES_PER_CHUNK}")
    frames: list[Frame] = []
    # The limit holds for the frames of a chunk together: decoded, they wait in memory.
    n_pixels_left = MAX_IMAGE_PIXELS
    for data in message.frames:
        frame = decode_image(data, n_pixels_left)
        n_pixels_left -= frame.shape[0] * frame.shape[1]
        frames.append(frame)
    return Chunk(message.seq, samples, tuple(frames), message.force_listen, message.max_slice_nums)


def decode_image(data: bytes, max_pixels: int = MAX_IMAGE_PIXELS) -> Frame:
    """Return the upright RGB pixels of a JPEG or PNG file.

    Raises:
        BadImage: another format, damaged, truncated, or more than `max_pixels`; the size is
            checked before anything is decoded.
    """
    try:
        with Image.open(io.BytesIO(data), formats=("JPEG", "PNG")) as image:
            width, height = image.size
            if width * height > max_pixels:
                raise BadImage(f"image is {width}x{height}, at most {max_pixels} pixels are left")
            turn = _TURNS.get(_orientation(image))
            image.load()
            upright = image if turn is None else image.transpose(turn)
            return np.asarray(upright.convert("RGB"), dtype=np.uint8)
    except _UNREADABLE as error:
        raise BadImage("image is no readable JPEG or PNG") from error


def _orientation(image: Image.Image) -> int:
    """EXIF orientation, 1 if there is none; damaged EXIF does not spoil an image."""
    try:
        value = image.getexif().get(ExifTags.Base.Orientation, 1)
    except _UNREADABLE:
        return 1
    return value if isinstance(value, int) else 1
