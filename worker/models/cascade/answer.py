"""One turn of the assistant: transcribe, look, think, speak phrase by phrase."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from shared.limits import OUTPUT_SAMPLE_RATE_HZ
from worker.engine.contract import Op, Program, TaskHandle, Until
from worker.models.cascade.language import (
    DECODE,
    MAX_PREFILL_TOKENS,
    PREFILL,
    DecodeRequest,
    PrefillRequest,
)
from worker.models.cascade.reading import READ_TEXT, ReadRequest, needs_camera
from worker.models.cascade.speech import SYNTHESIZE, PhraseSplitter, SynthesizeRequest

if TYPE_CHECKING:
    from worker.models.cascade.conversation import Conversation
    from worker.models.cascade.model import CascadeModel

MAX_ANSWER_TOKENS: Final = 256

MAX_LEAD_S: Final = 6.0
"""Speech made ahead of what has been handed out; more would be thrown away at an interruption."""

URGENT_S: Final = 0.3
"""Until its first phrase exists, an answer's ops are due this long after its unit."""

MAX_CONTEXT_SHARE: Final = 0.75
"""The context is trimmed after an answer that leaves it fuller than this, so that the next turn
always fits without waiting."""

KEEP_CONTEXT_SHARE: Final = 0.3
"""Newest turns kept when the context is trimmed."""

PIECE_S: Final = 0.15
"""Time between the deadlines of two prefill ops in a row, about what one takes: long texts let
the speech of others pass."""

MAX_SEEN_CHARS: Final = 1200
"""Text of a picture that goes into a question: about 300 tokens."""


@dataclass(slots=True)
class Segment:
    """One phrase of an answer, ready to be handed out."""

    text: str
    audio: NDArray[np.float32]
    """24 kHz; empty when the client wants text only."""
    n_taken: int = 0
    """Samples handed out."""


@dataclass(slots=True)
class Answer:
    """State of one turn, from the user's silence to the last sample handed out."""

    utterance: NDArray[np.float32]
    """16 kHz: what the user said."""
    frame: NDArray[np.uint8] | None
    """RGB picture the question may be about."""
    begun_at: float
    task: TaskHandle | None = None
    confirmed: bool = False
    """The user has been silent for long enough: the answer may be heard."""
    audible: bool = False
    finished: bool = False
    """Everything there is to say is in `segments`."""
    heard: str = ""
    turn_start: int | None = None
    """Length of the context before this turn; None = not touched yet."""
    question_end: int = 0
    """Length of the context with the question and without anything of the answer."""
    tokens: list[int] = field(default_factory=list)
    n_tokens_reported: int = 0
    segments: deque[Segment] = field(default_factory=deque)
    costs_ms: dict[str, float] = field(default_factory=dict)
    """Time spent since the last result, by the names of `shared.protocol.Timings`."""

    @property
    def buffered_s(self) -> float:
        n_samples = sum(len(segment.audio) - segment.n_taken for segment in self.segments)
        return n_samples / OUTPUT_SAMPLE_RATE_HZ

    @property
    def failed(self) -> bool:
        return self.task is not None and self.task.error is not None

    @contextmanager
    def timed(self, stage: str, clock: Callable[[], float]) -> Iterator[None]:
        begun = clock()
        yield
        self.costs_ms[stage] = self.costs_ms.get(stage, 0.0) + 1000 * (clock() - begun)


def answer_program(model: CascadeModel, state: Conversation, answer: Answer) -> Program:
    """Fill `answer.segments`, phrase by phrase; end with `answer.finished`."""
    urgent = answer.begun_at + URGENT_S
    with answer.timed("transcribe_ms", state.clock):
        answer.heard = yield from model.transcriber.transcribe(
            state.slot, answer.utterance, deadline=urgent
        )
    if answer.heard:
        yield from _think(model, state, answer, urgent)
    answer.finished = True
    yield from _tidy(model, state, answer)


