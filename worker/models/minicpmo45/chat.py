"""One answer to a list of messages: text as it comes, then a voice that says it.

Follows the chat mode of the MiniCPM-o 4.5 reference with its defaults but one: it samples from one
beam instead of three. The whole history comes with every request, so a slot's context is filled
anew each time. All ops may wait for those of live units.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from shared.errors import BadMessage
from worker.engine.contract import Emit, Op, Program
from worker.models.contract import Piece, Taken, TurnMessage
from worker.models.minicpmo45 import ops
from worker.models.minicpmo45.draws import Draws, SeededDraws
from worker.models.minicpmo45.feeding import feed
from worker.models.minicpmo45.ops import Choice, Fed, Step
from worker.models.minicpmo45.prompt import (
    Layout,
    MediaOptions,
    embed,
    has_audio,
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
from worker.nn.code_sampling import CodeSampling
from worker.nn.sampling import Sampling

if TYPE_CHECKING:
    from worker.models.minicpmo45.model import MiniCpmO45
    from worker.models.minicpmo45.tokenizer import Tokenizer

MAX_INPUT_TOKENS: Final = 8192
MIN_CODES: Final = 50
MAX_CODES: Final = 2048
DEADLINE: Final = math.inf
"""Chat has none: it runs when no unit waits."""
STRIPPED_CHARACTERS: Final = "<|tseo_>"
"""Of the original's `rstrip("<|tts_eos|>")`, which strips a set of characters, not that text."""


@dataclass(frozen=True, slots=True)
class SpeechOut:
    """That the answer shall be spoken, and how."""

    voice: NDArray[np.float32] | None = None
    """16 kHz sample of a voice; None = the default voice."""
    sampling: CodeSampling | None = None
    """None = as the checkpoint says."""
    vocoder: str = "token2wav"


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """What a client asks; the defaults are the original's, but for the single beam."""

    messages: tuple[TurnMessage, ...]
    max_new_tokens: int = 512
    min_new_tokens: int = 0
    do_sample: bool = True
    temperature: float = 0.7
    top_p: float = 0.8
    top_k: int = 100
    repetition_penalty: float = 1.02
    length_penalty: float = 1.0
    """Above 1: the answer becomes longer. One beam alone has no lengths to compare, so it acts on
    what ends the answer, as in half duplex."""
    num_beams: int = 1
    max_input_tokens: int = MAX_INPUT_TOKENS
    max_slice_nums: int | None = None
    """Most tiles of a picture; None = as the checkpoint says."""
    use_image_id: bool | None = None
    """Whether pictures are numbered; None = as the checkpoint says."""
    is_omni: bool = False
    """Parts of a message follow each other without a line end."""
    enable_thinking: bool = False
    use_tts_template: bool = False
    """Open the answer as a spoken one; audio in a message or a voice does so anyhow."""
    speech: SpeechOut | None = None
    is_streaming: bool = True
    """Emit text and sound as they come."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Value of a `chat` program."""

    text: str
    audio: NDArray[np.float32]
    """24 kHz; empty without a voice."""
    prompt: str
    """The rendered messages, with a mark for each picture and clip."""
    n_input_tokens: int
    token_ids: tuple[int, ...]
    """All that was generated, what ended it included."""
    was_cut: bool
    """It did not end by itself."""


@dataclass(slots=True)
class ChatState:
    """What a slot keeps for chat."""

    slot: int
    draws: Draws
    n_tokens: int = 0
    """Filled positions of the context."""
    voice: Any = None


def new_state(slot: int, seed: int) -> ChatState:
    return ChatState(slot, SeededDraws(seed))


def chat(model: MiniCpmO45, state: ChatState, request: ChatRequest) -> Program:
    """Answer a request.

    Emits `Taken`, then `Piece`s if it streams; the value is an `Answer`. Closing the program
    stops it for good.

    Raises:
        BadMessage: messages or settings that cannot be answered, a prompt that is too long.
        BadImage, BadAudio: a picture or clip that cannot be used.
        VoiceUnavailable: a voice is asked for that this server cannot make.
    """
    check(model, request)
    is_spoken = request.speech is not None
    text = model.tokenizer.render_chat(
        rendered(request.messages, request.is_omni),
        add_generation_prompt=True,
        enable_thinking=request.enable_thinking,
        use_tts_template=request.use_tts_template or is_spoken or has_audio(request.messages),
    )
    options = media_options(model, request)
    layout = lay_out(model, text, media_of(request.messages), options)
    check_length(model, request, layout)
    if request.speech is not None:
        state.voice = yield from model.learn_voice(request.speech.voice, DEADLINE)
    pieces = yield from embed(model, layout, options, DEADLINE)
    n_input = layout.n_rows
    # The answer takes its time, and nobody needs the pictures any more.
    request = replace(request, messages=())
    del layout

    written = yield from _write(model, state, request, pieces, n_input)
    audio = NO_SAMPLES
    if request.speech is not None and written.states:
        audio = yield from _read_out(model, state, request, request.speech, written)
    return Answer(
        text=answer_text(model.tokenizer, written.ids, model.compat.answer_strips_character_set),
        audio=audio,
        prompt=text,
        n_input_tokens=n_input,
        token_ids=tuple(written.ids),
        was_cut=not written.has_ended,
    )


def check(model: MiniCpmO45, request: ChatRequest) -> None:
    """Refuse what cannot be done. Raises BadMessage."""
    if not request.messages:
        raise BadMessage("there are no messages to answer")
    if request.num_beams != 1:
        raise BadMessage(f"num_beams is {request.num_beams}; only 1 is supported: leave it away")
    if request.max_new_tokens < 1:
        raise BadMessage(f"max_new_tokens is {request.max_new_tokens}, must be at least 1")
    if request.speech is None:
        return
    if request.speech.vocoder != "token2wav":
        raise BadMessage(
            f"the vocoder {request.speech.vocoder!r} is not supported: use 'token2wav'"
        )
    if not model.has_voice:
        raise BadMessage("this server has no voice (token2wav files): ask for text only")


