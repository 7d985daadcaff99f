"""One session of a load run, of any mode: admitted, served, ended, and how that went."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from client.chat import ChatClient, Done, Prefilled
from client.connection import SessionClient
from client.duplex import DuplexClient
from client.events import Closed, ErrorEvent, Queued, QueueDone, SessionError
from client.half_duplex import HalfDuplexClient
from client.journal import Journal, Sent
from client.load.answers import Answers
from client.load.plan import Mode, Plan, Track
from client.load.talker import ANSWER_LIMIT_S, Talker
from client.paced import pace, stream

GOODBYE_S = 10.0
"""For the server to close the session after `stop`."""

CHAT_ANSWER_LIMIT_S = 120.0
"""A chat answer that is not complete by then, its time in the queue apart, is none."""

SPARE_S: Final = 2 * ANSWER_LIMIT_S
"""Of a half-duplex session's time: its last question may be asked at the end of its plan."""

MAX_TURNS_S: Final = 3600.0
"""The longest half-duplex session that a server accepts."""

QUESTIONS: Final = (
    "What is the capital of France?",
    "How many days has a week?",
    "Name three colours of the rainbow.",
    "What do bees make?",
)
"""What chat is asked, one after the other."""


@dataclass
class Visit:
    """One session's fate. `lost` is the slug of what kept it from being served to its end."""

    lost: str = ""
    queue_waits_s: list[float] = field(default_factory=list)
    """From the first word of the queue to a free slot, each time that it waited."""
    prepare_s: float | None = None
    """From a free slot to the session being ready; None = it never was, or it is chat."""
    begin_at: float = 0.0
    journal: Journal | None = None
    """Full duplex: None = it was refused."""
    answers: Answers | None = None
    """Half duplex and chat: None = it was refused."""
    close_codes: list[int | None] = field(default_factory=list)
    """Of each connection; None = the server did not close it, or could not be reached."""

    @property
    def sent(self) -> list[Sent]:
        record = self.journal or self.answers
        return [] if record is None else record.sent

    @property
    def errors(self) -> list[ErrorEvent]:
        record = self.journal or self.answers
        return [] if record is None else record.errors


async def visit(
    plan: Plan, mode: Mode, track: Track, start_at: float, index: int, phase_s: float
) -> Visit:
    """Open a session, use it as its mode is used, end it; never raises for what a server does.

    Args:
        index: among the sessions of its mode.
    """
    what = Visit()
    grid_at = start_at + phase_s
    await asyncio.sleep(grid_at - time.monotonic())
    if mode == "chat":
        await _visit_chat(what, plan, index, start_at)
    else:
        await _visit_live(what, plan, mode, track, grid_at)
    return what


async def _visit_live(what: Visit, plan: Plan, mode: Mode, track: Track, grid_at: float) -> None:
    client: HalfDuplexClient | DuplexClient
    if mode == "half_duplex":
        client = HalfDuplexClient(plan.url, plan.api_key, ca_file=plan.ca_file)
    else:
        kind: Literal["omni", "audio"] = "omni" if mode == "omni" else "audio"
        client = DuplexClient(plan.url, plan.api_key, mode=kind, ca_file=plan.ca_file)
    try:
        async with client as session:
            try:
                await _serve(session, what, plan, mode, track, grid_at)
            except SessionError:
                await _stop(session)
                raise
            await _stop(session)
    except (TimeoutError, SessionError) as error:
        what.lost = _loss(error, client)
    _note_end(what, client)


