"""One full-duplex session on one slot, from `Opened` to `Closed`.

Four tasks share the session: the reader handles each command the moment it is read, so `stop`,
`pause` and `force_listen` overtake audio; the decoder turns chunks into units in their order;
the worker runs one program at a time (a prompt, or a unit up to the end of its deferred work,
because `finalize` has to be done before the next prefill); the watch keeps the time limits.
Whichever ends first ends the session, and however it ends, the slot is cleaned before it is
free and before `Closed` is sent.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from concurrent.futures import Future
from contextvars import copy_context
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from shared.errors import (
    BadMessage,
    ContextFull,
    EngineFault,
    ModelFault,
    NotPrepared,
    OmniError,
    SessionPaused,
    SessionTimeout,
    SlowReader,
)
from shared.limits import IDLE_TIMEOUT_S, MAX_INBOX_UNITS, MAX_PROMPT_CHARS
from shared.protocol import (
    Closed,
    Command,
    Event,
    Failure,
    Input,
    Interrupt,
    Interrupted,
    Notice,
    Open,
    Opened,
    Pause,
    Paused,
    Prepare,
    Prepared,
    RequestType,
    Resume,
    Resumed,
    Stop,
    Stopped,
    Timings,
)
from shared.states import SESSION_EDGES, SessionState, StateMachine
from shared.turns import Turn
from worker.engine.contract import Program
from worker.engine.engine import Engine, ProgramCancelled, Task
from worker.engine.slots import SlotTable
from worker.metrics import WorkerMetrics
from worker.models.contract import DuplexModel, Prompt, Unit, UnitResult
from worker.sessions.failures import CLOSE_INTERNAL, CLOSE_NORMAL, failure_for, program_failure
from worker.sessions.inbox import FailedChunk, Inbox
from worker.sessions.media import MediaDecoder, PendingChunk

log = logging.getLogger(__name__)
R = TypeVar("R")

UNIT_BUDGET_S = 1.0
"""A unit's result is due one tick of the duplex clock after the unit was complete."""

MAX_PREPARES = 4
PREPARE_WINDOW_S = 60.0
"""Prompts of one session in this time: reading one may take as long as many units, and neighbours
wait for their share of it."""

MIN_PAUSE_S = 0.1
MAX_PAUSE_S = 3600.0
"""A paused session keeps its slot, so no client may ask for more than an hour."""

MAX_REASON_CHARS = 100


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """Time limits of a session, in seconds."""

    pause_timeout_s: float = 60.0
    idle_timeout_s: float = IDLE_TIMEOUT_S
    max_session_s: float = 0.0
    """0 = none."""


@dataclass(slots=True)
class SessionHost:
    """What all sessions of a worker share; made on the event loop they run on."""

    model: DuplexModel
    engine: Engine
    slots: SlotTable
    media: MediaDecoder
    call: Callable[[Callable[[], Any]], Future[Any]]
    """Runs a function on the thread that owns the caches."""
    on_broken: Callable[[EngineFault], None]
    """Told when a slot could not be cleaned."""
    fault: asyncio.Future[EngineFault]
    """Done as soon as the device is lost."""
    limits: SessionLimits = SessionLimits()
    metrics: WorkerMetrics = field(default_factory=WorkerMetrics)
    sessions: dict[int, DuplexSession] = field(default_factory=dict)
    """Slot -> session, newest last."""


@dataclass(frozen=True, slots=True)
class _Ending:
    reason: str
    error: BaseException | None = None


