"""One client's session: queue phase, then frames both ways, then an orderly end.

    client --_read--> inbox --_forward--> worker
    client <--_write-- outbox <--_backward-- worker

The client's socket is read from the first moment to the last, so its early frames, its pings
and its leaving are seen in the queue too. The first pump to end decides how the session ends.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

from starlette.types import Message
from starlette.websockets import WebSocket, WebSocketDisconnect

from gateway.context import Gateway
from gateway.dialects.contract import Diagnostic, Dialect, RefusedChunk
from gateway.faults import Fault, WorkerFailure
from gateway.inbox import Chunk, Inbox
from gateway.link import WorkerLink
from gateway.metrics import SessionWatch
from gateway.pool import Lease
from gateway.tickets import Ticket
from shared.errors import (
    BadMessage,
    FrameTooLarge,
    NoFreeSlot,
    ServerShutdown,
    SlowReader,
    UnexpectedBinary,
    WorkerLost,
)
from shared.limits import MAX_FRAME_BYTES, MAX_OUTBOX_BYTES
from shared.protocol import (
    Closed,
    Event,
    Failure,
    Open,
    Paused,
    Prepared,
    RequestType,
    Result,
    Stop,
    Stopped,
)

log = logging.getLogger(__name__)

FRAME_TOO_LARGE = "frame_too_large"
"""Key of a `websocket.receive` event that stands for a message above the frame limit."""

QUEUE_UPDATE_S = 3.0
QUEUE_QUIET_S = 0.5
"""Between two updates of one client: each departure moves everybody who waits behind it."""

OPEN_ATTEMPTS = 4
"""Workers that are tried before the session is given up; each failed one leaves the rotation."""

LAST_WORDS_S = 1.0
"""For what a worker sent before its connection broke, which explains more than the break does."""

STOP_TIMEOUT_S = 15.0
FLUSH_TIMEOUT_S = 2.0
"""For the last frames of a session to reach the client's socket."""


class ClientGone(Exception):
    """The client's connection ended."""


class Outbox:
    """Frames that wait for the client to read them, bounded."""

    def __init__(self) -> None:
        self._frames: deque[str] = deque()
        self._n_bytes = 0
        self._filled = asyncio.Event()

    def put(self, frame: str) -> None:
        """Raises SlowReader when the client has left too much unread."""
        if self._n_bytes + len(frame) > MAX_OUTBOX_BYTES and self._frames:
            raise SlowReader("Output was not read in time")
        self.put_last(frame)

    def put_last(self, frame: str) -> None:
        """Add the frame that ends the session, however much is unread."""
        self._frames.append(frame)
        self._n_bytes += len(frame)
        self._filled.set()

    async def until_filled(self) -> None:
        while not self._frames:
            self._filled.clear()
            await self._filled.wait()

    @property
    def head(self) -> str:
        return self._frames[0]

    def drop_head(self) -> None:
        self._n_bytes -= len(self._frames.popleft())

    def clear(self) -> None:
        self._frames.clear()
        self._n_bytes = 0

    def __len__(self) -> int:
        return len(self._frames)


