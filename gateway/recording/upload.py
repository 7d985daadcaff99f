"""A recording made by a page, taken from a multipart form as it arrives."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Final

import av
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import ClientDisconnect

from gateway.recording.store import kept
from gateway.uploads import MIN_SOUND_S, Uploads
from shared.errors import BadMessage, BadRecordingFile, NoStorage, PayloadTooLarge
from shared.limits import MIB

MAX_UPLOAD_BYTES: Final = 200 * MIB
MAX_UPLOADS: Final = 16
"""Under way at the same time: 3 GiB of disk that may be thrown away again."""

MAX_PACKETS: Final = 10_000
"""Looked at for `MIN_SOUND_S` of sound or pictures, which come in some hundred at most."""

WRITE_BYTES: Final = MIB
STEM: Final = "frontend_replay"

TYPES: Final = {
    "video/webm": "webm",
    "video/mp4": "mp4",
    "audio/wav": "wav",
    "audio/webm": "webm",
    "audio/mp4": "mp4",
}
"""Of the part, without parameters -> extension. The last one is Safari's."""

FORMATS: Final = {"webm": "matroska,webm", "mp4": "mov,mp4,m4a,3gp,3g2,mj2", "wav": "wav"}
"""FFmpeg's names of the containers that each extension may hold."""


class _Form:
    """Finds the field `file` in a form and collects what has arrived of it."""

    def __init__(self, boundary: bytes) -> None:
        self.extension = ""
        self.arrived = bytearray()
        self.n_bytes = 0
        self.is_complete = False
        self._is_ours = False
        self._headers: dict[bytes, bytes] = {}
        self._name = b""
        self._value = b""
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._begin_part,
                "on_header_field": self._header_field,
                "on_header_value": self._header_value,
                "on_header_end": self._end_header,
                "on_headers_finished": self._begin_data,
                "on_part_data": self._data,
                "on_part_end": self._end_part,
            },
        )

    def feed(self, data: bytes) -> None:
        """Raises BadMessage, PayloadTooLarge."""
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise BadMessage(f"not a multipart form: {error}") from error

    def _begin_part(self) -> None:
        self._headers.clear()

    def _header_field(self, data: bytes, start: int, end: int) -> None:
        self._name += data[start:end]

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _end_header(self) -> None:
        self._headers[self._name.lower()] = self._value
        self._name = self._value = b""

    def _begin_data(self) -> None:
        _, options = parse_options_header(self._headers.get(b"content-disposition", b""))
        self._is_ours = options.get(b"name") == b"file" and not self.is_complete
        if self._is_ours:
            kind, _ = parse_options_header(self._headers.get(b"content-type", b""))
            said = kind.decode("latin-1").lower()
            if said not in TYPES:
                raise UnsupportedType(f"Unsupported file type: {said[:100]}")
            self.extension = TYPES[said]

    def _data(self, data: bytes, start: int, end: int) -> None:
        if not self._is_ours:
            return
        self.n_bytes += end - start
        if self.n_bytes > MAX_UPLOAD_BYTES:
            raise PayloadTooLarge(f"The recording is larger than {MAX_UPLOAD_BYTES} bytes")
        self.arrived += data[start:end]

    def _end_part(self) -> None:
        self.is_complete |= self._is_ours
        self._is_ours = False


class UnsupportedType(BadMessage):
    """A file of a type that no page records."""

    http_status = 400


async def receive(
    folder: Path, content_type: str, body: AsyncIterator[bytes], uploads: Uploads
) -> tuple[Path, int]:
    """Store the form's file; an earlier one of the same kind is replaced once this is complete.

    Returns where it is and its bytes.

    Args:
        content_type: header of the request.

    Raises:
        BadMessage: no form, none with a field `file`, or not all of it.
        TooManyConnections: others are under way.
        UnsupportedType: see `TYPES`.
        BadRecordingFile: it is not of the type that it is said to be, or holds next to nothing.
        PayloadTooLarge: the file has more than `MAX_UPLOAD_BYTES`.
        NoStorage: the disk does not take it.
    """
    kind, options = parse_options_header(content_type)
    boundary = options.get(b"boundary", b"")
    if kind != b"multipart/form-data" or not boundary:
        raise BadMessage("expected a multipart form with a field named file")
    form = _Form(boundary)
    part = folder / f".upload-{secrets.token_hex(8)}"
    target = folder / STEM
    try:
        with uploads.receiving(), kept(folder):
            async for data in body:
                form.feed(data)
                if len(form.arrived) >= WRITE_BYTES:
                    await asyncio.to_thread(_append, part, bytes(form.arrived))
                    form.arrived.clear()
            if not form.is_complete or not form.n_bytes:
                raise BadMessage("the form has no file in a field named file")
            await asyncio.to_thread(_append, part, bytes(form.arrived))
            async with uploads.examining:
                await asyncio.to_thread(_look_at, part, form.extension)
            target = target.with_suffix(f".{form.extension}")
            part.replace(target)
    except OSError as error:
        raise NoStorage("The recording cannot be stored") from error
    except ClientDisconnect as error:
        raise BadMessage("the upload was broken off") from error
    finally:
        # A disk that takes nothing may not give up anything either; the reason is told already.
        with suppress(OSError):
            part.unlink(missing_ok=True)
    return target, form.n_bytes


def _look_at(path: Path, extension: str) -> None:
    """Raises BadRecordingFile: no container of this kind with some sound or pictures. OSError."""
    options = {"format_whitelist": FORMATS[extension]}
    try:
        # A file, not its path: nothing that it names can be opened.
        with path.open("rb") as file, av.open(file, "r", container_options=options) as container:
            held_s = _first_part(container)
    except (av.error.FFmpegError, ValueError) as error:
        raise BadRecordingFile(f"The file is no {extension} that can be read") from error
    if held_s < MIN_SOUND_S:
        least = f"at least {1000 * MIN_SOUND_S:g} ms are needed"
        raise BadRecordingFile(
            f"The file holds {1000 * held_s:.1f} ms of sound or pictures; {least}"
        )


def _first_part(container: av.container.InputContainer) -> float:
    """Return the seconds of sound or pictures, whichever are more; not all beyond `MIN_SOUND_S`.

    Sound is decoded, since a header may promise any length. Pictures are not, since one may take
    gigabytes: they count from the first one to the end of the last one.
    """
    held_s, first_s = 0.0, dict[int, float]()
    n_samples: Counter[int] = Counter()
    media = [*container.streams.video, *container.streams.audio]
    # Without streams FFmpeg's wrapper would take all kinds of them.
    for packet in islice(container.demux(media), MAX_PACKETS) if media else ():
        index = packet.stream_index
        if isinstance(packet.stream, av.AudioStream):
            for frame in packet.stream.decode(packet):
                n_samples[index] += frame.samples
                held_s = max(held_s, n_samples[index] / max(1, frame.sample_rate))
        elif packet.size and packet.pts is not None:
            begins_s = float(packet.pts * packet.time_base)
            lasts_s = float((packet.duration or 0) * packet.time_base)
            held_s = max(held_s, begins_s + lasts_s - first_s.setdefault(index, begins_s))
        if held_s >= MIN_SOUND_S:
            break
    return held_s


def _append(path: Path, data: bytes) -> None:
    with open(path, "ab", opener=_private) as file:
        file.write(data)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