def media_options(model: MiniCpmO45, request: ChatRequest) -> MediaOptions:
    most, numbered = request.max_slice_nums, request.use_image_id
    return MediaOptions(
        max_slice_nums=model.config.slices.max_slice_nums if most is None else most,
        use_image_id=model.config.use_image_id if numbered is None else numbered,
        is_clip_chunked=True,
    )


def check_length(model: MiniCpmO45, request: ChatRequest, layout: Layout) -> None:
    """Refuse a prompt that is too long. Raises BadMessage."""
    limit = min(request.max_input_tokens, model.n_positions - 1)
    if layout.n_rows > limit:
        raise BadMessage(
            f"the messages have {layout.n_rows} tokens, at most {limit}: shorten them, send fewer "
            "pictures or a lower max_slice_nums"
        )


# ---- text


@dataclass(slots=True)
class Written:
    """An answer's text as it grows."""

    ids: list[int] = field(default_factory=list)
    """What ended it included."""
    states: list[Tensor] = field(default_factory=list)
    """Hidden state at each id but the one that ended it, if there is to be a voice."""
    has_ended: bool = False


def _write(
    model: MiniCpmO45,
    state: ChatState,
    request: ChatRequest,
    pieces: Sequence[ops.Piece],
    n_input: int,
) -> Program:
    """Feed the prompt and generate; the value is what was `Written`."""
    ids = model.tokenizer.ids
    endings = frozenset((ids.im_end, ids.endoftext))
    sampling = Sampling(
        temperature=request.temperature if request.do_sample else 0.0,
        top_k=request.top_k,
        top_p=request.top_p,
        repetition_penalty=request.repetition_penalty,
        window=request.max_new_tokens,
        endings=tuple(sorted(endings)),
        length_penalty=request.length_penalty,
    )
    written = Written()

    def choice() -> Choice:
        # The prompt is fed as embeddings: the penalty knows what was generated only.
        recent = np.array(written.ids, np.int64)
        is_early = len(written.ids) < request.min_new_tokens
        return Choice(sampling, state.draws.text(), recent, endings if is_early else None)

    fed: Fed = yield from feed(state.slot, 0, pieces, DEADLINE, choice())
    state.n_tokens = n_input
    yield Emit(Taken(n_input))
    stream = TextStream(model.tokenizer)
    n_most = min(request.max_new_tokens, model.n_positions - n_input)
    while len(written.ids) < n_most:
        assert fed.token is not None, "a choice was asked for"
        token = fed.token
        written.ids.append(token)
        written.has_ended = token in endings
        if written.has_ended:
            break
        text = stream.push(token)
        if request.is_streaming and text:
            yield Emit(Piece(text))
        is_last = len(written.ids) == n_most
        if is_last and request.speech is None:
            break
        step = Step(state.slot, state.n_tokens, token, None if is_last else choice())
        fed = yield Op(ops.DECODE, step, deadline=DEADLINE)
        state.n_tokens += 1
        if request.speech is not None:
            written.states.append(fed.hidden)
    rest = stream.flush()
    if request.is_streaming and rest:
        yield Emit(Piece(rest))
    return written


def answer_text(tokenizer: Tokenizer, generated: Sequence[int], strips_set: bool = False) -> str:
    """Return the text of an answer, without what ended it.

    Args:
        strips_set: as the original: id 0 is dropped, other special tokens are shown, and trailing
            characters of `STRIPPED_CHARACTERS` go.
    """
    ids = tokenizer.ids
    said = list(generated)
    if said and said[-1] in (ids.im_end, ids.endoftext):
        said.pop()
    if not strips_set:
        return tokenizer.decode(said)
    text = tokenizer.decode([index for index in said if index != 0], skip_special=False)
    return text.rstrip(STRIPPED_CHARACTERS)


# ---- voice


def _read_out(
    model: MiniCpmO45,
    state: ChatState,
    request: ChatRequest,
    speech: SpeechOut,
    written: Written,
) -> Program:
    """Say the whole answer in one run; the value is its samples."""
    utterance = Utterance(
        slot=state.slot,
        voice=state.voice,
        sampling=speech.sampling or model.config.speech.text_sampling(),
        attention="full_attention",
        is_streamed=request.is_streaming,
    )
    said, states = spoken_part(model.tokenizer, written)
    # An answer longer than half of the speech head's cache is said in parts.
    size = model.n_speech_positions // 2
    samples = [NO_SAMPLES]
    for first in range(0, len(said), size):
        is_last = first + size >= len(said)
        words = Words(said[first : first + size], states[first : first + size], is_last)
        made = yield from say(
            *(model, utterance, words, state.draws),
            is_last=is_last,
            max_new=MAX_CODES,
            min_new=MIN_CODES,
        )
        samples.append(made)
    return np.concatenate(samples)


def spoken_part(
    tokenizer: Tokenizer, written: Written
) -> tuple[tuple[int, ...], tuple[Tensor, ...]]:
    """Return ids and states of what is said aloud: no thoughts, nothing behind `<|tts_eos|>`."""
    ids = written.ids[: len(written.states)]
    end = ids.index(tokenizer.ids.tts_eos) if tokenizer.ids.tts_eos in ids else len(ids)
    thoughts = [i for i, index in enumerate(ids[:end]) if index == tokenizer.ids.think_end]
    start = thoughts[-1] + 1 if thoughts else 0
    return tuple(ids[start:end]), tuple(written.states[start:end])
