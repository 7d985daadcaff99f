"""Bounds on files that are received: each holds memory, or disk, for up to a minute."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from shared.errors import TooManyConnections

MIN_SOUND_S: Final = 0.1
"""A file with less has been cut off: its header may promise minutes."""


class Uploads:
    """The uploads of one kind.

    Args:
        most: how many may be under way at the same time.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._n_running = 0
        self.examining = asyncio.Lock()
        """Held while a decoder looks at a file: one crafted file can take its size in memory."""

    @contextmanager
    def receiving(self) -> Iterator[None]:
        """Hold the right to receive one file.

        Raises:
            TooManyConnections: as many as may are under way.
        """
        if self._n_running >= self._most:
            raise TooManyConnections("Other files are being uploaded; try again")
        self._n_running += 1
        try:
            yield
        finally:
            self._n_running -= 1
