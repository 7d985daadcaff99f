"""The worker's port with real sockets: sessions, refusals, vanishing and hostile peers."""

import asyncio
import os
import socket
import struct
import threading
from collections.abc import Sequence

import httpx
import numpy as np
import pytest
import websockets

from shared.limits import LARGE_FRAME_BYTES
from shared.protocol import (
    SESSION_PATH,
    Answered,
    Ask,
    ChatMessage,
    Closed,
    Command,
    Delta,
    Event,
    Failure,
    Open,
    Opened,
    Prefilled,
    Prepare,
    Prepared,
    PrepareTurns,
    Result,
    Stop,
    Stopped,
    TextPart,
    TurnDone,
    encode,
)
from shared.states import SessionState, WorkerState
from tests.fakes.model import FakeDuplexModel
from tests.fakes.patience import PATIENCE_S
from tests.fakes.session import LOUD, chunk, eventually
from tests.fakes.worker import FakeWorker
from worker.server import Outbox, bind

OPEN = Open("s", "duplex", "omni_duplex")


def n_free(worker: FakeWorker) -> int:
    assert worker.lifecycle.host is not None
    return worker.lifecycle.host.slots.n_free


async def test_a_session_over_a_real_socket(make):
    worker = await make()
    peer = await worker.connect()
    await peer.send(OPEN, Prepare("be brief"), chunk(0, LOUD))
    first = [await peer.next() for _ in range(3)]
    await peer.send(Stop("done"))
    last = await peer.rest()

    assert [type(event) for event in first] == [Opened, Prepared, Result]
    assert last == [Stopped(), Closed("done")]
    assert await peer.close_code() == 1000
    assert n_free(worker) == 2


async def test_the_port_is_on_loopback_and_sends_short_messages_at_once():
    """Two short messages in a row took 40 ms: asyncio sets TCP_NODELAY on named TCP only."""
    with bind(0) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"
        assert listener.proto == socket.IPPROTO_TCP


async def test_results_come_back_chunk_by_chunk(make):
    worker = await make()
    peer = await worker.session()
    texts = []
    for seq in range(3):
        await peer.send(chunk(seq, LOUD))
        texts.append((await peer.until(Result)).text)

    assert texts == ["u0 ", "u1 ", "u2 "]


async def test_a_socket_without_the_subprotocol_is_refused(make):
    worker = await make()

    with pytest.raises(websockets.InvalidStatus, match="403"):
        await websockets.connect(f"ws://127.0.0.1:{worker.port}{SESSION_PATH}", proxy=None)


@pytest.mark.parametrize(
    ("frame", "words"),
    [
        ("text", "text frame"),
        (b"\xff", "not a session command"),
        (encode(Prepare("x")), "first message has to be open"),
        (encode(Open("x" * 200, "duplex", "chat")), "longer than 128"),
        (encode(Open("a\nfake log line", "duplex", "chat")), "cannot be printed"),
    ],
)
async def test_a_wrong_first_message_is_told_and_closed(make, frame, words):
    worker = await make()
    peer = await worker.connect()
    await peer.socket.send(frame)
    (failure,) = await peer.rest()

    assert words in failure.message
    assert await peer.close_code() == failure.close_code == 1002


async def test_a_malformed_frame_inside_a_session_does_not_end_it(make):
    worker = await make()
    peer = await worker.session()
    for frame in (b"", b"\xc1", "text", b"\x81" * 10_000, os.urandom(64)):
        await peer.socket.send(frame)
        assert (await peer.until(Failure)).close_code is None
    await peer.send(chunk(0))

    await peer.until(Result)


async def test_a_large_frame_is_read_beside_the_loop(make):
    worker = await make()
    peer = await worker.session()
    await peer.send(chunk(0, frames=[bytes(LARGE_FRAME_BYTES)]))
    failure = await peer.until(Failure)

    assert (failure.slug, failure.seq) == ("bad_image", 0)


async def test_a_full_worker_refuses_with_try_again_later(make):
    worker = await make(n_slots=1)
    await worker.session("a")
    peer = await worker.connect()
    await peer.send(OPEN)
    (failure,) = await peer.rest()

    assert (failure.slug, failure.close_code) == ("no_free_slot", 1013)
    assert await peer.close_code() == 1013


