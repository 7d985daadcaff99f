"""`/ws/duplex` on real sockets: client <-> gateway <-> fake worker."""

from __future__ import annotations

import asyncio
import base64
import json
import socket
import struct
from contextlib import AsyncExitStack
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed

from gateway import link, outbox, pool, relay
from gateway.client_socket import ClientProtocol
from gateway.pool import Lease
from shared.config import Config
from shared.limits import MAX_INBOX_UNITS
from shared.protocol import Failure, Input, Prepare, Result, Stop
from tests.fakes.scripted_worker import Script, ScriptedWorker, speak


async def test_a_session_goes_from_queue_done_to_a_normal_close(serve, talker):
    async with ScriptedWorker() as worker, serve([worker]) as running, running.dial() as socket:
        client = talker(socket)

        first = await client.hear()
        prepared = await client.prepare(system_prompt="Be kind.", config={"chunk_ms": 500})
        await client.chunk()
        result = await client.hear()
        await client.say("stop")
        last = await client.hear()

        assert first == {"type": "queue_done"}
        assert prepared == {
            "type": "prepared",
            "prompt_length": 8,
            "prompt_tokens": 7,
            "ignored": ["chunk_ms", "length_penalty"],
            "languages": ["en"],
        }
        assert result["type"] == "result"
        assert last == {"type": "stopped"}
        assert await client.closed() == 1000


async def test_each_chunk_gets_one_result_in_order(serve, talker):
    worker = ScriptedWorker(script=Script(answer=speak))
    async with worker, serve([worker]) as running, running.dial() as socket:
        client = talker(socket)
        await client.prepare()

        sounds = [struct.pack("<4f", *[i / 10] * 4) for i in range(6)]
        for sound in sounds:
            await client.chunk(audio_base64=base64.b64encode(sound).decode())
        results = [await client.hear() for _ in sounds]

        assert [base64.b64decode(r["audio_data"]) for r in results] == sounds
        assert [c.seq for c in worker.sessions[0].chunks] == list(range(6))


async def test_early_prepare_and_chunks_are_replayed_in_order_after_the_queue(serve, talker):
    """The reference did not read the socket while queued and lost its normal early prepare."""
    async with (
        ScriptedWorker() as worker,
        serve([worker]) as running,
        running.dial("omni_a") as a,
        running.dial("omni_b") as b,
    ):
        first, second = talker(a), talker(b)
        await first.prepare()
        queued = await second.hear()

        await second.say("prepare", system_prompt="early")
        await second.chunk(force_listen=True)
        await second.chunk()
        await first.say("stop")
        kinds = [(await second.hear())["type"] for _ in range(4)]

        assert queued["type"] == "queued"
        assert queued["position"] == 1
        assert queued["ticket_id"].startswith("q_")
        assert isinstance(queued["estimated_wait_s"], float)
        assert kinds == ["queue_done", "prepared", "result", "result"]
        prepare, one, two = worker.sessions[1].commands[:3]
        assert isinstance(prepare, Prepare)
        assert prepare.system_prompt == "early"
        assert isinstance(one, Input)
        assert isinstance(two, Input)
        assert (one.force_listen, two.force_listen) == (True, False)


async def test_chunks_beyond_the_bound_while_queued_are_answered_as_dropped(serve, talker):
    async with (
        ScriptedWorker() as worker,
        serve([worker]) as running,
        running.dial("omni_a") as a,
        running.dial("omni_b") as b,
    ):
        first, second = talker(a), talker(b)
        await first.prepare()
        await second.hear_kind("queued")
        await second.say("prepare")

        for _ in range(MAX_INBOX_UNITS + 2):
            await second.chunk()
        early = [await second.hear_kind("result") for _ in range(2)]
        await first.say("stop")
        later = [await second.hear_kind("result") for _ in range(MAX_INBOX_UNITS)]

        assert [r.get("dropped") for r in early] == [True, True]
        assert not any("dropped" in r for r in later)
        assert len(worker.sessions[1].chunks) == MAX_INBOX_UNITS


