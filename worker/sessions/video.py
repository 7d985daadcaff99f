"""Bytes of a video file -> pictures of each of its seconds, and its sound."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator

import av
import numpy as np
from numpy.typing import NDArray

from shared.audio import Samples
from shared.clips import MAX_FRAME_SIDE
from shared.errors import BadImage, BadMessage
from shared.limits import INPUT_SAMPLE_RATE_HZ, MAX_IMAGE_PIXELS, MAX_STACK_FRAMES, MAX_VIDEO_S
from worker.models.contract import Video
from worker.sessions.media import MediaAccount

TAIL_S = 0.5
"""As much beyond the limit is still taken: cameras and codecs fill up their last block."""

MAX_SOUND_TAIL_S = 0.1
"""As much sound behind the last whole second is the codec's, not a second of its own."""

MAX_FRAMES_PER_SECOND = 240
"""Of what is decoded; a file may hold any number of pictures that claim the same moment."""

_MAX_FRAMES = int(MAX_VIDEO_S * MAX_FRAMES_PER_SECOND)

_OPTIONS = {
    # A playlist may name other files and addresses, and FFmpeg would read them.
    "format_whitelist": "mov,mp4,matroska,webm,avi,mpegts,mpeg,flv,ogg,asf,gif",
    "protocol_whitelist": "",
    # What a picture takes is allocated before anybody can look at its size.
    "max_pixels": str(MAX_IMAGE_PIXELS),
}


def decode_video(
    data: bytes, stack_frames: int, account: MediaAccount, max_pixels: int = MAX_IMAGE_PIXELS
) -> Video:
    """Return a film's upright RGB pictures, `stack_frames` of each second and evenly in it, and
    its sound. `account` holds the pictures while they live.

    Pictures are scaled so that no side is longer than `MAX_FRAME_SIDE`, and all of them together
    have at most `max_pixels`.

    Raises:
        BadMessage: `stack_frames` is out of range.
        BadImage: no video file, damaged, without pictures, or longer than `MAX_VIDEO_S`.
        MediaFull: there is no room for the pixels.
    """
    if not 1 <= stack_frames <= MAX_STACK_FRAMES:
        raise BadMessage(f"stack_frames is {stack_frames}, expected 1 to {MAX_STACK_FRAMES}")
    try:
        with av.open(io.BytesIO(data), "r", options=_OPTIONS) as container:
            return _Reader(container, stack_frames, account, max_pixels).read()
    except (av.error.FFmpegError, OSError, ValueError, OverflowError) as error:
        raise BadImage("video is damaged, or of no kind that can be read") from error


