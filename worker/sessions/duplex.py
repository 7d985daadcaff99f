"""One full-duplex session: chunks in, units through the model, one answer for each chunk.

`pause` and `force_listen` overtake audio like `stop`; the decoder turns chunks into units in their
order; the worker runs one program at a time (a prompt, or a unit up to the end of its deferred
work, because `finalize` has to be done before the next prefill).
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

import msgspec

from shared.errors import BadMessage, ContextFull, ModelFault, NotPrepared, SessionPaused
from shared.limits import MAX_INBOX_UNITS, MAX_PROMPT_CHARS
from shared.protocol import (
    Command,
    Event,
    Input,
    Interrupt,
    Interrupted,
    Notice,
    Pause,
    Paused,
    Prepare,
    RequestType,
    Resume,
    Resumed,
    Timings,
)
from shared.states import SessionState
from shared.turns import Turn
from worker.models.contract import Prompt, Unit, UnitResult
from worker.sessions.failures import failure_for, program_failure
from worker.sessions.host import SessionHost
from worker.sessions.inbox import FailedChunk, Inbox
from worker.sessions.media import PendingChunk
from worker.sessions.session import Session

log = logging.getLogger(__name__)

UNIT_BUDGET_S = 1.0
"""A unit's result is due one tick of the duplex clock after the unit was complete."""

MIN_PAUSE_S = 0.1
MAX_PAUSE_S = 3600.0
"""A paused session keeps its slot, so no client may ask for more than an hour."""


class DuplexSession(Session):
    """A client that hears and is heard at the same time.

    Args:
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
        super().__init__(host, session_id, request_type, send, new_state or host.model.new_state)
        self._inbox = Inbox(host.model.unit_samples)
        self._turn = Turn()
        self._undecoded: asyncio.Queue[PendingChunk] = asyncio.Queue(2 * MAX_INBOX_UNITS)
        self._prompt: Prompt | None = None
        self._answers_first = True
        """Results leave before the deferred work of their unit; the client may wish otherwise."""
        self._pause_until = math.inf
        self._pause_s = 0.0

    def _more_parts(self) -> Iterable[Coroutine[Any, Any, None]]:
        return (self._decode(),)

    def _due(self) -> Iterable[tuple[float, str]]:
        if self.state is SessionState.PAUSED:
            yield self._pause_until, f"Pause timeout ({self._pause_s:.1f}s)"
        elif self.state is not SessionState.PREPARING:
            yield self._idle_limit()

    def _forget_input(self) -> None:
        self._inbox.forget()
        while not self._undecoded.empty():
            self._undecoded.get_nowait()

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
            case _:
                raise self._unknown(command)

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
        self._admit_prepare()
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
        if self._prompt is not None and self.state is SessionState.PREPARING:
            prompt, self._prompt = self._prompt, None
            if not await self._prepare(self._host.model.prepare(self._state, prompt)):
                self._inbox.fail_waiting(NotPrepared("prepare failed"))
                self._answer()
            return True
        if self.state is not SessionState.LIVE:
            return False
        unit = self._inbox.next_unit(UNIT_BUDGET_S)
        if unit is None:
            return False
        await self._run_unit(unit)
        return True

    async def _run_unit(self, unit: Unit) -> None:
        engine, loop = self._host.engine, self._loop

        def emitted(result: UnitResult) -> None:
            total_ms = 1000.0 * (engine.clock() - unit.arrived_at)
            loop.call_soon_threadsafe(
                self._on_result, unit, result, total_ms, context=self._context
            )

        what = f"unit {unit.index}"
        task = await self._run(self._host.model.unit(self._state, unit), what, emitted)
        if self._is_ending(task):
            return
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
