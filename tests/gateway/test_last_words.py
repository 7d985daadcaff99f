"""Whoever is just sending still gets to know why its session ends.

A socket that is closed with unread bytes in it is reset, and a reset throws away what the other
side has not read yet: the error that says why.
"""

from __future__ import annotations

import asyncio
import itertools
import time

import pytest
from websockets.frames import Frame, Opcode

from gateway import client_socket, relay
from gateway.client_socket import ClientProtocol, LargeFrameGate
from shared.config import Config, SecurityConfig
from shared.protocol import Failure, Input, Result
from tests.fakes.deaf_client import DeafClient, frame
from tests.fakes.patience import PATIENCE_S
from tests.fakes.scripted_worker import Script, ScriptedWorker

LARGE = frame('{"type": "client_diagnostic", "text": "%s"}' % ("x" * 1_000_000))
TINY = frame('{"type": "client_diagnostic"}')
KEYS = Config(security=SecurityConfig(api_keys=("key",)))


@pytest.mark.parametrize(
    ("config", "path", "slug", "code"),
    [
        (KEYS, "/ws/duplex/omni_x", "unauthorized", 1008),
        (KEYS, "/ws/half_duplex/hdx_x", "unauthorized", 1008),
        (KEYS, "/ws/chat", "unauthorized", 1008),
        (Config(), "/ws/duplex/omni!", "bad_session_id", 1008),
        (Config(), "/ws/duplex/omni_x", "no_worker", 1013),
    ],
)
@pytest.mark.parametrize("flood", [LARGE * 20, TINY * 20_000], ids=["large", "tiny"])
async def test_a_refusal_reaches_a_client_that_floods(serve, config, path, slug, code, flood):
    async with serve([], config, ready=False) as running, DeafClient(running.port, path) as client:
        await client.send(flood)
        heard = await client.hear()

    assert [message["slug"] for message in heard.messages] == [slug]
    assert heard.close_code == code


async def test_a_failure_reaches_a_client_that_floods(serve):
    def fail(_: Input) -> Failure:
        return Failure("engine_fault", "The device is lost", close_code=1011)

    async with (
        ScriptedWorker(script=Script(answer=fail)) as worker,
        serve([worker]) as running,
        DeafClient(running.port, "/ws/duplex/omni_x") as client,
    ):
        await client.say("prepare")
        await client.say("audio_chunk", audio_base64="AAAAAA==")
        await client.send(LARGE * 20)
        heard = await client.hear()

    assert heard.messages[-1]["slug"] == "engine_fault"
    assert heard.close_code == 1011


async def test_bytes_that_are_no_frames_are_answered_with_an_error(serve):
    """Only a close frame was sent, and it was lost to a client that sent on."""
    unmasked = Frame(Opcode.TEXT, b"x" * 1_000_000).serialize(mask=False)
    async with (
        ScriptedWorker() as worker,
        serve([worker]) as running,
        DeafClient(running.port, "/ws/duplex/omni_x") as client,
    ):
        await client.say("prepare")
        await client.send(unmasked * 20)
        heard = await client.hear()

    assert heard.messages[-1]["slug"] == "bad_frame"
    assert heard.close_code == 1002


async def test_the_end_of_the_process_waits_for_a_client_that_is_sending(serve, monkeypatch):
    monkeypatch.setattr(client_socket, "SHUTDOWN_GRACE_S", 4.0)
    async with (
        ScriptedWorker() as worker,
        serve([worker]) as running,
        DeafClient(running.port, "/ws/duplex/omni_x") as client,
    ):
        await client.say("prepare")
        running.server.should_exit = True
        for _ in range(20):
            await client.send(LARGE)
            await asyncio.sleep(0.02)
        heard = await client.hear()

    assert heard.messages[-1]["slug"] == "server_shutdown"
    assert heard.close_code == 1001


async def test_a_client_whose_large_message_has_to_wait_is_told_and_leaves_the_line(
    serve, until, monkeypatch
):
    monkeypatch.setattr(client_socket, "LARGE_FRAME_BYTES", 200_000)
    gate = LargeFrameGate(0)
    monkeypatch.setattr(ClientProtocol, "gate", gate)
    async with (
        ScriptedWorker() as worker,
        serve([worker]) as running,
        DeafClient(running.port, "/ws/duplex/omni_x") as client,
    ):
        await client.say("prepare")
        await until(lambda: worker.n_live == 1)
        sending = asyncio.create_task(client.send(LARGE * 20))
        await until(lambda: gate._waiting)
        await worker.sessions[0].send(Failure("engine_fault", "It is lost", close_code=1011))
        await sending
        heard = await client.hear()

    assert heard.messages[-1]["slug"] == "engine_fault"
    assert heard.close_code == 1011
    assert not gate._waiting