async def test_stop_while_queued_is_answered_and_frees_the_place(serve, talker):
    async with (
        ScriptedWorker() as worker,
        serve([worker]) as running,
        running.dial("omni_a") as a,
        running.dial("omni_b") as b,
    ):
        await talker(a).prepare()
        client = talker(b)
        await client.hear_kind("queued")

        await client.say("stop")

        assert (await client.hear_kind("stopped"))["type"] == "stopped"
        assert await client.closed() == 1000
        assert len(running.gateway.queue) == 0


async def test_waiting_clients_that_vanish_do_not_hold_their_place(serve, talker, until):
    """B05: dead waiters were granted the worker before the next live user."""
    async with ScriptedWorker() as worker, serve([worker]) as running, running.dial("omni_a") as a:
        first = talker(a)
        await first.prepare()
        b, c = await running.dial("omni_b"), await running.dial("omni_c")
        async with running.dial("omni_d") as d:
            last = talker(d)
            assert (await last.hear_kind("queued"))["position"] == 3

            b.transport.abort()
            c.transport.abort()
            await until(lambda: len(running.gateway.queue) == 1)
            await first.say("stop")

            await last.hear_kind("queue_done", timeout_s=1.0)
            assert [s.opened.session_id for s in worker.sessions] == ["omni_a", "omni_d"]


async def test_a_client_lost_between_queue_done_and_prepare_frees_its_slot(serve, talker):
    async with ScriptedWorker() as worker, serve([worker]) as running:
        lost = await running.dial("omni_a")
        assert json.loads(await lost.recv()) == {"type": "queue_done"}
        lost.transport.abort()

        async with running.dial("omni_b") as socket:
            await talker(socket).hear_kind("queue_done", timeout_s=1.0)
        assert worker.most_live == 1


async def test_clients_lost_while_the_worker_opens_burn_no_slot(serve, talker):
    """B07: each cancelled open burned a slot, as only Exception was rolled back."""
    script = Script(open_delay_s=0.2)
    async with ScriptedWorker(slots=2, script=script) as worker, serve([worker]) as running:
        for i in range(3):
            lost = await running.dial(f"omni_{i}")
            await asyncio.sleep(0.02)
            lost.transport.abort()

        async with running.dial("omni_last") as socket:
            await talker(socket).prepare()


async def test_clients_lost_during_prefill_burn_no_slot(serve, talker):
    script = Script(prepare_delay_s=0.2)
    async with ScriptedWorker(slots=2, script=script) as worker, serve([worker]) as running:
        for i in range(3):
            lost = await running.dial(f"omni_{i}")
            await lost.send('{"type":"prepare"}')
            lost.transport.abort()

        async with running.dial("omni_last") as socket:
            await talker(socket).prepare()


async def test_fifty_sessions_in_a_row_are_all_admitted(serve, talker):
    """B08: a new open right after `stopped` was refused."""
    script = Script(cleanup_delay_s=0.005)
    async with ScriptedWorker(script=script) as worker, serve([worker]) as running:
        for i in range(50):
            async with running.dial(f"omni_{i}") as socket:
                client = talker(socket)
                await client.prepare()
                await client.say("stop")
                await client.hear_kind("stopped")

        assert len(worker.sessions) == 50
        assert worker.most_live == 1


async def test_a_dying_worker_ends_its_session_with_worker_lost_within_two_seconds(serve, talker):
    async with ScriptedWorker() as worker, serve([worker]) as running, running.dial() as socket:
        client = talker(socket)
        await client.prepare()

        await worker.die()
        error = await client.hear_kind("error", timeout_s=2.0)

        assert error["slug"] == "worker_lost"
        assert isinstance(error["error"], str)
        assert await client.closed(2.0) == 1011


