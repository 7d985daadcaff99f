"""The proxy makes the faults it names, and no others."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.faults.proxy import Proxy


@asynccontextmanager
async def echoing() -> AsyncIterator[tuple[Proxy, list[str]]]:
    """A proxy before a server that sends everything back and notes how its connections end."""
    ends: list[str] = []

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65_536):
                writer.write(data)
                await writer.drain()
            ends.append("eof")
        except ConnectionResetError:
            ends.append("reset")
        finally:
            writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    try:
        async with Proxy(server.sockets[0].getsockname()[1], seed=7) as proxy:
            yield proxy, ends
    finally:
        server.close()
        await server.wait_closed()


async def ends_as(ends: list[str], word: str) -> None:
    async with asyncio.timeout(10):
        while ends != [word]:  # noqa: ASYNC110 - the server's end has no event
            await asyncio.sleep(0.01)


async def test_without_faults_every_byte_arrives_in_order() -> None:
    sent = bytes(range(256)) * 2000
    async with echoing() as (proxy, ends):
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        writer.write(sent)

        assert await reader.readexactly(len(sent)) == sent
        writer.close()
        await ends_as(ends, "eof")


async def test_delay_jitter_and_loss_cost_time_and_keep_the_order() -> None:
    sent = bytes(range(256)) * 400
    async with echoing() as (proxy, _):
        proxy.up.delay_s, proxy.up.jitter_s, proxy.down.loss = 0.1, 0.05, 0.5
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        begun = time.monotonic()
        writer.write(sent)

        assert await reader.readexactly(len(sent)) == sent
        assert time.monotonic() - begun >= 0.1
        writer.close()


async def test_the_bandwidth_is_bounded() -> None:
    async with echoing() as (proxy, _):
        proxy.up.bytes_per_s = 100_000.0
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        begun = time.monotonic()
        writer.write(bytes(40_000))

        await reader.readexactly(40_000)
        # The last segment is paid for after it has left.
        assert time.monotonic() - begun >= 0.2
        writer.close()


async def test_a_black_hole_takes_bytes_and_ends_and_gives_nothing() -> None:
    async with echoing() as (proxy, ends):
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        writer.write(b"a")
        assert await reader.readexactly(1) == b"a"

        proxy.up.black_hole = True
        writer.write(bytes(1_000_000))
        await writer.drain()
        writer.write_eof()

        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.read(1), 0.3)
        assert ends == []
        writer.close()


async def test_a_reset_reaches_both_ends() -> None:
    async with echoing() as (proxy, ends):
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        writer.write(b"a")
        await reader.readexactly(1)

        proxy.reset()

        with pytest.raises(ConnectionResetError):
            await reader.read(1)
        await ends_as(ends, "reset")
        writer.close()


async def test_a_half_close_ends_one_direction_only() -> None:
    async with echoing() as (proxy, ends):
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        writer.write(b"last words")
        assert await reader.readexactly(10) == b"last words"

        proxy.half_close()

        await ends_as(ends, "eof")
        assert await reader.read() == b""
        writer.close()


async def test_a_cut_connection_has_carried_exactly_the_bytes_said() -> None:
    async with echoing() as (proxy, ends):
        proxy.down.cut_after_bytes = 1000
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        writer.write(bytes(5000))

        assert len(await reader.read()) == 1000
        async with asyncio.timeout(10):
            while not ends:  # noqa: ASYNC110 - the server's end has no event
                await asyncio.sleep(0.01)
        writer.close()
