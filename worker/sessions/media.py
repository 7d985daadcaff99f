"""Bytes of an `Input` -> samples and images, checked, on a few threads beside the event loop.

What waits here and behind it, encoded or decoded, is counted: a picture of 50 megapixels is a
small file and 150 MB in memory.
"""

from __future__ import annotations

import asyncio
import io
import re
import struct
import threading
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from PIL import ExifTags, Image

from shared.audio import Samples, check_f32_length, samples_from_f32
from shared.errors import BadAudio, BadImage, BadMessage, MediaFull
from shared.limits import (
    INPUT_SAMPLE_RATE_HZ,
    MAX_CHUNK_S,
    MAX_IMAGE_PIXELS,
    MAX_IMAGES_PER_CHUNK,
    MAX_MEDIA_BYTES,
    MAX_REFERENCE_VOICE_S,
    MAX_SESSION_MEDIA_BYTES,
)
from shared.protocol import Input
from worker.sessions.inbox import Chunk, Frame

R = TypeVar("R")

INLINE_AUDIO_BYTES = 256 * 1024
"""Four seconds: checking that much takes less time than handing it to another thread."""

FRAME_FORMATS = ("JPEG", "PNG")

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


class MediaBudget:
    """The bytes of media that all sessions of a worker hold; may be used from any thread.

    Args:
        n_sessions: a session below an even share of the budget is always given room, so that
            its neighbours cannot take it away.
    """

    def __init__(self, n_sessions: int) -> None:
        self._fair_share = MAX_MEDIA_BYTES // n_sessions
        self._lock = threading.Lock()
        self._total = 0
        self._dropped: deque[tuple[MediaAccount, int]] = deque()
        """What nobody needs any more. It is told from wherever the last reference goes, which
        may be inside of `take`: so no lock is taken there."""

    @property
    def total(self) -> int:
        self._collect()
        return self._total

    def take(self, account: MediaAccount, n_bytes: int) -> None:
        """Raises MediaFull."""
        self._collect()
        with self._lock:
            own = account.n_bytes + n_bytes
            fits = own <= MAX_SESSION_MEDIA_BYTES and self._total + n_bytes <= MAX_MEDIA_BYTES
            if not fits and own > self._fair_share:
                raise MediaFull(
                    f"{own} bytes of input would wait for the model, at most "
                    f"{MAX_SESSION_MEDIA_BYTES} may, and less while others send much: send less "
                    "or smaller pictures"
                )
            account.n_bytes = own
            self._total += n_bytes

    def give_back(self, account: MediaAccount, n_bytes: int) -> None:
        with self._lock:
            account.n_bytes -= n_bytes
            self._total -= n_bytes

    def dropped(self, account: MediaAccount, n_bytes: int) -> None:
        """Give back from a finalizer."""
        self._dropped.append((account, n_bytes))

    def _collect(self) -> None:
        while True:
            try:
                account, n_bytes = self._dropped.popleft()
            except IndexError:
                return
            self.give_back(account, n_bytes)


class MediaAccount:
    """One session's part of the budget."""

    def __init__(self, budget: MediaBudget) -> None:
        self._budget = budget
        self.n_bytes = 0
        self.is_closed = False
        """Nobody waits for what is being decoded any more."""

    @contextmanager
    def room(self, n_bytes: int) -> Iterator[None]:
        """Take room for what is made inside; given back at once if that fails.

        Raises:
            MediaFull: there is none.
        """
        self._budget.take(self, n_bytes)
        try:
            yield
        except BaseException:
            self._budget.give_back(self, n_bytes)
            raise

    @contextmanager
    def borrowed(self, n_bytes: int) -> Iterator[None]:
        """Take room for as long as what is inside goes on. Raises MediaFull."""
        self._budget.take(self, n_bytes)
        try:
            yield
        finally:
            self._budget.give_back(self, n_bytes)

    def hold(self, media: Frame | Samples | PendingChunk, n_bytes: int) -> None:
        """Keep room that was taken for `media` until its last reference is gone."""
        weakref.finalize(media, self._budget.dropped, self, n_bytes).atexit = False


@dataclass(frozen=True, slots=True, weakref_slot=True)
class PendingChunk:
    """A chunk on its way to be decoded, or only its number and why it will not be."""

    message: Input
    error: BadMessage | None = None


class MediaDecoder:
    """Decodes for all sessions of a worker."""

    def __init__(self, n_sessions: int, n_threads: int = 2) -> None:
        self.budget = MediaBudget(n_sessions)
        self._pool = ThreadPoolExecutor(n_threads, thread_name_prefix="omni-media")
        # A film takes seconds: what live sessions show must not wait behind it. The thread has no
        # lower priority: with other processes busy, the interpreter's lock would be held by the one
        # thread that gets no processor, and the whole worker would stand still.
        self._background = ThreadPoolExecutor(1, thread_name_prefix="omni-files")

    def session(self) -> SessionMedia:
        return SessionMedia(MediaAccount(self.budget), self._pool, self._background)

    def close(self) -> None:
        for pool in (self._pool, self._background):
            pool.shutdown(wait=False, cancel_futures=True)


