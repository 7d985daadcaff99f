"""The process and its sockets: command line, dead clients, clients that stop reading."""

from __future__ import annotations

import asyncio
import base64
import signal
import socket
import subprocess
import sys
import time

import httpx
import pytest
from websockets.frames import Frame, Opcode

from gateway import client_socket, server
from gateway.__main__ import main, worker_addresses
from gateway.pool import Address
from shared.config import Config
from shared.errors import ConfigError
from tests.fakes.patience import PATIENCE_S
from tests.fakes.scripted_worker import ScriptedWorker


def clients(running) -> list[client_socket.ClientProtocol]:
    """The WebSockets of a gateway."""
    connections = running.server.server_state.connections
    return [each for each in connections if isinstance(each, client_socket.ClientProtocol)]


async def test_a_client_that_went_silent_is_cut_and_its_slot_freed(
    serve, talker, until, monkeypatch
):
    """B11: without a bound, dead clients hold a slot for ever."""
    monkeypatch.setattr(server, "CLIENT_PING_INTERVAL_S", 0.05)
    async with ScriptedWorker() as worker, serve([worker]) as running:
        lost = await running.dial()
        await talker(lost).prepare()

        lost.transport.pause_reading()

        await until(lambda: worker.n_live == 0)
        lost.transport.abort()


async def test_a_quiet_client_that_answers_pings_lives_on(serve, talker, until, monkeypatch):
    monkeypatch.setattr(server, "CLIENT_PING_INTERVAL_S", 0.02)
    async with ScriptedWorker() as worker, serve([worker]) as running, running.dial() as socket:
        client = talker(socket)
        await client.prepare()
        (connection,) = worker.sessions
        sent = time.monotonic()

        await until(lambda: time.monotonic() - sent > 0.5)

        assert worker.n_live == 1
        await client.chunk()
        assert (await client.hear())["type"] == "result"
        assert connection.chunks


async def test_few_large_frames_are_held_at_a_time_and_all_are_served(serve, talker, monkeypatch):
    """B50: many clients with huge frames filled the memory."""
    monkeypatch.setattr(client_socket, "LARGE_FRAME_BYTES", 200_000)
    monkeypatch.setattr(client_socket.ClientProtocol, "gate", client_socket.LargeFrameGate(1))
    frame = base64.b64encode(bytes(2_000_000)).decode()

    async def talk(running, i: int) -> None:
        async with running.dial(f"omni_{i}") as socket:
            client = talker(socket)
            await client.prepare()
            for _ in range(2):
                await client.chunk(frame_base64_list=[frame])
            for _ in range(2):
                await client.hear_kind("result")

    async with ScriptedWorker(slots=6) as worker, serve([worker]) as running:
        async with asyncio.TaskGroup() as group:
            for i in range(6):
                group.create_task(talk(running, i))
        sizes = {len(chunk.frames[0]) for session in worker.sessions for chunk in session.chunks}
    assert sizes == {2_000_000}
    assert sum(len(session.chunks) for session in worker.sessions) == 12


async def test_a_session_that_has_sent_a_large_frame_does_not_block_the_others(
    serve, talker, monkeypatch
):
    monkeypatch.setattr(client_socket, "LARGE_FRAME_BYTES", 200_000)
    monkeypatch.setattr(client_socket.ClientProtocol, "gate", client_socket.LargeFrameGate(1))
    frame = base64.b64encode(bytes(2_000_000)).decode()
    async with (
        ScriptedWorker(slots=2) as worker,
        serve([worker]) as running,
        running.dial("omni_a") as first,
        running.dial("omni_b") as second,
    ):
        for client in (talker(first), talker(second)):
            await client.prepare()
            await client.chunk(frame_base64_list=[frame])
            await client.hear_kind("result")


