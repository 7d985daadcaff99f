"""The cascade's turn taking: how a session listens, answers, and stops when it is interrupted.

Two kinds of program share one `Conversation`: the *unit program* here runs once a second,
detects speech, decides who has the floor and hands out at most one second of what there is to
say; the *answer program* (`live_answer.py`) runs beside it for one turn and makes that.

An answer is begun in the first silence after speech (`EARLY_SILENCE_S`), before it is certain that
the user has finished. Until it becomes audible it can be withdrawn without a trace: the user goes
on talking, the context is cut back, the utterance grows.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from shared.limits import INPUT_SAMPLE_RATE_HZ, OUTPUT_SAMPLE_RATE_HZ
from worker.engine.contract import Emit, Op, Program, Spawn, Until
from worker.models.cascade.answer import Talk, checked_system, feed, stop_closing
from worker.models.cascade.context import Context
from worker.models.cascade.endpointing import (
    EARLY_SILENCE_S,
    LISTENING,
    SPEAKING,
    WINDOW_SAMPLES,
    Endpointer,
)
from worker.models.cascade.live_answer import LiveAnswer, answer_program
from worker.models.cascade.settings import DUPLEX_HONOURED, generation_of_duplex
from worker.models.contract import PreparedInfo, Prompt, Unit, UnitResult
from worker.models.voice_activity import DETECT_SPEECH, DetectRequest, VadState

if TYPE_CHECKING:
    from worker.models.cascade.model import CascadeModel

MAX_UTTERANCE_S: Final = 120.0

PRE_ROLL_S: Final = 0.4
"""Audio kept from before the detected start of speech: soft first consonants."""

FIRST_AUDIO_HOLD_S: Final = 0.75
"""A unit waits this long for the first phrase of an answer, so that the phrase goes out as soon
as it exists and not with the next unit; it leaves 0.25 s of the unit's second."""

NEXT_AUDIO_HOLD_S: Final = 0.3
"""A unit in the middle of an answer waits this long for a full second of speech."""

FRAME_MAX_AGE_UNITS: Final = 5


@dataclass(slots=True)
class Conversation(Talk):
    """All state of one duplex session.

    Its `closing` is the program of the last answer that was handed out whole.
    """

    n_units_to_force: int = 0
    """Units that still have to listen, whatever is said in them."""
    vad: VadState = field(default_factory=VadState.initial)
    ears: Endpointer = field(default_factory=Endpointer)
    audio: NDArray[np.float32] = field(default_factory=lambda: np.zeros(0, np.float32))
    """Newest input; its last sample is number `n_samples - 1` of the session."""
    n_samples: int = 0
    frame: NDArray[np.uint8] | None = None
    frame_unit: int = 0
    answer: LiveAnswer | None = None
    last_audio_unit: int | None = None
    """The unit whose result last held speech that the client may still be playing."""
    was_interrupted: bool = False

    def listen_to(self, samples: NDArray[np.float32]) -> None:
        """Append input audio; keep what an utterance may need."""
        self.audio = np.concatenate([self.audio, samples])
        self.n_samples += len(samples)
        origin = self.n_samples - len(self.audio)
        oldest = self.n_samples - int(MAX_UTTERANCE_S * INPUT_SAMPLE_RATE_HZ)
        self.audio = self.audio[max(0, self._first_needed - origin, oldest - origin) :]

    @property
    def _first_needed(self) -> int:
        start = self.ears.utterance_start
        first = self.n_samples if start is None else start * WINDOW_SAMPLES
        return first - int(PRE_ROLL_S * INPUT_SAMPLE_RATE_HZ)

    def is_speaking(self, unit_index: int) -> bool:
        """Whether the client is still playing speech of ours when this unit arrives."""
        is_audible = self.answer is not None and self.answer.audible
        return is_audible or self.last_audio_unit == unit_index - 1


def new_state(model: CascadeModel, slot: int) -> Conversation:
    return Conversation(slot, seed=random.getrandbits(31))


def prepare(model: CascadeModel, state: Conversation, prompt: Prompt) -> Program:
    """Prefill the system prompt; the conversation starts anew.

    Raises:
        BadMessage: the prompt leaves too little room for a conversation.
    """
    settings = prompt.settings
    system = checked_system(model, prompt.system_prompt)
    if state.answer is not None:
        _drop(state, state.answer)
    stop_closing(state)
    state.ears.finish()
    state.generation = generation_of_duplex(settings)
    state.speaks = settings.generate_audio is not False
    state.n_units_to_force = settings.force_listen_count or 0
    state.context = Context(system)
    yield from feed(state, deadline=state.clock())
    ignored = set(settings.said()) - DUPLEX_HONOURED
    if prompt.reference_voice.size or prompt.tts_reference_voice.size:
        ignored.add("reference_voice")
    return PreparedInfo(
        prompt_chars=len(prompt.system_prompt),
        prompt_tokens=len(state.context),
        ignored=tuple(sorted(ignored)),
        voice=model.voice,
        languages=("en",),
    )