async def test_a_worker_that_does_not_open_is_not_tried_again_at_once(serve, talker, monkeypatch):
    """Each attempt costs its whole time-out, and the broken worker still counted as ready."""
    monkeypatch.setattr(link, "OPEN_TIMEOUT_S", 0.2)
    mute = ScriptedWorker(slots=4, script=Script(open_delay_s=2.0))
    async with mute, ScriptedWorker(slots=2) as well, serve([mute, well]) as running:
        worker = running.gateway.pool.workers[1]
        busy = Lease(running.gateway.pool, worker, "omni_busy", "omni_duplex", 0.0)
        worker.lend(busy)
        async with running.dial() as socket:
            await talker(socket).prepare()
        busy.release()

    assert mute.n_opens == 1


async def test_after_a_worker_died_the_next_session_gets_the_other_one(serve, talker):
    """W2: a dead worker was marked idle at once and swallowed the sessions that followed."""
    async with ScriptedWorker() as dead, ScriptedWorker() as alive, serve([dead, alive]) as running:
        async with running.dial("omni_a") as a:
            await talker(a).prepare()
            victim, other = (dead, alive) if dead.sessions else (alive, dead)
            await victim.die()
            await talker(a).hear_kind("error")

        async with running.dial("omni_b") as b:
            await talker(b).hear_kind("queue_done", timeout_s=1.0)
        assert [s.opened.session_id for s in other.sessions] == ["omni_b"]


async def test_a_worker_that_died_unseen_is_skipped_without_an_error(serve, talker):
    async with ScriptedWorker() as dead, ScriptedWorker() as alive, serve([dead, alive]) as running:
        await dead.die()

        async with running.dial() as socket:
            await talker(socket).hear_kind("queue_done", timeout_s=1.0)
        assert len(alive.sessions) == 1


async def test_a_refused_slot_puts_the_client_back_to_the_head_of_the_line(serve, talker):
    refusal = Failure("no_free_slot", "no slot is free", 1013)
    script = Script(refuse_open=refusal)
    async with (
        ScriptedWorker(script=script) as worker,
        serve([worker]) as running,
        running.dial() as socket,
    ):
        client = talker(socket)
        assert (await client.hear())["type"] == "queued"
        script.refuse_open = None

        await client.hear_kind("queue_done")


async def test_a_worker_that_takes_nobody_any_more_puts_the_client_back_to_the_head(
    serve, talker, until
):
    """Between two polls a worker may have begun to drain; its next client got an error."""
    script = Script(refuse_open=Failure("no_worker", "this worker is retiring", 1013))
    async with ScriptedWorker(script=script) as worker, serve([worker]) as running:
        script.worker_status = "draining"
        async with running.dial() as socket:
            client = talker(socket)
            first = await client.hear()
            await until(lambda: running.gateway.pool.workers[0].status == "draining")
            script.refuse_open = script.worker_status = None

            assert first["type"] == "queued"
            await client.hear_kind("queue_done")


async def test_a_restarted_worker_serves_again(serve, talker, until):
    worker = ScriptedWorker()
    async with worker, serve([worker]) as running:
        await worker.die()
        await until(lambda: running.gateway.pool.n_ready == 0)

        await worker.start()

        await running.until_ready()
        async with running.dial() as socket:
            await talker(socket).prepare()


async def test_a_failure_with_close_code_ends_the_session_with_it(serve, talker):
    def fail(chunk: Input) -> Failure:
        return Failure("engine_fault", "The device is lost", 1011, chunk.seq)

    worker = ScriptedWorker(script=Script(answer=fail))
    async with worker, serve([worker]) as running, running.dial() as socket:
        client = talker(socket)
        await client.prepare()

        await client.chunk()

        assert await client.hear() == {
            "type": "error",
            "error": "The device is lost",
            "slug": "engine_fault",
        }
        assert await client.closed() == 1011


