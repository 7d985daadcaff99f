"""Restarts under load: the real launcher and gateway, real workers around the fake model."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
from contextlib import AbstractAsyncContextManager
from typing import Any

import msgspec
import pytest

from scripts.machine import fetch
from shared.protocol import WorkerHealth
from tests.fakes.launch import PATIENCE_S, Launch
from tests.faults.clients import Caller, Target
from tests.faults.service import told_within

NEWCOMER_WAITS_S = 2.0


def dial(launch: Launch, session_id: str) -> AbstractAsyncContextManager[Caller]:
    return Caller.open(Target(f"ws://127.0.0.1:{launch.port}", 2), session_id)


def workers(launch: Launch) -> list[dict[str, Any]]:
    """What the gateway says about them."""
    body = fetch(f"http://127.0.0.1:{launch.port}/workers", 2.0)
    rows: list[dict[str, Any]] = json.loads(body or b'{"workers": []}')["workers"]
    return rows


def pids(launch: Launch) -> list[int]:
    """Process ids of the workers, 0 for one that does not answer."""
    base = json.loads(launch.config.read_text())["service"]["worker_base_port"]
    bodies = [fetch(f"http://127.0.0.1:{base + i}/health", 2.0) for i in range(2)]
    return [msgspec.json.decode(body, type=WorkerHealth).pid if body else 0 for body in bodies]


async def until(condition: Any) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not await asyncio.to_thread(condition):  # noqa: ASYNC110 - other processes do it
            await asyncio.sleep(0.1)


async def visit(launch: Launch, number: int) -> None:
    """A newcomer's whole session, which begins without delay."""
    async with dial(launch, f"omni_new{number}") as caller:
        async with told_within(NEWCOMER_WAITS_S):
            await caller.prepare()
        await caller.exchange(1)
        await caller.stop()


async def test_a_rolling_restart_drops_nobody_and_newcomers_are_served_all_the_time(
    launch: Launch,
) -> None:
    launch.start_and_wait(behaviour="serves 2")
    before = pids(launch)
    restarted = asyncio.Event()

    async def visit_again_and_again() -> None:
        for number in itertools.count():
            if restarted.is_set():
                return
            await visit(launch, number)
            await asyncio.sleep(0.05)

    async def talk_until(caller: Caller, enough: asyncio.Event) -> None:
        while not enough.is_set():
            await caller.exchange(1)
            await asyncio.sleep(0.05)
        await caller.stop()

    async with dial(launch, "omni_a") as a, dial(launch, "omni_b") as b:
        await a.prepare()
        await b.prepare()
        on_first = next(row for row in workers(launch) if row["worker_id"] == "worker_0")
        first, second = (a, b) if on_first["current_session_id"] == "omni_a" else (b, a)
        enough_of_first, enough_of_second = asyncio.Event(), asyncio.Event()
        async with asyncio.TaskGroup() as group:
            group.create_task(talk_until(first, enough_of_first))
            group.create_task(talk_until(second, enough_of_second))
            group.create_task(visit_again_and_again())

            asked = await asyncio.to_thread(launch.run, "restart")
            await until(lambda: workers(launch)[0]["status"] == "draining")
            shown = await asyncio.to_thread(launch.run, "status")
            during = pids(launch)
            enough_of_first.set()
            await until(lambda: workers(launch)[1]["status"] == "draining")
            between = pids(launch)
            enough_of_second.set()
            await until(lambda: "rolling restart" not in launch.run("status")[1])
            after = pids(launch)
            restarted.set()

    assert asked[0] == 0
    assert shown[0] == 0
    assert "worker_0: takes no new sessions" in shown[1]
    assert "rolling restart: worker_0 lets its sessions end (1 of 2)" in shown[1]
    assert during == before
    assert between[0] != before[0]
    assert between[1] == before[1]
    assert set(after).isdisjoint({*before, 0})


async def test_stop_wins_over_a_rolling_restart_that_waits_for_a_session(launch: Launch) -> None:
    process = launch.start_and_wait(behaviour="serves 2")
    async with dial(launch, "omni_a") as caller:
        await caller.prepare()
        await asyncio.to_thread(launch.run, "restart")
        await until(lambda: workers(launch)[0]["status"] == "draining")

        stopped = await asyncio.to_thread(launch.run, "stop")
        error = await caller.hear("error")

    assert stopped == (0, "stopped\n")
    assert error["slug"] == "server_shutdown"
    assert process.wait(5) == 0


async def test_waiting_sessions_keep_their_place_while_all_workers_are_restarted(
    launch: Launch,
) -> None:
    launch.start_and_wait(behaviour="serves 1")
    async with (
        dial(launch, "omni_a") as a,
        dial(launch, "omni_b") as b,
        dial(launch, "omni_c") as waiting,
    ):
        await a.prepare()
        await b.prepare()
        await waiting.say("prepare")
        assert (await waiting.hear("queued"))["position"] == 1

        for pid in pids(launch):
            os.kill(pid, signal.SIGKILL)
        told = [await caller.hear("error") for caller in (a, b)]
        update = await waiting.hear("queue_update")
        async with dial(launch, "omni_d") as newcomer:
            queued = await newcomer.hear("queued")
            await waiting.hear("prepared")
            await newcomer.prepare()

    assert [error["slug"] for error in told] == ["worker_lost"] * 2
    assert (update["position"], update["state"]) == (1, "starting")
    assert (queued["position"], queued["state"]) == (2, "starting")


async def test_a_worker_that_cannot_come_back_leaves_the_others_alone(launch: Launch) -> None:
    """A restart with a configuration that no worker can start from must not take all down."""
    launch.start_and_wait(behaviour="serves 1")
    before = pids(launch)
    launch.weights.unlink()

    await asyncio.to_thread(launch.run, "restart")
    await until(lambda: "given up" in launch.run("status")[1])
    status, text = await asyncio.to_thread(launch.run, "status")

    assert status == 1
    assert "worker_0: no answer; ended by itself" in text
    assert "last rolling restart: given up: worker_0 died in its start; 1 of 2 workers" in text
    # A busy machine may answer one look late, which says nothing about the next one.
    await until(lambda: pids(launch) == [0, before[1]])
    await until(lambda: [row["status"] for row in workers(launch)] == ["offline", "idle"])
    await visit(launch, 0)


def test_nothing_is_restarted_where_nothing_runs(launch: Launch) -> None:
    assert launch.run("restart") == (3, "not running\n")


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
