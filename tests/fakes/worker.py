"""A whole worker around the fake model: real lifecycle, real uvicorn on a free port."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Sequence
from typing import Any

import httpx
import msgspec
import websockets

from shared.protocol import (
    SESSION_PATH,
    SUBPROTOCOL,
    Command,
    Event,
    Open,
    Prepare,
    Prepared,
    WorkerHealth,
    decode_event,
    encode,
)
from shared.states import WorkerState
from tests.fakes.model import FakeDuplexModel, as_model
from tests.fakes.patience import PATIENCE_S
from tests.fakes.session import LOUD, SILENT, E, chunk, eventually
from worker.compiling import Compiling
from worker.lifecycle import Lifecycle, WorkerSettings
from worker.models.contract import Model
from worker.server import bind, create_app, make_server
from worker.sessions.rehearsal import rehearse


class FakeWorker:
    """`start` it, talk to it, `close` it; `code` is the exit code once it has ended."""

    def __init__(
        self,
        model: FakeDuplexModel | None = None,
        n_slots: int = 2,
        stuck_after_s: float = 30.0,
        drain_timeout_s: float = 300.0,
        compiling: Compiling | None = None,
    ) -> None:
        self.model = model or FakeDuplexModel()
        self._compiling = compiling
        played = [chunk(0, SILENT), chunk(1, LOUD)]
        self.lifecycle = Lifecycle(
            WorkerSettings("fake", n_slots, 3, stuck_after_s, drain_timeout_s),
            self._build,
            functools.partial(rehearse, played),
            compiling=compiling,
        )
        self._listener = bind(0)
        self.port: int = self._listener.getsockname()[1]
        self._server = make_server(create_app(self.lifecycle))
        self._serving: asyncio.Task[None] | None = None
        self.running: asyncio.Task[int] | None = None

    def _build(self) -> Model:
        if self._compiling is not None:
            self._compiling.look()
        return as_model(self.model)

    async def start(self, ready: bool = True) -> FakeWorker:
        self._serving = asyncio.create_task(self._server.serve(sockets=[self._listener]))
        self.running = asyncio.create_task(self.lifecycle.run())
        if ready:
            await eventually(lambda: self.lifecycle.state is not WorkerState.LOADING)
            assert self.lifecycle.state is WorkerState.READY
        await eventually(lambda: self._server.started)
        return self

    async def code(self) -> int:
        assert self.running is not None
        return await asyncio.wait_for(asyncio.shield(self.running), PATIENCE_S)

    async def health(self) -> WorkerHealth:
        return msgspec.json.decode((await self.get("/health")).content, type=WorkerHealth)

    async def get(self, path: str) -> httpx.Response:
        # Loading certificates takes longer than the request.
        async with httpx.AsyncClient(trust_env=False, verify=False) as client:
            return await client.get(f"http://127.0.0.1:{self.port}{path}")

    async def connect(self, **options: Any) -> Peer:
        socket = await websockets.connect(
            f"ws://127.0.0.1:{self.port}{SESSION_PATH}",
            subprotocols=[websockets.Subprotocol(SUBPROTOCOL)],
            proxy=None,
            max_size=None,
            **options,
        )
        return Peer(socket)

    async def session(self, session_id: str = "s", prompt: str = "be brief") -> Peer:
        """A connection with a prepared session."""
        peer = await self.connect()
        await peer.send(Open(session_id, "duplex", "omni_duplex"), Prepare(prompt))
        await peer.until(Prepared)
        return peer

    async def close(self) -> None:
        for gate in self.model.gates.values():
            gate.set()
        self.lifecycle.request_stop()
        await self.code()
        self._server.should_exit = True
        assert self._serving is not None
        await asyncio.wait_for(self._serving, PATIENCE_S)


class Peer:
    """The gateway's end of one session socket."""

    def __init__(self, socket: websockets.ClientConnection) -> None:
        self.socket = socket

    async def send(self, *commands: Command) -> None:
        for command in commands:
            await self.socket.send(encode(command))

    async def next(self) -> Event:
        frame = await asyncio.wait_for(self.socket.recv(), PATIENCE_S)
        assert isinstance(frame, bytes)
        return decode_event(frame)

    async def until(self, kind: type[E]) -> E:
        while True:
            event = await self.next()
            if isinstance(event, kind):
                return event

    async def rest(self) -> Sequence[Event]:
        """What comes up to the close."""
        events = []
        try:
            while True:
                events.append(await self.next())
        except websockets.ConnectionClosed:
            return events

    async def close_code(self) -> int | None:
        await asyncio.wait_for(self.socket.wait_closed(), PATIENCE_S)
        return self.socket.close_code
