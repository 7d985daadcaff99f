"""Which ops run next: pure decisions, no threads, no tensors, no clock.

Ready ops of one lane are grouped by kind and bucket. A group runs as one batch, its earliest
deadlines first, up to the kind's batch limit. Equal deadlines go first in, first out, so nobody is
passed over for ever by ops of the same deadline. There is no batching wait: what is ready when a
lane asks is what the batch holds.

Strictly by deadline (`round_span_s` 0) the group that holds the earliest one runs. Where ops gain
by being batched, that is the wrong order: the session that is due first would keep the device for
all of its steps, and whoever came a little later could not catch up with it to share them. So
kinds whose earliest deadlines lie within `round_span_s` of each other take it in turn, the one that
has waited longest first. A kind runs what was ready when its turn came, before any newcomer that is
due sooner, and what becomes ready meanwhile for as long as all others took since its last turn (at
most `MAX_EXTENSION_S`): steps go on while others gather, so the more there is to do, the fuller the
batches. What is due much later still yields.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from worker.engine.contract import Op

T = TypeVar("T", bound=Hashable)

MAX_EXTENSION_S = 0.2
"""However long others took: an answer of hundreds of steps must not keep the lane for itself."""
NEVER = (-1, 0.0)
"""The last turn of a kind that has had none."""


@dataclass(frozen=True, slots=True)
class Batch(Generic[T]):
    """Ops of one kind and bucket that run as one call: the turn's own first, then by deadline."""

    lane: str
    kind: str
    bucket: Hashable
    tasks: tuple[T, ...]
    ops: tuple[Op, ...]


@dataclass(frozen=True, slots=True)
class _Ready(Generic[T]):
    task: T
    op: Op
    order: int

    @property
    def rank(self) -> tuple[float, int]:
        return (self.op.deadline, self.order)


@dataclass(slots=True)
class _Turn:
    """The kind that has a lane."""

    kind: str = ""
    ends_before: int = 0
    """Ops that came before this, on the clock of arrivals, are what the turn is for."""
    extension_s: float = 0.0
    """Time that is left for others of its kind."""
    busy_s: float = 0.0
    """All that this lane has run so far."""
    last_ends: dict[str, tuple[int, float]] = field(default_factory=dict)
    """Kind -> number of its last turn (its `ends_before`), and `busy_s` at that turn's end."""

    def is_for(self, item: _Ready[Any]) -> bool:
        return item.op.kind == self.kind and item.order < self.ends_before


class Scheduler(Generic[T]):
    """Holds the ready ops; each task (any hashable) has at most one.

    Args:
        lanes: op kind -> lane.
        max_batch: op kind -> most ops of a batch; 1 for those that are missing.
        round_span_s: kinds due within this time of the earliest deadline run in turn; 0 = strictly
            by deadline.
    """

    def __init__(
        self,
        lanes: Mapping[str, str],
        max_batch: Mapping[str, int],
        round_span_s: float = 0.0,
    ) -> None:
        self._lanes = lanes
        self._max_batch = max_batch
        self._round_span_s = round_span_s
        self._ready: dict[str, dict[T, _Ready[T]]] = {lane: {} for lane in lanes.values()}
        self._turns = {lane: _Turn() for lane in lanes.values()}
        self._lane_of: dict[T, str] = {}
        self._arrivals = itertools.count()

    def submit(self, task: T, op: Op) -> str:
        """Make the op of a task ready; returns the lane that will run it.

        Raises:
            ValueError: no lane runs this kind of op, or the task has an op waiting already.
        """
        lane = self._lanes.get(op.kind)
        if lane is None:
            raise ValueError(f"no lane runs {op.kind!r}; known: {', '.join(sorted(self._lanes))}")
        if task in self._lane_of:
            raise ValueError(f"{task!r} has an op waiting already")
        self._ready[lane][task] = _Ready(task, op, next(self._arrivals))
        self._lane_of[task] = lane
        return lane

    def withdraw(self, task: T) -> bool:
        """Forget the waiting op of a task; False if it has none (never had, or it was taken)."""
        lane = self._lane_of.pop(task, None)
        if lane is None:
            return False
        del self._ready[lane][task]
        return True

    def n_ready(self, lane: str) -> int:
        return len(self._ready[lane])

    def next_batch(self, lane: str) -> Batch[T] | None:
        """Take the batch that this lane has to run now; None if nothing is ready."""
        ready = self._ready[lane]
        if not ready:
            return None
        turn = self._turns[lane]
        first = min(ready.values(), key=lambda item: item.rank)
        last_deadline = first.op.deadline + self._round_span_s
        if self._round_span_s:
            due = [item for item in ready.values() if item.op.deadline <= last_deadline]
            first = self._first_in_turn(turn, due)
        kind, bucket = first.op.kind, first.op.bucket
        group = [r for r in ready.values() if r.op.kind == kind and r.op.bucket == bucket]
        # Were those who came later let in first, being due sooner, a turn might never end.
        group.sort(key=lambda r: (r.op.deadline > last_deadline or not turn.is_for(r), r.rank))
        chosen = group[: max(1, self._max_batch.get(kind, 1))]
        for item in chosen:
            del ready[item.task]
            del self._lane_of[item.task]
        return Batch(lane, kind, bucket, tuple(r.task for r in chosen), tuple(r.op for r in chosen))

    def ran(self, lane: str, seconds: float) -> None:
        """Be told how long the last batch of a lane took."""
        turn = self._turns[lane]
        turn.busy_s += seconds
        turn.extension_s -= seconds

    def _first_in_turn(self, turn: _Turn, due: Sequence[_Ready[T]]) -> _Ready[T]:
        """Return the op whose group runs, of those that are due within the span."""
        chosen = [item for item in due if turn.is_for(item)]
        if not chosen and turn.extension_s > 0:
            chosen = [item for item in due if item.op.kind == turn.kind]
        if not chosen:
            return self._begin_turn(turn, due)
        return min(chosen, key=lambda item: item.rank)

    def _begin_turn(self, turn: _Turn, due: Sequence[_Ready[T]]) -> _Ready[T]:
        """Give the lane to the kind that has waited longest; returns its first op."""
        turn.last_ends[turn.kind] = (turn.ends_before, turn.busy_s)
        # By number, since turns may take no time that the clock can tell.
        first = min(due, key=lambda r: (turn.last_ends.get(r.op.kind, NEVER)[0], r.rank))
        turn.kind, turn.ends_before = first.op.kind, next(self._arrivals)
        _, ended_at_s = turn.last_ends.get(turn.kind, (0, turn.busy_s))
        turn.extension_s = min(turn.busy_s - ended_at_s, MAX_EXTENSION_S)
        return first
