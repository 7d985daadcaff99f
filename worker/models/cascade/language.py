"""The cascade's language model: chat pieces, incremental text, and the prefill and decode ops.

The chat form is ChatML, as SmolLM2 was trained: `<|im_start|>role\\n…<|im_end|>\\n`. A session's
history is a row of the cache, fed piece by piece; nothing here remembers a session.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from tokenizers import Tokenizer
from torch import Tensor

from worker.compile.buckets import batch_sizes, fit
from worker.compile.compiler import Compiler
from worker.compile.graphs import Input, Inputs, Layout, Outputs, Stage, fill
from worker.compile.regions import Dim, Region
from worker.models.cascade.weights import LanguageWeights
from worker.nn.decoder import Decoder, KvCache, Rows
from worker.nn.sampling import Sampling, sample, uniform

PREFILL = "prefill"
DECODE = "decode"
MAX_PREFILL_TOKENS = 32
"""Most tokens of one prefill op: 0.14 s of one core of the build machine, so that the speaking
neighbours wait two of their own steps at most."""

MAX_DECODE_ROWS = 8
"""Most rows of one decode op."""

SPANS = (256, 512, 1024)
"""How many positions compiled steps look at, besides the whole context: few different shapes."""


@dataclass(frozen=True, slots=True)
class PrefillRequest:
    """Feed known tokens; the op's result is the id that follows the last one, or None."""

    slot: int
    tokens: tuple[int, ...]
    start: int
    """Position of the first token in the slot."""
    sampling: Sampling | None = None
    """None: no next token is wanted, and the op's result is None."""
    recent: tuple[int, ...] = ()
    seed: int = 0


@dataclass(frozen=True, slots=True)
class DecodeRequest:
    """Feed one token; the op's result is the id of the next one."""

    slot: int
    token: int
    position: int
    sampling: Sampling
    recent: tuple[int, ...] = ()
    """What the session has said, latest last, for the repetition penalty."""
    seed: int = 0
    """The session's own; a draw is a function of seed and position."""


