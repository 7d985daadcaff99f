"""One client's session, of any mode: queue phase, then frames both ways, then an orderly end.

    client --_read--> inbox --_forward--> worker
    client <--_write-- outbox <--_backward-- worker

The client's socket is read from the first moment to the last, so its early frames, its pings
and its leaving are seen in the queue too. The first pump to end decides how the session ends.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress

from starlette.types import Message
from starlette.websockets import WebSocket, WebSocketDisconnect

from gateway.admission import admit
from gateway.context import Gateway
from gateway.dialects.contract import Diagnostic, Dialect, RefusedChunk
from gateway.faults import Fault, WorkerFailure
from gateway.inbox import Chunk, Inbox
from gateway.link import WorkerLink
from gateway.metrics import SessionWatch
from gateway.outbox import Outbox
from gateway.race import first_to_end
from gateway.tape import Tape
from gateway.tickets import Place, Ticket
from shared.errors import (
    BadFrame,
    BadMessage,
    FrameTooLarge,
    ServerShutdown,
    SessionTimeout,
    SlowReader,
    UnexpectedBinary,
    WorkerLost,
)
from shared.limits import MAX_FRAME_BYTES
from shared.protocol import (
    Answered,
    Ask,
    Closed,
    Delta,
    Event,
    Failure,
    Generating,
    Open,
    Paused,
    Prepared,
    Result,
    Stop,
    Stopped,
    TurnDone,
)

log = logging.getLogger(__name__)

FRAME_TOO_LARGE = "frame_too_large"
"""Key of a `websocket.receive` event that stands for a message above the frame limit."""

FRAMING_BROKEN = "framing_broken"
"""The same for bytes that are no WebSocket frames."""

LAST_WORDS = "last_words"
"""Key of a `websocket.close` event: a text that goes out right before the close frame, or None."""

LAST_WORDS_S = 1.0
"""For what a worker sent before its connection broke, which explains more than the break does."""

STOP_TIMEOUT_S = 15.0
FLUSH_TIMEOUT_S = 2.0
"""For the last frames of a session to reach the client's socket."""

ANSWER_TIMEOUT_S = 60.0
"""The same for an answer that comes as a whole, minutes of sound perhaps. Its slot is free
meanwhile."""


class ClientGone(Exception):
    """The client's connection ended."""