class DuplexSession:
    """One client's stay on one slot.

    Args:
        host: what it shares with its neighbours.
        send: takes an event for the client; quick; raises SlowReader.
        new_state: makes the session's state of its slot; None = the model's own.
    """

    def __init__(
        self,
        host: SessionHost,
        session_id: str,
        request_type: RequestType,
        send: Callable[[Event], None],
        new_state: Callable[[int], Any] | None = None,
    ) -> None:
        self.session_id = session_id
        self.request_type = request_type
        self.kv_tokens = 0
        self.closed = asyncio.Event()
        """Set when nothing more will happen: the slot is free, or the worker is broken."""
        self._host = host
        self._out = send
        self._new_state = new_state or host.model.new_state
        self._clock = host.engine.clock
        self._machine = StateMachine(f"session {session_id}", SessionState.OPENED, SESSION_EDGES)
        self._inbox = Inbox(host.model.unit_samples)
        self._turn = Turn()
        self._media = host.media.session()
        self._undecoded: asyncio.Queue[PendingChunk] = asyncio.Queue(2 * MAX_INBOX_UNITS)
        self._prompt: Prompt | None = None
        self._answers_first = True
        """Results leave before the deferred work of their unit; the client may wish otherwise."""
        self._work_there = asyncio.Event()
        self._limits_moved = asyncio.Event()
        self._opened_at = self._heard_at = self._clock()
        self._prepares_at: deque[float] = deque(maxlen=MAX_PREPARES)
        self._pause_until = math.inf
        self._pause_s = 0.0
        self._slot = -1
        self._state: Any = None
        self._making: Future[Any] | None = None
        self._parts: list[asyncio.Task[None]] = []

    @property
    def state(self) -> SessionState:
        return self._machine.state

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
            for part in (self._read(commands), self._decode(), self._work(), self._watch()):
                self._parts.append(self._loop.create_task(self._part(part)))
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

    # ---- the four tasks

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
                await self._handle(command)
            except OmniError as error:
                if error.ws_close is not None:
                    raise
                self._send(failure_for(error, self.session_id, seq))
            if self._ended.done():
                return
            # It would be kept until the next one comes.
            del command
        self._end("disconnected")

    async def _decode(self) -> None:
        while True:
            # In a call of its own: a local name here would keep the last pictures alive.
            await self._take_in(await self._undecoded.get())

    async def _take_in(self, pending: PendingChunk) -> None:
        try:
            chunk = await self._media.chunk(pending)
        except BadMessage as error:
            self._inbox.refuse(pending.message.seq, error)
            self._answer()
            return
        self._heard_at = self._clock()
        n_dropped = self._inbox.add(chunk, self._heard_at)
        if n_dropped:
            self._host.metrics.dropped_units.inc(n_dropped)
            text = f"{n_dropped} units of input came faster than they could be heard"
            self._send(Notice("input_dropped", text, n_dropped))
        self._answer()
        self._work_there.set()

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
        limits = self._host.limits
        due: list[tuple[float, str]] = [(math.inf, "")]
        if limits.max_session_s > 0:
            text = f"Session limit ({limits.max_session_s:.1f}s)"
            due.append((self._opened_at + limits.max_session_s, text))
        if self.state is SessionState.PAUSED:
            due.append((self._pause_until, f"Pause timeout ({self._pause_s:.1f}s)"))
        elif self.state is not SessionState.PREPARING:
            text = f"Idle timeout ({limits.idle_timeout_s:.1f}s)"
            due.append((self._heard_at + limits.idle_timeout_s, text))
        return min(due)

    # ---- commands

    async def _handle(self, command: Command) -> None:
        match command:
            case Input():
                await self._on_input(command)
            case Prepare():
                await self._on_prepare(command)
            case Pause():
                self._on_pause(command)
            case Resume():
                self._on_resume()
            case Interrupt():
                if self.state in (SessionState.LIVE, SessionState.PAUSED):
                    await self._interrupt()
                self._send(Interrupted())
            case Stop():
                self._send(Stopped())
                # It is logged: a line break in it would forge a log line.
                printable = command.reason.isprintable()
                self._end(command.reason[:MAX_REASON_CHARS] if printable else "stopped")
            case Open():
                raise BadMessage("the session is open already")

    async def _on_input(self, message: Input) -> None:
        if self.state is SessionState.OPENED:
            raise NotPrepared("audio before prepare: send prepare first")
        if self.state is SessionState.PAUSED:
            raise SessionPaused("Worker is paused")
        if message.force_listen:
            self._inbox.force_listen_waiting()
            if not self._inbox.is_listen:
                await self._interrupt()
        await self._undecoded.put(self._media.admit(message))

    async def _on_prepare(self, message: Prepare) -> None:
        if self.state is SessionState.PAUSED:
            raise SessionPaused("Worker is paused")
        if self.state is SessionState.PREPARING:
            raise BadMessage("the last prepare is still running")
        now = self._clock()
        if len(self._prepares_at) == MAX_PREPARES and now - self._prepares_at[0] < PREPARE_WINDOW_S:
            limit = f"at most {MAX_PREPARES} in {PREPARE_WINDOW_S:g} s"
            raise BadMessage(f"prepare came too often, {limit}")
        self._prepares_at.append(now)
        if len(message.system_prompt) > MAX_PROMPT_CHARS:
            n_chars = len(message.system_prompt)
            raise BadMessage(f"system_prompt has {n_chars} characters, at most {MAX_PROMPT_CHARS}")
        media = self._media
        self._prompt = Prompt(
            message.system_prompt,
            message.settings,
            await media.voice(message.reference_voice),
            await media.voice(message.tts_reference_voice),
        )
        self._answers_first = message.deferred_finalize
        self._to(SessionState.PREPARING, "prepare")
        self._work_there.set()

    def _on_pause(self, message: Pause) -> None:
        if self.state not in (SessionState.LIVE, SessionState.PAUSED):
            raise BadMessage("pause before the session is prepared")
        asked = message.timeout_s
        if asked is None or math.isnan(asked):
            asked = self._host.limits.pause_timeout_s
        self._pause_s = min(max(asked, MIN_PAUSE_S), MAX_PAUSE_S)
        self._pause_until = self._clock() + self._pause_s
        if self.state is SessionState.LIVE:
            self._to(SessionState.PAUSED, "client")
        self._limits_moved.set()
        self._send(Paused(self._pause_s))

    def _on_resume(self) -> None:
        if self.state is not SessionState.PAUSED:
            raise BadMessage("resume without pause")
        self._to(SessionState.LIVE, "client")
        self._send(Resumed())
        self._work_there.set()

    async def _interrupt(self) -> None:
        host = self._host
        await asyncio.wrap_future(
            host.engine.between_steps(self._slot, lambda: host.model.interrupt(self._state))
        )
        self._inbox.drop_speech()

    # ---- programs

    async def _run_next(self) -> bool:
        """Run the next program there is; False if there is none."""
        if self._prompt is not None and self.state is SessionState.PREPARING:
            prompt, self._prompt = self._prompt, None
            await self._run_prepare(prompt)
            return True
        if self.state is not SessionState.LIVE:
            return False
        unit = self._inbox.next_unit(UNIT_BUDGET_S)
        if unit is None:
            return False
        await self._run_unit(unit)
        return True

    async def _run_prepare(self, prompt: Prompt) -> None:
        host = self._host
        began_at = self._clock()
        task = await self._run(host.model.prepare(self._state, prompt), "prepare")
        if self._ended.done() or isinstance(task.error, (ProgramCancelled, EngineFault)):
            return  # the session is ending
        if task.error is not None:
            self._to(SessionState.OPENED, "prepare failed")
            error = program_failure(task.error, "prepare")
            self._send(failure_for(error, self.session_id))
            self._inbox.fail_waiting(NotPrepared("prepare failed"))
            self._answer()
            return
        host.metrics.prepare_seconds.observe(self._clock() - began_at)
        info = task.value
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

    async def _run_unit(self, unit: Unit) -> None:
        engine, loop = self._host.engine, self._loop

        def emitted(result: UnitResult) -> None:
            total_ms = 1000.0 * (engine.clock() - unit.arrived_at)
            loop.call_soon_threadsafe(
                self._on_result, unit, result, total_ms, context=self._context
            )

        what = f"unit {unit.index}"
        task = await self._run(self._host.model.unit(self._state, unit), what, emitted)
        if self._ended.done() or isinstance(task.error, (ProgramCancelled, EngineFault)):
            return  # the session is ending
        if self._inbox.is_running:
            error = task.error or RuntimeError("the program emitted no result")
            failed = program_failure(error, what)
            if isinstance(failed, ContextFull):
                raise failed  # no later unit would fit either
            if failed.ws_close is not None:
                failed = ModelFault(f"{what} failed in the model")
            self._inbox.fail(failed)
            self._host.metrics.unit_failed()
        elif task.error is not None:
            # Its chunk has its result: what failed is the deferred part.
            program_failure(task.error, f"{what} after its result")
        self._answer()

    async def _run(
        self, program: Program, name: str, on_emit: Callable[[Any], None] | None = None
    ) -> Task:
        done: asyncio.Future[Task] = self._loop.create_future()

        def finished(task: Task) -> None:
            self._loop.call_soon_threadsafe(_set_result, done, task)

        self._host.engine.spawn(self._slot, program, on_emit, finished, name)
        return await done

    def _on_result(self, unit: Unit, result: UnitResult, total_ms: float) -> None:
        if self._ended.done():
            return
        if not self._inbox.is_running:
            log.error("second result of one unit ignored index=%d", unit.index)
            return
        timings = msgspec.structs.replace(result.timings, total_ms=total_ms)
        self._inbox.resolve(dataclasses.replace(result, timings=timings))
        self.kv_tokens = result.kv_tokens
        self._measure(unit, result, timings)
        log.debug("unit done index=%d ms=%.1f", unit.index, total_ms)
        if self._answers_first:
            self._answer()

    def _measure(self, unit: Unit, result: UnitResult, timings: Timings) -> None:
        metrics = self._host.metrics
        done_at = unit.arrived_at + timings.total_ms / 1000.0
        metrics.unit_done(timings, is_listen=result.is_listen, is_late=done_at > unit.deadline)
        turn_began_at = self._turn.take(
            unit.arrived_at,
            is_listen=result.is_listen,
            has_audio=bool(result.audio.size),
            end_of_turn=result.end_of_turn,
        )
        if turn_began_at is not None:
            metrics.first_audio_seconds.observe(done_at - turn_began_at)

    def _answer(self) -> None:
        for answer in self._inbox.answers():
            if isinstance(answer, FailedChunk):
                self._send(failure_for(answer.error, self.session_id, answer.seq))
            else:
                self._send(answer)

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

    def _end(self, reason: str, error: BaseException | None = None) -> None:
        """The first reason counts."""
        if not self._ended.done():
            self._ended.set_result(_Ending(reason, error))

    async def _close(self) -> int:
        """Tell the client why, clean the slot, then say so; returns the close code."""
        host, slot = self._host, self._slot
        ending = self._ended.result()
        self._machine.to(SessionState.CLOSING, ending.reason)
        host.metrics.session_ended(ending.reason)
        close_code = CLOSE_NORMAL
        if ending.error is not None:
            failure = failure_for(ending.error, self.session_id)
            close_code = failure.close_code or CLOSE_INTERNAL
            self._send(msgspec.structs.replace(failure, close_code=close_code))
        for part in self._parts:
            part.cancel()
        await asyncio.gather(*self._parts, return_exceptions=True)
        self._forget_input()
        host.slots.start_cleaning(slot)
        host.fault.remove_done_callback(self._on_fault)
        if await self._clean():
            host.slots.release(slot)
            self._machine.to(SessionState.CLOSED, ending.reason)
            self._send(Closed(ending.reason))
        del host.sessions[slot]
        self.closed.set()
        return close_code

    def _forget_input(self) -> None:
        """Drop what was never looked at. Session, tasks and tracebacks refer to each other, so
        its pictures would otherwise stay until some later garbage collection."""
        self._parts.clear()
        self._inbox.forget()
        while not self._undecoded.empty():
            self._undecoded.get_nowait()

    async def _clean(self) -> bool:
        """Bring the slot to a state nobody can see; False if the worker is broken."""
        host, making = self._host, self._making
        try:
            await self._unless_fault(asyncio.wrap_future(host.engine.cancel_session(self._slot)))
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
        self._state = None
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
