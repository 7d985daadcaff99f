"""A session whose ops run one by one, at a script's word, and what its client may be told."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, NoReturn

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from shared.errors import SlowReader
from shared.protocol import (
    Answered,
    Closed,
    Command,
    Delta,
    Event,
    Failure,
    Generating,
    Interrupted,
    Notice,
    Opened,
    Pause,
    Prefilled,
    Prepared,
    RequestType,
    Speaking,
    Stop,
    Stopped,
    TurnDone,
)
from shared.states import SessionState
from tests.fakes.model import FakeDuplexModel
from tests.fakes.patience import PATIENCE_S
from tests.fakes.session import Client, Stage, eventually
from worker.sessions.chat import ChatSession
from worker.sessions.failures import WorkerStopping
from worker.sessions.half_duplex import HalfDuplexSession

OPS = ("prefill", "read", "write", "speak", "hear")
ENDINGS = ("stop", "stop too late", "vanish", "drain", "cancel", "slow")
"""What `Puppet.end` knows."""

WHOLE = "w0 w1 w2 "
"""What the fake model answers."""

FAILED = re.compile(r"(prepare|turn \d+|speech detection|chat) failed in the model")


class Turnstile(threading.Event):
    """A gate that holds every op until it is let pass; set, it holds none any more."""

    def __init__(self) -> None:
        super().__init__()
        self._permits = threading.Semaphore(0)
        self._lock = threading.Lock()
        self._is_open = False
        self.n_held = 0

    def wait(self, timeout: float | None = None) -> bool:
        with self._lock:
            if self._is_open:
                return True
            self.n_held += 1
        return self._permits.acquire(timeout=timeout)

    def let_one_pass(self) -> None:
        with self._lock:
            if self.n_held:
                self.n_held -= 1
                self._permits.release()

    def set(self) -> None:
        with self._lock:
            self._is_open = True
            self._permits.release(self.n_held + 1)
            self.n_held = 0


@dataclass(frozen=True)
class Go:
    """A step of a script: this many ops may run, one after the other."""

    n_ops: int


def weighted(strategies: Sequence[SearchStrategy[Any]]) -> SearchStrategy[Any]:
    """Draw from one of them, each as often as it is named; `one_of` forgets repetitions."""
    return st.sampled_from(strategies).flatmap(lambda strategy: strategy)


# ---- what a client is told


@dataclass
class Told:
    """Checks each event as it comes; the attributes say how things stand."""

    events: list[Event] = field(default_factory=list)
    refusals: list[tuple[str, int | None]] = field(default_factory=list)
    """Slug and chunk of each failure that answers a command and ends nothing."""
    is_live: bool = False
    is_speaking: bool = False
    answer: list[str] | None = None
    """Pieces of the answer that is being given."""
    n_turns: int = 0
    n_prepares: int = 0
    """Prompts that have had their answer."""
    is_asked: bool = False
    """A chat session's: the question is in the context."""
    is_streaming: bool = True
    is_over: bool = False

    def take(self, event: Event) -> None:
        before = self.events[-1] if self.events else None
        self.events.append(event)
        assert isinstance(event, Opened) == (before is None)
        assert not isinstance(before, Closed)
        if self.is_over:
            assert isinstance(event, Closed)
        match event:
            case Speaking() | Generating() | Prefilled() | Delta():
                self._take_part(event, before)
            case TurnDone():
                self._end_answer(event.text)
                self.n_turns += 1
                assert event.turn_index == self.n_turns
            case Answered():
                self._end_answer(event.text)
                self.is_over = True
            case Prepared():
                self._end_prepare(is_live=True)
            case Interrupted():
                assert self.answer is None
            case Failure():
                self._take_failure(event)
            case Stopped():
                self.is_over = True
            case Notice():
                assert (event.slug, event.count) == ("input_dropped", 1)

    def _take_part(
        self, event: Speaking | Generating | Prefilled | Delta, before: Event | None
    ) -> None:
        match event:
            case Speaking():
                assert self.is_live
                assert self.answer is None
                assert event.is_speaking is not self.is_speaking
                self.is_speaking = event.is_speaking
            case Generating():
                assert before == Speaking(False)
                assert event.speech_ms > 0
                self.answer = []
            case Prefilled():
                assert not self.is_asked
                self.is_asked, self.answer = True, []
            case Delta():
                assert self.is_streaming
                assert self.answer is not None
                assert event.index == len(self.answer)
                self.answer.append(event.text)

    def _take_failure(self, failure: Failure) -> None:
        assert failure.slug not in ("internal", "engine_fault"), failure
        if failure.close_code is not None:
            self.is_over = True
            return
        what = FAILED.fullmatch(failure.message)
        if what is None:
            self.refusals.append((failure.slug, failure.seq))
        elif what[1] == "prepare":
            self._end_prepare(is_live=False)
        elif what[1].startswith("turn"):
            assert what[1] == f"turn {self.n_turns + 1}"
            assert self.answer is not None
            self.answer = None

    def _end_answer(self, text: str) -> None:
        assert self.answer is not None
        assert text == ("".join(self.answer) if self.is_streaming else WHOLE)
        self.answer = None

    def _end_prepare(self, *, is_live: bool) -> None:
        assert self.answer is None
        assert not self.is_speaking
        self.is_live = is_live
        self.n_prepares += 1

    def n(self, kind: type[Event]) -> int:
        return sum(isinstance(event, kind) for event in self.events)