async def test_who_has_been_refused_takes_no_place_for_a_large_message(serve, until, monkeypatch):
    monkeypatch.setattr(client_socket, "LARGE_FRAME_BYTES", 200_000)
    # Whoever takes a place of none stays in line.
    gate = LargeFrameGate(0)
    monkeypatch.setattr(ClientProtocol, "gate", gate)
    async with (
        serve([], KEYS) as running,
        DeafClient(running.port, "/ws/duplex/omni_x") as client,
    ):
        await until(lambda: running.gateway.desk.counts["unauthorized"])
        await client.send(LARGE * 20)
        assert not gate._waiting
        heard = await client.hear()

    assert heard.close_code == 1008


async def test_who_has_been_refused_has_few_of_its_frames_looked_at(serve, until, monkeypatch):
    """A stream of pings, few in each read, held the event loop for five seconds."""
    n_seen = 0
    plain = ClientProtocol.handle_ping

    def note(self):
        nonlocal n_seen
        n_seen += 1
        plain(self)

    monkeypatch.setattr(ClientProtocol, "handle_ping", note)
    monkeypatch.setattr(client_socket, "MAX_FRAMES_PER_READ", 100)
    pings = Frame(Opcode.PING, b"").serialize(mask=True) * 20
    async with (
        serve([], KEYS) as running,
        DeafClient(running.port, "/ws/duplex/omni_x") as client,
    ):
        await until(lambda: running.gateway.desk.counts["unauthorized"])
        for _ in range(50):
            await client.send(pings)
            await asyncio.sleep(0.001)
        heard = await client.hear()

    assert n_seen < 500
    assert heard.close_code == 1008


@pytest.mark.parametrize("is_deaf", [True, False])
async def test_what_is_thrown_away_is_read_at_a_pace(serve, until, monkeypatch, is_deaf):
    """It was read as fast as the network brings it, which took a core."""
    read_at = []
    plain = ClientProtocol.data_received

    def note(self, data):
        read_at.append(time.monotonic())
        plain(self, data)

    monkeypatch.setattr(ClientProtocol, "data_received", note)
    monkeypatch.setattr(client_socket, "READ_PAUSE_S", 0.02)
    if is_deaf:
        monkeypatch.setattr(client_socket, "LARGE_FRAME_BYTES", 200_000)
    async with (
        serve([], KEYS) as running,
        DeafClient(running.port, "/ws/duplex/omni_x") as client,
    ):
        await until(lambda: running.gateway.desk.counts["unauthorized"])
        await client.send(LARGE * 3)
        heard = await client.hear()

    pauses = [after - before for before, after in itertools.pairwise(read_at[-5:])]
    assert len(pauses) == 4
    assert min(pauses) > 0.015
    assert heard.close_code == 1008


async def test_a_client_that_reads_too_late_finds_the_reason_behind_what_was_sent(
    serve, until, monkeypatch
):
    """The close was left out when the last frames were not read within two seconds."""
    monkeypatch.setattr(relay, "FLUSH_TIMEOUT_S", 0.02)
    sound = bytes(4_000_000)

    def talk(chunk: Input) -> Result:
        return Result(seq=chunk.seq, is_listen=False, unit_index=1, audio=sound)

    async with (
        ScriptedWorker(script=Script(answer=talk)) as worker,
        serve([worker]) as running,
        DeafClient(running.port, "/ws/duplex/omni_x", buffer_bytes=100_000) as client,
    ):
        await client.say("prepare")
        for _ in range(6):
            await client.say("audio_chunk", audio_base64="AAAAAA==")
        await until(lambda: running.gateway.desk.counts["slow_reader"])
        await client.send(LARGE * 3)
        await asyncio.sleep(0.1)
        await client.send(LARGE * 3)
        heard = await client.hear()

    assert heard.messages[-1]["slug"] == "slow_reader"
    assert heard.close_code == 1008


@pytest.mark.parametrize(
    ("begin", "status"),
    [(b"GET / HTTP/1.1\r\nX-Long: ", 431), (b"\0no request\r\n", 400)],
    ids=["head", "nonsense"],
)
async def test_the_answer_to_a_request_that_cannot_be_read_reaches_who_sends_on(
    serve, begin, status
):
    async with serve([], ready=False) as running:
        reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
        writer.write(begin)
        for _ in range(20):
            writer.write(b"x" * 1_000_000)
            await writer.drain()
        async with asyncio.timeout(PATIENCE_S):
            answer = await reader.read()
        writer.close()

    assert int(answer.split()[1]) == status
