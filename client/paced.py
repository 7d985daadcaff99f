"""Sending at the pace of a microphone, without drift, and knowing how late one was oneself."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from types import TracebackType
from typing import Protocol, Self

from client.duplex import DuplexError
from client.events import Event
from client.journal import Journal, Sent
from shared.audio import Samples

LAST_RESULTS_S = 10.0
"""For the results that are still owed when the last chunk has been sent."""

GOODBYE_S = 5.0
"""For the server's reason after the connection has refused a chunk."""

PROBE_S = 0.02

Chunk = tuple[Samples, Sequence[bytes]]
"""Float32 16 kHz samples and the JPEG files seen meanwhile."""


class Session(Protocol):
    """A prepared session; `client.duplex.DuplexClient` is one."""

    sent_at: float
    received_at: float

    async def send_audio(self, samples: Samples, *, frames: Sequence[bytes] = ()) -> None: ...

    def __aiter__(self) -> AsyncIterator[Event]: ...


async def stream(
    session: Session,
    chunks: Iterable[Chunk],
    begin_at: float,
    chunk_s: float,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> Journal:
    """Send all chunks, take their results; returns when none is owed any more.

    Chunk k leaves at `begin_at + (k + 1) * chunk_s`: a microphone hands a chunk out when its last
    sample has been recorded. Results that are late never delay the next chunk. The session is
    left open, unless it ended by itself.

    Args:
        begin_at: when the microphone is opened, on `clock`.
        clock: the one that the session's stamps are of.
    """
    journal = Journal()
    moved = asyncio.Event()
    reader = asyncio.create_task(_follow(session, journal, moved))
    due = free_at = begin_at
    try:
        for samples, frames in chunks:
            due += chunk_s
            await sleep(max(0.0, due - clock()))
            if reader.done():
                break
            now = clock()
            # Noted before it is sent: a slow connection may bring the answer first.
            chunk = Sent(now, now - max(due, free_at))
            journal.send(chunk)
            await session.send_audio(samples, frames=frames)
            free_at = clock()
            chunk.sent_at = session.sent_at
            chunk.blocked_s = free_at - session.sent_at
        await _settle(journal, moved, reader)
    except DuplexError:
        # The reader knows why the connection has ended.
        await asyncio.wait([reader], timeout=GOODBYE_S)
    finally:
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)
    return journal


async def _settle(journal: Journal, moved: asyncio.Event, reader: asyncio.Task[None]) -> None:
    """Wait for the results that are still owed; what has not come by then is missing."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LAST_RESULTS_S):
            while journal.n_unanswered and not reader.done():
                moved.clear()
                await moved.wait()


async def _follow(session: Session, journal: Journal, moved: asyncio.Event) -> None:
    try:
        async for event in session:
            journal.take(event, session.received_at)
            moved.set()
    except DuplexError as error:
        journal.problem, journal.slug = str(error), error.slug
    finally:
        moved.set()


class LoopProbe:
    """`async with LoopProbe() as probe:` samples how late this event loop runs what is due."""

    def __init__(self) -> None:
        self.late_s: list[float] = []
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            due = time.monotonic() + PROBE_S
            await asyncio.sleep(PROBE_S)
            self.late_s.append(time.monotonic() - due)
