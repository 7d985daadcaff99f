"""What one client has still to read."""

from __future__ import annotations

import asyncio
from collections import deque

from shared.errors import SlowReader
from shared.limits import MAX_OUTBOX_BYTES


class Outbox:
    """Frames that wait for the client to read them, bounded."""

    def __init__(self) -> None:
        self._frames: deque[str] = deque()
        self._n_bytes = 0
        self._filled = asyncio.Event()

    def put(self, frame: str) -> None:
        """Raises SlowReader when the client has left too much unread."""
        if self._n_bytes + len(frame) > MAX_OUTBOX_BYTES and self._frames:
            raise SlowReader("Output was not read in time")
        self.put_last(frame)

    def put_last(self, frame: str) -> None:
        """Add a frame that ends the session, however much is unread."""
        self._frames.append(frame)
        self._n_bytes += len(frame)
        self._filled.set()

    async def until_filled(self) -> None:
        while not self._frames:
            self._filled.clear()
            await self._filled.wait()

    @property
    def head(self) -> str:
        return self._frames[0]

    def drop_head(self) -> None:
        self._n_bytes -= len(self._frames.popleft())

    def clear(self) -> None:
        self._frames.clear()
        self._n_bytes = 0

    def __len__(self) -> int:
        return len(self._frames)
