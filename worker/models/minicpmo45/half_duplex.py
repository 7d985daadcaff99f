"""Turn taking over one growing context: the user's messages are fed, then an answer is generated.

A round is a user's turn and the answer to it. Text is generated in chunks of ten tokens, and each
chunk is spoken before the next one is made. When the context grows too long, whole rounds go,
oldest first. Follows the half-duplex mode of the MiniCPM-o 4.5 reference with whole clips (no
streaming encoder) and its session-wide settings kept in the session.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from shared.errors import BadMessage
from worker.engine.contract import Emit, Op, Program
from worker.models.contract import Piece, TurnMessage
from worker.models.minicpmo45 import ops
from worker.models.minicpmo45.draws import Draws, SeededDraws
from worker.models.minicpmo45.feeding import feed, n_rows
from worker.models.minicpmo45.ops import Fed, Step
from worker.models.minicpmo45.prompt import (
    MediaOptions,
    content,
    embed,
    encoded,
    lay_out,
    media_of,
    rendered,
)
from worker.models.minicpmo45.speaking import (
    NO_SAMPLES,
    TextStream,
    Utterance,
    Words,
    say,
)
from worker.models.minicpmo45.turn_text import CHUNK_TOKENS, Sampler
from worker.models.voice_activity import VadState
from worker.nn.code_sampling import CodeSampling
from worker.nn.shapes import rounded_up

if TYPE_CHECKING:
    from worker.models.minicpmo45.model import MiniCpmO45

USER_OPENING: Final = "<|im_start|>user\n"
ANSWER_CLOSING: Final = "<|tts_eos|><|im_end|>\n"
ANSWER_OPENING: Final = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n<|tts_bos|>"

MAX_CHUNK_CODES: Final = 500
"""Draws for one chunk's words: 20 s, if the speech head does not end by itself."""
MAX_SYSTEM_SHARE: Final = 0.5
"""Largest part of the context that the system message may take."""
REPLY_S: Final = 1.0
"""Ops of a turn are to run within this time, as those of live units, until sound is made; what
follows that can wait until the sound has been played."""


@dataclass(frozen=True, slots=True)
class HalfDuplexSettings:
    """What a client may choose; the defaults are the original's."""

    max_new_tokens: int = 256
    """Rounded up to whole chunks."""
    do_sample: bool = True
    temperature: float = 0.7
    top_k: int = 100
    top_p: float = 0.8
    repetition_penalty: float = 1.02
    length_penalty: float = 1.1
    """Above 1: answers become longer."""
    generate_audio: bool = True
    code_sampling: CodeSampling | None = None
    """None = as the checkpoint says."""
    is_omni: bool = True
    """Parts of a message follow each other without a line end."""
    max_slice_nums: int = 1
    high_tokens: int = 8000
    """A longer context loses rounds, as far as the cache allows it to become that long at all."""
    low_tokens: int = 6000
    """Down to this."""


@dataclass(frozen=True, slots=True)
class TakenIn:
    """Value of a `prefill` program."""

    prompt: str
    """What was fed, with a mark for each picture and clip."""
    n_tokens: int
    """Length of the context."""


@dataclass(frozen=True, slots=True)
class Turn:
    """Value of a `generate` program."""

    text: str
    audio: NDArray[np.float32]
    """24 kHz; empty without a voice."""
    token_ids: tuple[int, ...]
    has_ended: bool
    """The model ended it; else `max_new_tokens` did."""


@dataclass(frozen=True, slots=True)
class Saved:
    """What `restore` goes back to. The caches hold the rest: they are only ever appended to."""

    n_tokens: int
    rounds: tuple[int, ...]
    is_user_turn: bool
    draws: Draws


@dataclass(slots=True)
class HalfDuplex:
    """All state of one session besides what its slot's caches hold."""

    slot: int
    draws: Draws
    settings: HalfDuplexSettings = field(default_factory=HalfDuplexSettings)
    n_tokens: int = 0
    """Filled positions of the context."""
    n_system: int = 0
    """Of these, the system message."""
    rounds: list[int] = field(default_factory=list)
    """Positions of every round that is kept, oldest first."""
    is_user_turn: bool = False
    """The newest round waits for its answer."""
    voice: Any = None
    saved: Saved | None = None
    vad: VadState = field(default_factory=VadState.initial)
    """Of whoever looks for speech in what the client sends."""


