"""Chat requests and turns as every back end takes them, in terms of `chat.py` and `half_duplex.py`.

Settings of the contract become those of the two modes, their values become the contract's, and what
a server cannot do is named or refused here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from shared.errors import BadAudio, BadMessage
from shared.protocol import GenerationSettings
from worker.engine.contract import Op, Program
from worker.models.contract import (
    ChatQuestion,
    Clip,
    PreparedInfo,
    TurnMessage,
    TurnPrompt,
    WholeAnswer,
)
from worker.models.minicpmo45 import half_duplex
from worker.models.minicpmo45.chat import Answer, ChatRequest, ChatState, SpeechOut, chat
from worker.models.minicpmo45.half_duplex import (
    REPLY_S,
    HalfDuplex,
    HalfDuplexSettings,
    TakenIn,
    Turn,
)
from worker.models.minicpmo45.op_costs import OpCosts
from worker.models.minicpmo45.speaking import NO_SAMPLES
from worker.models.voice_activity import DETECT_SPEECH, DetectRequest, VadState

if TYPE_CHECKING:
    from worker.models.minicpmo45.model import MiniCpmO45

DEFAULT_SYSTEM: Final = (
    "You are a helpful assistant. You hear and read what the user says, and you answer in speech "
    "and text."
)
LANGUAGES: Final = ("en", "zh")
NOT_IN_TURNS: Final = frozenset({"min_new_tokens", "max_input_tokens"})
"""Settings that a turn knows nothing of: its context is cut, and its length is the model's."""
BOUNDS: Final[Mapping[str, tuple[float, float]]] = {
    "max_new_tokens": (1, math.inf),
    "min_new_tokens": (0, math.inf),
    "temperature": (0, 100),
    "top_p": (0, 1),
    "top_k": (0, 2**24),
    "repetition_penalty": (0.01, 100),
    "length_penalty": (0.01, 100),
    "max_input_tokens": (1, math.inf),
}
"""Lowest and highest value that the sampler can compute with."""


# ---- chat


def answer(model: MiniCpmO45, state: ChatState, question: ChatQuestion) -> Program:
    """Answer a chat request: see `TurnModel.chat`."""
    costs = OpCosts(model.clock)
    program = chat(model, state, _request(question))
    # The pictures are held by nobody else: they go when they have been seen.
    question = replace(question, messages=())
    given: Answer = yield from costs.of(program)
    return WholeAnswer(
        text=given.text,
        n_input_tokens=given.n_input_tokens,
        n_generated_tokens=len(given.token_ids) - (0 if given.was_cut else 1),
        audio=NO_SAMPLES if question.is_streaming else given.audio,
        was_cut=given.was_cut,
        prompt=given.prompt,
        timings=costs.timings(),
    )


def _request(question: ChatQuestion) -> ChatRequest:
    """Return the question as this model takes it. Raises BadMessage for impossible settings."""
    limit = question.max_slice_nums
    if limit is not None and limit < 1:
        raise BadMessage(f"max_slice_nums is {limit}, must be at least 1")
    speech = None
    if question.speaks:
        speech = SpeechOut(voice=question.voice if question.voice.size else None)
    return ChatRequest(
        messages=question.messages,
        max_slice_nums=limit,
        use_image_id=question.use_image_id,
        is_omni=question.is_omni,
        enable_thinking=question.enable_thinking,
        use_tts_template=question.use_tts_template,
        speech=speech,
        is_streaming=question.is_streaming,
        **_said(question.generation),
    )


def _said(generation: GenerationSettings) -> dict[str, Any]:
    """Return the settings that a client has given. Raises BadMessage for impossible ones."""
    said = {name: getattr(generation, name) for name in sorted(generation.said())}
    for name, value in said.items():
        if name not in BOUNDS:
            continue
        lowest, highest = BOUNDS[name]
        if not (math.isfinite(value) and lowest <= value <= highest):
            bounds = f"at least {lowest}" if highest == math.inf else f"{lowest} to {highest}"
            raise BadMessage(f"{name} is {value}, must be {bounds}")
    return said


# ---- turns


def prepare(model: MiniCpmO45, state: HalfDuplex, prompt: TurnPrompt) -> Program:
    """Start a conversation anew: see `TurnModel.prepare_turns`.

    A server that cannot take voices speaks with its own one, since clients send a voice as a
    matter of course; the system message holds it all the same.
    """
    said = _said(prompt.generation)
    ignored = set(said) & NOT_IN_TURNS
    settings = HalfDuplexSettings(
        generate_audio=prompt.speaks,
        **{name: value for name, value in said.items() if name not in NOT_IN_TURNS},
    )
    voice = _voice_in(prompt)
    if voice is not None and not model.can_learn_voices:
        voice = None
        ignored.add("reference_voice")
    if prompt.speaks and not model.has_voice:
        ignored.add("speaks")
    system = TurnMessage("system", prompt.system or (DEFAULT_SYSTEM,))
    n_tokens: int = yield from half_duplex.prepare(model, state, system, settings, voice)
    state.vad = VadState.initial()
    return PreparedInfo(
        prompt_chars=sum(len(part) for part in prompt.system if isinstance(part, str)),
        prompt_tokens=n_tokens,
        ignored=tuple(sorted(ignored)),
        voice="client" if voice is not None else model.voice_name,
        languages=LANGUAGES,
    )


def _voice_in(prompt: TurnPrompt) -> NDArray[np.float32] | None:
    """Return the samples of the voice that the answers shall have; None = the default one."""
    if not prompt.speaks:
        return None
    return next((part.samples for part in prompt.system if isinstance(part, Clip)), None)


def detect_speech(model: MiniCpmO45, state: HalfDuplex, samples: NDArray[np.float32]) -> Program:
    """Look for speech: see `TurnModel.detect_speech`."""
    request = DetectRequest(state.vad, samples)
    deadline = model.clock() + REPLY_S
    probabilities, state.vad = yield Op(DETECT_SPEECH, request, deadline=deadline)
    return probabilities


def turn(model: MiniCpmO45, state: HalfDuplex, samples: NDArray[np.float32]) -> Program:
    """Answer what was said: see `TurnModel.turn`.

    What is closed or fails before the answer has begun leaves a question without an answer; the
    next one is asked together with it, as long as the context has room for both.

    Raises:
        BadMessage: the question is longer than the context.
        BadAudio: there are no samples.
    """
    costs = OpCosts(model.clock)
    return (yield from costs.of(_turn(model, state, samples, costs)))


def _turn(
    model: MiniCpmO45, state: HalfDuplex, samples: NDArray[np.float32], costs: OpCosts
) -> Program:
    question = TurnMessage("user", (Clip(samples),))
    try:
        taken: TakenIn = yield from half_duplex.prefill(model, state, question)
    except BadAudio:
        raise
    except BadMessage:
        if not state.is_user_turn:
            raise
        half_duplex.drop_question(model, state)
        taken = yield from half_duplex.prefill(model, state, question)
    said: Turn = yield from half_duplex.generate(model, state)
    return WholeAnswer(
        text=said.text,
        # All of the answer is in the context, but for what ended it.
        n_input_tokens=state.n_tokens - len(said.token_ids),
        n_generated_tokens=len(said.token_ids),
        was_cut=not said.has_ended,
        prompt=taken.prompt,
        timings=costs.timings(),
    )
