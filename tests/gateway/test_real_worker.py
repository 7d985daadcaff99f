"""The gateway in front of a worker with the real lifecycle around the fake model."""

from __future__ import annotations

import asyncio
import base64
import json
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np

from gateway.pool import Address
from shared.states import SessionState
from tests.fakes.patience import PATIENCE_S
from tests.fakes.worker import FakeWorker

UNIT = base64.b64encode(np.ones(160, np.float32).tobytes()).decode()


@asynccontextmanager
async def working(**options) -> AsyncIterator[FakeWorker]:
    worker = await FakeWorker(**options).start()
    try:
        yield worker
    finally:
        await worker.close()


def at(worker: FakeWorker) -> Address:
    return Address("127.0.0.1", worker.port)


async def ready(running) -> tuple[int, str | None]:
    """Status and slug of `/ready`."""
    async with running.client() as http:
        answer = await http.get("/ready")
    return answer.status_code, answer.json().get("slug")


async def stick(worker: FakeWorker, client) -> threading.Event:
    """Let a session's unit hang in the compute thread; returns what frees it."""
    gate, inside = threading.Event(), threading.Event()
    worker.model.gates["think"], worker.model.entered["think"] = gate, inside
    await client.chunk(audio_base64=UNIT)
    assert await asyncio.to_thread(inside.wait, PATIENCE_S)
    return gate


async def test_a_worker_with_a_stuck_compute_thread_gets_no_sessions_until_it_goes_on(
    serve, talker, until
):
    async with (
        working(stuck_after_s=2.0) as worker,
        serve([at(worker)]) as running,
        running.dial("omni_a") as a,
    ):
        client = talker(a)
        await client.prepare()
        gate = await stick(worker, client)

        await until(lambda: running.gateway.pool.n_ready == 0)
        not_ready = await ready(running)
        async with running.dial("omni_b") as b:
            queued = await talker(b).hear()
            gate.set()
            await client.hear_kind("result")
            await talker(b).hear_kind("queue_done")

        assert not_ready == (503, "starting")
        assert (queued["type"], queued["state"]) == ("queued", "starting")
        assert await ready(running) == (200, None)


async def test_a_worker_that_stays_stuck_ends_its_sessions_and_itself(serve, talker, until):
    async with (
        working(stuck_after_s=0.4) as worker,
        serve([at(worker)]) as running,
        running.dial() as socket,
    ):
        client = talker(socket)
        await client.prepare()
        await stick(worker, client)

        error = await client.hear_kind("error")

        assert error["slug"] == "engine_fault"
        assert await client.closed() == 1011
        assert await worker.code() == 70
        assert not running.gateway.pool.n_ready
        await until(lambda: not list(running.gateway.pool.leases()))


async def test_a_slot_that_cannot_be_cleaned_makes_its_worker_visibly_fail(serve, talker, until):
    """B08: a failed clean-up has to show, and must not refuse the next session without a word."""
    async with working() as worker, serve([at(worker)]) as running:
        worker.model.fail_end = True
        async with running.dial("omni_a") as a:
            await talker(a).prepare()
        await until(lambda: running.gateway.pool.n_ready == 0)
        async with running.dial("omni_b") as b:
            queued = await talker(b).hear()

        assert (queued["type"], queued["state"]) == ("queued", "starting")
        assert await worker.code() == 70


async def test_a_retiring_worker_keeps_its_sessions_and_gets_no_new_ones(serve, talker, until):
    async with (
        working() as leaving,
        working() as staying,
        serve([at(leaving), at(staying)]) as running,
        running.dial("omni_a") as a,
    ):
        client = talker(a)
        await client.prepare()
        assert running.gateway.pool.workers[0].leases

        leaving.lifecycle.request_retirement()
        async with running.dial("omni_b") as b, running.dial("omni_c") as c:
            await talker(b).prepare()
            await talker(c).prepare()
            await until(lambda: running.gateway.pool.workers[0].status == "draining")
            on_second = len(running.gateway.pool.workers[1].leases)
            await client.chunk(audio_base64=UNIT)
            result = await client.hear_kind("result")
        await client.say("stop")

        assert on_second == 2
        assert result["text"] == "u0 "
        assert (await client.hear_kind("stopped"))["type"] == "stopped"
        assert await client.closed() == 1000
        assert await leaving.code() == 0


