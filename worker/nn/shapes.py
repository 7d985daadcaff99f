"""Sizes that are rounded up, so that few different shapes occur."""

from __future__ import annotations


def rounded_up(n: int, step: int) -> int:
    """Return the next multiple of `step` that is at least `n`."""
    return -(-n // step) * step
