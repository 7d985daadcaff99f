"""A gateway on a real port in this process, and a client that speaks its protocol."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from websockets.asyncio.client import ClientConnection, connect

from gateway.app import create_app
from gateway.context import Gateway
from gateway.pool import Address
from gateway.server import GatewayServer, build_server
from shared.config import Config
from tests.fakes.patience import PATIENCE_S
from tests.fakes.scripted_worker import ScriptedWorker

SECOND = base64.b64encode(bytes(64_000)).decode()
READY_TIMEOUT_S = 30.0
"""Workers may be processes that have just been started, on a machine that is busy."""


async def wait_until(condition: Callable[[], object], timeout_s: float = PATIENCE_S) -> None:
    """Look at a condition that other tasks or threads make true; nothing announces it."""
    async with asyncio.timeout(timeout_s):
        while True:
            if condition():
                return
            await asyncio.sleep(0.01)


@dataclass
class Running:
    """A gateway on a real port, in this process."""

    gateway: Gateway
    port: int
    server: GatewayServer

    @property
    def http(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def client(self, **options: Any) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self.http, trust_env=False, timeout=PATIENCE_S, **options)

    def dial(self, session_id: str = "omni_test", **options: Any) -> connect:
        query = options.pop("query", "")
        return self.dial_path(f"/ws/duplex/{session_id}{query}", **options)

    def dial_path(self, path: str, **options: Any) -> connect:
        return connect(f"ws://127.0.0.1:{self.port}{path}", proxy=None, max_size=None, **options)

    async def until_ready(self, n_workers: int = 1) -> None:
        await wait_until(lambda: self.gateway.pool.n_ready >= n_workers, READY_TIMEOUT_S)


@asynccontextmanager
async def run_gateway(
    workers: Sequence[ScriptedWorker | Address],
    config: Config | None = None,
    static_dir: Path | None = None,
    ready: bool = True,
) -> AsyncIterator[Running]:
    addresses = [w if isinstance(w, Address) else w.address for w in workers]
    options = {} if static_dir is None else {"static_dir": static_dir}
    app = create_app(quiet(config or Config()), addresses, **options)
    server = build_server(app, "127.0.0.1", 0)
    serving = asyncio.create_task(server.serve())
    await wait_until(lambda: server.started)
    running = Running(app.state.gateway, server.port, server)
    try:
        if ready:
            await running.until_ready(len(addresses))
        yield running
    finally:
        server.should_exit = True
        await serving


def quiet(config: Config) -> Config:
    """Record nothing unless the test says so: its folder would be the working directory's."""
    if "recording" in config.model_fields_set:
        return config
    off = config.recording.model_copy(update={"enabled": False})
    return config.model_copy(update={"recording": off})


class Talker:
    """A G0 client in the words of the protocol."""

    def __init__(self, socket: ClientConnection) -> None:
        self.socket = socket

    async def say(self, kind: str, **fields: Any) -> None:
        await self.socket.send(json.dumps({"type": kind, **fields}))

    async def chunk(self, **fields: Any) -> None:
        await self.say("audio_chunk", audio_base64=fields.pop("audio_base64", SECOND), **fields)

    async def hear(self, timeout_s: float = PATIENCE_S) -> dict[str, Any]:
        async with asyncio.timeout(timeout_s):
            message: dict[str, Any] = json.loads(await self.socket.recv())
        return message

    async def hear_kind(self, kind: str, timeout_s: float = PATIENCE_S) -> dict[str, Any]:
        async with asyncio.timeout(timeout_s):
            while True:
                message = await self.hear(timeout_s)
                if message["type"] == kind:
                    return message

    async def prepare(self, **fields: Any) -> dict[str, Any]:
        await self.say("prepare", **fields)
        return await self.hear_kind("prepared")

    async def closed(self, timeout_s: float = PATIENCE_S) -> int | None:
        """Wait for the socket's end; return its close code."""
        async with asyncio.timeout(timeout_s):
            await self.socket.wait_closed()
        return self.socket.close_code
