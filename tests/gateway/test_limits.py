"""Bounds on what connections, requests and clients may take, over real sockets."""

from __future__ import annotations

import asyncio
import json
import ssl
import subprocess
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from gateway import client_socket, connection, context, inbox, requests, server
from gateway.app import create_app
from gateway.connection import HttpConnection, IdleConnections
from gateway.security import network_of
from gateway.server import build_server
from shared.config import Config
from tests.fakes.gateway import quiet
from tests.fakes.patience import PATIENCE_S
from tests.fakes.scripted_worker import ScriptedWorker

UPGRADE = (
    b"GET /ws/duplex/omni_x HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\n"
    b"Upgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
)
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.fixture
def certificate(tmp_path) -> Path:
    """A certificate of localhost, its key beside it."""
    made = tmp_path / "cert.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    names = ["-keyout", tmp_path / "key.pem", "-out", made, "-subj", "/CN=localhost"]
    subprocess.run([*command, *names], check=True, capture_output=True)
    return made


@pytest.fixture
def idle(monkeypatch):
    """The idle connections of this test alone."""
    own = IdleConnections()
    monkeypatch.setattr(HttpConnection, "idle", own)
    return own


async def dial(running, said: bytes = b"", host: str = "127.0.0.1"):
    reader, writer = await asyncio.open_connection("127.0.0.1", running.port, local_addr=(host, 0))
    writer.write(said)
    await writer.drain()
    return reader, writer


async def until_closed(reader, timeout_s: float = PATIENCE_S) -> bytes:
    """Return what comes before the end of the connection."""
    async with asyncio.timeout(timeout_s):
        try:
            return await reader.read()
        except ConnectionError:
            return b""


async def is_healthy(running) -> bool:
    async with httpx.AsyncClient(trust_env=False, verify=False, timeout=PATIENCE_S) as http:
        return (await http.get(f"{running.http}/health")).status_code == 200


def answer_of(raw: bytes) -> tuple[int, str]:
    head, _, body = raw.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["slug"]


