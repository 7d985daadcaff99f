"""A session of turns: the user's turns are found in the sound, each is answered as a whole.

The client's sound goes through the back end's voice detector; `turn_taking.py` decides. While a
turn is being answered the session goes on reading, but what it hears is dropped: the microphone is
off, as far as this mode is concerned. `Interrupt` ends the answer, `stop` the session, both at
once.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import msgspec

from shared.audio import F32_BYTES, Samples, samples_from_f32, samples_to_f32
from shared.errors import BadImage, BadMessage, ContextFull, EngineFault, ModelFault, NotPrepared
from shared.limits import INPUT_SAMPLE_RATE_HZ, MAX_TURN_S
from shared.protocol import (
    Command,
    Delta,
    Event,
    Generating,
    Input,
    Interrupt,
    Interrupted,
    Notice,
    PrepareTurns,
    RequestType,
    Speaking,
    Timings,
    TurnDone,
)
from shared.states import SessionState
from worker.engine.engine import ProgramCancelled, Task
from worker.models.contract import Piece, TurnPrompt, WholeAnswer
from worker.sessions.failures import failure_for, program_failure
from worker.sessions.host import SessionHost
from worker.sessions.message_media import read_system
from worker.sessions.session import Session
from worker.sessions.turn_taking import TurnBegan, TurnEnded, TurnTaker, check_settings

log = logging.getLogger(__name__)

SETTLE_S = 0.5
"""Sound after `Prepared` that is not listened to: microphones begin with a click."""

MIN_SESSION_S = 1.0
MAX_SESSION_S = 3600.0
"""Bounds of `PrepareTurns.timeout_s`."""

MAX_WAITING_S = 2 * MAX_TURN_S
"""Sound that waits for the detector; what is sent faster than it listens is dropped."""

MAX_DETECT_S = 2.0
"""Sound of one op of the detector: its lane serves others too."""


@dataclass(slots=True)
class _Answer:
    """One that is being given."""

    began_at: float
    task: Task | None = None
    texts: list[str] = field(default_factory=list)
    """What its client has been told of it."""
    n_interrupts: int = 0

    def interrupt(self) -> None:
        """Close its program; what was said so far stays said."""
        if self.task is not None:
            self.task.cancel()


class HalfDuplexSession(Session):
    """`Speaking(True)`, `Speaking(False)`, `Generating`, `Delta`s, `TurnDone` for each turn.

    A turn that is too short has the first two alone. One that failed ends with `Failure`, and the
    session goes on. A turn of the user that lasts for `MAX_TURN_S` ends there. `Input` has no
    answer of its own, unless it is refused.
    """

    def __init__(
        self,
        host: SessionHost,
        session_id: str,
        request_type: RequestType,
        send: Callable[[Event], None],
    ) -> None:
        super().__init__(host, session_id, request_type, send, host.model.turn_state)
        self._prompt: TurnPrompt | None = None
        self._taker: TurnTaker | None = None
        self._answer: _Answer | None = None
        self._n_turns = 0
        self._waiting = bytearray()
        """Sound for the detector, float32 without a gap: chunks may have one sample each."""
        self._n_to_skip = 0
        self._timeout_s = 0.0
        self._ends_at = math.inf

    def _due(self) -> Iterable[tuple[float, str]]:
        yield self._ends_at, f"Session timeout ({self._timeout_s:.1f}s)"
        if self.state is not SessionState.PREPARING and self._answer is None:
            yield self._idle_limit()

    def _forget_input(self) -> None:
        self._prompt = None
        self._waiting.clear()

    # ---- commands

    async def _handle(self, command: Command) -> None:
        match command:
            case Input():
                await self._on_input(command)
            case PrepareTurns():
                await self._on_prepare(command)
            case Interrupt():
                self._on_interrupt()
            case _:
                raise self._unknown(command)

    async def _on_input(self, message: Input) -> None:
        if self.state is SessionState.OPENED:
            raise NotPrepared("audio before prepare: send prepare first")
        if message.frames:
            raise BadImage("a half-duplex session takes no pictures, send sound alone")
        chunk = await self._media.chunk(self._media.admit(message))
        self._heard_at = self._clock()
        if self.state is not SessionState.LIVE or self._answer is not None:
            return
        samples = chunk.audio[self._n_to_skip :]
        self._n_to_skip -= len(chunk.audio) - len(samples)
        if not samples.size:
            return
        sound = samples_to_f32(samples)
        if len(self._waiting) + len(sound) > MAX_WAITING_S * INPUT_SAMPLE_RATE_HZ * F32_BYTES:
            text = "a chunk of input came faster than it could be heard"
            self._send(Notice("input_dropped", text, 1))
            return
        self._waiting += sound
        self._work_there.set()

    async def _on_prepare(self, message: PrepareTurns) -> None:
        check_settings(message.vad)
        if math.isnan(message.timeout_s):
            raise BadMessage("timeout_s is not a number")
        self._admit_prepare()
        system = await read_system(self._media, message.system)
        if self._taker is not None and self._taker.is_speaking:
            self._send(Speaking(False))
        if self._answer is not None:
            # The conversation it belongs to is over.
            self._answer.interrupt()
        self._forget_input()
        self._prompt = TurnPrompt(system, message.generation, message.speaks)
        self._taker = TurnTaker(message.vad)
        self._n_to_skip = round(SETTLE_S * INPUT_SAMPLE_RATE_HZ)
        self._timeout_s = min(max(message.timeout_s, MIN_SESSION_S), MAX_SESSION_S)
        self._ends_at = self._clock() + self._timeout_s
        self._to(SessionState.PREPARING, "prepare")
        self._work_there.set()

    def _on_interrupt(self) -> None:
        if self._answer is None:
            self._send(Interrupted())
            return
        # Told once the answer has ended: the reader does not wait for that, `stop` may follow.
        self._answer.n_interrupts += 1
        self._answer.interrupt()

    # ---- programs

    async def _run_next(self) -> bool:
        if self._prompt is not None and self.state is SessionState.PREPARING:
            prompt, self._prompt = self._prompt, None
            await self._prepare(self._host.model.prepare_turns(self._state, prompt))
            return True
        if self.state is not SessionState.LIVE or not self._waiting:
            return False
        await self._hear(self._next_sound())
        return True

    def _next_sound(self) -> Samples:
        n_bytes = round(MAX_DETECT_S * INPUT_SAMPLE_RATE_HZ) * F32_BYTES
        sound = samples_from_f32(bytes(self._waiting[:n_bytes]))
        del self._waiting[:n_bytes]
        return sound

    async def _hear(self, samples: Samples) -> None:
        taker = self._taker
        assert taker is not None, "a session is live after it was prepared"
        what = "speech detection"
        task = await self._run(self._host.model.detect_speech(self._state, samples), what)
        if self._is_ending(task):
            return
        if task.error is not None:
            self._tell_failure(task.error, what)
            return
        # It may have been prepared anew meanwhile.
        if self.state is not SessionState.LIVE:
            return
        for event in taker.hear(samples, task.value):
            self._send(Speaking(isinstance(event, TurnBegan)))
            if isinstance(event, TurnEnded) and event.samples is not None:
                await self._answer_turn(event.samples)

    async def _answer_turn(self, turn: Samples) -> None:
        answer = self._answer = _Answer(self._clock())
        self._waiting.clear()
        self._send(Generating(1000.0 * len(turn) / INPUT_SAMPLE_RATE_HZ))

        def emitted(piece: Piece) -> None:
            self._loop.call_soon_threadsafe(self._on_piece, answer, piece, context=self._context)

        what = f"turn {self._n_turns + 1}"
        program = self._host.model.turn(self._state, turn)
        answer.task, done = self._start(program, what, emitted)
        task = await done
        self._answer = None
        self._heard_at = self._clock()
        self._limits_moved.set()
        if self._ended.done() or isinstance(task.error, EngineFault):
            return  # the session is ending
        if task.error is None or isinstance(task.error, ProgramCancelled):
            self._tell_end(answer, task.value)
        else:
            self._host.metrics.answer_failed()
            self._tell_failure(task.error, what)
        for _ in range(answer.n_interrupts):
            self._send(Interrupted())

    def _on_piece(self, answer: _Answer, piece: Piece) -> None:
        if self._ended.done():
            return
        index = len(answer.texts)
        if not index:
            self._host.metrics.first_piece_seconds.observe(self._clock() - answer.began_at)
        answer.texts.append(piece.text)
        self._send(Delta(index, piece.text, samples_to_f32(piece.audio)))

    def _tell_end(self, answer: _Answer, whole: WholeAnswer | None) -> None:
        """`whole` is None for an answer that was interrupted."""
        self._n_turns += 1
        took_s = self._clock() - answer.began_at
        self._host.metrics.answer_done("interrupted" if whole is None else "turn", took_s)
        total_ms = 1000.0 * took_s
        if whole is None:
            text = "".join(answer.texts)
            self._send(TurnDone(self._n_turns, text, timings=Timings(total_ms=total_ms)))
            return
        self.kv_tokens = whole.n_input_tokens + whole.n_generated_tokens
        self._send(
            TurnDone(
                self._n_turns,
                whole.text,
                whole.heard,
                msgspec.structs.replace(whole.timings, total_ms=total_ms),
                whole.n_generated_tokens,
                self.kv_tokens,
            )
        )

    def _tell_failure(self, error: BaseException, what: str) -> None:
        """Raises ContextFull: no later turn would fit either."""
        failed = program_failure(error, what)
        if isinstance(failed, ContextFull):
            raise failed
        if failed.ws_close is not None:
            failed = ModelFault(f"{what} failed in the model")
        self._send(failure_for(failed, self.session_id))