async def test_a_result_that_waits_for_a_slow_client_is_sent_before_the_error(
    serve, talker, until, monkeypatch
):
    """A frame whose sending was cancelled by the session's end was lost."""
    connections = []
    connection_made = ClientProtocol.connection_made

    def remember(self: ClientProtocol, transport: asyncio.BaseTransport) -> None:
        connections.append(self)
        connection_made(self, transport)

    monkeypatch.setattr(ClientProtocol, "connection_made", remember)
    worker = ScriptedWorker(script=Script(answer=lambda _: None))
    async with worker, serve([worker]) as running, running.dial() as socket:
        client = talker(socket)
        await client.prepare()
        await client.chunk()
        await until(lambda: worker.sessions[0].chunks)

        connections[0].writable.clear()
        await worker.sessions[0].send(Result(0, True, 1))
        await worker.sessions[0].send(Failure("engine_fault", "The device is lost", 1011))
        await until(lambda: running.gateway.desk.counts["engine_fault"] == 1)
        connections[0].writable.set()

        assert [(await client.hear())["type"] for _ in range(2)] == ["result", "error"]


async def test_a_failure_without_close_code_leaves_the_session_alive(serve, talker):
    def fail_first(chunk: Input) -> Failure | Result:
        if chunk.seq == 0:
            return Failure("model_fault", "This unit failed", None, 0)
        return Result(chunk.seq, True, 1)

    worker = ScriptedWorker(script=Script(answer=fail_first))
    async with worker, serve([worker]) as running, running.dial() as socket:
        client = talker(socket)
        await client.prepare()

        await client.chunk()
        await client.chunk()

        assert [(await client.hear())["type"] for _ in range(2)] == ["error", "result"]


async def test_a_pause_timeout_reaches_the_client_as_timeout_and_closes_normally(serve, talker):
    async with ScriptedWorker() as worker, serve([worker]) as running, running.dial() as socket:
        client = talker(socket)
        await client.prepare()

        await worker.sessions[0].send(Failure("session_timeout", "Pause timeout (60.0s)", 1000))
        message = await client.hear()

        assert (message["type"], message["reason"]) == ("timeout", "Pause timeout (60.0s)")
        assert await client.closed() == 1000


async def test_pause_resume_and_interrupt_are_answered(serve, talker):
    async with ScriptedWorker() as worker, serve([worker]) as running, running.dial() as socket:
        client = talker(socket)
        await client.prepare()

        for kind in ("pause", "resume", "interrupt"):
            await client.say(kind)

        assert await client.hear() == {"type": "paused", "timeout": 60.0}
        assert await client.hear() == {"type": "resumed"}
        assert await client.hear() == {"type": "interrupted"}


async def test_disconnecting_tells_the_worker_to_stop_before_the_slot_is_leased_again(
    serve, talker
):
    script = Script(cleanup_delay_s=0.2)
    async with ScriptedWorker(script=script) as worker, serve([worker]) as running:
        async with running.dial("omni_a") as a:
            await talker(a).prepare()
        async with running.dial("omni_b") as b:
            await talker(b).hear_kind("queue_done")

        assert isinstance(worker.sessions[0].commands[-1], Stop)
        assert worker.most_live == 1


MALFORMED = {
    "array": "[1, 2]",
    "unknown type": '{"type": "video_frame"}',
    "no type": "{}",
    "missing audio": '{"type": "audio_chunk"}',
    "bad padding": '{"type": "audio_chunk", "audio_base64": "AAA"}',
    "odd byte count": '{"type": "audio_chunk", "audio_base64": "AAAA"}',
    "empty string": '{"type": "audio_chunk", "audio_base64": ""}',
    "frame no base64": json.dumps(
        {"type": "audio_chunk", "audio_base64": "AAAAAA==", "frame_base64_list": ["*"]}
    ),
    "deep": '{"a":' * 10_000 + "1" + "}" * 10_000,
    "too long": json.dumps({"type": "audio_chunk", "audio_base64": "A" * 4_000_000}),
    "server path": '{"type": "prepare", "ref_audio_path": "/etc/passwd"}',
    "setting out of range": '{"type": "prepare", "config": {"temperature": 9}}',
}


