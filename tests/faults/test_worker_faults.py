"""A worker that dies, freezes or gets stuck: its sessions are told, the others notice nothing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.faults.clients import Caller, Target, stopped
from tests.faults.processes import Process, fake_worker, gateway, running, wait_ready, wait_until
from tests.faults.service import told_within

TOLD_WITHIN_S = 2.0
N_SLOTS = 2
EXIT_FAULT = 70


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Process, list[Process]]]:
    folder = tmp_path_factory.mktemp("workers")
    workers = [fake_worker(folder, f"worker_{i}", slots=N_SLOTS) for i in range(2)]
    front = gateway(folder, [worker.port for worker in workers])
    with running(front, *workers):
        yield front, workers


@pytest.fixture
def two_workers(
    processes: tuple[Process, list[Process]],
) -> Iterator[tuple[Process, list[Process]]]:
    front, workers = processes
    wait_ready(front, *workers)
    all_free = has_slots(front, 2 * N_SLOTS, 2 * N_SLOTS)
    wait_until(all_free, "all slots are free", front, *workers)
    yield front, workers
    for worker in workers:
        if worker.is_alive():
            worker.thaw()
        else:
            worker.start()


async def lose(front: Process, worker: Process, how: Callable[[], None]) -> None:
    """Fill both workers, take one away; its sessions are told, the others go on, and the next
    session is served by the other worker."""
    target = Target(front.ws_url, 2 * N_SLOTS)
    async with AsyncExitStack() as stack:
        callers = [await stack.enter_async_context(Caller.live(target)) for _ in range(4)]
        # The least loaded worker is taken, the first one among equals.
        index = int(worker.name[-1])
        lost, others = callers[index::2], callers[1 - index :: 2]

        async with told_within(TOLD_WITHIN_S):
            how()
            ends = await asyncio.gather(*(caller.rest() for caller in lost))

        for messages, code in ends:
            assert [(m["type"], m["slug"]) for m in messages] == [("error", "worker_lost")]
            assert code == 1011
        for caller in others:
            await caller.exchange(3)
        assert await others[0].stop() == 1000
        async with told_within(TOLD_WITHIN_S):
            await stopped(target)


def has_slots(front: Process, total: int, free: int) -> Callable[[], bool]:
    def look() -> bool:
        status: dict[str, Any] = front.get("/status") or {}
        return (status.get("slots_total"), status.get("slots_free")) == (total, free)

    return look


def test_a_killed_worker(two_workers: tuple[Process, list[Process]]) -> None:
    front, workers = two_workers

    asyncio.run(lose(front, workers[0], workers[0].kill))

    workers[0].start()
    wait_until(
        has_slots(front, 2 * N_SLOTS, 2 * N_SLOTS),
        "all slots of both workers are free",
        front,
        workers[0],
        timeout_s=15,
    )
    asyncio.run(fill(front))


def test_a_frozen_worker(two_workers: tuple[Process, list[Process]]) -> None:
    front, workers = two_workers

    asyncio.run(lose(front, workers[1], workers[1].freeze))

    workers[1].thaw()
    wait_until(
        has_slots(front, 2 * N_SLOTS, 2 * N_SLOTS),
        "all slots of both workers are free",
        front,
        workers[1],
        timeout_s=15,
    )
    asyncio.run(fill(front))


async def fill(front: Process) -> None:
    """Every slot there should be takes a session."""
    target = Target(front.ws_url, 2 * N_SLOTS)
    async with AsyncExitStack() as stack:
        for _ in range(target.n_slots):
            caller = await stack.enter_async_context(Caller.live(target))
            await caller.exchange(1)


def test_sessions_that_arrive_while_a_worker_is_frozen_are_served(
    two_workers: tuple[Process, list[Process]],
) -> None:
    """Also those that come before anybody has noticed."""
    front, workers = two_workers

    async def scenario() -> None:
        target = Target(front.ws_url, 2 * N_SLOTS)
        workers[0].freeze()
        # One try at the frozen worker lasts until its connection times out.
        async with told_within(10.0):
            await asyncio.gather(*(stopped(target) for _ in range(N_SLOTS)))

    asyncio.run(scenario())


def test_the_gateway_outlives_the_restart_of_every_worker(
    two_workers: tuple[Process, list[Process]],
) -> None:
    front, workers = two_workers
    pid = front.pid

    async def scenario() -> None:
        target = Target(front.ws_url, 2 * N_SLOTS)
        for worker in workers:
            worker.kill()
        async with Caller.open(target) as waiting:
            await waiting.say("prepare", system_prompt="hello")
            assert (await waiting.hear("queued"))["state"] == "starting"
            for worker in workers:
                worker.start()
            await waiting.hear("prepared")
            await waiting.exchange(2)
            assert await waiting.stop() == 1000

    asyncio.run(scenario())

    assert front.pid == pid
    assert front.is_alive()


def test_a_stuck_compute_thread_takes_the_worker_out_of_rotation(tmp_path: Path) -> None:
    """Health said 200 elsewhere while nothing was computed any more."""
    worker = fake_worker(tmp_path, slots=2, stuck_after_s=0.6)
    front = gateway(tmp_path, [worker.port])

    async def scenario() -> tuple[list[dict[str, Any]], int | None]:
        async with Caller.live(Target(front.ws_url, 2)) as caller:
            await caller.say("prepare", system_prompt="block 60")
            return await caller.rest()

    with running(front, worker):
        wait_ready(front, worker)
        begun = time.monotonic()
        messages, code = asyncio.run(scenario())

        assert time.monotonic() - begun < 8.0
        assert (messages[-1]["type"], messages[-1]["slug"]) == ("error", "engine_fault")
        assert code == 1011
        assert worker.wait() == EXIT_FAULT
        wait_until(lambda: not (front.health() or {})["ready"], "not ready", front, timeout_s=5)