class TestSlowRequests:
    @pytest.mark.parametrize(
        "said",
        [b"", b"G", b"\r\n", b"GET /health HTTP/1.1\r\nHost: loc", UPGRADE],
        ids=["nothing", "a byte", "an empty line", "half a head", "half an upgrade"],
    )
    async def test_a_head_that_does_not_come_is_not_waited_for(self, serve, monkeypatch, said):
        """B70: a half-sent request kept its connection for ever."""
        monkeypatch.setattr(connection, "REQUEST_HEAD_TIMEOUT_S", 0.2)
        async with serve([]) as running:
            reader, writer = await dial(running, said)

            assert await until_closed(reader) == b""
            writer.close()

    async def test_bytes_that_trickle_do_not_lengthen_the_wait(self, serve, monkeypatch):
        monkeypatch.setattr(connection, "REQUEST_HEAD_TIMEOUT_S", 0.3)
        async with serve([]) as running:
            reader, writer = await dial(running, b"GET /health HTTP/1.1\r\nX: ")

            async def trickle() -> None:
                with suppress(ConnectionError):
                    while True:
                        writer.write(b"x")
                        await writer.drain()
                        await asyncio.sleep(0.02)

            trickling = asyncio.create_task(trickle())
            await until_closed(reader, 2)
            trickling.cancel()
            writer.close()

    async def test_a_kept_alive_connection_may_not_be_slow_later(self, serve, monkeypatch):
        """An empty line after a request stopped the keep-alive clock and started no other."""
        monkeypatch.setattr(connection, "REQUEST_HEAD_TIMEOUT_S", 0.3)
        async with serve([]) as running:
            reader, writer = await dial(running, HEALTH)
            await reader.readuntil(b"}")
            writer.write(b"\r\n")

            await until_closed(reader, 2)
            writer.close()

    async def test_an_idle_kept_alive_connection_is_closed(self, serve, monkeypatch):
        monkeypatch.setattr(server, "KEEP_ALIVE_S", 0.2)
        async with serve([]) as running:
            reader, writer = await dial(running, HEALTH)

            assert b"200 OK" in await until_closed(reader, 2)
            writer.close()

    async def test_a_body_that_does_not_come_is_not_waited_for(self, serve, monkeypatch):
        monkeypatch.setattr(connection, "REQUEST_BODY_TIMEOUT_S", 0.2)
        head = b"PUT /api/config/eta HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        async with serve([]) as running:
            reader, writer = await dial(running, head + b"Content-Length: 50\r\n\r\n{")

            await until_closed(reader, 2)
            writer.close()

    async def test_a_body_that_is_announced_large_may_take_longer(self, serve, monkeypatch):
        monkeypatch.setattr(connection, "REQUEST_BODY_TIMEOUT_S", 0.1)
        monkeypatch.setattr(connection, "MIN_BODY_BYTES_PER_S", 10)
        head = b"PUT /api/config/eta HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        async with serve([]) as running:
            head += b"Connection: close\r\nContent-Length: 50\r\n\r\n{"
            reader, writer = await dial(running, head)
            await asyncio.sleep(0.3)
            writer.write(b"}" + b" " * 48)

            assert b"200 OK" in await until_closed(reader, 5)
            writer.close()

    async def test_a_trailer_that_never_ends_is_cut(self, serve):
        """The parser kept all of it, for as long as a body may take."""
        head = b"PUT /api/config/eta HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        async with serve([]) as running:
            reader, writer = await dial(running, head + b"Transfer-Encoding: chunked\r\n\r\n")
            writer.write(b"2\r\n{}\r\n0\r\nX: ")

            writer.write(b"x" * 6_000_000)

            # What it sends on is not read, so the end is a reset.
            assert await until_closed(reader, 2) == b""
            assert await is_healthy(running)
            writer.close()

    async def test_a_body_in_pieces_is_taken_whole(self, serve):
        head = b"PUT /api/config/eta HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        async with serve([]) as running:
            reader, writer = await dial(running, head + b"Connection: close\r\n")
            writer.write(b"Transfer-Encoding: chunked\r\n\r\n")
            for _ in range(20):
                writer.write(b"2710\r\n" + b" " * 10_000 + b"\r\n")
                await writer.drain()
                await asyncio.sleep(0)
            writer.write(b"2\r\n{}\r\n0\r\n\r\n")

            assert b"200 OK" in await until_closed(reader)
            writer.close()

    async def test_a_client_that_does_not_read_its_answer_is_cut(
        self, serve, monkeypatch, tmp_path, until
    ):
        monkeypatch.setattr(connection, "WRITE_TIMEOUT_S", 0.2)
        (tmp_path / "index.html").write_text("x")
        (tmp_path / "big.bin").write_bytes(bytes(20_000_000))
        async with serve([], static_dir=tmp_path) as running:
            reader, writer = await dial(running)
            writer.transport.pause_reading()
            writer.write(b"GET /static/big.bin HTTP/1.1\r\nHost: x\r\n\r\n")

            connections = running.server.server_state.connections
            await until(lambda: connections)
            await until(lambda: not connections)
            writer.transport.abort()
            del reader

    async def test_a_client_that_reads_its_answer_slowly_gets_all_of_it(
        self, serve, monkeypatch, tmp_path
    ):
        monkeypatch.setattr(connection, "WRITE_TIMEOUT_S", 0.3)
        (tmp_path / "index.html").write_text("x")
        (tmp_path / "big.bin").write_bytes(bytes(20_000_000))
        async with serve([], static_dir=tmp_path) as running:
            reader, writer = await dial(running, b"GET /static/big.bin HTTP/1.1\r\nHost: x\r\n\r\n")
            await reader.readuntil(b"\r\n\r\n")

            for _ in range(20):
                await reader.readexactly(1_000_000)
                await asyncio.sleep(0.04)
            writer.close()

    async def test_a_handshake_of_tls_that_does_not_come_is_not_waited_for(
        self, certificate, monkeypatch, until
    ):
        monkeypatch.setattr(server, "REQUEST_HEAD_TIMEOUT_S", 0.3)
        app = create_app(quiet(Config()), [])
        served = build_server(app, "127.0.0.1", 0, certificate, certificate.with_name("key.pem"))
        serving = asyncio.create_task(served.serve())
        await until(lambda: served.started)
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
            await until_closed(reader, 2)
            writer.close()
            trust = ssl.create_default_context(cafile=str(certificate))
            async with httpx.AsyncClient(verify=trust, trust_env=False) as http:
                alive = await http.get(f"https://localhost:{served.port}/health")
        finally:
            served.should_exit = True
            await serving

        assert alive.status_code == 200


