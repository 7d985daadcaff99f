"""What the cascade hears: transcription (Whisper tiny.en).

A transcription is a program of many small ops (encoder block by encoder block, then token by
token), so that other sessions get their turns in between.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from worker.engine.contract import Op
from worker.models.cascade.weights import WhisperWeights
from worker.nn.mel import SAMPLE_RATE_HZ
from worker.nn.whisper import (
    POSITIONS_PER_S,
    WINDOWS_S,
    TextRows,
    WhisperCache,
    log_mel,
    window_for,
)

ENCODE_SPEECH = "encode_speech"
TRANSCRIBE_STEP = "transcribe_step"

Samples = NDArray[np.float32]

# ---- transcription

END_OF_TEXT = 50_256
START = 50_257
NO_SPEECH = 50_361
NO_TIMESTAMPS = 50_362
FIRST_TIMESTAMP = 50_363

TOKENS_PER_S = 8
SPARE_TOKENS = 8
"""Fast speech is about 5 tokens a second; whatever goes on longer is a loop."""
NO_SPEECH_ABOVE = 0.6
UNSURE_BELOW = -1.0
"""Whisper's own rule: silence if it says so and the mean log-probability is below this."""
MIN_SAMPLES = SAMPLE_RATE_HZ // 10
SILENT_PEAK = 1e-4

WINDOW_SAMPLES = WINDOWS_S[-1] * SAMPLE_RATE_HZ
CUT_SEARCH_SAMPLES = 5 * SAMPLE_RATE_HZ
"""Audio longer than the longest window is cut at the quietest place of a window's last 5 s."""
PART_S = 5.0
"""Time between the deadlines of two such parts. One takes up to 2.5 s, and only the speech that
others need sooner, some 0.1 s a phrase, passes it."""


@dataclass(frozen=True, slots=True, eq=False)
class EncodeRequest:
    """One stage of encoding a slot's speech; the op's result is the value of the next stage.

    Stage 0 turns samples into features and the first block's input, stages 1 to n run block n,
    the last one puts keys and values into the slot's caches and gives None.
    """

    slot: int
    stage: int
    window_s: int
    value: Samples | Tensor


@dataclass(frozen=True, slots=True)
class StepRequest:
    """Feed one text token of the slot's transcription; the op's result is a `Heard`."""

    slot: int
    token: int
    position: int
    n_frames: int


@dataclass(frozen=True, slots=True)
class Heard:
    """The likeliest next token."""

    token: int
    log_probability: float
    no_speech: float
    """Probability that nothing is said; meaningful after the start token only."""


