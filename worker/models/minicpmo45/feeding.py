"""Known rows into a slot's context, in ops of bounded size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from worker.engine.contract import Op, Program
from worker.models.minicpmo45.ops import MAX_FEED_ROWS, PREFILL, Choice, Feed, Piece


def feed(
    slot: int, start: int, pieces: Sequence[Piece], deadline: float, choice: Choice | None = None
) -> Program:
    """Append rows to a context that ends at `start`; the value is the last op's `Fed`.

    Args:
        pieces: at least one row in all.
        choice: how the token after the last row is chosen; None = none is.
    """
    blocks = list(in_blocks(pieces, MAX_FEED_ROWS))
    fed = None
    for index, block in enumerate(blocks):
        is_last = index == len(blocks) - 1
        request = Feed(slot, start, block, choice if is_last else None)
        fed = yield Op(PREFILL, request, request.bucket, deadline)
        start += request.n_rows
    return fed


def n_rows(pieces: Sequence[Piece]) -> int:
    return sum(map(len, pieces))


def in_blocks(pieces: Sequence[Piece], size: int) -> Iterator[tuple[Piece, ...]]:
    """Cut a run of pieces into blocks of at most `size` rows, in order."""
    block: list[Piece] = []
    room = size
    for piece in pieces:
        rest = piece
        while len(rest):
            part, rest = rest[:room], rest[room:]
            block.append(part)
            room -= len(part)
            if room == 0:
                yield tuple(block)
                block, room = [], size
    if block:
        yield tuple(block)
