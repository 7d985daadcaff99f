"""What every session has, whatever its mode: a slot, its state, programs, limits, an end.

Some tasks share a session: the reader handles each command the moment it is read, so `stop`
overtakes everything that waits; the parts of its mode do the work; the watch keeps the time
limits. Whichever ends first ends the session, and however it ends, its programs are closed, running
ops awaited and the slot cleaned before it is free and before `Closed` is sent.
"""

from __future__ import annotations

import asyncio
import logging
import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from concurrent.futures import Future
from contextvars import copy_context
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from shared.errors import (
    BadMessage,
    ContextFull,
    EngineFault,
    OmniError,
    SessionTimeout,
    SlowReader,
)
from shared.protocol import (
    Closed,
    Command,
    Event,
    Failure,
    Input,
    Open,
    Opened,
    Prepared,
    RequestType,
    Stop,
    Stopped,
)
from shared.states import SESSION_EDGES, SessionState, StateMachine
from worker.engine.contract import Program
from worker.engine.engine import ProgramCancelled, Task
from worker.models.contract import PreparedInfo
from worker.sessions.failures import CLOSE_INTERNAL, CLOSE_NORMAL, failure_for, program_failure
from worker.sessions.host import SessionHost

log = logging.getLogger(__name__)
R = TypeVar("R")

MAX_PREPARES = 4
PREPARE_WINDOW_S = 60.0
"""Prompts of one session in this time: reading one may take as long as many units, and neighbours
wait for their share of it."""

MAX_REASON_CHARS = 100


@dataclass(frozen=True, slots=True)
class _Ending:
    reason: str
    error: BaseException | None = None
    close_code: int | None = None
    """None = the error's own."""


