"""What all clients share: addresses, and the reason of an end that comes while they send."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from websockets.sync.server import ServerConnection, serve

from client.chat import ChatClient
from client.connection import SessionClient, endpoint
from client.duplex import Closed, DuplexClient, ErrorEvent, SessionError
from client.half_duplex import HalfDuplexClient

SECOND = np.zeros(16_000, np.float32)
LOST = ErrorEvent("worker lost", "worker_lost")
NO_LINGER = struct.pack("ii", 1, 0)


@contextmanager
def ending(end: Callable[[ServerConnection], None]) -> Iterator[str]:
    """A server that prepares, takes one chunk, says an error and ends; yields its address.

    In a thread of its own: the client under test holds up its event loop.
    """
    has_ended = threading.Event()

    def session(connection: ServerConnection) -> None:
        connection.recv()
        connection.send(json.dumps({"type": "prepared"}))
        connection.recv()
        connection.send(json.dumps({"type": "error", "error": LOST.message, "slug": LOST.slug}))
        end(connection)
        has_ended.set()

    # It does not read on while it closes, so the goodbye of the client is not waited for.
    with serve(session, "127.0.0.1", 0, close_timeout=0.1) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"ws://127.0.0.1:{server.socket.getsockname()[1]}"
        server.shutdown()
        thread.join(timeout=10)
        assert has_ended.is_set()


def close(connection: ServerConnection) -> None:
    connection.close(1011, "worker lost")


def hang_up(connection: ServerConnection) -> None:
    """End without a goodbye, with chunks unread: the system answers further ones with a reset."""
    connection.socket.shutdown(socket.SHUT_RDWR)
    connection.socket.close()


def reset(connection: ServerConnection) -> None:
    connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, NO_LINGER)
    connection.socket.close()


ENDS = {close: 1011, hang_up: 1006, reset: 1006}


async def send_until_refused(session: DuplexClient | HalfDuplexClient) -> SessionError:
    """Send without reading, as fast as it goes, blocking the loop between two chunks."""
    for _ in range(100):
        try:
            await session.send_audio(SECOND)
        except SessionError as error:
            return error
        time.sleep(0.005)  # noqa: ASYNC251 - nothing is to be read meanwhile
    raise AssertionError("the server took everything")


@pytest.mark.parametrize("end", ENDS, ids=lambda end: end.__name__)
@pytest.mark.parametrize("kind", [DuplexClient, HalfDuplexClient])
async def test_a_sender_is_told_why_the_server_has_closed(
    end: Callable[[ServerConnection], None], kind: type[DuplexClient | HalfDuplexClient]
) -> None:
    """It was told that the connection is closed, with the reason unread: in the client's queue,
    or, where a write met the reset, in the system's buffer, which nobody read any more."""
    with ending(end) as url:
        async with kind(url) as session:
            await session.prepare()
            error = await send_until_refused(session)
            events = [event async for event in session]

    assert (str(error), error.slug) == (LOST.message, LOST.slug)
    assert events[0] == LOST
    assert events[-1] == session.closed
    assert isinstance(session.closed, Closed)
    assert session.closed.code == ENDS[end]


async def test_a_reader_beside_the_sender_gets_the_reason_too() -> None:
    async def read(session: DuplexClient) -> list[object]:
        return [event async for event in session]

    with ending(hang_up) as url:
        async with DuplexClient(url) as session:
            await session.prepare()
            reader = asyncio.create_task(read(session))
            error = await send_until_refused(session)
            events = await reader

    assert error.slug == LOST.slug
    assert events == [LOST, Closed(1006, "")]


@pytest.mark.parametrize(
    ("client", "path"),
    [
        (DuplexClient("ws://host", mode="omni"), "/ws/duplex/omni_"),
        (DuplexClient("ws://host", mode="audio"), "/ws/duplex/adx_"),
        (HalfDuplexClient("ws://host"), "/ws/half_duplex/hdx_"),
        (ChatClient("ws://host"), "/ws/chat"),
        (DuplexClient("http://host/talk/", mode="omni"), "/talk/ws/duplex/omni_"),
        (HalfDuplexClient("ws://host/talk"), "/talk/ws/half_duplex/hdx_"),
        (ChatClient("ws://host/talk/"), "/talk/ws/chat"),
    ],
)
def test_each_client_has_its_endpoint(client: SessionClient[object], path: str) -> None:
    assert client.url.startswith(f"ws://host{path}")


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("ws://host:8006", "ws://host:8006/ws/duplex/omni_1"),
        ("https://host/", "wss://host/ws/duplex/omni_1"),
        ("http://host:1/ws/duplex/mine", "ws://host:1/ws/duplex/mine"),
        ("http://host:8180/talk/", "ws://host:8180/talk/ws/duplex/omni_1"),
        ("ws://host/talk", "ws://host/talk/ws/duplex/omni_1"),
        ("wss://host/a/talk//?key=k", "wss://host/a/talk/ws/duplex/omni_1?key=k"),
        ("ws://host/ws/", "ws://host/ws/ws/duplex/omni_1"),
        ("ws://host/news/x", "ws://host/news/x/ws/duplex/omni_1"),
        ("https://host/talk/ws/duplex/mine", "wss://host/talk/ws/duplex/mine"),
    ],
)
def test_the_endpoint_is_completed_below_a_base_address(url: str, expected: str) -> None:
    assert endpoint(url, "/ws/duplex/omni_1") == expected


@pytest.mark.parametrize(
    "url", ["ftp://host", "127.0.0.1:8006", "ws://", "ws://host:99999", "http://[::1"]
)
def test_an_address_without_host_or_scheme_is_refused(url: str) -> None:
    with pytest.raises(SessionError, match="no server address"):
        endpoint(url, "/ws/duplex/omni_1")