class _Reader:
    def __init__(
        self,
        container: av.container.InputContainer,
        stack_frames: int,
        account: MediaAccount,
        max_pixels: int,
    ) -> None:
        self._container = container
        self._account = account
        self._stack_frames = stack_frames
        self._max_pixels = self._n_pixels_left = max_pixels
        self._seconds: list[list[NDArray[np.uint8]]] = []
        self._last_slot = -1
        declared_s = max(container.duration or 0, 0) / av.time_base
        _check_length(declared_s)
        n_frames = stack_frames * math.ceil(declared_s or MAX_VIDEO_S)
        self._max_frame_pixels = max(max_pixels // n_frames, 1)

    def read(self) -> Video:
        resampler = av.AudioResampler(format="flt", layout="mono", rate=INPUT_SAMPLE_RATE_HZ)
        pieces: list[Samples] = []
        n_samples = n_frames = 0
        for frame, at_s in self._decoded():
            if self._account.is_closed:
                raise BadImage("nobody waits for this video any more")
            _check_length(at_s)
            if isinstance(frame, av.VideoFrame):
                n_frames += 1
                if n_frames > _MAX_FRAMES:
                    raise BadImage(f"video holds more than {_MAX_FRAMES} pictures, the most of any")
                self._take(frame, at_s)
                continue
            # Before it is resampled: a second of a rate of 1 Hz becomes 16,000 times as much.
            _check_length(at_s + frame.samples / max(frame.sample_rate, 1))
            for resampled in resampler.resample(frame):
                pieces.append(resampled.to_ndarray()[0])
                n_samples += pieces[-1].size
            _check_length(n_samples / INPUT_SAMPLE_RATE_HZ)
        if pieces:
            pieces += [resampled.to_ndarray()[0] for resampled in resampler.resample(None)]
        if not self._seconds:
            raise BadImage("video holds no pictures")
        samples = np.concatenate(pieces) if pieces else np.zeros(0, np.float32)
        return Video(tuple(map(tuple, self._seconds)), _without_tail(samples))

    def _decoded(self) -> Iterator[tuple[av.AudioFrame | av.VideoFrame, float]]:
        """Yield sound and pictures with their seconds from the begin of the file."""
        container = self._container
        best = (container.streams.best("video"), container.streams.best("audio"))
        if best[0] is None:
            raise BadImage("video holds no pictures")
        decoder = best[0].codec_context
        if not isinstance(decoder, av.VideoCodecContext):
            raise BadImage("video is of no kind that can be read")
        if decoder.width * decoder.height > MAX_IMAGE_PIXELS:
            raise BadImage(
                f"video is {decoder.width}x{decoder.height}, at most {MAX_IMAGE_PIXELS} pixels "
                "of a picture are accepted"
            )
        decoder.options = {"max_pixels": _OPTIONS["max_pixels"]}
        begin_s = (container.start_time or 0) / av.time_base
        for frame in container.decode([stream for stream in best if stream is not None]):
            # Only these two are asked for; the types know of subtitles as well.
            assert isinstance(frame, av.AudioFrame | av.VideoFrame)
            yield frame, max((frame.time or 0.0) - begin_s, 0.0)

    def _take(self, frame: av.VideoFrame, at_s: float) -> None:
        """Keep a picture if it is the first one of its part of a second."""
        slot = int(min(at_s, MAX_VIDEO_S - 1e-6) * self._stack_frames)
        if slot <= self._last_slot:
            return
        self._last_slot = slot
        width, height = self._size(frame)
        self._n_pixels_left -= width * height
        if self._n_pixels_left < 0:
            raise BadImage(
                f"video is longer than it says: its pictures are more than the {self._max_pixels} "
                "pixels that were left for them"
            )
        n_bytes = 3 * width * height
        with self._account.room(n_bytes):
            pixels = frame.to_ndarray(format="rgb24", width=width, height=height)
            # Counter-clockwise, as `rot90`: phones turn the picture by a note beside it.
            turned = np.rot90(pixels, round(frame.rotation / 90))
            upright: NDArray[np.uint8] = np.ascontiguousarray(turned, np.uint8)
        self._account.hold(upright, n_bytes)
        second = slot // self._stack_frames
        while len(self._seconds) <= second:
            self._seconds.append([])
        self._seconds[second].append(upright)

    def _size(self, frame: av.VideoFrame) -> tuple[int, int]:
        scale = min(
            1.0,
            MAX_FRAME_SIDE / max(frame.width, frame.height),
            math.sqrt(self._max_frame_pixels / (frame.width * frame.height)),
        )
        return max(int(scale * frame.width), 1), max(int(scale * frame.height), 1)


def _check_length(length_s: float) -> None:
    if length_s > MAX_VIDEO_S + TAIL_S:
        raise BadImage(f"video is {length_s:.1f} s long, at most {MAX_VIDEO_S:g} s are accepted")


def _without_tail(samples: Samples) -> Samples:
    n_over = samples.size % INPUT_SAMPLE_RATE_HZ
    is_tail = n_over <= MAX_SOUND_TAIL_S * INPUT_SAMPLE_RATE_HZ < samples.size
    return samples[: samples.size - n_over].copy() if is_tail else samples