def new_state(slot: int, seed: int) -> HalfDuplex:
    return HalfDuplex(slot, SeededDraws(seed))


# ---- taking in


def prepare(
    model: MiniCpmO45,
    state: HalfDuplex,
    system: TurnMessage | None,
    settings: HalfDuplexSettings,
    voice: NDArray[np.float32] | None = None,
) -> Program:
    """Start anew with a system message and a voice; the value is the context's length.

    Args:
        voice: 16 kHz sample; None = the default voice.

    Raises:
        BadMessage: the message leaves too little room or is no system message, or a setting makes
            no sense.
        VoiceUnavailable: the client brought a voice, and this server cannot take one.
    """
    if settings.max_new_tokens < 1:
        raise BadMessage(f"max_new_tokens is {settings.max_new_tokens}, must be at least 1")
    own_voice = voice if settings.generate_audio else None
    learnt = yield from model.learn_voice(own_voice, model.clock() + REPLY_S)
    state.settings, state.voice = settings, learnt
    state.n_tokens = state.n_system = 0
    state.rounds, state.is_user_turn, state.saved = [], False, None
    if system is not None:
        yield from prefill(model, state, system)
    return state.n_tokens


def prefill(model: MiniCpmO45, state: HalfDuplex, message: TurnMessage) -> Program:
    """Feed a message, or one more part of the user's turn; the value is what was `TakenIn`.

    A message that fails, or whose program is closed, leaves the context as it was, but for older
    rounds that had to go for it.

    Raises:
        BadMessage: a role that has no place here, or more than the context can hold.
        BadImage, BadAudio: a picture or clip that cannot be used.
    """
    is_system = message.role == "system"
    if message.role not in ("system", "user") or (is_system and state.n_tokens):
        raise BadMessage(
            f"a message of {message.role!r} has no place here: one of 'system' comes first, all "
            "others are of 'user'"
        )
    deadline = model.clock() + REPLY_S
    settings = state.settings
    if is_system:
        text = model.tokenizer.render_chat(rendered([message], settings.is_omni))
    else:
        text = _opening(state) + content(message.parts, settings.is_omni)
    options = MediaOptions(settings.max_slice_nums, use_image_id=False, is_clip_chunked=False)
    layout = lay_out(model, text, media_of([message]), options)
    if is_system and layout.n_rows > MAX_SYSTEM_SHARE * model.n_positions:
        limit = int(MAX_SYSTEM_SHARE * model.n_positions)
        raise BadMessage(f"the system message has {layout.n_rows} tokens, at most {limit}")
    if layout.n_rows:
        n_new = layout.n_rows + _least_answer(model)
        _plan_drop(model, state, n_new)  # what cannot fit is refused before it is encoded
        pieces = yield from embed(model, layout, options, deadline)
        had_rounds = bool(state.rounds)
        yield from _make_room(model, state, n_new, deadline)
        if had_rounds and not state.rounds:  # the answer to be closed is gone
            text = text.removeprefix(ANSWER_CLOSING)
            pieces = (pieces[0][len(encoded(model, ANSWER_CLOSING)) :], *pieces[1:])
        yield from feed(state.slot, state.n_tokens, pieces, deadline)
        state.n_tokens += n_rows(pieces)
        _register(model, state, n_rows(pieces), is_system)
    return TakenIn(text, state.n_tokens)


def _register(model: MiniCpmO45, state: HalfDuplex, n_fed: int, is_system: bool) -> None:
    """Count what has been fed for the round that it belongs to."""
    if is_system:
        state.n_system = n_fed
        return
    if not state.is_user_turn:
        # What closes the last answer goes with it when its round is dropped.
        n_closing = len(encoded(model, ANSWER_CLOSING)) if state.rounds else 0
        if state.rounds:
            state.rounds[-1] += n_closing
        state.rounds.append(-n_closing)
        state.is_user_turn = True
    state.rounds[-1] += n_fed


