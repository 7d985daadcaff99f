"""One answer to a list of messages. The whole history comes with every request."""

from __future__ import annotations

import math
import random
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import msgspec

from shared.errors import BadMessage
from worker.engine.contract import Emit, Program
from worker.models.cascade.answer import (
    DEFAULT_SYSTEM,
    MIN_ANSWER_TOKENS,
    Talk,
    check_chars,
    take_in,
    write,
)
from worker.models.cascade.context import Context
from worker.models.cascade.messages import Reading, text_length
from worker.models.cascade.reply import Reply
from worker.models.cascade.settings import CHAT_HONOURED, generation_of_turns, said_or
from worker.models.contract import ChatQuestion, Taken, WholeAnswer

if TYPE_CHECKING:
    from worker.models.cascade.model import CascadeModel

DEADLINE: Final = math.inf
"""Chat has none: it runs when no live unit waits."""


def new_state(slot: int) -> Talk:
    return Talk(slot, seed=random.getrandbits(31))


def chat(model: CascadeModel, talk: Talk, question: ChatQuestion) -> Program:
    """Answer a request; closing the program stops it for good.

    Emits `Taken`, then `Piece`s if it streams: phrases with their sound, or text token by token.
    The value is a `WholeAnswer`.

    Raises:
        BadMessage: no messages, more than the context holds, or settings that make no sense.
    """
    begun = talk.clock()
    if not question.messages:
        raise BadMessage("there are no messages to answer")
    generation = generation_of_turns(question.generation)
    n_chars = sum(text_length(message.parts) for message in question.messages)
    check_chars(n_chars, model.context_tokens, "messages")

    reply = Reply(question.speaks, DEADLINE, question.is_streaming)
    reading = Reading(model, talk.slot, talk.clock, reply.costs, DEADLINE)
    messages: list[tuple[str, str]] = []
    if question.messages[0].role != "system":
        messages.append(("system", DEFAULT_SYSTEM))
    ignored, heard = _ignored(question), ""
    unread = deque(question.messages)
    # The pictures are held by nobody else: each message goes when it has been read.
    question = replace(question, messages=())
    while unread:
        role = unread[0].role
        found = yield from reading.read(role, unread.popleft().parts)
        messages.append((role, found.text))
        ignored |= found.ignored
        heard = found.heard if role == "user" else heard

    language = model.language
    tokens = [i for role, text in messages for i in language.message_tokens(role, text)]
    tokens += language.answer_opening
    _check_length(model, question, len(tokens))
    talk.generation, talk.speaks, talk.context = generation, question.speaks, Context(tokens)
    token = yield from take_in(model, talk, reply)
    yield Emit(Taken(len(tokens)))
    n_most = min(generation.n_most, model.context_tokens - len(tokens))
    yield from write(model, talk, reply, token, n_most)
    total_ms = 1000 * (talk.clock() - begun)
    return WholeAnswer(
        text=reply.text,
        n_input_tokens=len(tokens),
        n_generated_tokens=len(reply.tokens),
        audio=reply.audio,
        was_cut=reply.was_cut,
        heard=heard,
        ignored=tuple(sorted(ignored)),
        prompt=rendered(messages),
        timings=msgspec.structs.replace(reply.costs.reported(), total_ms=total_ms),
    )


def rendered(messages: list[tuple[str, str]]) -> str:
    """Return messages (role, text) and the opening of the answer as the model reads them."""
    texts = (f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in messages)
    return "".join(texts) + "<|im_start|>assistant\n"


def _check_length(model: CascadeModel, question: ChatQuestion, n_tokens: int) -> None:
    room = model.context_tokens - MIN_ANSWER_TOKENS
    asked = said_or(question.generation.max_input_tokens, room)
    if n_tokens > min(asked, room):
        raise BadMessage(
            f"the messages have {n_tokens} tokens, at most {min(asked, room)}: shorten them "
            f"(max_input_tokens is {asked}, the context {model.context_tokens} with the answer)"
        )


def _ignored(question: ChatQuestion) -> set[str]:
    """Name what was asked for and has no meaning here, as clients name it."""
    has_said = {
        "ref_audio_data": question.voice.size > 0,
        "max_slice_nums": question.max_slice_nums is not None,
        "use_image_id": question.use_image_id is not None,
        "omni_mode": question.is_omni,
        "enable_thinking": question.enable_thinking,
        "use_tts_template": question.use_tts_template,
    }
    named = {name for name, is_said in has_said.items() if is_said}
    return named | set(question.generation.said() - CHAT_HONOURED)
