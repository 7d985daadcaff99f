"""A step of the model that lasts for many pings costs time, never a session."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.faults.clients import Caller, Target
from tests.faults.processes import Process, fake_worker, gateway, running, wait_ready

PING_INTERVAL_S = 0.4
PING_TIMEOUT_S = 1.2
"""Three intervals, as in the real ones."""

BLOCK_S = 3.0
"""Seven pings, and more than twice their timeout."""

HOLD_S = 0.6
"""More than a ping, and as far from its timeout as a busy machine may be late."""

PROBE_INTERVAL_S = 0.05
UNIT_BOUND_S = 0.3


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Process, Process]]:
    """Every leg pings as fast, so a blocked event loop would cut all of them."""
    folder = tmp_path_factory.mktemp("service")
    worker = fake_worker(
        folder,
        slots=2,
        unit_ms=5,
        ping_interval_s=PING_INTERVAL_S,
        ping_timeout_s=PING_TIMEOUT_S,
    )
    front = gateway(
        folder, [worker.port], client_ping_s=PING_INTERVAL_S, worker_ping_s=PING_INTERVAL_S
    )
    with running(front, worker):
        wait_ready(front, worker)
        yield front, worker


PINGS: dict[str, Any] = {"ping_interval": PING_INTERVAL_S, "ping_timeout": PING_TIMEOUT_S}


async def test_a_long_blocking_step_ends_no_session(service: tuple[Process, Process]) -> None:
    front, worker = service
    target = Target(front.ws_url, 2)
    async with Caller.live(target, **PINGS) as first, Caller.open(target, **PINGS) as second:
        await first.exchange(2)
        begun = time.monotonic()
        blocking = asyncio.create_task(second.prepare(f"block {BLOCK_S}"))
        await asyncio.sleep(0.2)

        answers = await first.exchange(1)
        assert time.monotonic() - begun > BLOCK_S - 0.5, "the step did not block the model"
        await blocking

        assert answers[0]["current_time"] == 3
        await asyncio.gather(first.exchange(2), second.exchange(2))
        assert [await caller.stop() for caller in (first, second)] == [1000, 1000]
    assert "keepalive" not in front.log + worker.log


async def test_a_step_that_holds_the_interpreter_ends_no_session(
    service: tuple[Process, Process],
) -> None:
    """Then not even the event loop runs; the ping's timeout is three intervals for that."""
    front, _ = service
    target = Target(front.ws_url, 2)
    async with Caller.live(target, **PINGS) as first, Caller.open(target, **PINGS) as second:
        await asyncio.gather(first.exchange(2), second.prepare(f"hold {HOLD_S}"))

        await asyncio.gather(first.exchange(2), second.exchange(2))
        assert [await caller.stop() for caller in (first, second)] == [1000, 1000]


async def test_health_probes_never_fail_and_never_slow_a_unit(
    service: tuple[Process, Process],
) -> None:
    front, worker = service
    failures: list[object] = []
    n_probes = 0

    async def probe(process: Process, client: httpx.AsyncClient) -> None:
        nonlocal n_probes
        while True:
            answer = await client.get(f"{process.url}/health", timeout=1.0)
            n_probes += 1
            if answer.status_code != 200:
                failures.append(answer.text)
            await asyncio.sleep(PROBE_INTERVAL_S)

    async def unit_times(caller: Caller) -> list[float]:
        times = []
        for _ in range(40):
            begun = time.monotonic()
            await caller.exchange(1)
            times.append(time.monotonic() - begun)
            await asyncio.sleep(0.03)
        return times

    async with (
        httpx.AsyncClient(trust_env=False) as client,
        Caller.live(Target(front.ws_url, 2)) as caller,
    ):
        probes = [asyncio.create_task(probe(process, client)) for process in (front, worker)]
        times = await unit_times(caller)
        for task in probes:
            task.cancel()
        ends = await asyncio.gather(*probes, return_exceptions=True)

    assert all(isinstance(end, asyncio.CancelledError) for end in ends), ends
    assert failures == []
    assert n_probes >= 30
    assert statistics.median(times) < UNIT_BOUND_S