def drop_question(model: MiniCpmO45, state: HalfDuplex) -> None:
    """Forget what the user has said in a turn that never got its answer."""
    assert state.is_user_turn, "the last round has its answer"
    state.n_tokens -= state.rounds.pop()
    if state.rounds:
        # The next question brings what closes the answer before.
        n_closing = len(encoded(model, ANSWER_CLOSING))
        state.rounds[-1] -= n_closing
        state.n_tokens -= n_closing
    state.is_user_turn, state.saved = False, None


def _opening(state: HalfDuplex) -> str:
    """What comes before the content of a user's message."""
    if state.is_user_turn:
        return ""
    # The original has a form for answers it knows to be complete, which it never knows.
    return ANSWER_CLOSING + USER_OPENING if state.rounds else USER_OPENING


def _least_answer(model: MiniCpmO45) -> int:
    return len(encoded(model, ANSWER_OPENING)) + CHUNK_TOKENS


def _make_room(model: MiniCpmO45, state: HalfDuplex, n_new: int, deadline: float) -> Program:
    """Drop rounds until the window allows for `n_new` more positions.

    If the program ends in the middle of it, nobody knows where things are: all rounds are gone.

    Raises:
        BadMessage: not even without any older round.
    """
    n_rounds, n_dropped = _plan_drop(model, state, n_new)
    if not n_dropped:
        return
    first = state.n_system + n_dropped
    move = ops.MoveRequest(state.slot, first, state.n_tokens, state.n_system)
    rounds, n_tokens, is_user_turn = state.rounds, state.n_tokens, state.is_user_turn
    # What was saved are lengths: they mean nothing in a context that has moved.
    state.rounds, state.n_tokens, state.is_user_turn, state.saved = [], state.n_system, False, None
    yield Op(ops.MOVE, move, deadline=deadline)
    state.rounds, state.n_tokens = rounds[n_rounds:], n_tokens - n_dropped
    state.is_user_turn = is_user_turn


def _plan_drop(model: MiniCpmO45, state: HalfDuplex, n_new: int) -> tuple[int, int]:
    """Return how many rounds have to go for `n_new` more positions, and their positions.

    Raises:
        BadMessage: not even all older rounds would be enough.
    """
    is_over = state.n_tokens > state.settings.high_tokens
    n_over = state.n_tokens + n_new - model.n_positions
    if not is_over and n_over <= 0:
        return 0, 0
    target = min(state.settings.low_tokens, model.n_positions - n_new)
    n_dropped, n_rounds = 0, 0
    # The newest round stays if it can, and in any case while it waits for its answer.
    while n_rounds < len(state.rounds) - 1 and state.n_tokens - n_dropped > target:
        n_dropped += state.rounds[n_rounds]
        n_rounds += 1
    if n_rounds < len(state.rounds) and not state.is_user_turn and n_dropped < n_over:
        n_dropped += state.rounds[n_rounds]
        n_rounds += 1
    n_dropped = min(n_dropped, state.n_tokens - state.n_system)
    if n_dropped < n_over:
        room = model.n_positions - (state.n_tokens - n_dropped)
        raise BadMessage(
            f"the message and an answer need {n_new} tokens, the context has room for {room}: "
            "send shorter clips or fewer pictures"
        )
    return n_rounds, n_dropped


# ---- answering