async def test_a_worker_that_is_loading_refuses(make):
    gate = threading.Event()
    model = FakeDuplexModel(on_stage=lambda name: gate.wait(PATIENCE_S) and None)
    worker = await make(ready=False, model=model)
    peer = await worker.connect()
    await peer.send(OPEN)
    (failure,) = await peer.rest()
    gate.set()

    assert (failure.slug, failure.message) == ("no_worker", "this worker is loading")
    assert await peer.close_code() == 1013


async def test_health_answers_fast_while_a_session_computes(make):
    gate, inside = threading.Event(), threading.Event()
    worker = await make()
    worker.model.gates["think"], worker.model.entered["think"] = gate, inside
    peer = await worker.session("talking")
    await peer.send(chunk(0))
    assert await asyncio.to_thread(inside.wait, PATIENCE_S)
    for _ in range(5):
        async with asyncio.timeout(1.0):
            health = await worker.health()
    gate.set()

    assert (health.status, health.worker_status, health.slots_free) == ("healthy", "idle", 1)
    assert health.current_session_id == "talking"
    assert (health.gpu_id, health.pid) == (3, os.getpid())


async def test_a_worker_without_free_slot_says_what_it_does(make):
    worker = await make(n_slots=1)
    await worker.session()
    health = await worker.health()

    assert (health.worker_status, health.slots_free, health.slots_total) == ("duplex_active", 0, 1)


async def test_a_connection_that_is_reset_in_the_middle_of_a_frame_leaves_a_clean_worker(make):
    """A client that is killed without a close frame took a whole server down elsewhere."""
    worker = await make(n_slots=1)
    for i in range(20):
        peer = await worker.session(f"s{i}")
        await peer.send(chunk(0, LOUD))
        raw = peer.socket.transport.get_extra_info("socket")
        peer.socket.transport.write(b"\x82\xfe\x10\x00half of a fra")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        peer.socket.transport.abort()
        await eventually(lambda: n_free(worker) == 1)
    peer = await worker.session("last")
    await peer.send(chunk(0, LOUD))

    assert (await peer.until(Result)).text == "u0 "


async def test_a_client_that_leaves_during_prepare_leaves_a_clean_worker(make):
    worker = await make(n_slots=1)
    gate, inside = threading.Event(), threading.Event()
    worker.model.gates["prefill"], worker.model.entered["prefill"] = gate, inside
    peer = await worker.connect()
    await peer.send(OPEN, Prepare("x"))
    assert await asyncio.to_thread(inside.wait, PATIENCE_S)
    peer.socket.transport.abort()
    gate.set()

    await eventually(lambda: n_free(worker) == 1)


async def test_closed_means_that_the_next_open_is_admitted(make):
    worker = await make(n_slots=1)
    for i in range(50):
        peer = await worker.session(f"s{i}")
        await peer.send(Stop())
        assert await peer.until(Closed) == Closed("stopped")


async def test_a_peer_that_does_not_read_is_let_go_and_its_neighbour_is_not_hurt(make):
    """Megabytes of output waited for a client that had stopped reading."""
    worker = await make(model=FakeDuplexModel(speech_samples=500_000))
    slow, good = await worker.session("slow"), await worker.session("good")
    slow.socket.transport.pause_reading()
    for seq in range(60):
        await slow.send(chunk(seq, LOUD))
        await good.send(chunk(seq, LOUD))
        assert len((await good.until(Result)).audio) == 2_000_000
        if n_free(worker) == 1:
            break

    assert n_free(worker) == 1
    slow.socket.transport.abort()


async def test_a_stuck_op_turns_health_unhealthy_and_refuses_sessions(make):
    gate, inside = threading.Event(), threading.Event()
    # At twice this time the thread is taken for lost: what follows has to fit in between.
    worker = await make(stuck_after_s=1.5)
    peer = await worker.session()
    worker.model.gates["think"], worker.model.entered["think"] = gate, inside
    await peer.send(chunk(0))
    assert await asyncio.to_thread(inside.wait, PATIENCE_S)
    await eventually(lambda: not worker.lifecycle.accepts_sessions)
    async with httpx.AsyncClient(trust_env=False) as client:
        answer = await client.get(f"http://127.0.0.1:{worker.port}/health")
    other = await worker.connect()
    await other.send(OPEN)
    (failure,) = await other.rest()
    gate.set()
    await peer.until(Result)

    assert answer.status_code == 503
    assert answer.json()["status"] == answer.json()["worker_status"] == "error"
    assert "stuck" in answer.json()["reason"]
    assert failure.slug == "no_worker"
    # The result leaves before the thread has put its op away.
    await eventually(lambda: worker.lifecycle.accepts_sessions)
    assert (await worker.health()).status == "healthy"


