"""Waiting times: how long runs and starts take, and a simulation of the dispatch over all slots."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from shared.config import ServiceConfig
from shared.protocol import RequestType, WorkerHealth

OVERDUE_S = 15.0
"""Remaining time of a run that has outlived its expected length."""

CLEANUP_S = 1.0
"""Remaining time of a run that has ended, while its worker cleans the slot."""

STARTUP_S = 60.0
"""Remaining time of a start that says nothing about itself."""

MIN_START_S = 1.0
"""A worker that starts is never there at once."""


@dataclass(slots=True)
class Learned:
    """What the runs of one type have taught so far; `mean_s` None = nothing."""

    mean_s: float | None = None
    n_samples: int = 0


class Durations:
    """The expected length of a run by request type: configured first, then learned.

    A sample is the time from a lease's begin to its release, of a run that has begun
    (`prepared`) and has ended in order: stopped, left, or timed out, with its slot cleaned. A
    lost or failing worker cuts runs short and teaches nothing about their length.
    """

    def __init__(self, service: ServiceConfig) -> None:
        self.base_s: dict[RequestType, float] = {
            "chat": service.eta_chat_s,
            "half_duplex_audio": service.eta_half_duplex_s,
            "audio_duplex": service.eta_audio_duplex_s,
            "omni_duplex": service.eta_omni_duplex_s,
        }
        self.alpha = service.eta_ema_alpha
        """Weight of the newest sample in the moving average."""
        self.learned = {kind: Learned() for kind in self.base_s}
        self._min_samples = service.eta_ema_min_samples

    def expected_s(self, request_type: RequestType) -> float:
        learned = self.learned[request_type]
        if learned.mean_s is None or learned.n_samples < self._min_samples:
            return self.base_s[request_type]
        return learned.mean_s

    def left_s(self, request_type: RequestType, elapsed_s: float, *, is_ending: bool) -> float:
        """Return the seconds until a run's slot is expected to be free."""
        if is_ending:
            return CLEANUP_S
        left_s = self.expected_s(request_type) - elapsed_s
        return left_s if left_s > 0 else OVERDUE_S

    def learn(self, request_type: RequestType, length_s: float) -> None:
        """Take in one run; the first sample counts as it is."""
        learned = self.learned[request_type]
        if learned.mean_s is None:
            learned.mean_s = length_s
        else:
            learned.mean_s += self.alpha * (length_s - learned.mean_s)
        learned.n_samples += 1


def start_left(health: WorkerHealth | None, stages_s: Mapping[str, float]) -> float:
    """Return the seconds until a worker that starts is ready.

    Args:
        health: its report while it loads; None = its process is not there yet.
        stages_s: length of each stage of the last start that was seen to its end. Without one
            the stages to come are unknown, and the running stage's own figure is all there is.
    """
    running_s = health.eta_s if health else None
    if not stages_s:
        return STARTUP_S if running_s is None else max(MIN_START_S, running_s)
    begun = {stage.name for stage in health.stages} if health else set()
    left_s = sum(length_s for name, length_s in stages_s.items() if name not in begun)
    if health and health.stage:
        if running_s is None:
            running_s = stages_s.get(health.stage, 0.0) - health.stage_elapsed_s
        left_s += max(0.0, running_s)
    return max(MIN_START_S, left_s)


def simulate(slots_free_in_s: Iterable[float], waiting_s: Sequence[float]) -> list[float]:
    """Return when each waiter gets a slot, in seconds from now, first in first out.

    Args:
        slots_free_in_s: for every slot, the seconds until it is free (0 = free now).
        waiting_s: expected run length of each waiter, in queue order.

    Without any slot every waiter gets 0.0: nothing is known.
    """
    heap = list(slots_free_in_s)
    if not heap:
        return [0.0] * len(waiting_s)
    heapq.heapify(heap)
    starts = []
    for duration in waiting_s:
        start = heap[0]
        heapq.heapreplace(heap, start + duration)
        starts.append(round(start, 1))
    return starts
