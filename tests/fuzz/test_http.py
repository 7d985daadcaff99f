"""Generated requests, right and wrong ones, against the gateway on a real port."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import response_schema_conformance

from gateway import connection, server
from gateway.app import create_app
from shared.config import Config
from tests.fakes.gateway import Running, run_gateway
from tests.fakes.scripted_worker import ScriptedWorker

pytestmark = pytest.mark.timeout(300)  # hundreds of sessions, beside busy processes too

TIMEOUT_S = 5.0
BOUNDED = settings(
    max_examples=40,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)

schema = schemathesis.openapi.from_dict(create_app(Config(), []).openapi())


@pytest.fixture(scope="module")
def running(tmp_path_factory) -> Iterator[Running]:
    """A gateway with one worker, on an event loop of its own."""
    pages = tmp_path_factory.mktemp("pages")
    (pages / "index.html").write_text("<p>page</p>")
    started = threading.Event()
    ended = threading.Event()
    found: list[Running] = []

    async def serve() -> None:
        # Uploads and traces are written.
        config = Config.model_validate({"service": {"data_dir": str(pages / "data")}})
        async with (
            ScriptedWorker() as worker,
            run_gateway([worker], config, static_dir=pages) as running,
        ):
            found.append(running)
            started.set()
            await asyncio.to_thread(ended.wait)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(connection, "REQUEST_HEAD_TIMEOUT_S", 0.3)
        patch.setattr(server, "KEEP_ALIVE_S", 0.3)
        patch.setattr(connection, "REQUEST_BODY_TIMEOUT_S", 0.3)
        patch.setattr(connection, "REST_TIMEOUT_S", 0.2)
        thread = threading.Thread(target=asyncio.run, args=(serve(),))
        thread.start()
        assert started.wait(10)
        yield found[0]
        ended.set()
        thread.join(20)
        assert not thread.is_alive()


@schema.parametrize()
@BOUNDED
def test_no_request_makes_the_gateway_fail(running, case):
    case.call_and_validate(
        base_url=running.http,
        timeout=TIMEOUT_S,
        checks=[not_a_server_error, response_schema_conformance],
    )


TOKENS = st.sampled_from(
    [b"GET", b"PUT", b"DELETE", b"OPTIONS", b" ", b"/health", b"/api/queue/..%2f", b"/ws/duplex/a"]
    + [b" HTTP/1.1", b" HTTP/1.0", b" HTTP/9.9", b"\r\n", b"\r\n\r\n", b"\n", b"Host: a", b": "]
    + [b"Content-Length: 5", b"Content-Length: -1", b"Content-Length: 99999999999999999999"]
    + [b"Content-Length: 3", b"Transfer-Encoding: chunked", b"5\r\nhello\r\n", b"0\r\n\r\n"]
    + [b"ffffffffffffffff\r\n", b"Connection: Upgrade", b"Upgrade: websocket", b"Upgrade: h2c"]
    + [b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==", b"Sec-WebSocket-Version: 13"]
    + [
        b"Sec-WebSocket-Key: x",
        b"Sec-WebSocket-Version: 1",
        b"Expect: 100-continue",
        b"\0",
        b"\xff",
    ]
)


REQUESTS = st.lists(TOKENS | st.binary(max_size=8), max_size=24).map(b"".join)


def read_to_end(raw: socket.socket) -> None:
    """Raises TimeoutError: the connection has not ended."""
    with suppress(ConnectionError):
        while raw.recv(65_536):
            pass


@settings(BOUNDED, max_examples=150)
@given(REQUESTS)
def test_no_bytes_hurt_the_gateway(running, said):
    with socket.create_connection(("127.0.0.1", running.port), timeout=TIMEOUT_S) as raw:
        raw.sendall(said)
        raw.shutdown(socket.SHUT_WR)
        read_to_end(raw)

    assert httpx.get(f"{running.http}/health", trust_env=False).status_code == 200


@settings(BOUNDED, max_examples=10)
@given(REQUESTS.filter(lambda said: b"Version: 13" not in said))
def test_no_bytes_keep_a_connection(running, said):
    with socket.create_connection(("127.0.0.1", running.port), timeout=TIMEOUT_S) as raw:
        raw.sendall(said)
        read_to_end(raw)
