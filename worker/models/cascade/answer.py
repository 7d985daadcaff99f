"""Thinking and speaking, the same in every kind of session: feed a question, write, say it.

What differs is where an answer goes and how soon it has to be there: see `Answer`.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from shared.errors import BadMessage
from shared.protocol import Timings
from worker.engine.contract import Emit, Op, Program, TaskHandle, Until
from worker.models.cascade.context import Context
from worker.models.cascade.language import (
    DECODE,
    MAX_PREFILL_TOKENS,
    PREFILL,
    DecodeRequest,
    PrefillRequest,
)
from worker.models.cascade.settings import MAX_ANSWER_TOKENS, Generation
from worker.models.cascade.speech import SYNTHESIZE, PhraseSplitter, SynthesizeRequest
from worker.nn.sampling import Sampling

if TYPE_CHECKING:
    from worker.models.cascade.language import Language
    from worker.models.cascade.model import CascadeModel

DEFAULT_SYSTEM: Final = "You are a helpful assistant."
"""Where a client gives no system message; the model was trained with one always. Of six plain
questions it answered six rightly with this one, five where it is asked to be brief, three where it
is asked for one or two short spoken sentences."""

MAX_PROMPT_SHARE: Final = 0.5
"""Largest part of the context that the system prompt may take."""

MIN_ANSWER_TOKENS: Final = 16
"""A question that leaves less room than this is refused."""

MAX_CONTEXT_SHARE: Final = 0.75
"""The context is trimmed after an answer that leaves it fuller than this, so that the next turn
always fits without waiting."""

KEEP_CONTEXT_SHARE: Final = 0.3
"""Newest turns kept when the context is trimmed."""

PIECE_S: Final = 0.15
"""Time between the deadlines of two prefill ops in a row, about what one takes: long texts let
the speech of others pass."""

MAX_CHARS_PER_TOKEN: Final = 16
"""A text of more characters than this for each position of the context is refused unread: cutting
megabytes into tokens would hold up every session."""

MAX_LOOP_TOKENS: Final = 128
"""Longest block that is looked for three times in a row: a few sentences."""

NEVER: Final = 1e9
"""Length penalty of an ending that must not come yet."""

NO_SAMPLES = np.zeros(0, np.float32)


@dataclass(slots=True)
class Talk:
    """What every kind of session keeps; dropping it and cleaning the slot is the reset."""

    slot: int
    clock: Callable[[], float] = time.monotonic
    """The engine's."""
    generation: Generation = field(default_factory=Generation)
    seed: int = 0
    speaks: bool = True
    context: Context = field(default_factory=Context)
    closing: TaskHandle | None = None
    """Program that outlives an answer: it may still feed the end of it."""


@dataclass(slots=True)
class Costs:
    """Time spent since it was last reported, in ms by the names of `shared.protocol.Timings`."""

    spent_ms: dict[str, float] = field(default_factory=dict)
    unit_begun: float = -math.inf
    """Clock reading; what was spent before it was spent ahead of the unit."""

    @contextmanager
    def timed(self, stage: str, clock: Callable[[], float]) -> Iterator[None]:
        begun = clock()
        yield
        ended = clock()
        counted = min(max(begun, self.unit_begun), ended)
        self._add(stage, ended - counted)
        self._add("ahead_ms", counted - begun)

    def _add(self, stage: str, spent_s: float) -> None:
        self.spent_ms[stage] = self.spent_ms.get(stage, 0.0) + 1000 * spent_s

    def begin_unit(self, now: float) -> None:
        """From now on the stages are those of a unit, which no stage may be longer than."""
        self.spent_ms = {"ahead_ms": sum(self.spent_ms.values())}
        self.unit_begun = now

    def reported(self) -> Timings:
        """Return what was spent and start over."""
        spent, self.spent_ms = self.spent_ms, {}
        return Timings(**spent)