def generate(model: MiniCpmO45, state: HalfDuplex, saves: bool = False) -> Program:
    """Answer the user's turn. Emits `Piece`s: a chunk's text, then its sound second by second.

    Closing the program ends the answer where it is.

    Args:
        saves: keep what `restore` needs to take the answer back.

    Raises:
        BadMessage: there is nothing to answer.
    """
    if not state.is_user_turn:
        raise BadMessage("there is nothing to answer: send a message first")
    deadline = model.clock() + REPLY_S
    settings = state.settings
    opening = encoded(model, ANSWER_OPENING)
    n_most = _whole_chunks(settings.max_new_tokens)
    # Even alone with the system message, the round has to fit.
    n_taken = state.n_system + state.rounds[-1] + len(opening)
    n_most = min(n_most, model.n_positions - n_taken)
    yield from _make_room(model, state, len(opening) + n_most, deadline)
    if saves:
        state.saved = _save(state)

    n_before = state.n_tokens
    sampler = Sampler(model, settings, state.draws)
    fed: Fed = yield from feed(state.slot, state.n_tokens, [opening], deadline, sampler.choice())
    state.is_user_turn = False
    _grow(state, len(opening))
    voice = _utterance(model, state)
    stream = TextStream(model.tokenizer)
    texts, samples = [], [NO_SAMPLES]
    token = _chosen(fed)
    is_over = token in sampler.endings
    while not is_over:
        n_next = min(CHUNK_TOKENS, n_most - len(sampler.said))
        words, token = yield from _next_words(model, state, sampler, token, n_next, deadline)
        is_over = token in sampler.endings or len(sampler.said) == n_most
        texts.append("".join(map(stream.push, words.ids)) + (stream.flush() if is_over else ""))
        yield Emit(Piece(texts[-1]))
        deadline = model.clock() + REPLY_S
        if voice is not None:
            made = yield from say(
                *(model, voice, words, state.draws),
                is_last=is_over,
                max_new=MAX_CHUNK_CODES,
            )
            samples.append(made)
            deadline = voice.due(model.clock())
    if model.compat.window_registers_retokenised_text:
        n_registered = len(model.tokenizer.encode("".join(texts)))
        state.rounds[-1] += n_registered - (state.n_tokens - n_before)
    has_ended = token in sampler.endings
    return Turn("".join(texts), np.concatenate(samples), tuple(sampler.said), has_ended)


def _next_words(
    model: MiniCpmO45,
    state: HalfDuplex,
    sampler: Sampler,
    token: int,
    n_most: int,
    deadline: float,
) -> Program:
    """Feed a chosen token and those that follow it; the value is the words and the next token.

    A token's hidden state comes with its being fed, so the token after the last word is known
    already: it either ends the text or begins the next words.
    """
    ids: list[int] = []
    states: list[Tensor] = []
    while len(ids) < n_most and token not in sampler.endings:
        sampler.said.append(token)
        step = Step(state.slot, state.n_tokens, token, sampler.choice())
        fed: Fed = yield Op(ops.DECODE, step, deadline=deadline)
        _grow(state, 1)
        ids.append(token)
        states.append(fed.hidden)
        token = _chosen(fed)
    sampler.close_chunk()
    return Words(tuple(ids), tuple(states), token in sampler.endings), token


def _whole_chunks(n_tokens: int) -> int:
    return rounded_up(n_tokens, CHUNK_TOKENS)


def _chosen(fed: Fed) -> int:
    assert fed.token is not None, "a choice was asked for"
    return fed.token


def _grow(state: HalfDuplex, n_tokens: int) -> None:
    state.n_tokens += n_tokens
    state.rounds[-1] += n_tokens


def _utterance(model: MiniCpmO45, state: HalfDuplex) -> Utterance | None:
    if not (state.settings.generate_audio and model.has_voice):
        return None
    return Utterance(
        slot=state.slot,
        voice=state.voice,
        sampling=state.settings.code_sampling or model.config.speech.text_sampling(),
        attention=model.config.tts_attention,
        reply_s=REPLY_S,
    )


# ---- taking back


def _save(state: HalfDuplex) -> Saved:
    draws = copy.deepcopy(state.draws)
    return Saved(state.n_tokens, tuple(state.rounds), state.is_user_turn, draws)


def restore(state: HalfDuplex) -> None:
    """Take the last answer back, once; the next one draws the same numbers.

    Raises:
        BadMessage: nothing was saved, or rounds were dropped since.
    """
    if state.saved is None:
        raise BadMessage("there is nothing to go back to")
    saved, state.saved = state.saved, None
    state.n_tokens, state.rounds = saved.n_tokens, list(saved.rounds)
    state.is_user_turn, state.draws = saved.is_user_turn, saved.draws