class Transcriber:
    """Whisper over slots: its ops, and the program that turns samples into text."""

    def __init__(self, weights: WhisperWeights, settings_file: Path) -> None:
        self._whisper = weights.whisper
        self._tokenizer = weights.tokenizer
        settings = json.loads(settings_file.read_text(encoding="utf-8"))
        self._banned = torch.zeros(self._whisper.config.vocab_size, dtype=torch.bool)
        self._banned[settings["suppress_ids"]] = True
        self._banned[FIRST_TIMESTAMP:] = True
        self._banned_first = self._banned.clone()
        self._banned_first[settings["suppress_ids_begin"]] = True
        self._cache: WhisperCache | None = None

    @property
    def cache(self) -> WhisperCache:
        assert self._cache is not None, "allocate() comes before any op"
        return self._cache

    def allocate(self, n_slots: int) -> None:
        """Make the caches of `n_slots` sessions."""
        self._cache = WhisperCache.allocate(self._whisper.config, n_slots)

    # ---- program

    def transcribe(
        self, slot: int, samples: Samples, deadline: float = math.inf
    ) -> Generator[Op, Any, str]:
        """Sub-program that returns what is said in the samples; "" when nothing is.

        One at a time per slot.

        Args:
            samples: 16 kHz, any length; more than 30 s are cut at quiet places.
            deadline: engine clock, of the ops of the first 30 s; the next ones are due later, so
                that a long utterance lets others speak.
        """
        texts = []
        for index, part in enumerate(cut_at_quiet(samples)):
            text = yield from self._transcribe_window(slot, part, deadline + index * PART_S)
            texts.append(text)
        return " ".join(text for text in texts if text)

    def _transcribe_window(
        self, slot: int, samples: Samples, deadline: float
    ) -> Generator[Op, Any, str]:
        if len(samples) < MIN_SAMPLES or float(np.abs(samples).max()) < SILENT_PEAK:
            return ""
        window_s = window_for(len(samples))
        value: Samples | Tensor = samples
        for stage in range(self._whisper.config.n_encoder_layers + 2):
            request = EncodeRequest(slot, stage, window_s, value)
            value = yield Op(ENCODE_SPEECH, request, window_s, deadline)

        n_frames = window_s * POSITIONS_PER_S
        step = StepRequest(slot, START, 0, n_frames)
        first: Heard = yield Op(TRANSCRIBE_STEP, step, None, deadline)
        limit = math.ceil(len(samples) / SAMPLE_RATE_HZ * TOKENS_PER_S) + SPARE_TOKENS
        limit = min(limit, self._whisper.config.max_tokens - 2)
        tokens: list[int] = []
        token, log_probability = NO_TIMESTAMPS, 0.0
        while len(tokens) < limit:
            step = StepRequest(slot, token, len(tokens) + 1, n_frames)
            heard: Heard = yield Op(TRANSCRIBE_STEP, step, None, deadline)
            token = heard.token
            log_probability += heard.log_probability
            if token == END_OF_TEXT:
                break
            tokens.append(token)
            if n_looping := loop_length(tokens):
                del tokens[-n_looping:]
                break
        if first.no_speech > NO_SPEECH_ABOVE and log_probability / (len(tokens) + 1) < UNSURE_BELOW:
            return ""
        return clean(self._tokenizer.decode(tokens))

    # ---- ops

    def encode(self, request: EncodeRequest) -> Tensor | None:
        """Run one stage of the encoder."""
        encoder, value = self._whisper.encoder, request.value
        if request.stage == 0:
            assert isinstance(value, np.ndarray)
            features = log_mel(value, request.window_s, self._whisper.config.n_mels)
            return encoder.stem(features)
        assert isinstance(value, Tensor)
        if request.stage <= len(encoder.layers):
            return encoder.layers[request.stage - 1](value)
        self._whisper.hear(self.cache, request.slot, encoder.norm(value))
        return None

    def step(self, requests: Sequence[StepRequest]) -> list[Heard]:
        """Run one text step of every row."""
        rows = TextRows(
            tuple(r.slot for r in requests),
            tuple(r.position for r in requests),
            tuple(r.n_frames for r in requests),
        )
        logits = self._whisper.step(self.cache, [r.token for r in requests], rows)
        no_speech = logits.softmax(dim=-1)[:, NO_SPEECH]
        banned = torch.stack(
            [self._banned_first if r.token == NO_TIMESTAMPS else self._banned for r in requests]
        )
        best = logits.masked_fill(banned, -torch.inf).log_softmax(dim=-1).max(dim=-1)
        columns = (best.indices.tolist(), best.values.tolist(), no_speech.tolist())
        return [Heard(*row) for row in zip(*columns, strict=True)]


def cut_at_quiet(samples: Samples) -> list[Samples]:
    """Return the samples in parts of at most `WINDOW_SAMPLES`, cut where it is quietest."""
    parts = []
    block = SAMPLE_RATE_HZ // 10
    while len(samples) > WINDOW_SAMPLES:
        tail = samples[WINDOW_SAMPLES - CUT_SEARCH_SAMPLES : WINDOW_SAMPLES].reshape(-1, block)
        quietest = int(np.square(tail).sum(axis=1).argmin())
        cut = WINDOW_SAMPLES - CUT_SEARCH_SAMPLES + quietest * block + block // 2
        parts.append(samples[:cut])
        samples = samples[cut:]
    return [*parts, samples]


def loop_length(tokens: Sequence[int]) -> int:
    """Return how many tokens at the end only repeat what stands before them; 0 = no loop.

    A loop is one token five times, or up to eight tokens four times in a row.
    """
    for period in range(1, 9):
        n_times = 5 if period == 1 else 4
        tail = tokens[-period * n_times :]
        if len(tail) == period * n_times and all(
            tail[i] == tail[i % period] for i in range(len(tail))
        ):
            return period * (n_times - 1)
    return 0


def clean(text: str) -> str:
    """Return a transcript without descriptions of sounds; "" if no letter or digit is left."""
    text = re.sub(r"\[[^\]]*\]|\([^)]*\)", " ", text)
    text = " ".join(text.split())
    return text if any(char.isalnum() for char in text) else ""