@dataclass(slots=True)
class Answer(ABC):
    """An answer while it is written, and where it goes."""

    tokens: list[int] = field(default_factory=list, init=False)
    was_cut: bool = field(default=False, init=False)
    """It did not end by itself."""
    costs: Costs = field(default_factory=Costs, init=False)

    @abstractmethod
    def text_due(self) -> float:
        """Return the engine clock by which the next token is needed."""

    @abstractmethod
    def speech_due(self) -> float:
        """Return the engine clock by which the sound of the phrase at hand is needed."""

    @abstractmethod
    def put(self, text: str, audio: NDArray[np.float32]) -> Emit | None:
        """Take the next piece, sound in 24 kHz; returns what has to be emitted for it, if anything.

        Pieces are phrases if `comes_in_phrases()`, else what each token adds.
        """

    def comes_in_phrases(self) -> bool:
        return True

    def wants_more(self) -> bool:
        """Say whether it goes on now; looked at again whenever the session advances."""
        return True


# ---- the context


def checked_system(model: CascadeModel, text: str) -> tuple[int, ...]:
    """Return the tokens of a system message.

    Raises:
        BadMessage: it leaves too little room for a conversation.
    """
    limit = int(MAX_PROMPT_SHARE * model.context_tokens)
    check_chars(len(text), limit, "system_prompt")
    system = model.language.system_tokens(text)
    if len(system) > limit:
        raise BadMessage(f"system_prompt has {len(system)} tokens, at most {limit}: shorten it")
    return system


def check_chars(n_chars: int, n_tokens: int, name: str) -> None:
    """Refuse a text that cannot be `n_tokens` tokens or less, whatever it says."""
    limit = MAX_CHARS_PER_TOKEN * n_tokens
    if n_chars > limit:
        raise BadMessage(
            f"{name}: {n_chars} characters are more than the context of this model holds, which is "
            f"{limit} at the very most (and {n_tokens} tokens): shorten it"
        )


@dataclass(frozen=True, slots=True)
class Question:
    """Where a turn stands in the context."""

    start: int
    end: int
    """Length of the context with the question and without anything of the answer."""
    n_most: int
    """Tokens of an answer for which there is room."""


def begin_turn(model: CascadeModel, talk: Talk, text: str) -> Question:
    """Append the user's words and what opens an answer; the oldest turns go if it gets too long.

    Raises:
        BadMessage: even alone the question leaves no room for an answer; nothing was changed.
    """
    context, language = talk.context, model.language
    tokens = language.user_tokens(text)
    around = len(language.answer_opening) + len(language.turn_end_tokens)
    room = model.context_tokens - context.n_system - len(tokens) - around
    if room < MIN_ANSWER_TOKENS:
        raise BadMessage(
            f"the question has {len(tokens)} tokens: with the system message of "
            f"{context.n_system} and an answer it does not fit into the context of "
            f"{model.context_tokens}"
        )
    stop_closing(talk)
    start = context.begin_turn(tokens)
    wanted = min(talk.generation.n_most, MAX_ANSWER_TOKENS)
    if len(context) + around + wanted > model.context_tokens:
        start += context.drop_oldest(int(KEEP_CONTEXT_SHARE * model.context_tokens))
    end = len(context)
    context.append(language.answer_opening)
    return Question(start, end, model.context_tokens - end - around)


def trim(model: CascadeModel, talk: Talk) -> int:
    """Make room for the next turn; return by how much what is kept has moved (zero or less)."""
    if len(talk.context) <= MAX_CONTEXT_SHARE * model.context_tokens:
        return 0
    return talk.context.drop_oldest(int(KEEP_CONTEXT_SHARE * model.context_tokens))


def stop_closing(talk: Talk) -> None:
    """From now on somebody else feeds the context: two at a time would feed the same tokens."""
    if talk.closing is not None:
        talk.closing.cancel()
        talk.closing = None