class SessionMedia:
    """The decoder as one session sees it."""

    def __init__(
        self, account: MediaAccount, pool: ThreadPoolExecutor, background: ThreadPoolExecutor
    ) -> None:
        self._account = account
        self._pool = pool
        self._background = background

    def close(self) -> None:
        """The session has ended: what is still being decoded for it may stop."""
        self._account.is_closed = True

    def admit(self, message: Input) -> PendingChunk:
        """Return the message as it may wait; one there is no room for is answered in its turn."""
        n_bytes = len(message.audio) + sum(map(len, message.frames))
        try:
            with self._account.room(n_bytes):
                pending = PendingChunk(message)
        except MediaFull as error:
            return PendingChunk(Input(message.seq, b""), error)
        self._account.hold(pending, n_bytes)
        return pending

    async def chunk(self, pending: PendingChunk) -> Chunk:
        """Raises BadAudio, BadImage, MediaFull."""
        if pending.error is not None:
            raise pending.error
        message = pending.message
        if not message.frames and len(message.audio) <= INLINE_AUDIO_BYTES:
            return decode_chunk(message, self._account)
        return await asyncio.get_running_loop().run_in_executor(
            self._pool, decode_chunk, message, self._account
        )

    async def request(
        self, n_bytes: int, decode: Callable[[MediaAccount], R], *, takes_long: bool
    ) -> R:
        """Run `decode`, which reads `n_bytes`; one that takes long where it delays nobody live.

        Raises:
            MediaFull: there is no room; and whatever `decode` raises.
        """
        pool = self._background if takes_long else self._pool
        with self._account.borrowed(n_bytes):
            return await asyncio.get_running_loop().run_in_executor(pool, decode, self._account)

    async def voice(self, data: bytes) -> Samples:
        """Raises BadAudio."""
        if not data:
            return np.zeros(0, np.float32)
        return await asyncio.get_running_loop().run_in_executor(self._pool, decode_voice, data)


def decode_voice(data: bytes) -> Samples:
    """Return the samples of a reference voice. Raises BadAudio."""
    check_f32_length(data, MAX_REFERENCE_VOICE_S, INPUT_SAMPLE_RATE_HZ)
    return samples_from_f32(data)


def decode_chunk(message: Input, account: MediaAccount) -> Chunk:
    """Return the chunk that a message holds.

    Raises:
        BadAudio: empty, too long, or no audio.
        BadImage: too many frames, or one that is damaged or too large.
        MediaFull: there is no room for the pixels.
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
        frame = decode_image(data, account, n_pixels_left)
        n_pixels_left -= frame.shape[0] * frame.shape[1]
        frames.append(frame)
    return Chunk(message.seq, samples, tuple(frames), message.force_listen, message.max_slice_nums)


def decode_image(
    data: bytes,
    account: MediaAccount,
    max_pixels: int = MAX_IMAGE_PIXELS,
    formats: tuple[str, ...] = FRAME_FORMATS,
) -> Frame:
    """Return the upright RGB pixels of an image file; `account` holds them while they live.

    Of a file with several pictures it is the first one.

    Raises:
        BadImage: another format, damaged, truncated, or more than `max_pixels`; the size is
            checked before anything is decoded.
        MediaFull: there is no room for the pixels.
    """
    try:
        with Image.open(io.BytesIO(data), formats=formats) as image:
            width, height = image.size
            if width * height > max_pixels:
                raise _too_large(f"is {width}x{height}", max_pixels)
            n_bytes = 3 * width * height
            with account.room(n_bytes):
                turn = _TURNS.get(_orientation(image))
                image.load()
                upright = image if turn is None else image.transpose(turn)
                frame = np.asarray(upright.convert("RGB"), dtype=np.uint8)
            account.hold(frame, n_bytes)
            return frame
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        # Pillow does not even open it. It knows the size, but tells it only in words.
        n_pixels = re.search(r"\d+", str(error))
        raise _too_large(f"has {n_pixels[0] if n_pixels else 'more'} pixels", max_pixels) from error
    except _UNREADABLE as error:
        raise BadImage(f"image is no readable {' or '.join(formats)}") from error


def _too_large(has: str, max_pixels: int) -> BadImage:
    return BadImage(
        f"image {has}: at most {max_pixels} pixels are left of the {MAX_IMAGE_PIXELS} that all "
        "pictures together may have"
    )


def _orientation(image: Image.Image) -> int:
    """EXIF orientation, 1 if there is none; damaged EXIF does not spoil an image."""
    try:
        value = image.getexif().get(ExifTags.Base.Orientation, 1)
    except _UNREADABLE:
        return 1
    return value if isinstance(value, int) else 1