HELLO = {"messages": [{"role": "user", "content": "Hello"}], "tts": {"enabled": True}}


async def test_a_chat_is_answered_on_its_socket_and_over_http(serve, talker):
    async with working() as worker, serve([at(worker)]) as running:
        async with running.dial_path("/ws/chat") as socket:
            await socket.send(json.dumps(HELLO))
            client = talker(socket)
            kinds = [(await client.hear())["type"] for _ in range(worker.model.n_pieces + 1)]
            done = await client.hear()
            code = await client.closed()
        async with running.client() as http:
            answer = (await http.post("/api/chat", json=HELLO)).json()

    assert kinds == ["prefill_done", *["chunk"] * worker.model.n_pieces]
    assert (done["type"], code) == ("done", 1000)
    assert done["text"] == answer["text"] != ""
    assert answer["audio_data"]
    assert answer["ignored"] == ["length_penalty"]


async def test_a_question_that_the_model_refuses_keeps_its_kind(serve):
    async with (
        working() as worker,
        serve([at(worker)]) as running,
        running.client() as http,
    ):
        answers = [
            await http.post("/api/chat", json={"messages": [{"role": "user", "content": content}]})
            for content in ("too long", "fail", "Hello")
        ]

    assert [answer.status_code for answer in answers] == [422, 500, 200]
    assert [answer.json().get("slug") for answer in answers] == ["bad_message", "model_fault", None]


async def test_leaving_a_chat_stops_its_program_and_frees_the_slot(serve, talker, until):
    """W4: generation went on beside the next request."""
    async with working(n_slots=1) as worker, serve([at(worker)]) as running:
        gate, inside = threading.Event(), threading.Event()
        worker.model.gates["write"], worker.model.entered["write"] = gate, inside
        async with running.dial_path("/ws/chat") as socket:
            await socket.send(json.dumps(HELLO))
            assert await asyncio.to_thread(inside.wait, PATIENCE_S)
            (session,) = worker.lifecycle.host.sessions.values()
        await until(lambda: session.state is SessionState.CLOSING)
        gate.set()
        async with running.dial_path("/ws/chat") as socket:
            await socket.send(json.dumps(HELLO))
            await talker(socket).hear_kind("done")

        left, stayed = worker.model.states[-2:]
        assert (left.said, left.ended) == ([], True)
        assert len(stayed.said) == worker.model.n_pieces


async def test_a_turn_is_heard_and_answered(serve, talker):
    async with (
        working() as worker,
        serve([at(worker)]) as running,
        running.dial_path("/ws/half_duplex/hdx_1") as socket,
    ):
        client = talker(socket)
        prepared = await client.prepare()
        for value in (0.0, 1.0, 0.0):
            sound = np.full(16_000, value, np.float32).tobytes()
            await client.chunk(audio_base64=base64.b64encode(sound).decode())
        heard = []
        while not heard or heard[-1]["type"] not in ("turn_done", "error"):
            heard.append(await client.hear())
        await client.say("stop")

        kinds = [message["type"] for message in heard]
        assert prepared["timeout_s"] == 300.0
        assert kinds[:3] == ["vad_state", "vad_state", "generating"]
        assert kinds[3:] == ["chunk"] * (worker.model.n_pieces + 1) + ["turn_done"]
        assert heard[-1]["turn_index"] == 1
        assert (await client.hear_kind("stopped"))["type"] == "stopped"
        assert await client.closed() == 1000
