"""Workers that stop answering, and gateways that only seem to see that: real processes."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import httpx
import msgspec
import pytest
from websockets.asyncio.client import connect

from gateway import pool
from gateway.clock import Clock
from gateway.pool import Address, Pool
from tests.fakes.gateway import READY_TIMEOUT_S
from tests.fakes.scripted_worker import ScriptedWorker


@contextmanager
def process(module: str, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """`python -m module`, killed at the end."""
    child = subprocess.Popen([sys.executable, "-m", module, *arguments])
    try:
        yield child
    finally:
        child.kill()
        child.wait()


def worker_process(port: int) -> AbstractContextManager[subprocess.Popen[bytes]]:
    return process("tests.fakes.scripted_worker", str(port))


@pytest.mark.realtime
async def test_a_frozen_worker_loses_its_sessions_within_two_seconds(
    serve, talker, until, unused_tcp_port
):
    """Its sockets stay open and silent: its sessions were told only after the ping's 80 s."""
    with worker_process(unused_tcp_port) as frozen:
        async with (
            serve([Address("127.0.0.1", unused_tcp_port)]) as running,
            running.dial("omni_a") as a,
            running.dial("omni_b") as b,
        ):
            clients = [talker(a), talker(b)]
            for client in clients:
                await client.prepare()
            (worker,) = running.gateway.pool.workers

            frozen.send_signal(signal.SIGSTOP)
            frozen_at = time.monotonic()
            told = [await client.hear() for client in clients]
            told_after_s = time.monotonic() - frozen_at

            assert [(t["type"], t["slug"]) for t in told] == [("error", "worker_lost")] * 2
            assert [await client.closed() for client in clients] == [1011] * 2
            # 1.7 s and what a busy machine adds.
            assert told_after_s < 2.5
            assert (worker.in_rotation, worker.leases) == (False, [])

            frozen.send_signal(signal.SIGCONT)
            await until(lambda: worker.slots_free == 4)
            async with running.dial("omni_next") as after:
                await talker(after).prepare()


async def test_a_session_that_meets_a_frozen_worker_goes_to_another_one(
    serve, talker, unused_tcp_port
):
    """The opening had five seconds to time out, and its client heard nothing meanwhile."""
    address = Address("127.0.0.1", unused_tcp_port)
    with worker_process(unused_tcp_port) as frozen:
        async with ScriptedWorker(slots=2) as well, serve([address, well]) as running:
            frozen.send_signal(signal.SIGSTOP)
            async with running.dial() as socket:
                await talker(socket).prepare()

            assert [s.opened.session_id for s in well.sessions] == ["omni_test"]


async def test_a_worker_that_is_busy_for_seven_tenths_of_a_second_loses_nobody(
    serve, talker, unused_tcp_port
):
    with worker_process(unused_tcp_port) as frozen:
        address = Address("127.0.0.1", unused_tcp_port)
        async with serve([address]) as running, running.dial() as socket:
            client = talker(socket)
            await client.prepare()

            # Three times, so that the pause meets the polls at different points.
            for _ in range(3):
                frozen.send_signal(signal.SIGSTOP)
                await asyncio.sleep(0.7)
                frozen.send_signal(signal.SIGCONT)
                await client.chunk()
                await client.hear_kind("result")
                await asyncio.sleep(0.15)

            assert running.gateway.desk.counts["worker_lost"] == 0


async def test_a_gateway_whose_loop_was_blocked_for_seconds_gives_up_nobody(
    serve, talker, unused_tcp_port
):
    with worker_process(unused_tcp_port):
        address = Address("127.0.0.1", unused_tcp_port)
        async with serve([address]) as running, running.dial() as socket:
            client = talker(socket)
            await client.prepare()

            time.sleep(3.0)  # noqa: ASYNC251 - the loop is what is to be held up
            await client.chunk()
            await client.hear_kind("result")
            await asyncio.sleep(1.2)

            assert running.gateway.pool.n_ready == 1
            assert running.gateway.desk.counts["worker_lost"] == 0


async def test_a_gateway_process_that_was_suspended_for_seconds_gives_up_nobody(
    talker, until, unused_tcp_port_factory, tmp_path: Path
):
    worker_port, port = unused_tcp_port_factory(), unused_tcp_port_factory()
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"recording": {"enabled": False}}))
    options = ["gateway", "--port", str(port), "--workers", f"127.0.0.1:{worker_port}"]
    options += ["--config", str(config)]
    address = f"ws://127.0.0.1:{port}/ws/duplex/omni_a"
    with worker_process(worker_port), process(*options) as gateway:
        await until(lambda: is_listening(port), READY_TIMEOUT_S)
        async with connect(address, proxy=None) as connection:
            client = talker(connection)
            await client.prepare()

            gateway.send_signal(signal.SIGSTOP)
            await asyncio.sleep(3.0)
            gateway.send_signal(signal.SIGCONT)
            await client.chunk()
            await client.hear_kind("result")
            await asyncio.sleep(1.2)
            await client.chunk()
            await client.hear_kind("result")


def is_listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


async def test_polls_in_which_the_gateway_was_held_up_count_neither_way(monkeypatch):
    """The answers lay in the socket while the time-outs of the gateway itself went off."""
    monkeypatch.setattr(pool, "POLL_TIMEOUT_S", 0.05)
    report = msgspec.json.encode(ScriptedWorker().health())

    async def answer(request: httpx.Request) -> httpx.Response:
        if worker.leases:
            time.sleep(0.2)  # noqa: ASYNC251 - the loop is what is to be held up
            # From the socket to the reader an answer takes several rounds of the loop.
            await asyncio.sleep(0.01)
        return httpx.Response(200, content=report)

    client = httpx.AsyncClient(transport=httpx.MockTransport(answer), trust_env=False)
    workers = Pool([Address("127.0.0.1", 1)], client, Clock())
    (worker,) = workers.workers
    await workers.poll(worker)
    lease = workers.take("s", "omni_duplex")
    assert lease is not None

    for _ in range(3):
        await workers.poll(worker)

    assert worker.in_rotation
    assert not lease.lost.is_set()
    await client.aclose()


async def test_a_poll_that_fails_in_an_unforeseen_way_is_not_the_last_one(monkeypatch, until):
    n_polls = 0

    def answer(request: httpx.Request) -> httpx.Response:
        nonlocal n_polls
        n_polls += 1
        raise RuntimeError("nobody has thought of this")

    monkeypatch.setattr(pool, "POLL_S", 0.01)
    client = httpx.AsyncClient(transport=httpx.MockTransport(answer), trust_env=False)
    polling = asyncio.create_task(Pool([Address("127.0.0.1", 1)], client, Clock()).run())

    await until(lambda: n_polls > 2)

    polling.cancel()
    await asyncio.gather(polling, return_exceptions=True)
    await client.aclose()
