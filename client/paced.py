"""Sending at the pace of a microphone, without drift, and knowing how late one was oneself."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

from client.events import Event, SessionError
from client.journal import Journal, Sent
from shared.audio import Samples

LAST_RESULTS_S = 10.0
"""For the results that are still owed when the last chunk has been sent."""

GOODBYE_S = 5.0
"""For the server's reason after the connection has refused a chunk."""

PROBE_S = 0.02

Chunk = tuple[Samples, Sequence[bytes]]
"""Float32 16 kHz samples and the JPEG files seen meanwhile."""

Sending = Callable[[], Awaitable[None]]
"""Sends one chunk."""

EventT = TypeVar("EventT")
EventT_co = TypeVar("EventT_co", covariant=True)
EventT_contra = TypeVar("EventT_contra", contravariant=True)


class Line(Protocol[EventT_co]):
    """A prepared session's connection; any `client.connection.SessionClient` is one."""

    sent_at: float
    received_at: float

    def __aiter__(self) -> AsyncIterator[EventT_co]: ...


class Session(Line[Event], Protocol):
    """A full-duplex one; `client.duplex.DuplexClient` is one."""

    async def send_audio(self, samples: Samples, *, frames: Sequence[bytes] = ()) -> None: ...


class Record(Protocol[EventT_contra]):
    """Is told what a session sends and gets, with times."""

    problem: str | None
    slug: str

    @property
    def n_unanswered(self) -> int: ...

    def send(self, chunk: Sent) -> None: ...

    def take(self, event: EventT_contra, at: float) -> None: ...


async def stream(
    session: Session,
    chunks: Iterable[Chunk],
    begin_at: float,
    chunk_s: float,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> Journal:
    """Send all chunks, take their results; returns when none is owed any more (see `pace`)."""
    journal = Journal()
    sendings = (partial(session.send_audio, samples, frames=frames) for samples, frames in chunks)
    await pace(session, sendings, journal, begin_at, chunk_s, clock=clock, sleep=sleep)
    return journal


async def pace(
    line: Line[EventT],
    sendings: Iterable[Sending | None],
    record: Record[EventT],
    begin_at: float,
    chunk_s: float,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> None:
    """Send chunks at the pace of a microphone; returns when no answer is owed any more.

    Chunk k leaves at `begin_at + (k + 1) * chunk_s`: a microphone hands a chunk out when its last
    sample has been recorded. Answers that are late never delay the next chunk. The session is
    left open, unless it ended by itself.

    Args:
        sendings: one for each chunk, asked for when its first sample is recorded; None: the
            microphone is off meanwhile.
        begin_at: when the microphone is opened, on `clock`.
        clock: the one that the line's stamps are of.
    """
    moved = asyncio.Event()
    reader = asyncio.create_task(_follow(line, record, moved))
    due = free_at = begin_at
    try:
        for sending in sendings:
            due += chunk_s
            await sleep(max(0.0, due - clock()))
            if reader.done():
                break
            if sending is None:
                continue
            now = clock()
            # Noted before it is sent: a slow connection may bring the answer first.
            chunk = Sent(now, now - max(due, free_at))
            record.send(chunk)
            await sending()
            free_at = clock()
            chunk.sent_at = line.sent_at
            chunk.blocked_s = free_at - line.sent_at
        await _settle(record, moved, reader)
    except SessionError:
        # The reader knows why the connection has ended.
        await asyncio.wait([reader], timeout=GOODBYE_S)
    finally:
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)


async def _settle(record: Record[Any], moved: asyncio.Event, reader: asyncio.Task[None]) -> None:
    """Wait for the answers that are still owed; what has not come by then is missing."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LAST_RESULTS_S):
            while record.n_unanswered and not reader.done():
                moved.clear()
                await moved.wait()


async def _follow(line: Line[EventT], record: Record[EventT], moved: asyncio.Event) -> None:
    try:
        async for event in line:
            record.take(event, line.received_at)
            moved.set()
    except SessionError as error:
        record.problem, record.slug = str(error), error.slug
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