class TestFloods:
    async def test_idle_connections_are_bounded_and_the_oldest_goes(
        self, serve, monkeypatch, idle, until
    ):
        monkeypatch.setattr(connection, "MAX_IDLE_CONNECTIONS", 5)
        async with serve([]) as running:
            dialled = [await dial(running) for _ in range(8)]

            for reader, _ in dialled[:3]:
                await until_closed(reader, 2)
            await until(lambda: len(idle) == 5)
            assert await is_healthy(running)
            for _, writer in dialled:
                writer.close()

    async def test_a_connection_is_idle_again_after_its_answer(self, serve, idle):
        async with serve([]) as running:
            reader, writer = await dial(running, HEALTH)
            await reader.readuntil(b"}")

            assert len(idle) == 1
            writer.close()

    async def test_a_flood_costs_its_sender_and_nobody_else(self, serve, monkeypatch, idle):
        monkeypatch.setattr(connection, "MAX_IDLE_CONNECTIONS", 5)
        async with serve([]) as running:
            other_reader, other = await dial(running, b"GET /health HT", host="127.0.0.2")

            flood = [await dial(running) for _ in range(20)]
            other.write(b"TP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")

            assert b"200 OK" in await until_closed(other_reader)
            for _, writer in [*flood, (None, other)]:
                writer.close()

    async def test_a_connection_at_work_is_not_idle(self, serve, talker, monkeypatch, idle):
        monkeypatch.setattr(connection, "MAX_IDLE_CONNECTIONS", 1)
        async with ScriptedWorker() as worker, serve([worker]) as running:
            async with running.dial() as socket:
                client = talker(socket)
                await client.prepare()
                flood = [await dial(running) for _ in range(4)]
                await client.chunk()
                assert (await client.hear())["type"] == "result"
            for _, writer in flood:
                writer.close()

    async def test_no_connection_is_remembered_after_its_end(self, serve, idle, until):
        async with serve([]) as running:
            for said in (b"", b"GET", HEALTH, UPGRADE + b"\r\n", b"nonsense\r\n\r\n"):
                reader, writer = await dial(running, said)
                writer.close()
                del reader
            await until(lambda: not len(idle))
            await until(lambda: not running.server.server_state.connections)

    async def test_five_hundred_sockets_of_one_client_do_not_hinder_another(
        self, serve, talker, until
    ):
        """B70: one address opens 500 sockets; the queue is full of it."""
        config = Config.model_validate(
            {"security": {"max_sessions_per_client": 8}, "service": {"max_queue_size": 20}}
        )
        async with ScriptedWorker(slots=9) as worker, serve([worker], config) as running:
            async with asyncio.timeout(60):
                sockets = [await running.dial(f"omni_{i}") for i in range(500)]
                first = [json.loads(await socket.recv()) for socket in sockets]
            refused = [said for said in first if said.get("slug") == "too_many_sessions"]
            async with running.dial("omni_other", local_addr=("127.0.0.2", 0)) as other:
                await talker(other).prepare()
            for socket in sockets:
                socket.transport.abort()
            await until(lambda: not running.gateway.sessions)

        assert len(refused) == 492

    async def test_sessions_that_wait_count_as_sessions_of_their_client(self, serve, talker):
        config = Config.model_validate({"security": {"max_sessions_per_client": 2}})
        async with (
            ScriptedWorker(slots=1) as worker,
            serve([worker], config) as running,
            running.dial("omni_a") as served,
            running.dial("omni_b") as waiting,
            running.dial("omni_c") as third,
        ):
            await talker(served).prepare()
            assert (await talker(waiting).hear())["type"] == "queued"
            assert (await talker(third).hear())["slug"] == "too_many_sessions"

    async def test_a_gateway_that_is_full_says_so_and_goes_on(self, serve, talker, monkeypatch):
        monkeypatch.setattr(context, "MAX_SESSIONS", 1)
        async with (
            ScriptedWorker(slots=2) as worker,
            serve([worker]) as running,
            running.dial("omni_a") as one,
            running.dial("omni_b") as two,
        ):
            await talker(one).prepare()
            assert (await talker(two).hear())["slug"] == "too_many_connections"
            assert await talker(two).closed() == 1013
            await talker(one).chunk()
            assert (await talker(one).hear())["type"] == "result"

    async def test_requests_beyond_the_bound_are_told_to_come_back(self, serve, monkeypatch):
        monkeypatch.setattr(requests, "MAX_REQUESTS", 0)
        async with serve([]) as running, httpx.AsyncClient(trust_env=False) as http:
            refused = await http.get(f"{running.http}/status")
            probe = await http.get(f"{running.http}/health")

        assert (refused.status_code, refused.json()["slug"]) == (503, "too_many_connections")
        assert "Retry-After" in refused.headers
        assert probe.status_code == 200