class Relay:
    """Runs one session on an accepted socket."""

    def __init__(
        self,
        gateway: Gateway,
        socket: WebSocket,
        dialect: Dialect,
        session_id: str,
        request_type: RequestType,
    ) -> None:
        self._gateway = gateway
        self._socket = socket
        self._dialect = dialect
        self._session_id = session_id
        self._request_type = request_type
        self._clock = gateway.clock
        self._inbox = Inbox(gateway.held)
        self._outbox = Outbox()
        self._stop = asyncio.Event()
        self._link: WorkerLink | None = None
        self._is_queue_shown = False
        self._n_results = 0
        self._watch = SessionWatch(gateway.metrics, gateway.config.audio.playback_delay_ms / 1000.0)

    async def run(self) -> None:
        """Serve the session to its end; returns once the socket has been told to close."""
        started_at = self._clock.monotonic()
        log.info("session opened request_type=%s", self._request_type)
        ending = "stopped"
        try:
            await first_to_end(self._read(), self._write(), self._serve(), self._shutdown())
            await self._finish(None)
        except ClientGone:
            ending = "stopped" if self._stop.is_set() else "client_gone"
        except Exception as error:  # noqa: BLE001 - the session's edge: whatever it was, it is told
            fault = self._gateway.desk.translate(error, f"session {self._session_id}")
            ending = fault.slug
            await self._finish(fault)
        finally:
            self._inbox.close()
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
        frame = message.get("text")
        if frame is None:
            raise UnexpectedBinary("Binary frames are not part of this protocol")
        try:
            await self._accept(frame, self._clock.monotonic())
        except BadMessage as error:
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
        if fault is not None:
            if fault.slug == SlowReader.slug:
                self._outbox.clear()
            self._outbox.put_last(self._dialect.failure(fault.slug, fault.message))
        code = 1000 if fault is None or fault.ws_close is None else fault.ws_close
        try:
            async with asyncio.timeout(FLUSH_TIMEOUT_S):
                while self._outbox:
                    await self._send_head()
                await self._socket.close(code, fault.close_reason if fault else "")
        except (ClientGone, WebSocketDisconnect, RuntimeError):
            # Gone meanwhile: there is nobody left to tell. starlette and uvicorn report a socket
            # that closed under us as RuntimeError.
            log.debug("client left before the end was told")
        except TimeoutError:
            log.warning("client does not read its last frames")

    async def _shutdown(self) -> None:
        await self._gateway.closing.wait()
        raise ServerShutdown("The service is going down")

    # ---- the worker's side

    async def _serve(self) -> None:
        try:
            await first_to_end(self._admit(), self._stop.wait())
            if self._stop.is_set():
                self._outbox.put(self._dialect.stopped())
                return
            assert self._link is not None
            self._outbox.put(self._dialect.queue_done())
            await first_to_end(
                self._backward(self._link),
                self._forward(self._link),
                self._link.watch(),
                self._limit_stop(),
            )
        finally:
            if self._link is not None:
                self._link.retire("client_gone")

    async def _admit(self) -> None:
        """Wait for a slot and open the session on its worker."""
        gateway = self._gateway
        ticket = gateway.queue.join(self._session_id, self._request_type)
        try:
            for attempt in range(1, OPEN_ATTEMPTS + 1):
                lease = await self._wait(ticket)
                self._link = WorkerLink(lease, gateway.background, gateway.large)
                try:
                    opening = Open(self._session_id, "duplex", self._request_type)
                    # A worker that has frozen would use up the whole time-out of the opening.
                    await first_to_end(self._link.open(opening), self._link.watch())
                except (WorkerLost, NoFreeSlot) as error:
                    self._link.retire("refused")
                    log.warning("worker refused attempt=%d error=%s", attempt, error)
                    if attempt == OPEN_ATTEMPTS:
                        raise
                    gateway.queue.rejoin(ticket)
                else:
                    wait_s = self._clock.monotonic() - ticket.enqueued_at
                    gateway.metrics.queue_wait_seconds.observe(wait_s)
                    log.info(
                        "session assigned worker=%s wait_s=%.1f", self._link.worker_name, wait_s
                    )
                    return
        finally:
            gateway.queue.leave(ticket)

    async def _wait(self, ticket: Ticket) -> Lease:
        queue = self._gateway.queue
        while (lease := ticket.claim()) is None:
            ticket.changed.clear()
            place = queue.place(ticket)
            if self._is_queue_shown:
                self._outbox.put(self._dialect.queue_update(place))
            else:
                self._is_queue_shown = True
                self._outbox.put(self._dialect.queued(ticket.ticket_id, place))
            with suppress(TimeoutError):
                async with asyncio.timeout(QUEUE_QUIET_S):
                    await ticket.decided.wait()
                    continue
            with suppress(TimeoutError):
                async with asyncio.timeout(QUEUE_UPDATE_S - QUEUE_QUIET_S):
                    await ticket.changed.wait()
        return lease

    async def _forward(self, link: WorkerLink) -> None:
        try:
            while True:
                await link.send(await self._inbox.get())
        except WorkerLost:
            await asyncio.sleep(LAST_WORDS_S)
            raise

    async def _backward(self, link: WorkerLink) -> None:
        """Pass the worker's events on until it has closed the session."""
        is_stopped = False
        while True:
            event = await link.receive()
            match event:
                case Closed():
                    if not is_stopped:
                        raise WorkerLost(f"The worker ended the session: {event.reason}")
                    return
                case Failure():
                    self._fail(event)
                case Result():
                    self._answer(event)
                case _:
                    is_stopped |= isinstance(event, Stopped)
                    if isinstance(event, Prepared):
                        self._watch.prepared(self._clock.monotonic())
                    elif isinstance(event, Paused):
                        self._watch.paused()
                    self._show(event, 0.0)

    async def _limit_stop(self) -> None:
        await self._stop.wait()
        await asyncio.sleep(STOP_TIMEOUT_S)
        raise WorkerLost("The worker did not end the session in time")

    def _show(self, event: Event, wall_clock_ms: float) -> None:
        frame = self._dialect.event(event, wall_clock_ms, self._clock.wall())
        if frame is not None:
            self._outbox.put(frame)

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
        if failure.close_code is not None:
            raise WorkerFailure(failure.slug, failure.message, failure.close_code)
        self._gateway.desk.count(failure.slug)
        self._outbox.put(self._dialect.failure(failure.slug, failure.message))
        self._answer_due()

    def _refuse(self, error: BadMessage) -> None:
        fault = self._gateway.desk.translate(error, f"session {self._session_id}")
        self._outbox.put(self._dialect.failure(fault.slug, fault.message))

    def _age_ms(self, chunk: Chunk) -> float:
        return (self._clock.monotonic() - chunk.arrived_at) * 1000.0


async def first_to_end(*works: Coroutine[Any, Any, object]) -> None:
    """Run all until one ends, end the others, and raise what the first one raised.

    Where several have ended at once, the earlier argument is believed.
    """
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        ended = [task for task in tasks if task.done()]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in ended:
        task.result()