# ---- who talks to the session


class Watched(Client):
    """Knows whether all that was sent has been dealt with."""

    is_heard = False

    async def _stream(self) -> AsyncIterator[Command]:
        while True:
            self.is_heard = True
            command = await self._commands.get()
            if command is None:
                return
            self.is_heard = False
            yield command


class Puppet:
    """A session on a worker of its own, moved on step by step."""

    def __init__(self, stage: Stage, turnstile: Turnstile, client: Watched) -> None:
        self.stage, self.client, self.told = stage, client, Told()
        self.session = client.session
        self._turnstile = turnstile

    async def send(self, command: Command) -> None:
        self.client.send(command)
        await self.settle()

    async def go(self, n_ops: int) -> None:
        for _ in range(n_ops):
            self._turnstile.let_one_pass()
            await self.settle()

    async def settle(self) -> None:
        """Wait until nothing moves any more without an op."""
        n_still = 0

        def is_still() -> bool:
            nonlocal n_still
            n_still = n_still + 1 if self._is_still() else 0
            return n_still == 3

        await eventually(is_still)
        self.listen()

    def _is_still(self) -> bool:
        state = self.session.state
        if self.client.task.done() or self._turnstile.n_held and state is SessionState.CLOSING:
            return True
        is_heard = self.client.is_heard and self.client._commands.empty()
        if self._turnstile.n_held:
            return is_heard
        engine = self.stage.host.engine
        is_idle = state in (SessionState.OPENED, SessionState.LIVE) and not engine._sessions
        return is_heard and is_idle and not getattr(self.session, "_waiting", None)

    def listen(self) -> None:
        for event in self.client.rest():
            self.told.take(event)

    async def until(self, is_told: Callable[[], bool]) -> None:
        """Wait until the client has been told something, without a further op."""

        def heard() -> bool:
            self.listen()
            return is_told()

        await eventually(heard)

    async def release(self) -> None:
        """Hold nothing any more, and wait until everything is over."""
        self._turnstile.set()
        await self.settle()

    async def end(self, how: str) -> None:
        """End the session; the op that runs is over only after that."""
        match how:
            case "stop":
                self.client.send(Stop(), Pause())
            case "stop too late":
                # The event loop finds both at once: what an op has brought, and the stop before it.
                self.client.send(Stop())
                self._turnstile.let_one_pass()
                time.sleep(0.003)  # noqa: ASYNC251
            case "vanish":
                self.client.disconnect()
            case "drain":
                self.session.end("draining", WorkerStopping("The worker is shutting down"))
            case "cancel":
                self.client.task.cancel()
            case "slow":
                self.session._out = _too_slow
                self.client.send(Pause(), Pause())
        over = (SessionState.CLOSING, SessionState.CLOSED)
        await eventually(lambda: self.session.state in over)
        n_batches = len(self.stage.model.batches)
        self._turnstile.set()
        with suppress(asyncio.CancelledError):
            await self.client.code()
        self.listen()
        assert how == "stop too late" or len(self.stage.model.batches) == n_batches
        assert self.told.n(Closed) == (how != "slow")
        assert self.told.n(Stopped) == how.startswith("stop")

    async def is_clean(self, n_tasks: int) -> None:
        host = self.stage.host
        assert self.session.state is SessionState.CLOSED
        assert (host.slots.n_free, host.sessions, host.engine.n_programs) == (1, {}, 0)
        assert [state.ended for state in self.stage.model.states] == [True]
        assert not self.stage.broken
        # The fake remembers everything.
        self.stage.model.states.clear()
        await eventually(lambda: host.media.budget.total == 0)
        await eventually(lambda: len(asyncio.all_tasks()) == n_tasks)


def _too_slow(event: Event) -> NoReturn:
    raise SlowReader("more waits than may be left unread")


@asynccontextmanager
async def puppet_on(
    model: FakeDuplexModel, kind: type[HalfDuplexSession | ChatSession]
) -> AsyncIterator[Puppet]:
    """A session alone on a worker; when all went well, nothing may be left of it."""
    turnstile = Turnstile()
    model.gates = dict.fromkeys(OPS, turnstile)
    stage = Stage(model, n_slots=1)
    n_tasks = len(asyncio.all_tasks())
    request_type: RequestType = "chat" if kind is ChatSession else "half_duplex_audio"
    puppet = Puppet(stage, turnstile, Watched(stage.host, "s", kind, request_type))
    try:
        await puppet.settle()
        yield puppet
        await puppet.is_clean(n_tasks)
    finally:
        puppet.session.end("test over", WorkerStopping("test over"))
        turnstile.set()
        await asyncio.wait_for(puppet.session.closed.wait(), PATIENCE_S)
        await stage.close()