async def test_an_op_that_stays_stuck_ends_sessions_and_process(make):
    gate = threading.Event()
    worker = await make(stuck_after_s=0.1)
    peer = await worker.session()
    worker.model.gates["think"] = gate
    await peer.send(chunk(0))
    failure = await peer.until(Failure)

    assert (failure.slug, failure.close_code) == ("engine_fault", 1011)
    assert worker.lifecycle.state is WorkerState.FAILED
    assert await worker.code() == 70


async def test_a_lost_device_fails_the_worker(make):
    worker = await make()
    peer, idle = await worker.session("a"), await worker.session("b")
    worker.model.fault_kinds.add("think")
    await peer.send(chunk(0))

    for each in (peer, idle):
        failure = await each.until(Failure)
        assert (failure.slug, failure.close_code) == ("engine_fault", 1011)
        assert await each.close_code() == 1011
    assert await worker.code() == 70
    health = await worker.health()
    assert (health.status, health.reason) == ("error", "the device is gone")


async def test_a_worker_that_is_stopped_tells_its_sessions_and_ends_with_zero(make):
    worker = await make()
    peer = await worker.session()
    worker.lifecycle.request_stop()
    failure = await peer.until(Failure)

    assert (failure.slug, failure.close_code) == ("worker_lost", 1001)
    assert await peer.next() == Closed("draining")
    assert await peer.close_code() == 1001
    assert await worker.code() == 0


async def test_a_retiring_worker_refuses_sessions_and_ends_with_zero_after_its_last_one(make):
    worker = await make()
    peer = await worker.session()
    worker.lifecycle.request_retirement()
    worker.lifecycle.request_retirement()
    other = await worker.connect()
    await other.send(OPEN)
    (refusal,) = await other.rest()
    health = await worker.health()
    await peer.send(chunk(0, LOUD))
    result = await peer.until(Result)
    await peer.send(Stop())

    assert (refusal.slug, refusal.message) == ("no_worker", "this worker is retiring")
    assert (health.status, health.worker_status, health.slots_free) == ("healthy", "draining", 0)
    assert result.text == "u0 "
    assert await peer.until(Closed) == Closed("stopped")
    assert await worker.code() == 0


async def test_a_retiring_worker_tells_the_sessions_that_are_left_after_its_time(make):
    worker = await make(drain_timeout_s=0.2)
    peer = await worker.session()
    worker.lifecycle.request_retirement()
    failure = await peer.until(Failure)

    assert (failure.slug, failure.close_code) == ("worker_lost", 1001)
    assert await peer.close_code() == 1001
    assert await worker.code() == 0


async def test_a_retiring_worker_without_sessions_ends_at_once(make):
    worker = await make()
    worker.lifecycle.request_retirement()

    assert await worker.code() == 0


async def test_a_stop_ends_a_worker_that_waits_for_its_sessions(make):
    worker = await make()
    peer = await worker.session()
    worker.lifecycle.request_retirement()
    worker.lifecycle.request_stop()

    assert (await peer.until(Failure)).close_code == 1001
    assert await worker.code() == 0


async def test_a_retiring_worker_that_loses_its_device_fails(make):
    worker = await make()
    peer = await worker.session()
    worker.lifecycle.request_retirement()
    worker.model.fault_kinds.add("think")
    await peer.send(chunk(0))

    assert (await peer.until(Failure)).slug == "engine_fault"
    assert await worker.code() == 70


async def test_a_worker_whose_device_hangs_can_still_be_stopped(make, monkeypatch):
    monkeypatch.setattr("worker.lifecycle.DRAIN_TIMEOUT_S", 0.2)
    monkeypatch.setattr("worker.lifecycle.FAULT_TIMEOUT_S", 0.2)
    worker = await make()
    inside = worker.model.entered["think"] = threading.Event()
    worker.model.gates["think"] = threading.Event()
    peer = await worker.session()
    await peer.send(chunk(0))
    assert await asyncio.to_thread(inside.wait, PATIENCE_S)
    worker.lifecycle.request_stop()

    assert await worker.code() == 0
    assert (await peer.until(Failure)).slug == "worker_lost"
    assert await peer.close_code() == 1001


