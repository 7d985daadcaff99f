"""A TCP proxy on loopback whose network can be made bad while connections live.

    async with Proxy(port) as proxy:
        proxy.down.delay_s = 0.2          # towards the client
        proxy.up.black_hole = True        # towards the server: read, thrown away, no end
        await proxy.reset()               # both ends of all connections get a TCP reset

A lost segment cannot be taken out of a TCP stream; what its ends see of a loss is the wait for
the retransmission, and that is what `loss` makes.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, NoReturn, Self

SEGMENT_BYTES = 16 * 1024
MAX_SEGMENTS_UNDER_WAY = 64
"""Beyond this the sending end is not read any more, as with a full window."""

LINGER_0 = struct.pack("ii", 1, 0)


@dataclass
class Faults:
    """What happens to one direction; may be changed at any time, for the bytes still to come."""

    delay_s: float = 0.0
    jitter_s: float = 0.0
    """Up to this much on top of the delay; bytes never overtake each other."""
    loss: float = 0.0
    """Share of the segments that have to be sent again."""
    retransmit_s: float = 0.2
    """What a lost segment costs."""
    bytes_per_s: float | None = None
    black_hole: bool = False
    """Bytes and ends are accepted and go nowhere; what has met one never flows again."""
    cut_after_bytes: int | None = None
    """Each connection is ended (FIN, to both ends) after this many bytes."""


_End = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass(eq=False)
class _Leg:
    """One direction of one connection."""

    faults: Faults
    source: asyncio.StreamReader
    sink: asyncio.StreamWriter
    rng: random.Random
    source_ended: asyncio.Event
    under_way: asyncio.Queue[tuple[float, bytes]] = field(
        default_factory=lambda: asyncio.Queue(MAX_SEGMENTS_UNDER_WAY)
    )

    async def run(self) -> bool:
        """Carry bytes until the source ends; True when both ends are to be closed."""
        delivery = asyncio.create_task(self._deliver())
        try:
            is_cut = await self._read()
            self.source_ended.set()
            await self.under_way.join()
            if not is_cut and self.sink.can_write_eof():
                self.sink.write_eof()
            return is_cut
        finally:
            delivery.cancel()
            await asyncio.gather(delivery, return_exceptions=True)

    async def _read(self) -> bool:
        """Put segments under way until the source ends; True when it was cut here."""
        loop = asyncio.get_running_loop()
        faults, due, n_bytes = self.faults, 0.0, 0
        while True:
            data = await self.source.read(SEGMENT_BYTES)
            if faults.black_hole:
                await self._swallow()
            if not data:
                return False
            limit = faults.cut_after_bytes
            if limit is not None:
                data = data[: max(0, limit - n_bytes)]
            n_bytes += len(data)
            wait_s = faults.delay_s + faults.jitter_s * self.rng.random()
            if self.rng.random() < faults.loss:
                wait_s += faults.retransmit_s
            due = max(due, loop.time() + wait_s)
            await self.under_way.put((due, data))
            if limit is not None and n_bytes >= limit:
                return True

    async def _swallow(self) -> NoReturn:
        with contextlib.suppress(ConnectionError):
            while await self.source.read(SEGMENT_BYTES):
                pass
        self.source_ended.set()
        while True:
            await asyncio.Event().wait()

    async def _deliver(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due, data = await self.under_way.get()
            try:
                await asyncio.sleep(max(0.0, due - loop.time()))
                if self.faults.black_hole:
                    continue
                self.sink.write(data)
                await self.sink.drain()
                if self.faults.bytes_per_s:
                    await asyncio.sleep(len(data) / self.faults.bytes_per_s)
            except ConnectionError:
                continue  # the sink is gone; what is under way has nowhere to go
            finally:
                self.under_way.task_done()


class Proxy:
    """Listens on `port` of 127.0.0.1 and carries each connection to `target_port`.

    Args:
        port: 0 = any free one.
    """

    def __init__(self, target_port: int, seed: int = 0, port: int = 0) -> None:
        self.up = Faults()
        """Client to server."""
        self.down = Faults()
        """Server to client."""
        self.server_hung_up = asyncio.Event()
        """Set when a server has ended a connection, even if its client cannot learn of it."""
        self.port = port
        self._target_port = target_port
        self._rng = random.Random(seed)
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._pairs: set[tuple[asyncio.StreamWriter, asyncio.StreamWriter]] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._server is not None
        self._server.close()
        while self._tasks:
            # A task that is cancelled before its first step would leave its socket open.
            await asyncio.sleep(0)
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()

    def reset(self) -> None:
        """End all connections with a TCP reset towards both ends."""
        for pair in list(self._pairs):
            for writer in pair:
                reset(writer.transport)

    def half_close(self) -> None:
        """Tell the servers that their clients have sent everything; nothing else changes."""
        for _, to_server in list(self._pairs):
            to_server.write_eof()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # A plain function: what `start_server` makes a task of, nobody could wait for.
        task = asyncio.create_task(self._carry(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _carry(self, reader: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        async with _closing(to_client):
            try:
                from_server, to_server = await asyncio.open_connection(
                    "127.0.0.1", self._target_port
                )
            except OSError:
                reset(to_client.transport)
                return
            async with _closing(to_server):
                await self._both_ways((reader, to_client), (from_server, to_server))

    async def _both_ways(self, client: _End, server: _End) -> None:
        rng = random.Random(self._rng.random())
        up = _Leg(self.up, client[0], server[1], rng, asyncio.Event())
        down = _Leg(self.down, server[0], client[1], rng, self.server_hung_up)
        legs = [asyncio.create_task(leg.run()) for leg in (up, down)]
        pair = (client[1], server[1])
        self._pairs.add(pair)
        try:
            for leg in asyncio.as_completed(legs):
                if await leg:
                    break  # cut: both ends get a FIN
        except ConnectionError:
            # A reset of one end is passed on to the other.
            for writer in pair:
                reset(writer.transport)
        finally:
            for task in legs:
                task.cancel()
            await asyncio.gather(*legs, return_exceptions=True)
            self._pairs.discard(pair)


@asynccontextmanager
async def _closing(writer: asyncio.StreamWriter) -> AsyncIterator[None]:
    """Close with the block: in order after its end, at once when it was cancelled."""
    try:
        yield
    except asyncio.CancelledError:
        writer.transport.abort()
        raise
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


def reset(transport: Any) -> None:
    """End a TCP connection at once, with a reset instead of the orderly end."""
    raw = transport.get_extra_info("socket")
    if raw is not None and not transport.is_closing():
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER_0)
    transport.abort()
