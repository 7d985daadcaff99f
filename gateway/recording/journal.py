"""The log of one live session: what both sides said, appended as it happens.

    magic, then records: head (`length u32, crc u32, kind u8, at f64, wall_clock_ms f64`), payload

A payload is the MessagePack frame of `shared/protocol.py`, or the reason of the end. Whatever
kills the process leaves a log that is good up to its last whole record. The writer holds a lock
on the file: a log that is locked belongs to a session that lives, or is being finished.
"""

from __future__ import annotations

import fcntl
import os
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from shared.errors import BadMessage
from shared.protocol import Command, Event, decode_command, decode_event

NAME: Final = "log.msgpack"
MAGIC: Final = b"omnilog1"

TOOK: Final = 0
"""A command of the client."""
GAVE: Final = 1
"""An event that the client was told."""
END: Final = 2
"""The reason of the end, UTF-8; the last record."""

_HEAD = struct.Struct("<IIBdd")
_CHECKED = struct.Struct("<Bdd")


@dataclass(frozen=True, slots=True)
class Record:
    """`at`: seconds since the session began. `wall_clock_ms`: of a result, else 0."""

    kind: int
    at: float
    wall_clock_ms: float
    message: Command | Event | None
    """None: the end."""
    reason: str = ""


class LogDamaged(Exception):
    """A record is not what was written; what stands behind it cannot be trusted."""


class Journal:
    """The log of a session that lives. Used by the writer's thread only.

    Raises:
        OSError: from every method, as the disk has it. What was written before stays readable.
    """

    def __init__(self, folder: Path) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._file = os.open(folder / NAME, flags, 0o600)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _write_all(self._file, MAGIC)
        except OSError:
            os.close(self._file)
            raise

    def append(self, kind: int, at: float, wall_clock_ms: float, payload: bytes) -> None:
        checked = _CHECKED.pack(kind, at, wall_clock_ms)
        crc = zlib.crc32(payload, zlib.crc32(checked))
        _write_all(self._file, _HEAD.pack(len(payload), crc, kind, at, wall_clock_ms), payload)

    def close(self) -> None:
        """Let go of the file; the log may be finished now."""
        os.close(self._file)


def read(path: Path) -> Iterator[Record]:
    """Yield the whole records of a log, one in memory at a time.

    It ends before a last record that is torn. A record that this version does not know (a log that
    an older one has left behind) is passed over.

    Raises:
        OSError: the file cannot be read.
        LogDamaged: after all records before the first one that is altered.
    """
    with path.open("rb") as file:
        left = os.fstat(file.fileno()).st_size - len(MAGIC)
        if not MAGIC.startswith(file.read(len(MAGIC))):
            raise LogDamaged
        while left >= _HEAD.size:
            length, crc, kind, at, wall_clock_ms = _HEAD.unpack(file.read(_HEAD.size))
            left -= _HEAD.size + length
            if left < 0:
                return
            payload = file.read(length)
            checked = zlib.crc32(_CHECKED.pack(kind, at, wall_clock_ms))
            if len(payload) < length or zlib.crc32(payload, checked) != crc:
                raise LogDamaged
            record = _decode(kind, at, wall_clock_ms, payload)
            if record is not None:
                yield record


def _decode(kind: int, at: float, wall_clock_ms: float, payload: bytes) -> Record | None:
    if kind == END:
        return Record(kind, at, 0.0, None, payload.decode(errors="replace"))
    try:
        if kind == TOOK:
            return Record(kind, at, wall_clock_ms, decode_command(payload))
        return Record(kind, at, wall_clock_ms, decode_event(payload))
    except BadMessage:
        return None


@contextmanager
def locked(folder: Path) -> Iterator[bool]:
    """Hold the log of a recording, so that nobody writes or finishes it meanwhile.

    Yields False when somebody does already; True also for a recording that has no log (any more).

    Raises:
        OSError: the log cannot be opened.
    """
    try:
        file = os.open(folder / NAME, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        yield True
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        yield False
    else:
        yield True
    finally:
        os.close(file)


def _write_all(file: int, *parts: bytes) -> None:
    views = [memoryview(part) for part in parts if part]
    while views:
        n_written = os.writev(file, views)
        while views and n_written >= len(views[0]):
            n_written -= len(views.pop(0))
        if views:
            views[0] = views[0][n_written:]
