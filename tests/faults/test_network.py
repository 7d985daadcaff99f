"""Bad networks on both legs: client to gateway, gateway to worker."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from gateway.server import PINGS_BEFORE_DEAD
from tests.faults.clients import Caller, Target, stopped
from tests.faults.processes import Process, fake_worker, gateway, running, wait_ready
from tests.faults.proxy import Proxy

CLIENT_PING_S = 0.4
TOLD_WITHIN_S = 2.0
SLACK_S = 2.0
N_SLOTS = 2


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


@asynccontextmanager
async def network(folder: Path) -> AsyncIterator[Network]:
    worker = fake_worker(folder, slots=N_SLOTS, unit_ms=2)
    async with Proxy(worker.port, seed=1) as worker_leg:
        front = gateway(folder, [worker_leg.port], client_ping_s=CLIENT_PING_S)
        async with Proxy(front.port, seed=2) as client_leg:
            with running(front, worker):
                await asyncio.to_thread(wait_ready, front, worker)
                target = Target(f"ws://127.0.0.1:{client_leg.port}", N_SLOTS)
                yield Network(front, worker, client_leg, worker_leg, target)


async def test_delay_jitter_and_loss_on_both_legs_keep_a_session_right(tmp_path: Path) -> None:
    n_chunks = 40
    async with network(tmp_path) as net:
        for leg in (net.client_leg, net.worker_leg):
            for faults in (leg.up, leg.down):
                faults.delay_s, faults.jitter_s, faults.loss = 0.03, 0.05, 0.1
        async with Caller.live(net.target) as caller:

            async def talk() -> None:
                for _ in range(n_chunks):
                    await caller.chunk()
                    await asyncio.sleep(0.05)

            talking = asyncio.create_task(talk())
            answers = [await caller.hear("result") for _ in range(n_chunks)]
            await talking

            assert [answer["current_time"] for answer in answers] == list(range(1, n_chunks + 1))
            assert not any(answer.get("dropped") for answer in answers)
            assert await caller.stop() == 1000
        await net.until_free(SLACK_S)


async def test_a_black_holed_client_frees_its_slot_in_the_stated_bound(tmp_path: Path) -> None:
    """No FIN, no reset, nothing: only the missing pongs tell."""
    bound_s = (PINGS_BEFORE_DEAD + 1) * CLIENT_PING_S
    async with network(tmp_path) as net, Caller.live(net.target) as caller:
        await caller.exchange(3)

        net.client_leg.up.black_hole = net.client_leg.down.black_hole = True

        assert await net.until_free(bound_s + SLACK_S) >= CLIENT_PING_S


async def test_a_client_that_is_only_slow_is_not_taken_for_dead(tmp_path: Path) -> None:
    """Its bytes are late by more than two pings, but they come."""
    async with network(tmp_path) as net, Caller.live(net.target) as caller:
        net.client_leg.up.delay_s = 2.5 * CLIENT_PING_S

        await asyncio.sleep((PINGS_BEFORE_DEAD + 2) * CLIENT_PING_S)

        assert await caller.stop() == 1000


@pytest.mark.parametrize("fault", ["reset", "cut in mid-frame", "black hole"])
async def test_a_broken_worker_leg_is_told_to_the_client(tmp_path: Path, fault: str) -> None:
    async with network(tmp_path) as net, Caller.live(net.target) as caller:
        await caller.exchange(3)
        begun = time.monotonic()

        if fault == "reset":
            net.worker_leg.reset()
        elif fault == "cut in mid-frame":
            net.worker_leg.down.cut_after_bytes = 1
            await caller.chunk()
        else:
            net.worker_leg.up.black_hole = net.worker_leg.down.black_hole = True
        messages, code = await caller.rest()

        assert time.monotonic() - begun < TOLD_WITHIN_S
        assert (messages[-1]["type"], messages[-1]["slug"]) == ("error", "worker_lost")
        assert code == 1011


async def test_after_a_reset_of_the_worker_leg_the_next_session_is_served(tmp_path: Path) -> None:
    async with network(tmp_path) as net:
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
    tmp_path: Path, end: Callable[[Proxy], None]
) -> None:
    async with network(tmp_path) as net, Caller.live(net.target) as caller:
        await caller.exchange(1)

        end(net.client_leg)

        await net.until_free(SLACK_S)