class Relay:
    """Runs one session on an accepted socket."""

    def __init__(
        self,
        gateway: Gateway,
        socket: WebSocket,
        dialect: Dialect,
        opening: Open,
    ) -> None:
        self._gateway = gateway
        self._socket = socket
        self._dialect = dialect
        self._opening = opening
        self._session_id = opening.session_id
        self._clock = gateway.clock
        self._inbox = Inbox(gateway.held, answers_chunks=opening.mode == "duplex")
        self._outbox = Outbox()
        self._stop = asyncio.Event()
        self._asked = asyncio.Event()
        if opening.mode != "chat":
            self._asked.set()
        self._is_answered = False
        self._is_stopped = False
        self._tape = Tape(gateway.recorder, opening)
        self._link: WorkerLink | None = None
        self._is_queue_shown = False
        self._n_results = 0
        self._watch = SessionWatch(
            gateway.metrics, gateway.config.audio.playback_delay_ms / 1000.0, opening.mode
        )

    async def run(self) -> None:
        """Serve the session to its end; returns once the socket has been told to close."""
        started_at = self._clock.monotonic()
        log.info("session opened request_type=%s", self._opening.request_type)
        ending = "stopped"
        try:
            await first_to_end(self._read(), self._write(), self._serve(), self._shutdown())
            await self._finish(None)
        except ClientGone:
            is_over = self._stop.is_set() or self._is_answered
            ending = "stopped" if is_over else "client_gone"
        except Exception as error:  # noqa: BLE001 - the session's edge: whatever it was, it is told
            fault = self._gateway.desk.translate(error, f"session {self._session_id}")
            ending = fault.slug
            await self._finish(fault)
        finally:
            self._inbox.close()
            self._tape.end(ending)
            self._gateway.metrics.session_ended(ending)
            log.info(
                "session ended ending=%s results=%d unanswered=%d duration_s=%.1f",
                ending,
                self._n_results,
                self._inbox.n_unanswered,
                self._clock.monotonic() - started_at,
            )

    # ---- the client's side

    async def _read(self) -> None:
        while True:
            # In a call of its own: a local name here would keep the last message, which may have
            # 128 MiB, until the next one.
            await self._take(await self._socket.receive())
            # Receiving does not yield while frames wait; a burst must not starve the other pumps.
            await asyncio.sleep(0)

    async def _take(self, message: Message) -> None:
        if message["type"] == "websocket.disconnect":
            raise ClientGone
        if FRAME_TOO_LARGE in message:
            raise FrameTooLarge(f"A message may have {MAX_FRAME_BYTES} bytes at most")
        if FRAMING_BROKEN in message:
            raise BadFrame("What came is not framed as RFC 6455 says")
        frame = message.get("text")
        if frame is None:
            raise UnexpectedBinary("Binary frames are not part of this protocol")
        try:
            await self._accept(frame, self._clock.monotonic())
        except BadMessage as error:
            if not self._asked.is_set():
                # The request is all that a chat session is for.
                raise
            self._refuse(error)

    async def _accept(self, frame: str, arrived_at: float) -> None:
        command = await self._gateway.large.run(len(frame), self._dialect.parse, frame)
        if isinstance(command, Diagnostic):
            self._gateway.n_diagnostics += 1
            return
        if self._stop.is_set():
            raise BadMessage("The session has been stopped")
        if isinstance(command, RefusedChunk):
            self._inbox.refuse(command.error, arrived_at)
        else:
            self._inbox.put(command, arrived_at)
        self._answer_due()
        if isinstance(command, Stop):
            self._stop.set()
        elif isinstance(command, Ask):
            self._asked.set()

    async def _write(self) -> None:
        while True:
            await self._outbox.until_filled()
            await self._send_head()

    async def _send_head(self) -> None:
        try:
            await self._socket.send_text(self._outbox.head)
        except WebSocketDisconnect as error:
            raise ClientGone from error
        # Removed only now: a send that is cancelled has waited and written nothing, and the
        # frame is sent by whoever comes next.
        self._outbox.drop_head()

    async def _finish(self, fault: Fault | None) -> None:
        """Say the last words, then close; a client that does not read does not delay us."""
        code = 1000 if fault is None or fault.ws_close is None else fault.ws_close
        reason = fault.close_reason if fault else ""
        words = self._failure(fault.slug, fault.message) if fault else None
        if fault and fault.slug == SlowReader.slug:
            self._outbox.clear()
        if words is not None:
            self._outbox.put_last(words)
        limit_s = ANSWER_TIMEOUT_S if self._is_answered else FLUSH_TIMEOUT_S
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(limit_s):
                    while self._outbox:
                        await self._send_head()
            if self._outbox:
                log.warning("client does not read its last frames")
            left = words if self._outbox else None
            close = {"type": "websocket.close", "code": code, "reason": reason, LAST_WORDS: left}
            await self._socket.send(close)
        except (ClientGone, WebSocketDisconnect, RuntimeError):
            # Gone meanwhile: there is nobody left to tell. starlette and uvicorn report a socket
            # that closed under us as RuntimeError.
            log.debug("client left before the end was told")

    async def _shutdown(self) -> None:
        await self._gateway.closing.wait()
        raise ServerShutdown("The service is going down")

    # ---- the worker's side

    async def _serve(self) -> None:
        try:
            await self._until_asked()
            await first_to_end(self._admit(), self._stop.wait())
            if self._stop.is_set():
                self._put(self._dialect.stopped())
                return
            assert self._link is not None
            self._put(self._dialect.queue_done(self._clock.wall()))
            try:
                await first_to_end(
                    self._backward(self._link),
                    self._forward(self._link),
                    self._link.watch(),
                    self._limit_stop(),
                )
            except WorkerLost:
                if not self._has_all:
                    raise
        finally:
            if self._link is not None:
                self._link.retire("client_gone")

    async def _until_asked(self) -> None:
        """A slot is not taken for somebody who may never ask."""
        timeout_s = self._gateway.config.duplex.idle_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                await self._asked.wait()
        except TimeoutError as error:
            raise SessionTimeout(f"No request has come ({timeout_s:.1f}s)") from error

    async def _admit(self) -> None:
        """Wait for a slot and open the session on its worker."""
        self._link = await admit(self._gateway, self._opening, self._show_place)

    def _show_place(self, ticket: Ticket, place: Place) -> None:
        if self._is_queue_shown:
            self._put(self._dialect.queue_update(place))
        else:
            self._is_queue_shown = True
            self._put(self._dialect.queued(ticket.ticket_id, place))

    async def _forward(self, link: WorkerLink) -> None:
        try:
            while True:
                command, arrived_at = await self._inbox.get()
                self._tape.took(command, arrived_at, link.worker_index)
                if self._tape.recording_id is not None:
                    self._dialect.recorded(self._tape.recording_id)
                if isinstance(command, Ask):
                    self._watch.asked(self._clock.monotonic())
                await link.send(command)
                # What it holds may be large, and the next one may be long in coming.
                del command
        except WorkerLost:
            await asyncio.sleep(LAST_WORDS_S)
            raise

    @property
    def _has_all(self) -> bool:
        """Whether the client has all it asked for; it is not told what comes after."""
        return self._is_stopped or self._is_answered

    async def _backward(self, link: WorkerLink) -> None:
        """Pass the worker's events on until it has closed the session."""
        while True:
            event = await link.receive()
            match event:
                case Closed():
                    if not self._has_all:
                        raise WorkerLost(f"The worker ended the session: {event.reason}")
                    return
                case Failure():
                    self._fail(event)
                case Result():
                    self._answer(event)
                case Answered():
                    await self._give_answer(event)
                case _:
                    self._is_stopped |= isinstance(event, Stopped)
                    self._note(event)
                    self._show(event, 0.0)

    def _note(self, event: Event) -> None:
        now = self._clock.monotonic()
        match event:
            case Prepared():
                self._watch.prepared(now)
            case Paused():
                self._watch.paused()
            case Generating():
                self._watch.asked(now)
            case Delta():
                self._watch.piece(event.audio, now)
            case TurnDone():
                self._watch.answer_done(now)

    async def _give_answer(self, answered: Answered) -> None:
        self._watch.answer_done(self._clock.monotonic())
        self._tape.gave(answered, 0.0, self._clock.monotonic())
        frames = await self._gateway.large.run(
            len(answered.audio), self._dialect.event, answered, 0.0, self._clock.wall()
        )
        for frame in frames:
            self._outbox.put_last(frame)
        self._is_answered = True

    async def _limit_stop(self) -> None:
        await self._stop.wait()
        await asyncio.sleep(STOP_TIMEOUT_S)
        raise WorkerLost("The worker did not end the session in time")

    def _show(self, event: Event, wall_clock_ms: float) -> None:
        self._tape.gave(event, wall_clock_ms, self._clock.monotonic())
        for frame in self._dialect.event(event, wall_clock_ms, self._clock.wall()):
            self._outbox.put(frame)

    def _put(self, frame: str | None) -> None:
        if frame is not None:
            self._outbox.put(frame)

    def _failure(self, slug: str, message: str) -> str:
        return self._dialect.failure(slug, message, self._clock.wall())

    def _answer(self, result: Result) -> None:
        chunk = self._inbox.answered(result.seq)
        if chunk is None:
            log.warning("worker answered no chunk of ours seq=%d", result.seq)
            return
        self._n_results += 1
        self._show(result, self._age_ms(chunk))
        self._watch.answered(result, chunk.arrived_at, self._clock.monotonic())
        self._answer_due()

    def _answer_due(self) -> None:
        """Answer the chunks that the worker is not asked about, each in its turn."""
        for chunk in self._inbox.due():
            if chunk.refusal is not None:
                self._refuse(chunk.refusal)
                continue
            self._n_results += 1
            self._watch.dropped()
            self._outbox.put(self._dialect.dropped(self._age_ms(chunk), self._clock.wall()))

    def _fail(self, failure: Failure) -> None:
        """Raises WorkerFailure when the failure ends the session."""
        if failure.seq is not None and self._inbox.answered(failure.seq) is not None:
            self._watch.failed()
        self._tape.gave(failure, 0.0, self._clock.monotonic())
        if failure.close_code is not None:
            raise WorkerFailure(failure.slug, failure.message, failure.close_code)
        self._gateway.desk.count(failure.slug)
        self._outbox.put(self._failure(failure.slug, failure.message))
        self._answer_due()

    def _refuse(self, error: BadMessage) -> None:
        fault = self._gateway.desk.translate(error, f"session {self._session_id}")
        self._outbox.put(self._failure(fault.slug, fault.message))

    def _age_ms(self, chunk: Chunk) -> float:
        return (self._clock.monotonic() - chunk.arrived_at) * 1000.0
