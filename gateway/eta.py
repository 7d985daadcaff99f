"""Waiting times: a simulation of the dispatch chain over all slots."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence

from shared.config import ServiceConfig
from shared.protocol import RequestType

OVERDUE_S = 15.0
"""Remaining time of a run that has outlived its expected length."""

STARTUP_S = 60.0
"""Remaining time of a start that says nothing about itself."""


def base_durations(service: ServiceConfig) -> Mapping[RequestType, float]:
    """Return the expected length of a run, in seconds."""
    return {
        "chat": service.eta_chat_s,
        "half_duplex_audio": service.eta_half_duplex_s,
        "audio_duplex": service.eta_audio_duplex_s,
        "omni_duplex": service.eta_omni_duplex_s,
    }


def remaining(expected_s: float, elapsed_s: float) -> float:
    left = expected_s - elapsed_s
    return left if left > 0 else OVERDUE_S


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
