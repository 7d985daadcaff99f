"""A recording as one zip file that is made while it is sent."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from gateway.recording.store import files_of, kept

PIECE_BYTES: Final = 256 * 1024
COMPRESSED: Final = frozenset({".json", ".txt", ".wav"})
"""The rest is compressed already."""


class _Sink:
    """What `zipfile` writes to: no seeking, so that nothing has to be kept."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []

    def write(self, data: bytes) -> int:
        self._pieces.append(bytes(data))
        return len(data)

    def flush(self) -> None:
        """There is nothing behind this."""

    def close(self) -> None:
        """There is nothing to let go of."""

    def take(self) -> bytes:
        taken = b"".join(self._pieces)
        self._pieces.clear()
        return taken


def pieces(folder: Path) -> Iterator[bytes]:
    """Yield the zip of all readable files; about one `PIECE_BYTES` is in memory at a time.

    The recording is not removed before the end. A file that vanishes before its turn is left out.

    Raises:
        OSError: the folder cannot be opened.
    """
    sink = _Sink()
    with kept(folder), zipfile.ZipFile(sink, "w", allowZip64=True) as archive:
        for path in files_of(folder):
            yield from _member(archive, sink, path, f"{folder.name}/{path.relative_to(folder)}")
    yield sink.take()


def _member(archive: zipfile.ZipFile, sink: _Sink, path: Path, name: str) -> Iterator[bytes]:
    try:
        file = path.open("rb")
    except OSError:
        return
    with file:
        entry = zipfile.ZipInfo.from_file(path, name, strict_timestamps=False)
        is_plain = path.suffix in COMPRESSED
        entry.compress_type = zipfile.ZIP_DEFLATED if is_plain else zipfile.ZIP_STORED
        with archive.open(entry, "w", force_zip64=True) as member:
            while piece := file.read(PIECE_BYTES):
                member.write(piece)
                yield sink.take()
