"""Which sizes a captured stage exists in: a graph has one shape, traffic has many."""

from __future__ import annotations

from collections.abc import Sequence


def batch_sizes(most: int) -> tuple[int, ...]:
    """Return the powers of two below `most`, and `most` itself, ascending."""
    sizes = [1 << bit for bit in range(most.bit_length()) if 1 << bit < most]
    return (*sizes, most)


def fit(n: int, sizes: Sequence[int]) -> int | None:
    """Return the smallest size that holds n: for work that is padded. None if none does."""
    return next((size for size in sizes if size >= n), None)


def split(n: int, sizes: Sequence[int]) -> tuple[int, ...]:
    """Cut n into sizes, largest first: for work where padding costs as much as content.

    Args:
        sizes: ascending, beginning with 1.
    """
    parts: list[int] = []
    for size in reversed(sizes):
        parts += [size] * (n // size)
        n %= size
    return tuple(parts)
