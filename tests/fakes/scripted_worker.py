"""A worker without a model: the real session protocol on a real socket, answers by script.

`python -m tests.fakes.scripted_worker PORT` runs one as a process of its own, for ever.
"""

from __future__ import annotations

import asyncio
import struct
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Literal, Self

import msgspec
from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response
from websockets.typing import Subprotocol

from gateway.pool import Address
from shared import protocol
from shared.limits import MAX_FRAME_BYTES
from shared.protocol import (
    Answered,
    Ask,
    Command,
    CompileStatus,
    Delta,
    Event,
    Failure,
    Generating,
    Input,
    Prefilled,
    Result,
    Speaking,
    TurnDone,
    WorkerHealth,
)

Answer = Callable[[Input], Event | None]
"""What a chunk is answered with; None = nothing at all."""

Turn = Callable[[Input], Sequence[Event]]
"""What a chunk of half duplex leads to."""

Chat = Callable[[Ask], Sequence[Event]]
"""What a chat request is answered with, one after the other."""

WORDS = ("The capital ", "of France is Paris.")
TONE = struct.pack("<4f", 0.1, -0.2, 0.3, -0.4) * 600
"""A tenth of a second of speech."""


def listen(chunk: Input) -> Result:
    return Result(seq=chunk.seq, is_listen=True, unit_index=chunk.seq + 1, kv_tokens=100)


def speak(chunk: Input) -> Result:
    """The chunk's own bytes come back as speech."""
    return Result(
        seq=chunk.seq, is_listen=False, unit_index=chunk.seq + 1, text="word", audio=chunk.audio
    )


def take_turns(chunk: Input) -> Sequence[Event]:
    """A chunk with any sound in it is a whole turn of the user, answered at once."""
    if not any(chunk.audio):
        return ()
    return (
        Speaking(True),
        Speaking(False),
        Generating(512.0),
        Delta(0, WORDS[0], TONE),
        Delta(1, WORDS[1]),
        TurnDone(1, "".join(WORDS), "What is the capital of France?"),
    )


def tell(ask: Ask) -> Sequence[Event]:
    """Two words, spoken if that was asked for."""
    sound = TONE if ask.speaks else b""
    text = "".join(WORDS)
    if not ask.is_streaming:
        return Prefilled(12), Answered(text, 12, 7, sound * 2, prompt="user: …")
    pieces = [Delta(i, word, sound) for i, word in enumerate(WORDS)]
    return Prefilled(12), *pieces, Answered(text, 12, 7, ignored=["length_penalty"])


@dataclass
class Script:
    """How the worker behaves; may be changed while it runs."""

    answer: Answer = listen
    turn: Turn = take_turns
    chat: Chat = tell
    piece_delay_s: float = 0.0
    """Before each event of a chat answer."""
    open_delay_s: float = 0.0
    prepare_delay_s: float = 0.0
    result_delay_s: float = 0.0
    cleanup_delay_s: float = 0.0
    worker_status: str | None = None
    """None = by the slots in use."""
    eta_s: float | None = None
    refuse_open: Failure | None = None
    compile_status: str = msgspec.json.encode(CompileStatus("warm", fingerprint="ab12")).decode()
    compile_delay_s: float = 0.0


@dataclass
class FakeSession:
    """What one session has received."""

    connection: ServerConnection
    opened: protocol.Open
    commands: list[Command] = field(default_factory=list)
    n_turns: int = 0
    n_told: int = 0
    """Events of a chat answer that have been sent."""

    @property
    def chunks(self) -> list[Input]:
        return [command for command in self.commands if isinstance(command, Input)]

    async def send(self, event: Event) -> None:
        await self.connection.send(protocol.encode(event))