async def test_no_task_is_left_of_connections_that_have_ended(make):
    worker = await make()
    await worker.health()
    before = len(asyncio.all_tasks())
    for i in range(5):
        peer = await worker.session(f"s{i}")
        await peer.send(chunk(0, LOUD), Stop())
        await peer.rest()
    await eventually(lambda: len(asyncio.all_tasks()) <= before)


async def chat(worker: FakeWorker, *commands: Command) -> Sequence[Event]:
    peer = await worker.connect()
    await peer.send(Open("c", "chat", "chat"), *commands)
    return await peer.rest()


def question(text: str, **fields) -> Ask:
    return Ask([ChatMessage("user", [TextPart(text)])], **fields)


async def test_a_chat_request_over_a_real_socket(make):
    worker = await make()
    n_before = (await worker.health()).total_requests
    events = await chat(worker, question("hello"))

    assert [type(event) for event in events] == [
        *(Opened, Prefilled, Delta, Delta, Delta, Answered, Closed)
    ]
    assert events[-1] == Closed("done")
    assert n_free(worker) == 2
    # Chat requests count as units do.
    assert (await worker.health()).total_requests == n_before + 1


async def test_a_session_of_turns_over_a_real_socket(make):
    worker = await make()
    peer = await worker.connect()
    turn = np.concatenate((np.ones(4096, np.float32), np.zeros(16_000, np.float32)))
    await peer.send(Open("h", "half_duplex", "half_duplex_audio"), PrepareTurns([]))
    await peer.until(Prepared)
    await peer.send(chunk(0, np.zeros(8000)), chunk(1, turn))
    done = await peer.until(TurnDone)
    await peer.send(Stop())

    assert (done.turn_index, done.text) == (1, "w0 w1 w2 ")
    assert await peer.until(Closed) == Closed("stopped")
    assert (await worker.health()).total_requests == 1


@pytest.mark.parametrize(
    ("opening", "word"),
    [
        (Open("c", "chat", "chat"), "busy_chat"),
        (Open("h", "half_duplex", "half_duplex_audio"), "busy_half_duplex"),
    ],
)
async def test_a_worker_without_free_slot_says_which_mode_has_it(make, opening, word):
    worker = await make(n_slots=1)
    peer = await worker.connect()
    await peer.send(opening)
    await peer.until(Opened)

    assert (await worker.health()).worker_status == word


async def test_a_gateway_that_closes_the_socket_stops_the_answer(make):
    worker = await make(model=FakeDuplexModel(n_pieces=1000), n_slots=1)
    inside = worker.model.entered["write"] = threading.Event()
    gate = worker.model.gates["write"] = threading.Event()
    peer = await worker.connect()
    await peer.send(Open("c", "chat", "chat"), question("hello"))
    assert await asyncio.to_thread(inside.wait, PATIENCE_S)
    await peer.socket.close()
    host = worker.lifecycle.host
    await eventually(lambda: host is not None and host.sessions[0].state is SessionState.CLOSING)
    gate.set()
    await eventually(lambda: n_free(worker) == 1)

    assert len(worker.model.states[-1].said) == 0


async def test_a_worker_that_is_stopped_stops_its_answers(make):
    worker = await make(model=FakeDuplexModel(n_pieces=1000))
    inside = worker.model.entered["write"] = threading.Event()
    gate = worker.model.gates["write"] = threading.Event()
    peer = await worker.connect()
    await peer.send(Open("c", "chat", "chat"), question("hello"))
    assert await asyncio.to_thread(inside.wait, PATIENCE_S)
    worker.lifecycle.request_stop()
    assert (await peer.until(Failure)).slug == "worker_lost"
    gate.set()

    assert await peer.until(Closed) == Closed("draining")
    assert await worker.code() == 0


async def test_an_answer_may_be_larger_than_what_may_wait(make):
    """Minutes of sound in one message: nothing waits behind it."""
    worker = await make(model=FakeDuplexModel(speech_samples=1_000_000))
    events = await chat(worker, question("hello", speaks=True, is_streaming=False))

    assert len(events[2].audio) == 12_000_000
    assert events[-1] == Closed("done")


def test_the_outbox_holds_messages_up_to_its_bound():
    outbox = Outbox(max_bytes=100)
    outbox.put(Stopped())

    with pytest.raises(Exception, match="waits to be read"):
        outbox.put(Closed("x" * 100))
    outbox.put(Stopped())
