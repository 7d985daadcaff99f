"""A gateway with its workers under test: are all slots free, and what do the processes hold."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from client.paced import LoopProbe
from tests.faults.clients import Target
from tests.faults.endings import NEEDS_ALL_SLOTS, Ending
from tests.faults.processes import Process, Usage, wait_until

SETTLE_TIMEOUT_S = 45.0
"""Longer than a client that has gone silent is waited for."""

MAX_GROWTH_MB = 20.0
N_POOL_THREADS = 8
"""Threads that a process starts when it first needs them, and keeps."""

ORDINARY_LATENESS_S = 0.02


@dataclass
class Service:
    front: Process
    workers: Sequence[Process]
    target: Target

    @property
    def processes(self) -> Sequence[Process]:
        return [self.front, *self.workers]

    def is_idle(self) -> bool:
        """Whether gateway and workers say that nobody is there."""
        status = self.front.get("/status") or {}
        return (
            status.get("slots_free") == self.target.n_slots
            and status.get("sessions") == status.get("queue_length") == 0
            and all(
                (health := worker.health()) is not None
                and health["slots_free"] == health["slots_total"]
                for worker in self.workers
            )
        )

    def usage(self) -> dict[str, Usage]:
        return {process.name: process.usage() for process in self.processes}

    def settle(self) -> dict[str, Usage]:
        """Wait until nobody is there, then return what the processes hold."""
        wait_until(self.is_idle, "all slots free", *self.processes, timeout_s=SETTLE_TIMEOUT_S)
        return self.usage()

    def leaks(self, before: dict[str, Usage], early: dict[str, Usage]) -> list[str]:
        """What is held beyond what was held at the start (descriptors, tasks) and after the first
        sessions (memory, threads); empty = nothing.

        What the last sessions left behind is given a few seconds to go.
        """
        found: list[str] = []

        def is_clean() -> bool:
            found[:] = [
                line
                for name, now in self.usage().items()
                for line in _compare(name, before[name], early[name], now)
            ]
            return not found

        try:
            wait_until(is_clean, "nothing leaks", *self.processes, timeout_s=10.0)
        except AssertionError:
            return found or ["a process has ended"]
        return []


def _compare(name: str, before: Usage, early: Usage, now: Usage) -> list[str]:
    found = []
    if now.n_fds > before.n_fds:
        found.append(f"{name}: {now.n_fds} descriptors, {before.n_fds} at the start")
    if now.n_tasks > before.n_tasks:
        found.append(f"{name}: {now.n_tasks} tasks, {before.n_tasks} at the start")
    if now.n_threads > early.n_threads + N_POOL_THREADS:
        found.append(f"{name}: {now.n_threads} threads, {early.n_threads} early on")
    if now.rss_mb - early.rss_mb >= MAX_GROWTH_MB:
        found.append(f"{name}: {now.rss_mb:.0f} MB, {early.rss_mb:.0f} MB early on")
    return found


@asynccontextmanager
async def told_within(seconds: float) -> AsyncIterator[None]:
    """The block has to end within so many seconds of a machine that runs what is due.

    What a busy machine kept this process waiting, it kept the service waiting, too: that much is
    allowed on top. Where nobody is kept waiting the bound is the one that is stated.
    """
    begun = time.monotonic()
    async with LoopProbe() as probe:
        yield
    took_s = time.monotonic() - begun
    held_up_s = sum(late_s for late_s in probe.late_s if late_s > ORDINARY_LATENESS_S)
    assert took_s - held_up_s < seconds, f"{took_s:.2f} s, held up for {held_up_s:.2f} s of them"


async def run_all(
    target: Target,
    endings: Sequence[Ending],
    at_a_time: int,
    on_done: Callable[[Ending], None] = lambda _: None,
) -> None:
    """Run endings a few at a time; those that need every slot for themselves come last."""
    gate = asyncio.Semaphore(at_a_time)

    async def run(ending: Ending) -> None:
        async with gate:
            await ending(target)
            on_done(ending)

    async with asyncio.TaskGroup() as group:
        for ending in endings:
            if ending not in NEEDS_ALL_SLOTS:
                group.create_task(run(ending))
    for ending in endings:
        if ending in NEEDS_ALL_SLOTS:
            await ending(target)
            on_done(ending)


def mixed(endings: Sequence[Ending], n: int, rng: random.Random) -> list[Ending]:
    """`n` endings in random order, each as often as the others."""
    order = rng.sample(endings, len(endings))
    many = [order[i % len(order)] for i in range(n)]
    rng.shuffle(many)
    return many
