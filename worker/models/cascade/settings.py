"""What clients may choose: from their settings to how the tokens of an answer are chosen."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final, TypeVar

from shared.errors import BadMessage
from shared.protocol import DuplexSettings, GenerationSettings
from worker.nn.sampling import Sampling

DUPLEX_HONOURED: Final = frozenset(
    {
        "temperature",
        "top_k",
        "top_p",
        "text_repetition_penalty",
        "text_repetition_window_size",
        "decode_mode",
        "force_listen_count",
        "generate_audio",
    }
)
"""Settings that mean something to this back end; all others are named as ignored."""

TURN_HONOURED: Final = frozenset(
    {
        "max_new_tokens",
        "min_new_tokens",
        "do_sample",
        "temperature",
        "top_k",
        "top_p",
        "repetition_penalty",
    }
)
CHAT_HONOURED: Final = TURN_HONOURED | {"max_input_tokens"}

SAMPLED: Final = Sampling(temperature=0.7, top_k=20, top_p=0.8)
"""What sampling means where a client asks for it without saying how (the reference's defaults)."""

MAX_ANSWER_TOKENS: Final = 256
"""Longest answer where a client does not say."""

REPETITION_PENALTY: Final = 1.1
"""For the tokens of an answer, where a client does not say. Without it greedy answers go round: of
30 questions 22 ended by themselves and 7 said a sentence twice; with 1.05 it was 25 and 2, with 1.1
28 and 0, and 24 were right with and without (`tests/bench/bench_chat_answers.py`)."""

N = TypeVar("N", int, float)


@dataclass(frozen=True, slots=True)
class Generation:
    """How an answer's tokens are chosen, and how many there are."""

    sampling: Sampling = field(default_factory=Sampling)
    n_most: int = MAX_ANSWER_TOKENS
    n_least: int = 0
    """Tokens before which the answer does not end by itself."""


def generation_of_duplex(settings: DuplexSettings) -> Generation:
    """Greedy unless the client asks for sampling: a model this small is at its best there."""
    asked = {settings.temperature, settings.top_k, settings.top_p} != {None}
    wants_sampling = settings.decode_mode == "sampling" or asked
    base = SAMPLED if wants_sampling and settings.decode_mode != "greedy" else Sampling()
    temperature = 0.0 if settings.decode_mode == "greedy" else settings.temperature
    return Generation(
        Sampling(
            temperature=said_or(temperature, base.temperature),
            top_k=said_or(settings.top_k, base.top_k),
            top_p=said_or(settings.top_p, base.top_p),
            repetition_penalty=said_or(settings.text_repetition_penalty, REPETITION_PENALTY),
            window=said_or(settings.text_repetition_window_size, MAX_ANSWER_TOKENS),
        )
    )


def generation_of_turns(settings: GenerationSettings) -> Generation:
    """Greedy unless the client asks for sampling, with `do_sample` or by saying how.

    Raises:
        BadMessage: a number with which nothing can be generated.
    """
    n_most = said_or(settings.max_new_tokens, MAX_ANSWER_TOKENS)
    penalty = said_or(settings.repetition_penalty, REPETITION_PENALTY)
    if n_most < 1:
        raise BadMessage(f"max_new_tokens is {n_most}, must be at least 1")
    if not 0 < penalty < math.inf:
        raise BadMessage(f"repetition_penalty is {penalty}, must be a number above 0")
    asked = {settings.temperature, settings.top_k, settings.top_p} != {None}
    wants_sampling = asked if settings.do_sample is None else settings.do_sample
    base = SAMPLED if wants_sampling else Sampling()
    temperature = 0.0 if settings.do_sample is False else settings.temperature
    sampling = Sampling(
        temperature=said_or(temperature, base.temperature),
        top_k=said_or(settings.top_k, base.top_k),
        top_p=said_or(settings.top_p, base.top_p),
        repetition_penalty=penalty,
        window=n_most,
    )
    return Generation(sampling, n_most, said_or(settings.min_new_tokens, 0))


def said_or(said: N | None, default: N) -> N:
    return default if said is None else said
