"""Large commands on their way to a worker: in pieces, and whole even if nobody waits any more."""

from __future__ import annotations

import asyncio
import gc

import pytest
from websockets.asyncio.client import connect
from websockets.asyncio.server import serve as listen

from gateway.inbox import n_bytes_of
from gateway.link import PIECE_BYTES, Background, WorkerLink
from gateway.offload import LargeFrames
from gateway.pool import Lease
from shared.limits import LARGE_FRAME_BYTES
from shared.protocol import Ask, ChatMessage, Input, Stop, VideoPart, decode_command, encode

FILM = VideoPart(bytes(range(256)) * (4 * LARGE_FRAME_BYTES // 256))
ASK = Ask([ChatMessage("user", [FILM])])


class Worker:
    """The other end of one link; it reads when it is let."""

    def __init__(self):
        self.may_read = asyncio.Event()
        self.said = []

    async def __call__(self, connection):
        await self.may_read.wait()
        async for frame in connection:
            self.said.append(decode_command(frame))


@pytest.fixture
async def worker():
    return Worker()


@pytest.fixture
async def link(worker):
    link = WorkerLink(Lease(None, None, "omni_a", "omni_duplex", 0.0), Background(), LargeFrames())
    async with listen(worker, "127.0.0.1", 0, max_size=None) as server:
        port = server.sockets[0].getsockname()[1]
        async with connect(f"ws://127.0.0.1:{port}", compression=None, proxy=None) as connection:
            link._connection = connection
            yield link
            worker.may_read.set()


class Counting:
    """A connection that looks at what it is given."""

    def __init__(self):
        self.pieces = []

    async def send(self, message):
        self.pieces += [message] if isinstance(message, bytes) else [bytes(one) for one in message]


@pytest.mark.parametrize("command", [ASK, Input(0, bytes(64_000))])
async def test_only_what_is_large_goes_in_pieces(command):
    link = WorkerLink(Lease(None, None, "omni_a", "omni_duplex", 0.0), Background(), LargeFrames())
    link._connection = connection = Counting()

    await link.send(command)

    assert b"".join(connection.pieces) == encode(command)
    assert max(map(len, connection.pieces)) <= PIECE_BYTES
    assert (len(connection.pieces) > 1) == (n_bytes_of(command) > LARGE_FRAME_BYTES)


async def test_a_client_that_leaves_meanwhile_does_not_break_the_connection(link, worker, until):
    asking = asyncio.create_task(link.send(ASK))
    await until(lambda: link._connection.send_in_progress is not None)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    stopping = asyncio.create_task(link.send(Stop("client_gone")))
    await asyncio.sleep(0)
    worker.may_read.set()
    await stopping
    await until(lambda: len(worker.said) == 2)

    assert worker.said == [ASK, Stop("client_gone")]


async def test_a_connection_that_breaks_meanwhile_says_nothing_in_the_log(link, until, caplog):
    asking = asyncio.create_task(link.send(ASK))
    await until(lambda: link._connection.send_in_progress is not None)
    asking.cancel()
    link._connection.transport.abort()
    await asyncio.gather(asking, return_exceptions=True)
    await link._connection.wait_closed()
    await asyncio.sleep(0)
    gc.collect()

    assert [r.message for r in caplog.records if r.name == "asyncio"] == []