async def _serve(
    session: HalfDuplexClient | DuplexClient,
    what: Visit,
    plan: Plan,
    mode: Mode,
    track: Track,
    grid_at: float,
) -> None:
    """Use one live session.

    Raises:
        SessionError: it cannot start, or ended before its time.
        TimeoutError: it was not ready within `max_wait_s`.
    """
    chunk_s = plan.chunk_of(mode)
    async with asyncio.timeout(plan.max_wait_s):
        await _admit(session, what)
        ready_at = time.monotonic()
        if isinstance(session, DuplexClient):
            await session.prepare()
        else:
            timeout_s = min(MAX_TURNS_S, plan.duration_s + SPARE_S)
            await session.prepare(settings={"session": {"timeout_s": timeout_s}})
    what.prepare_s = session.received_at - ready_at
    # On the grid that all sessions share, however long each had to wait.
    n_past = (time.monotonic() - grid_at) // chunk_s + 1
    begin_at = what.begin_at = grid_at + n_past * chunk_s
    record: Journal | Answers
    if isinstance(session, DuplexClient):
        chunks = track.chunks(plan.n_chunks(mode), chunk_s, has_frames=mode == "omni")
        record = what.journal = await stream(session, chunks, begin_at, chunk_s)
    else:
        record = what.answers = Answers(plan.buffer_s)
        talker = Talker(session, track, record, begin_at)
        sendings = talker.sendings(plan.duration_s, chunk_s)
        await pace(session, sendings, record, begin_at, chunk_s)
    if record.problem:
        raise SessionError(record.problem, record.slug)
    if session.closed is not None:
        last = record.errors[-1].slug if record.errors else ""
        raise SessionError("the session ended early", last or f"closed_{session.closed.code}")


async def _visit_chat(what: Visit, plan: Plan, index: int, start_at: float) -> None:
    """Ask one question after the other until the time is over, or one is lost."""
    for number in itertools.count(index):
        client = ChatClient(plan.url, plan.api_key, ca_file=plan.ca_file)
        try:
            async with client as chat:
                await _ask(chat, what, plan, QUESTIONS[number % len(QUESTIONS)])
        except (TimeoutError, SessionError) as error:
            what.lost = _loss(error, client)
        _note_end(what, client)
        if what.lost or time.monotonic() >= start_at + plan.duration_s:
            return


async def _ask(chat: ChatClient, what: Visit, plan: Plan, question: str) -> None:
    """Ask one question and take its answer.

    Raises:
        SessionError: the server refused it, or closed before the answer was complete.
        TimeoutError: it had no worker within `max_wait_s`.
    """
    asking = [{"role": "user", "content": question}]
    async with asyncio.timeout(plan.max_wait_s):
        await chat.ask(asking, speaks=plan.chat_speaks)
        asked_at = chat.sent_at
        await _admit(chat, what)
    answers = what.answers = what.answers or Answers(plan.buffer_s)
    answers.ask(asked_at)
    is_done = False
    try:
        async with asyncio.timeout(CHAT_ANSWER_LIMIT_S):
            async for event in chat:
                answers.take(event, chat.received_at)
                is_done |= isinstance(event, Done)
                if isinstance(event, ErrorEvent):
                    raise SessionError(event.message, event.slug)
    except TimeoutError as error:
        raise SessionError("the answer did not come", "no_answer") from error
    finally:
        answers.give_up()
    if not is_done:
        raise SessionError("the connection ended without an answer", "no_answer")


async def _admit(session: SessionClient[Any], what: Visit) -> None:
    """Wait for a slot. Raises SessionError when there will be none."""
    queued_at: float | None = None
    async for event in session:
        match event:
            case Queued():
                queued_at = session.received_at
            case QueueDone() | Prefilled():
                # A server that tells chat nothing of its queue begins with the latter.
                if queued_at is not None:
                    what.queue_waits_s.append(session.received_at - queued_at)
                return
            case ErrorEvent():
                raise SessionError(event.message, event.slug)
            case Closed():
                raise SessionError(event.reason, f"closed_{event.code}")
            case _:
                pass


async def _stop(session: HalfDuplexClient | DuplexClient) -> None:
    """End the session in order, if it has not ended yet, and wait until the server has closed."""
    with contextlib.suppress(TimeoutError, SessionError):
        async with asyncio.timeout(GOODBYE_S):
            with contextlib.suppress(SessionError):
                await session.stop()
            async for _ in session:
                pass


def _loss(error: TimeoutError | SessionError, client: SessionClient[Any]) -> str:
    if isinstance(error, TimeoutError):
        return "gave_up_waiting"
    return error.slug or ("connection_lost" if client.closed else "no_connection")


def _note_end(what: Visit, client: SessionClient[Any]) -> None:
    code = client.closed.code if client.closed else None
    what.close_codes.append(code)
    if not what.lost and code != 1000:
        what.lost = f"closed_{code}" if code else "not_closed"