@pytest.mark.parametrize("frame", MALFORMED.values(), ids=MALFORMED.keys())
async def test_malformed_json_gets_a_typed_error_and_the_session_goes_on(serve, talker, frame):
    async with ScriptedWorker() as worker, serve([worker]) as running, running.dial() as socket:
        client = talker(socket)
        await client.prepare()

        await socket.send(frame)
        error = await client.hear()
        await client.chunk()
        result = await client.hear()

        assert error["type"] == "error"
        assert isinstance(error["error"], str)
        assert error["slug"] in ("bad_message", "bad_audio", "bad_image")
        assert result["type"] == "result"
        assert len(worker.sessions[0].commands) == 2


@pytest.mark.parametrize("frame", ["hello", "", '{"a": "\0"}', '{"a": NaN}'])
async def test_text_that_is_no_json_ends_the_session_with_1007(serve, talker, frame):
    async with ScriptedWorker() as worker, serve([worker]) as running, running.dial() as socket:
        client = talker(socket)
        await client.prepare()

        await socket.send(frame)

        assert (await client.hear())["slug"] == "not_json"
        assert await client.closed() == 1007


async def test_a_binary_frame_ends_the_session_with_1003(serve, talker):
    async with ScriptedWorker() as worker, serve([worker]) as running, running.dial() as socket:
        client = talker(socket)
        await client.prepare()

        await socket.send(b'{"type":"stop"}')

        assert (await client.hear())["slug"] == "unexpected_binary"
        assert await client.closed() == 1003


async def test_a_chunk_after_stop_is_refused_by_name(serve, talker):
    script = Script(cleanup_delay_s=0.2)
    async with (
        ScriptedWorker(script=script) as worker,
        serve([worker]) as running,
        running.dial() as socket,
    ):
        client = talker(socket)
        await client.prepare()

        await client.say("stop")
        await client.chunk()

        assert (await client.hear_kind("error"))["slug"] == "bad_message"
        assert await client.closed() == 1000


async def test_diagnostics_are_swallowed(serve, talker):
    async with ScriptedWorker() as worker, serve([worker]) as running, running.dial() as socket:
        client = talker(socket)
        await client.prepare()

        await client.say("client_diagnostic", event="gap")
        await client.chunk()

        assert (await client.hear())["type"] == "result"
        assert running.gateway.n_diagnostics == 1


@pytest.mark.parametrize(
    "session_id",
    ["..%2f..%2fetc", "a%00b", "a%20b", "a%0Ab", "a%0A", "x" * 200, "%E4%BD%A0", "a/b"],
)
async def test_an_unsafe_session_id_gets_a_typed_error(serve, talker, session_id):
    async with (
        ScriptedWorker() as worker,
        serve([worker]) as running,
        running.dial(session_id) as socket,
    ):
        client = talker(socket)

        assert (await client.hear())["slug"] == "bad_session_id"
        assert await client.closed() == 1008


async def test_twenty_resets_in_mid_frame_leave_the_gateway_serving(serve, talker, caplog):
    """B01: clients that reset the connection took the server down."""
    async with ScriptedWorker() as worker, serve([worker]) as running:
        for i in range(20):
            lost = await running.dial(f"omni_{i}")
            client = talker(lost)
            await client.prepare()
            await client.chunk()
            await client.hear_kind("result")
            raw = lost.transport.get_extra_info("socket")
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            # The head of a masked text frame of 64 kB, then a part of it, then a reset.
            lost.transport.write(b"\x81\xfe\xff\xff" + b"mask" + bytes(1000))
            lost.transport.abort()

        async with running.dial("omni_last") as alive:
            client = talker(alive)
            await client.prepare()
            await client.chunk()
            assert (await client.hear_kind("result"))["is_listen"] is True
    assert not [r for r in caplog.records if r.exc_info]


