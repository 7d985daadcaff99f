"""Sessions that end in every way leave a service as it was."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Iterator

import pytest

from tests.faults.clients import (
    Caller,
    Target,
    holding_slots,
    reset_in_mid_frame,
    stopped,
    stopped_reading,
)
from tests.faults.endings import ENDINGS, NEEDS_ALL_SLOTS, SLOW_ENDINGS, WARM_UP, Ending
from tests.faults.processes import fake_worker, gateway, running, wait_ready
from tests.faults.service import Service, mixed, run_all, told_within

CLIENT_PING_S = 0.5
"""A silent client is given up after four of these."""

N_SESSIONS = 200
N_EARLY = 20
AT_A_TIME = 6
"""More than there are slots, so that some always wait."""

MAX_UNREAD_MB = 40.0
"""What a client that does not read may cost the gateway: its outbox, as text and as frames."""


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("service")
    workers = [
        fake_worker(folder, f"worker_{i}", slots=2, unit_ms=2, speech_s=1.0) for i in range(2)
    ]
    front = gateway(folder, [worker.port for worker in workers], client_ping_s=CLIENT_PING_S)
    with running(front, *workers):
        wait_ready(front, *workers)
        yield Service(front, workers, Target(front.ws_url, 4, rng=random.Random(5)))


@pytest.mark.parametrize(
    "ending", [*ENDINGS, *SLOW_ENDINGS, *NEEDS_ALL_SLOTS], ids=lambda ending: ending.__name__
)
def test_a_session_that_ended_like_this_gives_its_slot_back(
    service: Service, ending: Ending
) -> None:
    asyncio.run(ending(service.target))

    service.settle()


def test_200_sessions_ended_in_every_way_leave_nothing_behind(service: Service) -> None:
    """Slots, tasks and descriptors at their start; memory grows by less than 20 MB from the 20th
    session to the 200th. (A server of this kind had no place left after a few sessions.)"""
    rng = random.Random(11)
    first = [*SLOW_ENDINGS, *WARM_UP]
    early = [*first, *mixed(ENDINGS, N_EARLY - len(first), rng)]
    many = [*SLOW_ENDINGS * 2, *NEEDS_ALL_SLOTS]
    many += mixed(ENDINGS, N_SESSIONS - len(early) - len(many), rng)
    before = service.settle()

    asyncio.run(run_all(service.target, early, AT_A_TIME))
    after_early = service.settle()
    asyncio.run(run_all(service.target, many, AT_A_TIME))

    service.settle()
    assert service.leaks(before, after_early) == []
    for process in service.processes:
        assert process.trace_lines() == []


def test_twenty_resets_in_mid_frame_do_not_hurt_the_next_session(service: Service) -> None:
    async def scenario() -> None:
        for _ in range(20):
            await reset_in_mid_frame(service.target)
        await stopped(service.target)

    asyncio.run(scenario())

    service.settle()


def test_nothing_is_computed_for_a_session_whose_client_left_in_mid_answer(
    service: Service,
) -> None:
    """Elsewhere the loop of a gone session went on for ever."""

    async def leave() -> None:
        async with Caller.live(service.target) as caller:
            assert await caller.ask()
            await caller.chunk(service.target.speech[0])
            caller.vanish()

    asyncio.run(leave())
    service.settle()
    units = [(worker.health() or {})["total_requests"] for worker in service.workers]

    time.sleep(1.0)

    assert [(worker.health() or {})["total_requests"] for worker in service.workers] == units


def test_a_session_can_be_opened_at_once_after_each_of_fifty_stops(service: Service) -> None:
    async def scenario() -> None:
        # One slot is left, and each session needs the one that the last has just given back.
        async with (
            holding_slots(service.target, service.target.n_slots - 1),
            told_within(15.0),
        ):
            for _ in range(50):
                await stopped(service.target)

    asyncio.run(scenario())


def test_clients_that_do_not_read_cost_bounded_memory_and_no_neighbour(service: Service) -> None:
    before = service.settle()
    peaks: list[float] = []

    async def scenario() -> list[float]:
        times = []
        async with Caller.live(service.target) as neighbour:
            deaf = [asyncio.create_task(stopped_reading(service.target)) for _ in range(3)]
            while not all(task.done() for task in deaf):
                begun = time.monotonic()
                await neighbour.exchange(1)
                times.append(time.monotonic() - begun)
                peaks.append(service.front.rss_mb())
                await asyncio.sleep(0.05)
            await asyncio.gather(*deaf)
        return times

    times = asyncio.run(scenario())

    service.settle()
    assert statistics.median(times) < 0.3
    assert max(times) < 3.0
    assert max(peaks) - before["gateway"].rss_mb < 3 * MAX_UNREAD_MB
    assert (service.front.get("/status") or {})["errors"]["slow_reader"] >= 3
