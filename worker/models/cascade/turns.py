"""Half-duplex turns: a conversation in which the user speaks, then is answered, in one context."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from worker.engine.contract import Op, Program, Spawn
from worker.models.cascade.answer import (
    DEFAULT_SYSTEM,
    Costs,
    Question,
    Talk,
    begin_turn,
    checked_system,
    feed,
    stop_closing,
    take_in,
    trim,
    write,
)
from worker.models.cascade.context import Context
from worker.models.cascade.messages import Reading
from worker.models.cascade.reply import Reply
from worker.models.cascade.settings import TURN_HONOURED, generation_of_turns
from worker.models.contract import PreparedInfo, TurnPrompt, WholeAnswer
from worker.models.voice_activity import DETECT_SPEECH, DetectRequest, VadState

if TYPE_CHECKING:
    from worker.models.cascade.model import CascadeModel

REPLY_S: Final = 1.0
"""The first phrase of an answer is due this long after the turn; live units come first."""


@dataclass(slots=True)
class Turns(Talk):
    """All state of one half-duplex session."""

    vad: VadState = field(default_factory=VadState.initial)


def new_state(slot: int) -> Turns:
    return Turns(slot, seed=random.getrandbits(31))


def prepare(model: CascadeModel, state: Turns, prompt: TurnPrompt) -> Program:
    """Prefill the system message; the conversation and the voice detector start anew.

    Raises:
        BadMessage: it leaves too little room for a conversation, or a setting makes no sense; the
            conversation goes on as it was.
    """
    generation = generation_of_turns(prompt.generation)
    reading = Reading(model, state.slot, state.clock, Costs(), state.clock() + REPLY_S)
    found = yield from reading.read("system", prompt.system)
    text = found.text or DEFAULT_SYSTEM
    system = checked_system(model, text)
    stop_closing(state)
    state.generation, state.speaks, state.vad = generation, prompt.speaks, VadState.initial()
    state.context = Context(system)
    yield from feed(state, deadline=state.clock() + REPLY_S)
    ignored = found.ignored | (prompt.generation.said() - TURN_HONOURED)
    return PreparedInfo(
        prompt_chars=len(text),
        prompt_tokens=len(state.context),
        ignored=tuple(sorted(ignored)),
        voice=model.voice,
        languages=("en",),
    )


def detect_speech(state: Turns, samples: NDArray[np.float32]) -> Program:
    """Return the probability of speech of each whole window; what is left over waits."""
    # It takes 3 ms a second and decides what all others are worth. Not before what is late, as a
    # live unit's: sound that comes much faster than it was spoken would hold up everybody.
    request = DetectRequest(state.vad, samples)
    probabilities, state.vad = yield Op(DETECT_SPEECH, request, deadline=state.clock())
    return probabilities


def turn(model: CascadeModel, state: Turns, samples: NDArray[np.float32]) -> Program:
    """Answer what was said; emits `Piece`s, the value is a `WholeAnswer`.

    Sound in which nothing is understood gets no answer and leaves no trace. However an answer is
    cut off, its question stays in the context and the answer goes: see `conversation._drop`.

    Raises:
        BadMessage: the question does not fit into the context.
    """
    begun = state.clock()
    reply = Reply(state.speaks, begun + REPLY_S)
    with reply.costs.timed("transcribe_ms", state.clock):
        heard = yield from model.transcriber.transcribe(state.slot, samples, reply.first_due)
    n_input = len(state.context)
    if heard:
        question = begin_turn(model, state, heard)
        n_input = len(state.context)
        yield from _answer(model, state, reply, question)
        trim(model, state)
        # Beside the client hearing it: the next turn is not kept waiting, it takes over.
        state.closing = yield Spawn(feed(state, math.inf), name="closing")
    total_ms = 1000 * (state.clock() - begun)
    return WholeAnswer(
        text=reply.text,
        n_input_tokens=n_input,
        n_generated_tokens=len(reply.tokens),
        was_cut=reply.was_cut,
        heard=heard,
        timings=msgspec.structs.replace(reply.costs.reported(), total_ms=total_ms),
    )


def _answer(model: CascadeModel, state: Turns, reply: Reply, question: Question) -> Program:
    context = state.context
    is_whole = False
    try:
        token = yield from take_in(model, state, reply)
        n_most = min(state.generation.n_most, question.n_most)
        yield from write(model, state, reply, token, n_most)
        is_whole = True
    finally:
        if not is_whole:
            context.truncate(question.end)
