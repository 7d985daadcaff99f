"""Work on large frames: off the event loop and one at a time; few of them under way."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import ParamSpec, TypeVar

from shared.limits import LARGE_FRAME_BYTES, MAX_LARGE_FRAMES

P = ParamSpec("P")
R = TypeVar("R")


class LargeFrames:
    def __init__(self) -> None:
        # One at a time: parsing 100 MiB holds the interpreter for a fifth of a second, and with
        # several such threads the event loop would wait for all of them before its own turn.
        self._permits = asyncio.Semaphore(1)
        self._sending = asyncio.Semaphore(MAX_LARGE_FRAMES)

    async def run(self, n_bytes: int, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Return what `work` returns; a frame of ordinary size is handled on the spot."""
        if n_bytes <= LARGE_FRAME_BYTES:
            return work(*args, **kwargs)
        async with self._permits:
            return await asyncio.to_thread(work, *args, **kwargs)

    @asynccontextmanager
    async def sending(self, n_bytes: int) -> AsyncIterator[None]:
        """Hold the right to make and send a frame; one of ordinary size needs none."""
        if n_bytes <= LARGE_FRAME_BYTES:
            yield
            return
        async with self._sending:
            yield