class ScriptedWorker:
    """`async with ScriptedWorker(slots=2) as worker:` listens on a free port until its end."""

    connection_type: type[ServerConnection] = ServerConnection

    def __init__(self, slots: int = 1, script: Script | None = None, port: int = 0) -> None:
        self.slots = slots
        self.script = script or Script()
        self.port = port
        self.sessions: list[FakeSession] = []
        self.n_live = 0
        self.most_live = 0
        self.n_opens = 0
        self.may_clean = asyncio.Event()
        """Cleared: a session that has ended keeps its slot."""
        self.may_clean.set()
        self._server: Server | None = None

    @property
    def address(self) -> Address:
        return Address("127.0.0.1", self.port)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.die()

    async def start(self) -> None:
        self._server = await serve(
            self._session,
            "127.0.0.1",
            self.port,
            create_connection=self.connection_type,
            process_request=self._http,
            subprotocols=[Subprotocol(protocol.SUBPROTOCOL)],
            max_size=MAX_FRAME_BYTES,
            compression=None,
        )
        self.port = next(iter(self._server.sockets)).getsockname()[1]

    async def die(self) -> None:
        """Vanish like a killed process: connections are reset, the port is closed."""
        if self._server is None:
            return
        for connection in list(self._server.connections):
            connection.transport.abort()
        self._server.close(close_connections=False)
        await self._server.wait_closed()
        self._server = None
        self.n_live = 0

    def health(self) -> WorkerHealth:
        status = self.script.worker_status
        if status is None:
            status = "idle" if self.n_live < self.slots else "duplex_active"
        kinds: dict[str, Literal["healthy", "initializing", "error"]] = {
            "loading": "initializing",
            "error": "error",
        }
        kind = kinds.get(status, "healthy")
        return WorkerHealth(
            status=kind,
            worker_status=status,
            gpu_id=None,
            model_loaded=kind == "healthy",
            current_session_id=None,
            total_requests=len(self.sessions),
            avg_inference_time_ms=0.0,
            kv_cache_length=0,
            slots_total=self.slots,
            slots_free=max(0, self.slots - self.n_live),
            backend="fake",
            stage="warmup_compile" if status == "loading" else None,
            stage_progress=0.5 if status == "loading" else 1.0,
            stage_elapsed_s=1.0,
            eta_s=self.script.eta_s,
            stages=[],
        )

    async def _http(self, connection: ServerConnection, request: Request) -> Response | None:
        if request.path == "/api/compile":
            await asyncio.sleep(self.script.compile_delay_s)
            return connection.respond(200, self.script.compile_status)
        if request.path != "/health":
            return None
        return connection.respond(200, msgspec.json.encode(self.health()).decode())

    async def _session(self, connection: ServerConnection) -> None:
        try:
            await self._serve(connection)
        except ConnectionClosed:
            return

    async def _serve(self, connection: ServerConnection) -> None:
        assert connection.subprotocol == protocol.SUBPROTOCOL
        opened = protocol.decode_command(await connection.recv(decode=False))
        assert isinstance(opened, protocol.Open)
        session = FakeSession(connection, opened)
        self.n_opens += 1
        await asyncio.sleep(self.script.open_delay_s)
        refusal = self.script.refuse_open
        if refusal is None and self.n_live >= self.slots:
            refusal = Failure("no_free_slot", "no slot is free", 1013)
        if refusal is not None:
            await session.send(refusal)
            await session.send(protocol.Closed("refused"))
            return
        self.n_live += 1
        self.most_live = max(self.most_live, self.n_live)
        self.sessions.append(session)
        try:
            await session.send(protocol.Opened(slot=self.n_live - 1))
            reason = await (self._be_asked if opened.mode == "chat" else self._converse)(session)
            await asyncio.sleep(self.script.cleanup_delay_s)
            await self.may_clean.wait()
        finally:
            self.n_live = max(0, self.n_live - 1)
        await session.send(protocol.Closed(reason))

    async def _be_asked(self, session: FakeSession) -> str:
        """Answer a chat request; `Stop` ends it at once."""
        ask = protocol.decode_command(await session.connection.recv(decode=False))
        session.commands.append(ask)
        if not isinstance(ask, Ask):
            return "stopped"
        works = [
            asyncio.ensure_future(self._tell(session, ask)),
            asyncio.ensure_future(session.connection.recv(decode=False)),
        ]
        try:
            await asyncio.wait(works, return_when=asyncio.FIRST_COMPLETED)
            if works[0].done():
                works[0].result()
                return "done"
            session.commands.append(protocol.decode_command(works[1].result()))
            return "stopped"
        finally:
            for work in works:
                work.cancel()
                with suppress(asyncio.CancelledError, ConnectionClosed):
                    await work

    async def _tell(self, session: FakeSession, ask: Ask) -> None:
        for event in self.script.chat(ask):
            await asyncio.sleep(self.script.piece_delay_s)
            await session.send(event)
            session.n_told += 1

    async def _converse(self, session: FakeSession) -> str:
        async for frame in session.connection:
            assert isinstance(frame, bytes)
            command = protocol.decode_command(frame)
            session.commands.append(command)
            if isinstance(command, protocol.Stop):
                await session.send(protocol.Stopped())
                break
            await self._reply(session, command)
            # A fake that keeps nothing, for tests of what others keep.
            del frame, command
        return "stopped"

    async def _reply(self, session: FakeSession, command: Command) -> None:
        match command:
            case protocol.Prepare():
                await asyncio.sleep(self.script.prepare_delay_s)
                await session.send(
                    protocol.Prepared(
                        prompt_chars=len(command.system_prompt),
                        prompt_tokens=7,
                        ignored=["length_penalty"],
                        languages=["en"],
                    )
                )
            case protocol.PrepareTurns():
                await asyncio.sleep(self.script.prepare_delay_s)
                await session.send(
                    protocol.Prepared(11, 7, ignored=["length_penalty"], languages=["en"])
                )
            case Input() if session.opened.mode == "half_duplex":
                await self._take_turn(session, command)
            case Input():
                await asyncio.sleep(self.script.result_delay_s)
                event = self.script.answer(command)
                if event is not None:
                    await session.send(event)
            case protocol.Pause():
                await session.send(protocol.Paused(command.timeout_s or 60.0))
            case protocol.Resume():
                await session.send(protocol.Resumed())
            case protocol.Interrupt():
                await session.send(protocol.Interrupted())

    async def _take_turn(self, session: FakeSession, chunk: Input) -> None:
        for event in self.script.turn(chunk):
            if isinstance(event, TurnDone):
                session.n_turns += 1
                event = msgspec.structs.replace(event, turn_index=session.n_turns)
            await session.send(event)


async def main(port: int) -> None:
    async with ScriptedWorker(slots=4, port=port):
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