def feed(talk: Talk, deadline: float, sampling: Sampling | None = None) -> Program:
    """Bring the cache up to the context, in pieces; with `sampling` return the next token.

    Args:
        deadline: of the first piece.
    """
    context = talk.context
    chosen = None
    while piece := context.unfed(MAX_PREFILL_TOKENS):
        start = context.n_fed
        is_last = start + len(piece) == len(context)
        request = PrefillRequest(
            talk.slot, piece, start, sampling=sampling if is_last else None, seed=talk.seed
        )
        chosen = yield Op(PREFILL, request, deadline=deadline)
        deadline += PIECE_S
        context.mark_fed(start, piece)
    return chosen


# ---- the answer


def take_in(model: CascadeModel, talk: Talk, answer: Answer) -> Program:
    """Feed what stands in the context; the value is the first token of the answer."""
    with answer.costs.timed("prefill_ms", talk.clock):
        sampling = sampling_at(model.language, talk.generation, 0)
        token = yield from feed(talk, answer.text_due(), sampling)
    return token


def write(model: CascadeModel, talk: Talk, answer: Answer, token: int, n_most: int) -> Program:
    """Write the answer that begins with a token, and say it.

    What was written stays in the context, the end of the turn is appended and not yet fed.
    """
    context, language = talk.context, model.language
    detokeniser, splitter = language.detokeniser(), PhraseSplitter()
    in_phrases = answer.comes_in_phrases()
    while not language.is_end(token):
        text = detokeniser.push(token)
        answer.tokens.append(token)
        context.append([token])
        yield from _say(talk, answer, splitter.push(text) if in_phrases else [text])
        if len(answer.tokens) >= n_most or is_looping(answer.tokens):
            answer.was_cut = True
            break
        yield Until(answer.wants_more, float("inf"))
        with answer.costs.timed("decode_ms", talk.clock):
            token = yield from _decode(model, talk, answer)
    rest = detokeniser.flush()
    yield from _say(talk, answer, splitter.push(rest) + splitter.flush() if in_phrases else [rest])
    context.append(language.turn_end_tokens)


def _say(talk: Talk, answer: Answer, pieces: Sequence[str]) -> Program:
    for piece in filter(None, pieces):
        audio = NO_SAMPLES
        if talk.speaks:
            request = SynthesizeRequest(piece)
            with answer.costs.timed("vocode_ms", talk.clock):
                audio = yield Op(SYNTHESIZE, request, deadline=answer.speech_due())
        emit = answer.put(piece, audio)
        if emit is not None:
            yield emit


def _decode(model: CascadeModel, talk: Talk, answer: Answer) -> Program:
    """Feed the newest token, return the next one."""
    position = talk.context.n_fed
    (token,) = talk.context.unfed(1)
    sampling = sampling_at(model.language, talk.generation, len(answer.tokens))
    request = DecodeRequest(
        talk.slot,
        token,
        position,
        sampling,
        recent=tuple(answer.tokens[-sampling.window :]),
        seed=talk.seed,
    )
    chosen = yield Op(DECODE, request, deadline=answer.text_due())
    talk.context.mark_fed(position, [token])
    return chosen


def sampling_at(language: Language, generation: Generation, n_said: int) -> Sampling:
    """Return how the token after `n_said` of an answer is chosen: endings may have to wait."""
    if n_said >= generation.n_least:
        return generation.sampling
    return replace(generation.sampling, endings=language.endings, length_penalty=NEVER)


def is_looping(tokens: Sequence[int]) -> bool:
    """Whether the sequence ends in three equal blocks of 4 tokens or more: small models do that."""
    return any(
        # Most lengths are ruled out by one token.
        tokens[-1] == tokens[-1 - n]
        and tokens[-n:] == tokens[-2 * n : -n] == tokens[-3 * n : -2 * n]
        for n in range(4, 1 + min(MAX_LOOP_TOKENS, len(tokens) // 3))
    )
