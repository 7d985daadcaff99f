"""What pages report about their own troubles: one JSON line each, in two files of bounded size."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import msgspec

from gateway.clock import Clock
from shared.errors import NoStorage

log = logging.getLogger(__name__)

MAX_FILE_BYTES = 5 * 1024 * 1024


class TraceLog:
    """Appends to one file; a full one takes the place of the last full one (`.1`)."""

    def __init__(self, path: Path, clock: Clock) -> None:
        self._path = path
        self._clock = clock
        self._writing = asyncio.Lock()

    async def append(self, record: dict[str, Any]) -> None:
        """Write one line, off the event loop.

        Raises:
            NoStorage: the disk takes no more.
        """
        line = msgspec.json.encode({**record, "ts": self._clock.date()}) + b"\n"
        async with self._writing:
            try:
                await asyncio.to_thread(self._write, line)
            except OSError as error:
                log.warning("trace cannot be written path=%s reason=%s", self._path, error)
                raise NoStorage("Traces cannot be written at the moment") from error

    def _write(self, line: bytes) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if self._path.is_file() and self._path.stat().st_size + len(line) > MAX_FILE_BYTES:
            self._path.replace(self._path.with_name(f"{self._path.name}.1"))
        with self._path.open("ab") as file:
            file.write(line)