async def test_a_client_that_trickles_a_large_frame_does_not_block_the_others(
    serve, talker, monkeypatch
):
    monkeypatch.setattr(client_socket, "LARGE_FRAME_BYTES", 200_000)
    monkeypatch.setattr(client_socket, "LARGE_FRAME_TIMEOUT_S", 0.3)
    monkeypatch.setattr(client_socket.ClientProtocol, "gate", client_socket.LargeFrameGate(1))
    async with ScriptedWorker(slots=2) as worker, serve([worker]) as running:
        slow = await running.dial("omni_slow")
        await talker(slow).prepare()
        # The head of a masked text frame of 1 MB, and a part of it.
        slow.transport.write(b"\x81\xff" + (1_000_000).to_bytes(8, "big") + bytes(4 + 400_000))
        async with running.dial("omni_b") as socket:
            client = talker(socket)
            await client.prepare()
            await client.chunk(frame_base64_list=[base64.b64encode(bytes(2_000_000)).decode()])
            await client.hear_kind("result")
        await slow.wait_closed()


async def test_pings_of_a_client_that_does_not_read_are_not_answered(serve, talker, until):
    """Their answers piled up, as many bytes as the client cared to send."""
    ping = Frame(Opcode.PING, b"x" * 125).serialize(mask=True)
    async with ScriptedWorker() as worker, serve([worker]) as running, running.dial() as socket:
        await talker(socket).prepare()
        (protocol,) = clients(running)
        socket.transport.pause_reading()

        for _ in range(20):
            socket.transport.write(ping * 8000)
            await until(lambda: not socket.transport.get_write_buffer_size())

        assert protocol.transport.get_write_buffer_size() < 1_000_000
        socket.transport.abort()


async def test_a_ping_of_a_client_that_reads_on_later_is_answered_then(serve, talker):
    """A slow network would otherwise look like a dead service to the client."""
    async with ScriptedWorker() as worker, serve([worker]) as running, running.dial() as socket:
        await talker(socket).prepare()
        (protocol,) = clients(running)

        protocol.pause_writing()
        pong = await socket.ping()
        await asyncio.sleep(0.05)
        assert not pong.done()
        protocol.resume_writing()

        await asyncio.wait_for(pong, PATIENCE_S)


async def test_a_message_of_endless_empty_frames_is_cut(serve, talker, monkeypatch):
    """They count for nothing in the length of the message, and added up for ever."""
    monkeypatch.setattr(client_socket, "MAX_FRAGMENTS", 100)
    async with ScriptedWorker() as worker, serve([worker]) as running, running.dial() as socket:
        await talker(socket).prepare()

        socket.transport.write(Frame(Opcode.TEXT, b"", fin=False).serialize(mask=True))
        socket.transport.write(Frame(Opcode.CONT, b"", fin=False).serialize(mask=True) * 100)

        async with asyncio.timeout(PATIENCE_S):
            await socket.wait_closed()


@pytest.mark.parametrize("opcode", [Opcode.PING, Opcode.PONG, Opcode.TEXT])
async def test_a_flood_of_tiny_frames_is_cut(serve, talker, opcode):
    """Parsing a read of them takes 0.1 s, in which nobody else is served."""
    async with ScriptedWorker() as worker, serve([worker]) as running, running.dial() as socket:
        await talker(socket).prepare()

        socket.transport.write(Frame(opcode, b"{}").serialize(mask=True) * 100_000)

        async with asyncio.timeout(PATIENCE_S):
            await socket.wait_closed()
        assert socket.close_code == 1006


async def test_text_that_is_no_utf8_is_refused_with_a_reason(serve, talker, caplog):
    async with ScriptedWorker() as worker, serve([worker]) as running, running.dial() as socket:
        client = talker(socket)
        await client.prepare()

        await socket.send(b'{"type": "stop", "x": "\xff"}', text=True)

        assert (await client.hear())["slug"] == "not_json"
        assert await client.closed() == 1007
    assert not [record for record in caplog.records if record.exc_info]