async def test_twenty_parallel_sessions_do_not_mix(serve, talker):
    worker = ScriptedWorker(slots=20, script=Script(answer=speak))

    async def talk(running: Any, i: int) -> None:
        sound = struct.pack("<2f", i, i)
        async with running.dial(f"omni_{i}") as socket:
            client = talker(socket)
            await client.prepare()
            for _ in range(10):
                await client.chunk(audio_base64=base64.b64encode(sound).decode())
            for _ in range(10):
                result = await client.hear_kind("result")
                assert base64.b64decode(result["audio_data"]) == sound
            await client.say("stop")
            await client.hear_kind("stopped")

    async with worker, serve([worker]) as running:
        async with asyncio.TaskGroup() as group:
            for i in range(20):
                group.create_task(talk(running, i))
        assert worker.most_live <= 20


async def test_a_client_that_does_not_read_is_closed_and_others_go_on(serve, talker):
    """B49: output for a client that stopped reading was buffered without limit."""
    megabyte = bytes(1 << 20)

    def flood(chunk: Input) -> Result:
        return Result(chunk.seq, False, chunk.seq, audio=megabyte)

    worker = ScriptedWorker(slots=2, script=Script(answer=flood))
    async with worker, serve([worker]) as running, running.dial("omni_b") as other:
        deaf = await running.dial("omni_a", max_queue=1)
        await deaf.send('{"type":"prepare"}')
        short = json.dumps({"type": "audio_chunk", "audio_base64": "AAAAAA=="})

        async def keep_asking() -> None:
            for _ in range(2000):
                await deaf.send(short)
                await asyncio.sleep(0.005)

        with pytest.raises(ConnectionClosed):
            await keep_asking()
        assert running.gateway.desk.counts["slow_reader"] == 1

        client = talker(other)
        await client.prepare()
        await client.chunk()
        assert (await client.hear_kind("result"))["audio_data"]
        deaf.transport.abort()


async def test_the_last_words_to_a_client_that_does_not_read_are_not_waited_for(
    serve, talker, until, monkeypatch
):
    """With its output almost at the bound, the error itself was one frame too many."""
    monkeypatch.setattr(outbox, "MAX_OUTBOX_BYTES", 400)
    monkeypatch.setattr(relay, "FLUSH_TIMEOUT_S", 0.1)
    worker = ScriptedWorker(script=Script(answer=speak))
    async with worker, serve([worker]) as running, running.dial() as socket:
        client = talker(socket)
        await client.prepare()
        # The socket is full from now on.
        (protocol,) = (
            each
            for each in running.server.server_state.connections
            if isinstance(each, ClientProtocol)
        )
        protocol.writable.clear()
        await client.chunk(audio_base64=base64.b64encode(bytes(8)).decode())
        await until(lambda: worker.sessions[-1].chunks)

        await worker.sessions[-1].connection.close()

        await until(lambda: not running.server.server_state.tasks)
        assert running.gateway.desk.counts == {"worker_lost": 1}
        protocol.writable.set()


async def test_no_session_task_is_left_after_sessions_ended(serve, talker, until):
    async with ScriptedWorker(slots=3) as worker, serve([worker]) as running:
        before = len(asyncio.all_tasks())
        for i in range(3):
            async with running.dial(f"omni_{i}") as socket:
                await talker(socket).prepare()
        await until(lambda: not running.gateway.background and worker.n_live == 0)
        await until(lambda: len(asyncio.all_tasks()) <= before)


