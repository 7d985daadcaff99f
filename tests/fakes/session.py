"""A session host around the fake model, and a client that talks to a session in memory."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from shared.audio import samples_to_f32
from shared.errors import EngineFault
from shared.protocol import Command, Event, Input, Prepare, Prepared, RequestType
from tests.fakes.model import LANGUAGE, UNIT_SAMPLES, FakeDuplexModel, as_model
from tests.fakes.patience import PATIENCE_S
from worker.engine.engine import Engine
from worker.engine.gpu_thread import LaneThreads
from worker.engine.slots import SlotTable
from worker.sessions.chat import ChatSession
from worker.sessions.duplex import DuplexSession
from worker.sessions.half_duplex import HalfDuplexSession
from worker.sessions.host import SessionHost, SessionLimits
from worker.sessions.media import MediaDecoder

E = TypeVar("E")

LOUD = np.ones(UNIT_SAMPLES, np.float32)
"""One unit that the fake model answers."""

SILENT = np.zeros(UNIT_SAMPLES, np.float32)


def chunk(seq: int, samples: Any = SILENT, **fields: Any) -> Input:
    return Input(seq, samples_to_f32(np.asarray(samples, np.float32)), **fields)


async def eventually(condition: Callable[[], bool]) -> None:
    """Give way to the other tasks until the condition holds. Raises TimeoutError."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110 - what tests wait for has no event
            await asyncio.sleep(0.001)


def gated(*kinds: str, **fields: Any) -> FakeDuplexModel:
    """A fake model whose ops of these kinds wait for `model.gates[kind]`."""
    gates = {kind: threading.Event() for kind in kinds}
    entered = {kind: threading.Event() for kind in kinds}
    return FakeDuplexModel(gates=gates, entered=entered, **fields)


async def entered(stage: Stage, kind: str) -> None:
    """Wait until an op of this kind runs."""
    assert await asyncio.to_thread(stage.model.entered[kind].wait, 5)


class Stage:
    """A host on real compute threads; `close` it at the end of the test."""

    def __init__(
        self,
        model: FakeDuplexModel | None = None,
        n_slots: int = 2,
        limits: SessionLimits | None = None,
    ) -> None:
        self.model = model or FakeDuplexModel()
        self.model.n_slots = n_slots
        self.broken: list[EngineFault] = []
        loop = asyncio.get_running_loop()
        fault: asyncio.Future[EngineFault] = loop.create_future()

        def on_fault(error: EngineFault) -> None:
            if not fault.done():
                fault.set_result(error)

        def from_thread(error: EngineFault) -> None:
            loop.call_soon_threadsafe(on_fault, error)

        self.threads = LaneThreads()
        engine = Engine(
            as_model(self.model),
            on_fault=from_thread,
        )
        self.threads.serve(engine)
        self.host = SessionHost(
            model=as_model(self.model),
            engine=engine,
            slots=SlotTable(n_slots),
            media=MediaDecoder(n_slots),
            call=lambda fn: self.threads.call(LANGUAGE, fn),
            on_broken=self.broken.append,
            fault=fault,
            limits=limits or SessionLimits(),
        )

    def client(self, session_id: str = "s") -> Client:
        return Client(self.host, session_id)

    def chat(self, session_id: str = "c") -> Client:
        return Client(self.host, session_id, ChatSession, "chat")

    def half_duplex(self, session_id: str = "h") -> Client:
        return Client(self.host, session_id, HalfDuplexSession, "half_duplex_audio")

    async def close(self) -> None:
        for gate in self.model.gates.values():
            gate.set()
        self.threads.stop()
        assert await asyncio.to_thread(self.threads.join, 5.0)
        self.host.media.close()


class Client:
    """Sends commands, receives events; the session runs as a task of its own."""

    def __init__(
        self,
        host: SessionHost,
        session_id: str,
        kind: type[DuplexSession | HalfDuplexSession | ChatSession] = DuplexSession,
        request_type: RequestType = "omni_duplex",
    ) -> None:
        self.events: asyncio.Queue[Event] = asyncio.Queue()
        self._commands: asyncio.Queue[Command | None] = asyncio.Queue()
        self.session = kind(host, session_id, request_type, self.events.put_nowait)
        self.task = asyncio.create_task(self.session.run(self._stream()))

    def send(self, *commands: Command) -> None:
        for command in commands:
            self._commands.put_nowait(command)

    def disconnect(self) -> None:
        self._commands.put_nowait(None)

    async def next(self, kind: type[E]) -> E:
        """The next event, which has to be of this kind."""
        event = await asyncio.wait_for(self.events.get(), PATIENCE_S)
        assert isinstance(event, kind), f"expected {kind.__name__}, got {event}"
        return event

    async def until(self, kind: type[E]) -> E:
        """The next event of this kind; others are skipped."""
        while True:
            event = await asyncio.wait_for(self.events.get(), PATIENCE_S)
            if isinstance(event, kind):
                return event

    async def prepared(self, prompt: str = "be brief") -> Prepared:
        self.send(Prepare(prompt))
        return await self.until(Prepared)

    async def code(self) -> int:
        """The close code, once the session has ended."""
        return await asyncio.wait_for(asyncio.shield(self.task), PATIENCE_S)

    def rest(self) -> Sequence[Event]:
        return [self.events.get_nowait() for _ in range(self.events.qsize())]

    async def _stream(self) -> AsyncIterator[Command]:
        while (command := await self._commands.get()) is not None:
            yield command