def _think(model: CascadeModel, state: Conversation, answer: Answer, urgent: float) -> Program:
    question = yield from _question(state, answer, urgent)
    context, language = state.context, model.language
    stop_closing(state)
    answer.turn_start = context.begin_turn(language.user_tokens(question))
    around = len(language.answer_opening) + len(language.turn_end_tokens)
    if len(context) + around + MAX_ANSWER_TOKENS > model.context_tokens:
        answer.turn_start += context.drop_oldest(int(KEEP_CONTEXT_SHARE * model.context_tokens))
    answer.question_end = len(context)
    context.append(language.answer_opening)
    room = model.context_tokens - len(context) - len(language.turn_end_tokens)
    detokeniser, splitter = language.detokeniser(), PhraseSplitter()

    with answer.timed("prefill_ms", state.clock):
        token = yield from feed(state, urgent, choose=True)
    while not language.is_end(token) and len(answer.tokens) < min(MAX_ANSWER_TOKENS, room):
        text = detokeniser.push(token)
        answer.tokens.append(token)
        context.append([token])
        yield from _speak(model, state, answer, splitter.push(text))
        if is_looping(answer.tokens):
            break
        yield Until(lambda: answer.buffered_s < MAX_LEAD_S, float("inf"))
        with answer.timed("decode_ms", state.clock):
            token = yield from _decode(state, answer)
    rest = splitter.push(detokeniser.flush()) + splitter.flush()
    yield from _speak(model, state, answer, rest)
    context.append(language.turn_end_tokens)


def _question(state: Conversation, answer: Answer, deadline: float) -> Program:
    """The user's words, with what the camera shows if they are about that."""
    if answer.frame is None or not needs_camera(answer.heard):
        return answer.heard
    with answer.timed("vision_ms", state.clock):
        seen = yield Op(READ_TEXT, ReadRequest(answer.frame), deadline=deadline)
    if not seen:
        return answer.heard
    return f"The camera shows this text:\n{seen[:MAX_SEEN_CHARS]}\n\n{answer.heard}"


def stop_closing(state: Conversation) -> None:
    """From now on somebody else feeds the context: two at a time would feed the same tokens."""
    if state.closing is not None:
        state.closing.cancel()
        state.closing = None


def _decode(state: Conversation, answer: Answer) -> Program:
    """Feed the newest token, return the next one."""
    position = state.context.n_fed
    (token,) = state.context.unfed(1)
    request = DecodeRequest(
        state.slot,
        token,
        position,
        state.sampling,
        recent=tuple(answer.tokens[-state.sampling.window :]),
        seed=state.seed,
    )
    deadline = state.now + answer.buffered_s if answer.audible else answer.begun_at + URGENT_S
    chosen = yield Op(DECODE, request, deadline=deadline)
    state.context.mark_fed(position, [token])
    return chosen


def _speak(
    model: CascadeModel, state: Conversation, answer: Answer, phrases: Sequence[str]
) -> Program:
    for phrase in phrases:
        audio = np.zeros(0, np.float32)
        if state.generate_audio:
            deadline = state.now + answer.buffered_s
            with answer.timed("vocode_ms", state.clock):
                audio = yield Op(SYNTHESIZE, SynthesizeRequest(phrase), deadline=deadline)
        answer.segments.append(Segment(phrase, audio))


def _tidy(model: CascadeModel, state: Conversation, answer: Answer) -> Program:
    """Close the turn in the cache and make room for the next one, while this one is being heard."""
    context = state.context
    if len(context) > MAX_CONTEXT_SHARE * model.context_tokens:
        shift = context.drop_oldest(int(KEEP_CONTEXT_SHARE * model.context_tokens))
        answer.question_end += shift
        if answer.turn_start is not None:
            answer.turn_start += shift
    yield from feed(state, deadline=state.now + 1.0)


def feed(state: Conversation, deadline: float, choose: bool = False) -> Program:
    """Bring the cache up to the context, in pieces; with `choose` return the next token.

    Args:
        deadline: of the first piece.
    """
    context = state.context
    chosen = None
    while piece := context.unfed(MAX_PREFILL_TOKENS):
        start = context.n_fed
        is_last = start + len(piece) == len(context)
        request = PrefillRequest(
            state.slot,
            piece,
            start,
            sampling=state.sampling if choose and is_last else None,
            seed=state.seed,
        )
        chosen = yield Op(PREFILL, request, deadline=deadline)
        deadline += PIECE_S
        context.mark_fed(start, piece)
    return chosen


def is_looping(tokens: Sequence[int]) -> bool:
    """Whether the sequence ends in three equal blocks of 4 to 32 tokens: small models do that."""
    return any(
        tokens[-n:] == tokens[-2 * n : -n] == tokens[-3 * n : -2 * n]
        for n in range(4, 1 + min(32, len(tokens) // 3))
    )