@lru_cache(maxsize=1)
def byte_of_char() -> dict[str, int]:
    """Return the byte each character of a byte-level vocabulary stands for.

    Printable Latin-1 characters stand for themselves; the other bytes, in order, for the
    characters from U+0100 on (the convention of GPT-2's encoder).
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(0x100 + index): byte for index, byte in enumerate(others)}


class Detokeniser:
    """Text of a growing list of tokens, never half a character. Copy it with `copy.copy`."""

    def __init__(self, tokenizer: Tokenizer, silent: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._silent = silent
        self._pending = b""

    def push(self, token: int) -> str:
        """Return the text that this token completes; marks such as `<|im_end|>` give none."""
        word = None if token in self._silent else self._tokenizer.id_to_token(token)
        table = byte_of_char()
        data = self._pending + bytes(table[char] for char in word or "")
        text, n_used = codecs.utf_8_decode(data, "replace", False)
        self._pending = data[n_used:]
        return text

    def flush(self) -> str:
        """Return what is left when no token follows: a replacement character, or nothing."""
        text, _ = codecs.utf_8_decode(self._pending, "replace", True)
        self._pending = b""
        return text


class Language:
    """Tokens, caches and the two ops of the language lane."""

    def __init__(self, weights: LanguageWeights, context_tokens: int) -> None:
        self.decoder: Decoder = weights.decoder
        self.context_tokens = context_tokens
        self._stage: Stage | None = None
        """Compiled steps, which look at whole spans; None: exact slices of the caches, eagerly."""
        self._tokenizer = weights.tokenizer
        self._begin = self._mark("<|im_start|>")
        self.end_of_turn = self._mark("<|im_end|>")
        self._end_of_text = self._mark("<|endoftext|>")
        self._newline = self.text_tokens("\n")
        added = self._tokenizer.get_added_tokens_decoder()
        self._silent = frozenset(index for index, token in added.items() if token.special)
        self._cache: KvCache | None = None

    def _mark(self, text: str) -> int:
        index = self._tokenizer.token_to_id(text)
        assert index is not None, f"the tokenizer has no {text}"
        return int(index)

    def allocate(self, n_slots: int, compiler: Compiler) -> None:
        """Make the caches of `n_slots` sessions, and declare what can be compiled."""
        self._cache = KvCache.allocate(self.decoder.config, n_slots, self.context_tokens)
        self._rows = batch_sizes(min(n_slots, MAX_DECODE_ROWS))
        self._spans = (*(n for n in SPANS if n < self.context_tokens), self.context_tokens)
        dims = (Dim("x", 0, 1, self._rows[-1]), Dim("visible", 3, SPANS[0], self.context_tokens))
        compiler.region(Region("llm.decode", "llm", self.decoder.decode_layers, dims))
        if compiler.plan is None:
            return
        buckets = [(rows, span) for rows in self._rows for span in self._spans]
        self._stage = compiler.stage(
            "llm.decode", _decode_inputs, self._decode_stage, buckets, torch.device("cpu")
        )

    @property
    def cache(self) -> KvCache:
        assert self._cache is not None, "allocate() comes before any op"
        return self._cache

    # ---- text and tokens

    def text_tokens(self, text: str) -> tuple[int, ...]:
        """Return the tokens of plain text; marks in it are text as well."""
        return tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def system_tokens(self, text: str) -> tuple[int, ...]:
        """Return a whole system message."""
        return self.message_tokens("system", text)

    def user_tokens(self, text: str) -> tuple[int, ...]:
        return self.message_tokens("user", text)

    def message_tokens(self, role: str, text: str) -> tuple[int, ...]:
        """Return a whole message of system, user or assistant."""
        return (self._begin, *self.text_tokens(f"{role}\n{text}"), *self.turn_end_tokens)

    @property
    def answer_opening(self) -> tuple[int, ...]:
        """What comes before the first token of an answer."""
        return (self._begin, *self.text_tokens("assistant\n"))

    @property
    def turn_end_tokens(self) -> tuple[int, ...]:
        """What closes an answer in the cache, whether it was finished or cut off."""
        return (self.end_of_turn, *self._newline)

    @property
    def endings(self) -> tuple[int, ...]:
        """Tokens that end an answer."""
        return (self.end_of_turn, self._end_of_text)

    def is_end(self, token: int) -> bool:
        return token in self.endings

    def detokeniser(self) -> Detokeniser:
        return Detokeniser(self._tokenizer, self._silent)

    # ---- ops

    def prefill(self, request: PrefillRequest) -> int | None:
        """Run one prefill op.

        Raises:
            ValueError: no tokens, too many for one op, or beyond the context.
        """
        n, end = len(request.tokens), request.start + len(request.tokens)
        if not 1 <= n <= MAX_PREFILL_TOKENS:
            raise ValueError(f"prefill of {n} tokens, expected 1 to {MAX_PREFILL_TOKENS}")
        self._check(request.slot, request.start, end)
        hidden = self.decoder.prefill(
            self.cache,
            torch.tensor([request.tokens]),
            torch.tensor([request.slot]),
            torch.tensor([request.start]),
            Rows((request.slot,), (end,)),
        )
        if request.sampling is None:
            return None
        draw = uniform(request.seed, end - 1)
        logits = self.decoder.head(hidden)
        return int(sample(logits, [request.sampling], [request.recent], [draw])[0])

    def decode(self, requests: Sequence[DecodeRequest]) -> list[int | ValueError]:
        """Run one step of all rows; a row beyond the context gets its error, the others go on."""
        results: list[int | ValueError] = [0] * len(requests)
        good = []
        for index, request in enumerate(requests):
            try:
                self._check(request.slot, request.position, request.position + 1)
                good.append(index)
            except ValueError as error:
                results[index] = error
        if not good:
            return results
        rows = [requests[index] for index in good]
        logits = self._logits(rows) if self._stage is None else self._staged_logits(rows)
        chosen = sample(
            logits,
            [row.sampling for row in rows],
            [row.recent for row in rows],
            [uniform(row.seed, row.position) for row in rows],
        )
        for index, token in zip(good, chosen.tolist(), strict=True):
            results[index] = int(token)
        return results

    def _logits(self, rows: Sequence[DecodeRequest]) -> Tensor:
        reach = Rows(tuple(row.slot for row in rows), tuple(row.position + 1 for row in rows))
        hidden = self.decoder.decode(
            self.cache,
            torch.tensor([row.token for row in rows]),
            torch.tensor(reach.slots),
            torch.tensor([row.position for row in rows]),
            reach,
        )
        logits: Tensor = self.decoder.head(hidden)
        return logits

    def _staged_logits(self, rows: Sequence[DecodeRequest]) -> Tensor:
        assert self._stage is not None
        n, span = len(rows), fit(max(row.position for row in rows) + 1, self._spans)
        call = self._stage.at((fit(n, self._rows) or n, span))
        host = call.begin()
        fill(host["tokens"], [row.token for row in rows])
        fill(host["slots"], [row.slot for row in rows])
        # Rows that fill the bucket up are padding.
        fill(host["positions"], [row.position for row in rows], self.cache.spare)
        return call.run()[0][:n]

    def _decode_stage(self, bucket: tuple[int, int], inputs: Inputs) -> Outputs:
        tokens, slots, positions = inputs["tokens"], inputs["slots"], inputs["positions"]
        hidden = self.decoder.decode(self.cache, tokens, slots, positions, bucket[1])
        return (self.decoder.head(hidden),)

    def _check(self, slot: int, start: int, end: int) -> None:
        if start < 0 or end > self.context_tokens:
            raise ValueError(
                f"positions {start} to {end - 1} of slot {slot} are outside of the context of "
                f"{self.context_tokens} tokens"
            )


def _decode_inputs(bucket: tuple[int, int]) -> Layout:
    row = Input((bucket[0],), torch.int64)
    return {"tokens": row, "slots": row, "positions": row}
