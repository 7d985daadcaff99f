"""An MP4 of still pictures, stereo sound and a subtitle track, made with PyAV."""

from __future__ import annotations

import struct
from fractions import Fraction
from pathlib import Path
from typing import Final

import av
import numpy as np
from PIL import Image, UnidentifiedImageError

from gateway.recording.assets import pcm16
from shared.audio import Samples
from shared.limits import MAX_IMAGE_PIXELS

MAX_SIDE: Final = 960
MS: Final = Fraction(1, 1000)
SEEK_EVERY: Final = 10
"""A player can jump to every so many pictures; most of them hardly differ from the one before."""

MAX_CAPTION_CHARS: Final = 120
"""Of what the assistant says in a turn, its newest words."""

STYLES: Final = b"""[Script Info]
ScriptType: v4.00+

[V4+ Styles]
Format: Name, Fontname, Fontsize, PrimaryColour, Alignment
Style: Default,Sans,18,&H00FFFFFF,2

[Events]
Format: Layer, Start, End, Style, Text
"""
"""Without styles the encoder of MP4 subtitles does not open."""


class Film:
    """Positions and lengths are samples of its sound.

    Args:
        first: shown from the begin until `picture` shows another; all get its size.

    Raises:
        OSError, av.error.FFmpegError: from every method (the latter is one of the former or a
            ValueError).
    """

    def __init__(self, path: Path, first: Image.Image, sample_rate_hz: int) -> None:
        self._rate = sample_rate_hz
        self._size = _even(first.size)
        self._container = av.open(str(path), "w", format="mp4", options={"movflags": "+faststart"})
        # Low latency: no picture may wait for later ones, which can be minutes away.
        self._video = self._container.add_stream(
            "libx264",
            rate=1,
            options={
                "preset": "veryfast",
                "tune": "stillimage,zerolatency",
                "g": str(SEEK_EVERY),
            },
        )
        self._video.width, self._video.height = self._size
        self._video.pix_fmt = "yuv420p"
        self._video.codec_context.thread_count = 1
        self._video.codec_context.time_base = MS
        self._audio = self._container.add_stream("aac", rate=sample_rate_hz)
        self._audio.layout = "stereo"
        self._subtitles = self._container.add_stream("mov_text")
        self._subtitles.time_base = MS
        self._subtitles.codec_context.time_base = MS
        self._subtitles.codec_context.subtitle_header = STYLES
        self._n_sound = 0
        self._words = ""
        self._shown_ms = -1
        self._draw(first, 0)

    def picture(self, path: Path, begin: int) -> None:
        """Show a picture from here on; a file that is none changes nothing."""
        image = open_picture(path)
        if image is not None:
            self._draw(image, begin)

    def sound(self, stereo: Samples) -> None:
        """Add the next samples, float32 `[n, 2]`."""
        frame = av.AudioFrame(format="s16", layout="stereo", samples=len(stereo))
        frame.planes[0].update(pcm16(stereo))
        frame.sample_rate = self._rate
        frame.pts = self._n_sound
        frame.time_base = Fraction(1, self._rate)
        self._n_sound += len(stereo)
        self._container.mux(self._audio.encode(frame))

    def caption(self, begin: int, n: int, heard: str, said: str, is_open: bool) -> None:
        """Show words for `n` samples.

        Args:
            heard: of the user.
            said: of the assistant, behind what it has said before in this turn.
            is_open: the turn goes on.
        """
        self._words = (self._words + said)[-MAX_CAPTION_CHARS:]
        lines = [f"» {heard.strip()}" if heard.strip() else "", self._words.strip()]
        text = "\n".join(filter(None, lines)).encode()
        if text:
            # A sample of MPEG-4 timed text: the length, then UTF-8.
            packet = av.Packet(struct.pack(">H", len(text)) + text)
            packet.stream = self._subtitles
            packet.time_base = MS
            packet.pts = packet.dts = self._ms(begin)
            packet.duration = self._ms(n)
            self._container.mux(packet)
        if not is_open:
            self._words = ""

    def close(self) -> None:
        """Finish the file."""
        self._container.mux(self._video.encode())
        self._container.mux(self._audio.encode())
        self._container.close()

    def abandon(self) -> None:
        """Let go of a file that nobody will read; harmless after `close`."""
        self._container.close()

    def _draw(self, image: Image.Image, begin: int) -> None:
        at_ms = self._ms(begin)
        if at_ms <= self._shown_ms:
            return
        self._shown_ms = at_ms
        frame = av.VideoFrame.from_ndarray(np.asarray(image.convert("RGB").resize(self._size)))
        frame.pts, frame.time_base = at_ms, MS
        self._container.mux(self._video.encode(frame))

    def _ms(self, n: int) -> int:
        return round(1000 * n / self._rate)


def open_picture(path: Path) -> Image.Image | None:
    """Return a picture of moderate size; None: the file holds none that may be decoded."""
    try:
        # Nobody has looked at what is recorded: Pillow would start a PostScript interpreter too.
        with Image.open(path, formats=("JPEG", "PNG")) as image:
            if image.width * image.height > MAX_IMAGE_PIXELS:
                return None
            image.draft("RGB", (MAX_SIDE, MAX_SIDE))
            image.thumbnail((MAX_SIDE, MAX_SIDE))
            return image.copy()
    except (OSError, ValueError, SyntaxError, UnidentifiedImageError, Image.DecompressionBombError):
        return None  # what Pillow raises for files that are damaged or no pictures


def _even(size: tuple[int, int]) -> tuple[int, int]:
    """4:2:0 video has even sides."""
    width, height = size
    return max(2, width - width % 2), max(2, height - height % 2)