class Session(ABC):
    """One client's stay on one slot; the modes are its subclasses.

    Args:
        host: what it shares with its neighbours.
        send: takes an event for the client; quick; raises SlowReader.
        new_state: makes the session's state of its slot.
    """

    def __init__(
        self,
        host: SessionHost,
        session_id: str,
        request_type: RequestType,
        send: Callable[[Event], None],
        new_state: Callable[[int], Any],
    ) -> None:
        self.session_id = session_id
        self.request_type = request_type
        self.kv_tokens = 0
        self.closed = asyncio.Event()
        """Set when nothing more will happen: the slot is free, or the worker is broken."""
        self._host = host
        self._out = send
        self._new_state = new_state
        self._clock = host.engine.clock
        self._machine = StateMachine(f"session {session_id}", SessionState.OPENED, SESSION_EDGES)
        self._media = host.media.session()
        self._work_there = asyncio.Event()
        self._limits_moved = asyncio.Event()
        self._opened_at = self._heard_at = self._clock()
        self._prepares_at: deque[float] = deque(maxlen=MAX_PREPARES)
        self._slot = -1
        self._state: Any = None
        self._making: Future[Any] | None = None
        self._parts: list[asyncio.Task[None]] = []

    @property
    def state(self) -> SessionState:
        return self._machine.state

    # ---- what a mode adds

    @abstractmethod
    async def _handle(self, command: Command) -> None:
        """Do what a command says; `Open` and `Stop` do not come here.

        Raises:
            OmniError: told to the client; the session goes on unless the error closes it.
        """

    @abstractmethod
    async def _run_next(self) -> bool:
        """Run the next program there is; False if there is none. Called after `_work_there`."""

    @abstractmethod
    def _due(self) -> Iterable[tuple[float, str]]:
        """Times (engine clock) at which the session ends, with what its client is told."""

    def _more_parts(self) -> Iterable[Coroutine[Any, Any, None]]:
        """Tasks beside reading, working and watching."""
        return ()

    @abstractmethod
    def _forget_input(self) -> None:
        """Drop what was never looked at. Session, tasks and tracebacks refer to each other, so
        its pictures would otherwise stay until some later garbage collection."""

    async def run(self, commands: AsyncIterator[Command]) -> int:
        """Serve the client until the session ends; returns the WebSocket close code.

        Cancellation ends the session too; it is passed on after the slot has been cleaned.

        Raises:
            NoFreeSlot: nothing has been done.
        """
        host = self._host
        self._loop = asyncio.get_running_loop()
        # Compute threads know no session; what they hand over to the loop logs with this one.
        self._context = copy_context()
        self._slot = host.slots.acquire(self.session_id)
        self._ended: asyncio.Future[_Ending] = self._loop.create_future()
        host.sessions[self._slot] = self
        host.fault.add_done_callback(self._on_fault)
        try:
            self._making = host.call(lambda: self._new_state(self._slot))
            self._state = await self._unless_fault(asyncio.wrap_future(self._making))
            self._send(Opened(self._slot))
            parts = (self._read(commands), *self._more_parts(), self._work(), self._watch())
            self._parts += [self._loop.create_task(self._part(part)) for part in parts]
            await asyncio.shield(self._ended)
        except Exception as error:  # noqa: BLE001 - told to the client by `_close`
            self._end("fault", error)
        finally:
            self._end("cancelled")
            closing = self._loop.create_task(self._close())
            await _in_spite_of_cancellation(closing)
        return closing.result()

    def end(self, reason: str, error: OmniError) -> None:
        """End the session from outside, with an error for its client."""
        self._end(reason, error)

    # ---- the tasks

    async def _part(self, coroutine: Coroutine[Any, Any, None]) -> None:
        try:
            await coroutine
        except SessionTimeout as timeout:
            self._end("timeout", timeout)
        except ContextFull as error:
            self._end("context full", error)
        except SlowReader as error:
            self._end("slow reader", error)
        except Exception as error:  # noqa: BLE001 - told to the client by `_close`
            self._end("fault", error)

    async def _read(self, commands: AsyncIterator[Command]) -> None:
        async for command in commands:
            seq = command.seq if isinstance(command, Input) else None
            try:
                await self._take(command)
            except OmniError as error:
                if error.ws_close is not None:
                    raise
                self._send(failure_for(error, self.session_id, seq))
            if self._ended.done():
                return
            # It would be kept until the next one comes.
            del command
        self._end("disconnected")

    async def _work(self) -> None:
        while True:
            await self._work_there.wait()
            self._work_there.clear()
            while await self._run_next():
                pass

    async def _watch(self) -> None:
        while True:
            self._limits_moved.clear()
            due, message = self._next_limit()
            wait_s = due - self._clock()
            if wait_s <= 0:
                raise SessionTimeout(message)
            try:
                async with asyncio.timeout(None if math.isinf(wait_s) else wait_s):
                    await self._limits_moved.wait()
            except TimeoutError:
                continue

    def _next_limit(self) -> tuple[float, str]:
        due = [(math.inf, ""), *self._due()]
        longest_s = self._host.limits.max_session_s
        if longest_s > 0:
            due.append((self._opened_at + longest_s, f"Session limit ({longest_s:.1f}s)"))
        return min(due)

    def _idle_limit(self) -> tuple[float, str]:
        """When a session ends that hears nothing, as one of `_due`."""
        limits = self._host.limits
        idle_s = limits.idle_timeout_s
        if self.state is SessionState.OPENED:
            idle_s = min(idle_s, limits.prepare_timeout_s)
        return self._heard_at + idle_s, f"Idle timeout ({idle_s:.1f}s)"

    # ---- commands

    async def _take(self, command: Command) -> None:
        match command:
            case Open():
                raise BadMessage("the session is open already")
            case Stop():
                self._send(Stopped())
                # It is logged: a line break in it would forge a log line.
                printable = command.reason.isprintable()
                self._end(command.reason[:MAX_REASON_CHARS] if printable else "stopped")
            case _:
                await self._handle(command)

    def _unknown(self, command: Command) -> BadMessage:
        kind = type(command).__struct_config__.tag
        return BadMessage(f"{kind} is no message of a session of {self.request_type}")

    def _admit_prepare(self) -> None:
        """Raises BadMessage: this is no time for a prompt, or there were too many."""
        if self.state is SessionState.PREPARING:
            raise BadMessage("the last prepare is still running")
        now = self._clock()
        if len(self._prepares_at) == MAX_PREPARES and now - self._prepares_at[0] < PREPARE_WINDOW_S:
            limit = f"at most {MAX_PREPARES} in {PREPARE_WINDOW_S:g} s"
            raise BadMessage(f"prepare came too often, {limit}")
        self._prepares_at.append(now)

    # ---- programs

    async def _prepare(self, program: Program) -> bool:
        """Run the program of a prompt; False if it failed and the session has to be prepared still.

        The client has been told either way.
        """
        began_at = self._clock()
        task = await self._run(program, "prepare")
        if self._is_ending(task):
            return True
        if task.error is not None:
            self._to(SessionState.OPENED, "prepare failed")
            self._send(failure_for(program_failure(task.error, "prepare"), self.session_id))
            return False
        self._host.metrics.prepare_seconds.observe(self._clock() - began_at)
        info: PreparedInfo = task.value
        self._to(SessionState.LIVE, "prepared")
        self._send(
            Prepared(
                info.prompt_chars,
                info.prompt_tokens,
                list(info.ignored),
                info.voice,
                list(info.languages),
            )
        )
        return True

    def _is_ending(self, task: Task) -> bool:
        """Whether a program's end says nothing, for the session's end is why."""
        return self._ended.done() or isinstance(task.error, (ProgramCancelled, EngineFault))

    async def _run(
        self, program: Program, name: str, on_emit: Callable[[Any], None] | None = None
    ) -> Task:
        """Run a program to its end; `on_emit` is called on a compute thread."""
        return await self._start(program, name, on_emit)[1]

    def _start(
        self, program: Program, name: str, on_emit: Callable[[Any], None] | None = None
    ) -> tuple[Task, asyncio.Future[Task]]:
        """Start a program; returns its task, and a future of the same task once it has ended."""
        done: asyncio.Future[Task] = self._loop.create_future()

        def finished(task: Task) -> None:
            self._loop.call_soon_threadsafe(_set_result, done, task)

        return self._host.engine.spawn(self._slot, program, on_emit, finished, name), done

    # ---- the end

    def _to(self, state: SessionState, reason: str) -> None:
        self._machine.to(state, reason)
        self._heard_at = self._clock()
        self._limits_moved.set()

    def _send(self, event: Event) -> None:
        if isinstance(event, Failure):
            self._host.metrics.failed(event.slug)
        try:
            self._out(event)
        except SlowReader as error:
            self._end("slow reader", error)

    def _on_fault(self, fault: asyncio.Future[EngineFault]) -> None:
        self._end("fault", fault.result())

    def _end(
        self, reason: str, error: BaseException | None = None, close_code: int | None = None
    ) -> None:
        """The first reason counts."""
        if not self._ended.done():
            self._ended.set_result(_Ending(reason, error, close_code))

    async def _close(self) -> int:
        """Tell the client why, clean the slot, then say so; returns the close code."""
        host, slot = self._host, self._slot
        ending = self._ended.result()
        # First of all: nothing more is computed for a client that does not wait for it.
        for part in self._parts:
            part.cancel()
        quiet = host.engine.cancel_session(slot)
        self._machine.to(SessionState.CLOSING, ending.reason)
        host.metrics.session_ended(ending.reason)
        close_code = CLOSE_NORMAL
        if ending.error is not None:
            failure = failure_for(ending.error, self.session_id)
            close_code = ending.close_code or failure.close_code or CLOSE_INTERNAL
            self._send(msgspec.structs.replace(failure, close_code=close_code))
        await asyncio.gather(*self._parts, return_exceptions=True)
        self._parts.clear()
        self._media.close()
        self._forget_input()
        host.slots.start_cleaning(slot)
        host.fault.remove_done_callback(self._on_fault)
        if await self._clean(quiet):
            host.slots.release(slot)
            self._machine.to(SessionState.CLOSED, ending.reason)
            self._send(Closed(ending.reason))
        del host.sessions[slot]
        self.closed.set()
        return close_code

    async def _clean(self, quiet: Future[None]) -> bool:
        """Bring the slot to a state nobody can see; False if the worker is broken.

        Args:
            quiet: done when no program and no op of the session is left.
        """
        host, making = self._host, self._making
        try:
            await self._unless_fault(asyncio.wrap_future(quiet))
            if making is not None and not making.cancel():
                await self._unless_fault(_settled(making))
                if making.exception() is None:
                    state = making.result()
                    ended = host.call(lambda: host.model.end(state))
                    await self._unless_fault(asyncio.wrap_future(ended))
        except EngineFault:
            return False
        except Exception as error:
            log.exception("slot could not be cleaned slot=%d", self._slot)
            fault = EngineFault(f"slot {self._slot} could not be cleaned: {type(error).__name__}")
            self._send(failure_for(fault, self.session_id))
            host.on_broken(fault)
            return False
        self._state = self._making = None
        return True

    async def _unless_fault(self, work: Awaitable[R]) -> R:
        """Wait for work of a compute thread. Raises EngineFault: it may never be done."""
        waiting = asyncio.ensure_future(work)
        either: list[asyncio.Future[Any]] = [waiting, self._host.fault]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if self._host.fault.done():
            waiting.cancel()
            raise self._host.fault.result()
        return await waiting


async def _settled(future: Future[Any]) -> None:
    """Wait for a future of another thread, whatever its outcome."""
    await asyncio.gather(asyncio.wrap_future(future), return_exceptions=True)


def _set_result(future: asyncio.Future[Task], task: Task) -> None:
    if not future.done():
        future.set_result(task)


async def _in_spite_of_cancellation(task: asyncio.Task[Any]) -> None:
    """Wait for `task` to the end; a cancellation that comes meanwhile is passed on after it."""
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