async def test_shutdown_tells_the_sessions(serve, talker):
    async with ScriptedWorker() as worker:
        async with serve([worker]) as running:
            socket = await running.dial()
            client = talker(socket)
            await client.prepare()

        assert (await client.hear())["slug"] == "server_shutdown"
        assert await client.closed() == 1001
        assert isinstance(worker.sessions[0].commands[-1], Stop)


async def test_a_cancelled_ticket_ends_its_client_with_a_reason(serve, talker):
    async with (
        ScriptedWorker() as worker,
        serve([worker]) as running,
        running.dial("omni_a") as a,
        running.dial("omni_b") as b,
    ):
        await talker(a).prepare()
        client = talker(b)
        ticket_id = (await client.hear_kind("queued"))["ticket_id"]

        assert running.gateway.queue.cancel(ticket_id)

        assert (await client.hear_kind("error"))["slug"] == "ticket_cancelled"
        assert await client.closed() == 1000


async def test_waiters_hear_of_their_place_when_it_changes(serve, talker):
    async with (
        ScriptedWorker() as worker,
        serve([worker]) as running,
        running.dial("omni_a") as a,
        running.dial("omni_b") as b,
        running.dial("omni_c") as c,
    ):
        await talker(a).prepare()
        await talker(b).hear_kind("queued")
        last = talker(c)
        assert (await last.hear_kind("queued"))["position"] == 2

        await talker(b).say("stop")
        update = await last.hear_kind("queue_update", timeout_s=1.0)

        assert update["position"] == 1
        assert update["queue_length"] == 1


async def test_many_departures_at_once_are_told_to_a_waiter_in_few_updates(serve, talker, until):
    async with ScriptedWorker() as worker, serve([worker]) as running, AsyncExitStack() as stack:

        async def enter(name):
            return talker(await stack.enter_async_context(running.dial(f"omni_{name}")))

        await (await enter("holder")).prepare()
        leavers = [await enter(f"leaver{i}") for i in range(20)]
        await until(lambda: len(running.gateway.queue) == 20)
        last = await enter("last")
        assert (await last.hear_kind("queued"))["position"] == 21
        for leaver in leavers:
            await leaver.socket.close()

        positions = [21]
        while positions[-1] != 1:
            positions.append((await last.hear_kind("queue_update"))["position"])

        assert len(positions) <= 5


class TestRefusals:
    """B13: overload, a broken back end and a start must not look alike."""

    async def test_a_full_queue(self, serve, talker):
        config = Config.model_validate({"service": {"max_queue_size": 0}})
        async with (
            ScriptedWorker() as worker,
            serve([worker], config) as running,
            running.dial("omni_a") as a,
            running.dial("omni_b") as b,
        ):
            await talker(a).prepare()
            client = talker(b)
            error = await client.hear()

            assert error["slug"] == "queue_full"
            assert error["error"] == "Queue full (0 requests)"
            assert await client.closed() == 1013

    async def test_no_worker_alive(self, serve, talker, until, monkeypatch):
        monkeypatch.setattr(pool, "RESTART_GRACE_S", 0.0)
        worker = ScriptedWorker(script=Script(worker_status="error"))
        async with worker, serve([worker], ready=False) as running:
            await until(lambda: running.gateway.pool.workers[0].status == "error")
            async with running.dial() as socket:
                client = talker(socket)
                error = await client.hear()

                assert error["slug"] == "no_worker"
                assert error["error"] == "No worker available"
                assert await client.closed() == 1013

    async def test_workers_still_loading(self, serve, talker, until):
        script = Script(worker_status="loading", eta_s=12.0)
        async with ScriptedWorker(script=script) as worker, serve([worker], ready=False) as running:
            await until(lambda: running.gateway.pool.workers[0].status == "loading")
            async with running.dial() as socket:
                client = talker(socket)
                queued = await client.hear()
                script.worker_status = None

                assert (queued["type"], queued["state"]) == ("queued", "starting")
                assert queued["estimated_wait_s"] == 12.0
                await client.hear_kind("queue_done")
