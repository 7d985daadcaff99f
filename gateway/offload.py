"""Work on large frames: off the event loop, and few at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from shared.limits import LARGE_FRAME_BYTES, MAX_LARGE_FRAMES

P = ParamSpec("P")
R = TypeVar("R")


class LargeFrames:
    def __init__(self) -> None:
        self._permits = asyncio.Semaphore(MAX_LARGE_FRAMES)

    async def run(self, n_bytes: int, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Return what `work` returns; a frame of ordinary size is handled on the spot."""
        if n_bytes <= LARGE_FRAME_BYTES:
            return work(*args, **kwargs)
        async with self._permits:
            return await asyncio.to_thread(work, *args, **kwargs)