class TestLongRequests:
    async def test_a_body_that_says_it_is_too_long_is_refused_unread(self, serve):
        head = b"PUT /api/config/eta HTTP/1.1\r\nHost: x\r\nContent-Length: 200000000\r\n\r\n"
        async with serve([]) as running:
            reader, writer = await dial(running, head)
            async with asyncio.timeout(PATIENCE_S):
                raw = await reader.readuntil(b"}")
            writer.close()

        assert answer_of(raw) == (413, "payload_too_large")

    @pytest.mark.parametrize("method", ["PUT", "POST"])
    @pytest.mark.parametrize("path", ["/api/config/eta"])
    async def test_a_chunked_body_is_refused_once_it_has_grown_too_long(
        self, serve, monkeypatch, method, path
    ):
        monkeypatch.setattr(requests, "MAX_BODY_BYTES", 100_000)
        n_sent = 0

        async def body():
            nonlocal n_sent
            for _ in range(20):
                n_sent += 1
                yield b" " * 50_000

        async with serve([]) as running, httpx.AsyncClient(trust_env=False) as http:
            answer = await http.request(method, f"{running.http}{path}", content=body())
            assert await is_healthy(running)

        expected = {"PUT": (413, "payload_too_large"), "POST": (405, "method_not_allowed")}
        assert (answer.status_code, answer.json()["slug"]) == expected[method]

    async def test_a_body_without_end_is_cut_after_its_answer(self, serve, monkeypatch):
        monkeypatch.setattr(connection, "REST_TIMEOUT_S", 0.3)
        async with serve([]) as running:
            head = b"GET /health HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
            reader, writer = await dial(running, head)

            async def pour() -> None:
                with suppress(ConnectionError):
                    while True:
                        writer.write(b"1000\r\n" + bytes(0x1000) + b"\r\n")
                        await writer.drain()
                        await asyncio.sleep(0.01)

            pouring = asyncio.create_task(pour())
            await until_closed(reader, 3)
            pouring.cancel()
            writer.close()

    async def test_a_head_without_end_is_refused(self, serve):
        async with serve([]) as running:
            reader, writer = await dial(running, b"GET /health HTTP/1.1\r\n")
            with suppress(ConnectionError):
                for _ in range(100):
                    writer.write(b"X-Long: " + b"y" * 8000 + b"\r\n")
                    await writer.drain()
            raw = await until_closed(reader)
            writer.close()
            assert await is_healthy(running)

        assert answer_of(raw) == (431, "head_too_large")

    @pytest.mark.parametrize("upgrade", [b"", UPGRADE.partition(b"\r\n")[2]], ids=["http", "ws"])
    @pytest.mark.parametrize("n_bytes", [66_000, 200_000])
    @pytest.mark.parametrize("where", ["url", "header", "headers"])
    async def test_a_head_that_is_too_long_is_refused_however_it_comes(
        self, serve, where, n_bytes, upgrade
    ):
        """One read brings up to 256 KiB, and the parser has its own bound for addresses."""
        long = b"x" * n_bytes
        many = b"".join(b"X-%d: %s\r\n" % (i, bytes(9)) for i in range(n_bytes // 10))
        query = b"?long=" + long if where == "url" else b""
        headers = {"url": b"", "header": b"X-Long: " + long + b"\r\n", "headers": many}[where]
        head = b"GET /health" + query + b" HTTP/1.1\r\nHost: x\r\n" + upgrade + headers + b"\r\n"
        async with serve([]) as running:
            reader, writer = await dial(running, head.replace(b"\0", b"y"))
            raw = await until_closed(reader)
            writer.close()

        assert answer_of(raw) == (431, "head_too_large")

    @pytest.mark.parametrize("where", ["url", "header"])
    async def test_a_head_of_nearly_the_limit_is_answered(self, serve, where):
        long = "x" * 65_000
        async with serve([]) as running, httpx.AsyncClient(trust_env=False) as http:
            answer = await http.get(
                f"{running.http}/health?{long if where == 'url' else ''}",
                headers={"X-Long": long} if where == "header" else {},
            )

        assert answer.status_code == 200

    @pytest.mark.parametrize("said", [b"nonsense\r\n\r\n", b"\x16\x03\x01\x02\x00", b"GET\0 / HT"])
    async def test_what_is_no_http_has_the_one_error_shape(self, serve, said):
        async with serve([]) as running:
            reader, writer = await dial(running, said)
            raw = await until_closed(reader)
            writer.close()

        assert answer_of(raw) == (400, "bad_request")


class TestFrames:
    @pytest.fixture
    def limit(self, monkeypatch) -> int:
        monkeypatch.setattr(server, "MAX_FRAME_BYTES", 1_000_000)
        return 1_000_000

    async def test_a_message_above_the_limit_is_told_why_before_the_close(
        self, serve, talker, limit
    ):
        """B50: a bare 1009 told nobody anything, and clients tried again for ever."""
        async with ScriptedWorker() as worker, serve([worker]) as running:
            async with running.dial() as socket:
                client = talker(socket)
                await client.prepare()
                await client.chunk()
                await client.hear_kind("result")

                await socket.send("x" * 30 * limit)

                said = await client.hear()
                assert (said["type"], said["slug"]) == ("error", "frame_too_large")
                assert await client.closed() == 1009
            assert running.gateway.desk.counts["frame_too_large"] == 1

    async def test_pieces_of_a_message_count_together(self, serve, talker, limit):
        async with ScriptedWorker() as w, serve([w]) as running, running.dial() as socket:
            await talker(socket).prepare()
            await socket.send(["x" * 300_000] * 4)

            assert (await talker(socket).hear())["slug"] == "frame_too_large"
            assert await talker(socket).closed() == 1009

    async def test_a_message_at_the_limit_is_read(self, serve, talker, limit):
        async with ScriptedWorker() as w, serve([w]) as running, running.dial() as socket:
            await talker(socket).prepare()
            filler = "x" * (limit - len('{"type": "interrupt", "x": ""}'))

            await talker(socket).say("interrupt", x=filler)

            assert (await talker(socket).hear())["type"] == "interrupted"

    async def test_a_client_that_never_stops_sending_is_cut(
        self, serve, talker, limit, monkeypatch
    ):
        monkeypatch.setattr(client_socket, "CLOSE_GRACE_S", 0.5)
        async with ScriptedWorker() as worker, serve([worker]) as running:
            socket = await running.dial()
            await talker(socket).prepare()
            socket.transport.write(b"\x81\xff" + (1 << 40).to_bytes(8, "big") + bytes(4))

            async def pour() -> None:
                while not socket.transport.is_closing():
                    socket.transport.write(bytes(10_000))
                    await asyncio.sleep(0.01)

            pouring = asyncio.create_task(pour())
            assert (await talker(socket).hear())["slug"] == "frame_too_large"
            await talker(socket).closed(3)
            await pouring
            assert worker.n_live == 0


class TestOneAnswerEach:
    async def test_a_chunk_that_is_refused_here_is_answered_in_its_turn(self, serve, talker):
        """Errors name no chunk: only their place tells which one they are the answer to."""
        async with ScriptedWorker() as worker, serve([worker]) as running:
            worker.script.result_delay_s = 0.05
            async with running.dial() as socket:
                client = talker(socket)
                await client.prepare()
                for audio in (None, "AAA", None, "%", "", None):
                    fields = {} if audio is None else {"audio_base64": audio}
                    await client.chunk(**fields)
                said = [(await client.hear())["type"] for _ in range(6)]

        assert said == ["result", "error", "result", "error", "error", "result"]

    async def test_refused_chunks_of_a_waiting_client_are_bounded(self, serve, talker, monkeypatch):
        monkeypatch.setattr(inbox, "MAX_UNANSWERED", 512)
        async with (
            ScriptedWorker(slots=1) as worker,
            serve([worker]) as running,
            running.dial("omni_a") as first,
            running.dial("omni_b") as second,
        ):
            await talker(first).prepare()
            client = talker(second)
            await client.hear_kind("queued")
            await client.say("prepare")
            await client.chunk()
            for _ in range(600):
                await client.chunk(audio_base64="AAA")
            early = [await client.hear_kind("error") for _ in range(80)]
            await talker(first).say("stop")
            kinds = []
            while len(kinds) < 521:
                kind = (await client.hear())["type"]
                if kind in ("error", "result"):
                    kinds.append(kind)

        assert {said["slug"] for said in early} == {"bad_audio"}
        assert kinds.count("result") == 1
        assert kinds.count("error") == 520


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("10.0.0.1", "10.0.0.2", False),
        ("2001:db8:1:2::1", "2001:db8:1:2:ffff::9", True),
        ("2001:db8:1:2::1", "2001:db8:1:3::1", False),
        ("::ffff:10.0.0.1", "10.0.0.1", True),
        ("fe80::1%eth0", "fe80::2%eth1", True),
        ("no address", "another", False),
    ],
)
def test_an_ipv6_client_is_its_network(one, other, same):
    """One machine has 2^64 addresses of its own."""
    assert (network_of(one) == network_of(other)) == same
