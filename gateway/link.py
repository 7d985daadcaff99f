"""One session's connection to its worker. It owns the lease until the slot is known to be clean."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, WebSocketException
from websockets.typing import Subprotocol

from gateway.faults import WorkerFailure
from gateway.inbox import n_bytes_of
from gateway.offload import LargeFrames
from gateway.pool import Lease
from shared.errors import BadMessage, NoFreeSlot, NoWorker, WorkerLost
from shared.limits import LARGE_FRAME_BYTES, MAX_FRAME_BYTES, WS_PING_INTERVAL_S, WS_PING_TIMEOUT_S
from shared.protocol import (
    SESSION_PATH,
    SUBPROTOCOL,
    Answered,
    Closed,
    Command,
    Event,
    Failure,
    Open,
    Opened,
    Prefilled,
    Prepared,
    Stop,
    decode_event,
    encode,
)

log = logging.getLogger(__name__)

OPEN_TIMEOUT_S = 5.0
CLEANUP_TIMEOUT_S = 15.0
"""From `Stop` to `Closed`; a worker that needs longer is not trusted until its next report."""

PIECE_BYTES = 256 * 1024
"""Of a large message: to mask and write it in one go would hold the event loop for its length."""

CLOSE_TIMEOUT_S = 2.0
CLOSE_NORMAL = 1000


class Background:
    """Holds tasks that outlive their session (a worker's clean-up), so that they can be awaited."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def settle(self, timeout_s: float) -> None:
        """Wait for all of them; cancel what is left after `timeout_s`."""
        tasks = list(self._tasks)
        if not tasks:
            return
        _, late = await asyncio.wait(tasks, timeout=timeout_s)
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)


async def _in_pieces(connection: ClientConnection, frame: bytes) -> None:
    """Send a message as many frames. Cancelled, it leaves the rest to a task of its own: `Stop` can
    only be said behind the last one."""
    view = memoryview(frame)
    pieces = (view[i : i + PIECE_BYTES] for i in range(0, len(view), PIECE_BYTES))
    sending = asyncio.ensure_future(connection.send(pieces))
    # If nobody waits any more, nobody asks how it ended either.
    sending.add_done_callback(lambda task: task.cancelled() or task.exception())
    await asyncio.shield(sending)


class WorkerLink:
    def __init__(self, lease: Lease, background: Background, large: LargeFrames) -> None:
        self._lease = lease
        self._background = background
        self._large = large
        self._connection: ClientConnection | None = None
        self._has_begun = False
        self._is_failed = False
        self._is_ending = False
        """The worker has been told to end the session, or ends it by itself."""
        self._is_closed = False
        self._is_broken = False
        self._is_retired = False

    @property
    def worker_name(self) -> str:
        return self._lease.worker.name

    @property
    def worker_index(self) -> int:
        return self._lease.worker.index

    async def open(self, message: Open) -> None:
        """Connect and open the session.

        Raises:
            WorkerLost: the worker cannot be reached or does not answer.
            NoFreeSlot: it has less room than it last reported, or takes nobody any more.
            WorkerFailure: it refused for another reason.
        """
        try:
            async with asyncio.timeout(OPEN_TIMEOUT_S):
                self._connection = await connect(
                    f"ws://{self._lease.worker.address}{SESSION_PATH}",
                    subprotocols=[Subprotocol(SUBPROTOCOL)],
                    max_size=MAX_FRAME_BYTES,
                    compression=None,
                    ping_interval=WS_PING_INTERVAL_S,
                    ping_timeout=WS_PING_TIMEOUT_S,
                    close_timeout=CLOSE_TIMEOUT_S,
                    # The leg is local: a proxy named in the environment must not get it.
                    proxy=None,
                )
                await self.send(message)
                answer = await self.receive()
        except (OSError, WebSocketException, TimeoutError) as error:
            self._is_broken = True
            raise WorkerLost("The worker cannot be reached") from error
        if isinstance(answer, Failure):
            # Between two polls it may have begun to drain, or be a new process that still loads.
            if answer.slug in (NoFreeSlot.slug, NoWorker.slug):
                self._lease.worker.mark_full()
                raise NoFreeSlot(answer.message)
            raise WorkerFailure(answer.slug, answer.message, answer.close_code or 1011)
        if not isinstance(answer, Opened):
            self._is_broken = True
            raise WorkerLost("The worker did not open the session")

    async def watch(self) -> None:
        """Raises WorkerLost once the worker has stopped answering its health polls."""
        await self._lease.lost.wait()
        self._is_broken = True
        raise WorkerLost("The worker has stopped answering")

    async def send(self, command: Command) -> None:
        """Raises WorkerLost when the connection has ended."""
        assert self._connection is not None
        if isinstance(command, Stop):
            self._is_ending = self._lease.is_ending = True
        n_bytes = n_bytes_of(command)
        try:
            if n_bytes <= LARGE_FRAME_BYTES:
                await self._connection.send(encode(command))
            else:
                async with self._large.sending(n_bytes):
                    frame = await self._large.run(n_bytes, encode, command)
                    await _in_pieces(self._connection, frame)
        except ConnectionClosed as error:
            self._is_broken = True
            raise WorkerLost("The connection to the worker was lost") from error

    async def receive(self) -> Event:
        """Return the worker's next event.

        Raises:
            WorkerLost: the connection ended, or the worker speaks another protocol.
        """
        assert self._connection is not None
        try:
            frame = await self._connection.recv(decode=False)
            event = await self._large.run(len(frame), decode_event, frame)
        except ConnectionClosed as error:
            self._is_broken = True
            raise WorkerLost("The connection to the worker was lost") from error
        except BadMessage as error:
            self._is_broken = True
            raise WorkerLost("The worker speaks another protocol version") from error
        match event:
            case Closed():
                self._is_closed = True
            case Prepared() | Prefilled():
                self._has_begun = True
            case Answered():
                self._is_ending = self._lease.is_ending = True
            case Failure(close_code=int(code)) if code != CLOSE_NORMAL:
                self._is_failed = True
        return event

    def retire(self, reason: str) -> None:
        """End the session on the worker in the background, then give the lease back.

        Never waits, so it may be called while a cancellation is under way; a second call does
        nothing.
        """
        if self._is_retired:
            return
        self._is_retired = self._lease.is_ending = True
        if self._is_lost:
            # Before anybody is given the next lease: it must not be one on the same worker.
            self._lease.release(broken=True)
        self._background.spawn(self._close(reason))

    @property
    def _is_lost(self) -> bool:
        """The connection has ended before the worker said that the slot is clean."""
        return self._is_broken and not self._is_closed

    async def _close(self, reason: str) -> None:
        connection = self._connection
        try:
            if connection is not None and not self._is_closed and not self._is_broken:
                async with asyncio.timeout(CLEANUP_TIMEOUT_S):
                    if not self._is_ending:
                        with suppress(WorkerLost):
                            # It may have ended the session meanwhile, and said so before it left.
                            await self.send(Stop(reason))
                    while not self._is_closed:
                        await self.receive()
        except (WorkerLost, TimeoutError) as error:
            self._is_broken = True
            log.warning("worker did not clean up worker=%s error=%s", self.worker_name, error)
        finally:
            try:
                if connection is not None:
                    await connection.close()
            finally:
                is_sample = self._has_begun and self._is_closed and not self._is_failed
                self._lease.release(broken=self._is_lost, is_sample=is_sample)
