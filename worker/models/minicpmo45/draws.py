"""Where a session's random numbers come from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np


class Draws(Protocol):
    def text(self) -> tuple[float, float]:
        """Two numbers in [0, 1) for one text token."""

    def codes(self, n: int) -> Sequence[float]:
        """`n` numbers in [0, 1) for as many speech tokens."""


class SeededDraws:
    """Random numbers of one session; a copy of it goes on like the original."""

    def __init__(self, seed: int) -> None:
        self._generator = np.random.Generator(np.random.PCG64(seed))

    def text(self) -> tuple[float, float]:
        first, second = self._generator.random(2).tolist()
        return first, second

    def codes(self, n: int) -> Sequence[float]:
        numbers: list[float] = self._generator.random(n).tolist()
        return numbers