def unit(model: CascadeModel, state: Conversation, unit: Unit) -> Program:
    """One second: listen, decide, hand out at most one second of speech."""
    begun = state.clock()
    if state.answer is not None:
        state.answer.now = unit.arrived_at
    if unit.frames:
        state.frame, state.frame_unit = unit.frames[-1], unit.index

    forced = unit.force_listen or state.n_units_to_force > 0
    state.n_units_to_force = max(0, state.n_units_to_force - 1)
    # Before every other op: it takes 3 ms and decides what all others are worth.
    request = DetectRequest(state.vad, unit.audio)
    probabilities, state.vad = yield Op(DETECT_SPEECH, request, deadline=0.0)
    listen_ms = 1000 * (state.clock() - begun)
    if state.answer is not None:
        # It has been made beside the units before, and beside the listening of this one.
        state.answer.costs.begin_unit(state.clock())
    _decide_the_floor(state, unit.index, probabilities.tolist(), forced)
    state.listen_to(unit.audio)

    if state.answer is None and not forced and _may_answer(state):
        frame = _fresh_frame(state, unit.index)
        state.answer = LiveAnswer(state.audio, frame, unit.arrived_at, unit.arrived_at)
        program = answer_program(model, state, state.answer)
        state.answer.task = yield Spawn(program, name="answer")
    if state.answer is not None and state.ears.has_ended:
        state.answer.confirmed = True
    # Clients flush on a listen result: what was cut off and a new answer never share one.
    if not state.was_interrupted:
        yield from _wait_for_speech(state, unit.arrived_at)
    interrupted, state.was_interrupted = state.was_interrupted, False
    result = UnitResult(is_listen=True) if interrupted else _hand_out(state, unit.index)
    timings = msgspec.structs.replace(
        result.timings, listen_ms=listen_ms, total_ms=1000 * (state.clock() - begun)
    )
    yield Emit(
        replace(
            result,
            interrupted=interrupted,
            timings=timings,
            kv_tokens=state.context.n_fed,
        )
    )


def interrupt(state: Conversation) -> None:
    """Stop what is being said; the next result carries the flag that flushes the playback."""
    if state.answer is not None and state.answer.audible:
        _drop(state, state.answer)
        state.was_interrupted = True
        state.last_audio_unit = None


def _decide_the_floor(
    state: Conversation, unit_index: int, probabilities: list[float], forced: bool
) -> None:
    """Follow the user's speech; the answer gives way if the user speaks or listening is forced."""
    was_speaking = state.is_speaking(unit_index)
    user_spoke = state.ears.hear(probabilities, SPEAKING if was_speaking else LISTENING)
    if not (user_spoke or forced):
        return
    if state.answer is not None:
        _drop(state, state.answer)
    if was_speaking:
        state.was_interrupted = True
        state.last_audio_unit = None


def _drop(state: Conversation, answer: LiveAnswer) -> None:
    """End the running answer.

    One that nobody has heard is undone with its question: the user's turn goes on. Of one that is
    cut off the question stays in the context and the answer goes. A model this small holds on to
    what it was saying: of 15 questions right after an interrupted story it answered 7 rightly
    with the cut-off answer before them, 11 without it and 12 with no history at all.
    """
    state.answer = None
    if answer.task is not None:
        answer.task.cancel()
    if answer.turn_start is not None:
        state.context.truncate(answer.question_end if answer.audible else answer.turn_start)


def _may_answer(state: Conversation) -> bool:
    return state.ears.in_utterance and state.ears.silence_s >= EARLY_SILENCE_S


def _fresh_frame(state: Conversation, unit_index: int) -> NDArray[np.uint8] | None:
    return state.frame if unit_index - state.frame_unit < FRAME_MAX_AGE_UNITS else None


def _wait_for_speech(state: Conversation, arrived_at: float) -> Program:
    """Give an answer that may be heard a bounded time to have something to say."""
    answer = state.answer
    if answer is None or not answer.confirmed:
        return
    enough_s = 1.0 if answer.audible else 0.0
    hold_s = NEXT_AUDIO_HOLD_S if answer.audible else FIRST_AUDIO_HOLD_S

    def is_ready() -> bool:
        # An interrupt may drop the answer while this unit waits for it.
        if answer.finished or answer.failed or state.answer is not answer:
            return True
        has_enough = answer.buffered_s >= enough_s or not state.speaks
        return bool(answer.segments) and has_enough

    yield Until(is_ready, arrived_at + hold_s)


def _hand_out(state: Conversation, unit_index: int) -> UnitResult:
    """Take at most one second of what there is to say."""
    answer = state.answer
    if answer is None or not answer.confirmed:
        return UnitResult(is_listen=True)
    if answer.failed:
        _drop(state, answer)
        state.ears.finish()
        assert answer.task is not None
        assert answer.task.error is not None
        raise answer.task.error
    has_said_all = answer.finished and not answer.segments
    if not answer.audible and not answer.segments and not has_said_all:
        return UnitResult(is_listen=True)

    first = not answer.audible
    if first:
        # From here on the turn stands: the utterance belongs to it.
        answer.audible = True
        state.ears.finish()
    text, audio = _take(answer, OUTPUT_SAMPLE_RATE_HZ)
    n_tokens = len(answer.tokens) - answer.n_tokens_reported
    answer.n_tokens_reported = len(answer.tokens)
    ended = answer.finished and not answer.segments
    if ended:
        state.answer, state.closing = None, answer.task
    if audio.size:
        state.last_audio_unit = unit_index
    return UnitResult(
        is_listen=not text and not audio.size and ended,
        text=text,
        audio=audio,
        end_of_turn=ended and bool(text or audio.size),
        heard=answer.heard if first else "",
        timings=answer.costs.reported(),
        n_tokens=n_tokens,
    )


def _take(answer: LiveAnswer, n_samples: int) -> tuple[str, NDArray[np.float32]]:
    """Take up to `n_samples` of speech; a phrase's text comes with its first sample."""
    texts: list[str] = []
    parts: list[NDArray[np.float32]] = []
    while answer.segments and n_samples > 0:
        segment = answer.segments[0]
        if segment.n_taken == 0:
            texts.append(segment.text)
        part = segment.audio[segment.n_taken : segment.n_taken + n_samples]
        parts.append(part)
        segment.n_taken += len(part)
        n_samples -= len(part)
        if segment.n_taken >= len(segment.audio):
            answer.segments.popleft()
    audio = np.concatenate(parts) if parts else np.zeros(0, np.float32)
    return "".join(texts), audio
