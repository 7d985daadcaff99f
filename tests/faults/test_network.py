"""Bad networks on both legs: client to gateway, gateway to worker."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass

import pytest

from gateway.client_socket import PINGS_BEFORE_DEAD
from shared.limits import MAX_INBOX_UNITS
from tests.fakes.ports import free_port
from tests.faults.clients import Caller, Target, stopped
from tests.faults.processes import (
    Process,
    fake_worker,
    gateway,
    running,
    wait_ready,
    wait_until,
)
from tests.faults.proxy import Proxy
from tests.faults.service import told_within

CLIENT_PING_S = 0.4
TOLD_WITHIN_S = 2.0
SLACK_S = 4.0
"""For a busy machine; what is waited for takes a few milliseconds."""

N_SLOTS = 2


@dataclass
class Legs:
    """Gateway and worker, which are only connected through a proxy on this port."""

    front: Process
    worker: Process
    worker_leg_port: int


@dataclass
class Network:
    front: Process
    worker: Process
    client_leg: Proxy
    worker_leg: Proxy
    target: Target
    """Through the client's proxy."""

    async def until_free(self, timeout_s: float) -> float:
        """Wait until all slots are free, as gateway and worker see it; returns the seconds."""
        begun = time.monotonic()
        async with asyncio.timeout(timeout_s):
            while True:
                status = await asyncio.to_thread(self.front.get, "/status") or {}
                health = await asyncio.to_thread(self.worker.health) or {}
                if status.get("slots_free") == health.get("slots_free") == N_SLOTS:
                    return time.monotonic() - begun
                await asyncio.sleep(0.05)


@pytest.fixture(scope="module")
def legs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Legs]:
    folder = tmp_path_factory.mktemp("network")
    worker = fake_worker(folder, slots=N_SLOTS, unit_ms=2)
    worker_leg_port = free_port()
    front = gateway(folder, [worker_leg_port], client_ping_s=CLIENT_PING_S)
    with running(front, worker):
        wait_until(worker.is_idle, "the worker is ready", worker)
        yield Legs(front, worker, worker_leg_port)


@pytest.fixture
async def net(legs: Legs) -> AsyncIterator[Network]:
    """New networks for each test; gateway and worker stay."""
    front, worker = legs.front, legs.worker
    async with (
        Proxy(worker.port, seed=1, port=legs.worker_leg_port) as worker_leg,
        Proxy(front.port, seed=2) as client_leg,
    ):
        await asyncio.to_thread(wait_ready, front, worker)
        target = Target(f"ws://127.0.0.1:{client_leg.port}", N_SLOTS)
        net = Network(front, worker, client_leg, worker_leg, target)
        # What the test before has broken may have to be cleaned up.
        await net.until_free(10.0)
        yield net


async def test_delay_jitter_and_loss_on_both_legs_keep_a_session_right(net: Network) -> None:
    n_chunks = 40
    for leg in (net.client_leg, net.worker_leg):
        for faults in (leg.up, leg.down):
            faults.delay_s, faults.jitter_s, faults.loss = 0.03, 0.05, 0.1
    async with Caller.live(net.target) as caller:
        # Beyond the bound of the inboxes a long stall would drop chunks, which is right too.
        may_send = asyncio.Semaphore(MAX_INBOX_UNITS // 2)

        async def talk() -> None:
            for _ in range(n_chunks):
                await may_send.acquire()
                await caller.chunk()

        talking = asyncio.create_task(talk())
        answers = []
        for _ in range(n_chunks):
            answers.append(await caller.hear("result"))
            may_send.release()
        await talking

        assert [answer["current_time"] for answer in answers] == list(range(1, n_chunks + 1))
        assert not any(answer.get("dropped") for answer in answers)
        assert await caller.stop() == 1000
    await net.until_free(SLACK_S)


async def test_a_black_holed_client_frees_its_slot_in_the_stated_bound(net: Network) -> None:
    """No FIN, no reset, nothing: only the missing pongs tell."""
    bound_s = (PINGS_BEFORE_DEAD + 1) * CLIENT_PING_S
    async with Caller.live(net.target) as caller:
        await caller.exchange(3)

        net.client_leg.up.black_hole = net.client_leg.down.black_hole = True

        assert await net.until_free(bound_s + SLACK_S) >= CLIENT_PING_S


@pytest.mark.parametrize("n_pings_late", [0.8, 1.5])
async def test_a_client_that_is_only_slow_is_not_taken_for_dead(
    net: Network, n_pings_late: float
) -> None:
    """Its bytes are late, but they come."""
    async with Caller.live(net.target) as caller:
        net.client_leg.up.delay_s = n_pings_late * CLIENT_PING_S

        await asyncio.sleep((PINGS_BEFORE_DEAD + 2) * CLIENT_PING_S)

        assert await caller.stop() == 1000


@pytest.mark.parametrize("fault", ["reset", "cut in mid-frame", "black hole"])
async def test_a_broken_worker_leg_is_told_to_the_client(net: Network, fault: str) -> None:
    async with Caller.live(net.target) as caller:
        await caller.exchange(3)

        async with told_within(TOLD_WITHIN_S):
            if fault == "reset":
                net.worker_leg.reset()
            elif fault == "cut in mid-frame":
                net.worker_leg.down.cut_after_bytes = 1
                await caller.chunk()
            else:
                net.worker_leg.up.black_hole = net.worker_leg.down.black_hole = True
            messages, code = await caller.rest()

        assert (messages[-1]["type"], messages[-1]["slug"]) == ("error", "worker_lost")
        assert code == 1011


async def test_after_a_reset_of_the_worker_leg_the_next_session_is_served(net: Network) -> None:
    async with Caller.live(net.target) as caller:
        await caller.exchange(1)
        net.worker_leg.reset()
        await caller.rest()

    await asyncio.gather(*(stopped(net.target) for _ in range(N_SLOTS)))
    await net.until_free(SLACK_S)


@pytest.mark.parametrize(
    "end",
    [
        pytest.param(lambda leg: leg.half_close(), id="half-close"),
        pytest.param(lambda leg: leg.reset(), id="reset"),
    ],
)
async def test_a_client_leg_that_ends_frees_the_slot(
    net: Network, end: Callable[[Proxy], None]
) -> None:
    async with Caller.live(net.target) as caller:
        await caller.exchange(1)

        end(net.client_leg)

        await net.until_free(SLACK_S)
