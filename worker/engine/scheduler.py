"""Which ops run next: pure decisions, no threads, no tensors, no clock.

Ready ops of one lane are grouped by kind and bucket. The group that holds the earliest deadline
runs, its earliest deadlines first, up to the kind's batch limit. Equal deadlines go first in,
first out, so nobody is passed over for ever by ops of the same deadline. There is no batching
wait: what is ready when a lane asks is what the batch holds.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from worker.engine.contract import Op

T = TypeVar("T", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Batch(Generic[T]):
    """Ops of one kind and bucket that run as one call, in the order of their deadlines."""

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


class Scheduler(Generic[T]):
    """Holds the ready ops; each task (any hashable) has at most one."""

    def __init__(self, lanes: Mapping[str, str], max_batch: Mapping[str, int]) -> None:
        self._lanes = lanes
        self._max_batch = max_batch
        self._ready: dict[str, dict[T, _Ready[T]]] = {lane: {} for lane in lanes.values()}
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
        first = min(ready.values(), key=lambda item: item.rank)
        kind, bucket = first.op.kind, first.op.bucket
        group = [r for r in ready.values() if r.op.kind == kind and r.op.bucket == bucket]
        group.sort(key=lambda item: item.rank)
        chosen = group[: max(1, self._max_batch.get(kind, 1))]
        for item in chosen:
            del ready[item.task]
            del self._lane_of[item.task]
        return Batch(lane, kind, bucket, tuple(r.task for r in chosen), tuple(r.op for r in chosen))