async def test_short_messages_leave_at_once(serve, talker, monkeypatch):
    """Nagle's algorithm against delayed ACKs costs 40 ms whenever two small messages follow."""
    flags = []
    plain = client_socket.ClientProtocol.connection_made

    def note(self, transport) -> None:
        own = transport.get_extra_info("socket")
        flags.append(own.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        plain(self, transport)

    monkeypatch.setattr(client_socket.ClientProtocol, "connection_made", note)
    async with ScriptedWorker() as worker, serve([worker]) as running, running.dial() as client:
        await talker(client).prepare()

    assert flags
    assert all(flags)


async def test_a_message_beyond_the_frame_limit_ends_its_session_only(
    serve, talker, monkeypatch, caplog
):
    monkeypatch.setattr(server, "MAX_FRAME_BYTES", 1_000_000)
    async with ScriptedWorker(slots=2) as worker, serve([worker]) as running:
        async with running.dial("omni_a") as socket:
            client = talker(socket)
            await client.prepare()
            await socket.send("x" * 1_000_001)
            assert (await client.hear())["slug"] == "frame_too_large"
            assert await client.closed() == 1009
        async with running.dial("omni_b") as socket:
            await talker(socket).prepare()
    assert not [record for record in caplog.records if record.exc_info]


async def test_an_address_of_a_megabyte_is_refused_without_harm(serve, talker):
    async with ScriptedWorker() as worker, serve([worker]) as running:
        with socket.create_connection(("127.0.0.1", running.port)) as raw:
            raw.setblocking(False)
            await send_all(raw, b"GET /ws/duplex/" + b"x" * 1_000_000 + b" HTTP/1.1\r\n")
            await send_all(
                raw,
                b"Host: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
                b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n\r\n",
            )
        async with running.dial() as alive:
            await talker(alive).prepare()


@pytest.mark.parametrize(
    ("path", "header", "status"),
    [("x" * 10_000, "", 414), ("x", "X-Long: " + "y" * 20_000, 431), ("x", "A: b\r\n" * 300, 431)],
)
async def test_an_overlong_upgrade_request_is_refused(serve, path, header, status):
    """The socket stayed open for ever, without an answer and without a log line."""
    async with serve([]) as running:
        reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
        fields = ["Host: localhost", "Connection: Upgrade", "Upgrade: websocket"]
        fields += ["Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==", "Sec-WebSocket-Version: 13"]
        request = "\r\n".join([f"GET /ws/duplex/{path} HTTP/1.1", *fields, header.strip()])
        writer.write(request.encode() + b"\r\n\r\n")

        async with asyncio.timeout(PATIENCE_S):
            answer = await reader.read()
        writer.close()

    assert int(answer.split()[1]) == status


async def send_all(raw: socket.socket, data: bytes) -> None:
    try:
        await asyncio.get_running_loop().sock_sendall(raw, data)
    except ConnectionError:
        return


def test_workers_are_local_ones_from_the_base_port_unless_listed():
    config = Config()

    assert worker_addresses(config, None, None) == [Address("127.0.0.1", 22400)]
    assert worker_addresses(config, None, 2)[1] == Address("127.0.0.1", 22401)
    assert worker_addresses(config, "a:1,[::1]:2", None) == [Address("a", 1), Address("::1", 2)]


@pytest.mark.parametrize("listed", ["a", "a:", ":1", "a:b", "a:0", "a:1,,b:2"])
def test_a_worker_address_without_host_or_port_is_named(listed):
    with pytest.raises(ConfigError, match="--workers"):
        worker_addresses(Config(), listed, None)


def test_a_bad_configuration_ends_with_its_own_exit_code(tmp_path):
    path = tmp_path / "config.json"
    path.write_text('{"service": {"gateway_prt": 1}}')

    assert main(["--config", str(path)]) == 2
    assert main(["--ssl-certfile", str(path)]) == 2


def test_the_process_starts_fast_and_ends_on_sigterm(tmp_path):
    config = tmp_path / "config.json"
    config.write_text('{"recording": {"enabled": false}}')
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = time.monotonic()
    with subprocess.Popen(
        [sys.executable, "-m", "gateway", "--port", str(port), "--workers", "127.0.0.1:9"]
        + ["--lang", "zh", "--config", str(config)],
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stderr is not None
            next(line for line in process.stderr if "listening" in line)
            took_s = time.monotonic() - started
            url = f"http://127.0.0.1:{port}"
            body = httpx.get(f"{url}/health", trust_env=False).json()
            defaults = httpx.get(f"{url}/api/frontend_defaults", trust_env=False).json()
            process.send_signal(signal.SIGTERM)
            rest = process.stderr.read()
            process.wait(timeout=10)
        finally:
            process.kill()

    assert body["ready"] is False
    assert defaults["default_lang"] == "zh"
    assert took_s < 10
    assert "Traceback" not in rest
