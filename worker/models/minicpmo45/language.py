"""The language model's ops: feed rows, feed a token, choose the next one. For all slots at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shared.config import Compat
from worker.models.minicpmo45.ops import Choice, Fed, Feed, Step
from worker.models.minicpmo45.tokenizer import Tokenizer
from worker.nn.decoder import Decoder, KvCache, Rows
from worker.nn.sampling import Sampling, sample
from worker.nn.shapes import rounded_up
from worker.nn.text_sampling import (
    DuplexSampling,
    DuplexVocabulary,
    decide_stages,
    decision_inputs,
)
from worker.nn.transfer import ints

SPAN_STEP = 256
"""On an accelerator attention is told a multiple of this to look at, so that few shapes occur."""


class Language:
    """Weights and caches.

    Args:
        n_positions: size of every slot's context.
    """

    def __init__(
        self, llm: Decoder, tokenizer: Tokenizer, compat: Compat, n_slots: int, n_positions: int
    ) -> None:
        weight = llm.head.weight
        self.llm = llm
        self.compat = compat
        self.device, self.dtype = weight.device, weight.dtype
        self.cache = KvCache.allocate(llm.config, n_slots, n_positions, self.dtype, self.device)
        ids = tokenizer.ids
        self._vocabulary = DuplexVocabulary.build(
            llm.config.vocab_size,
            tuple(tokenizer.bad_ids),
            tts_pad=ids.tts_pad,
            chunk_eos=ids.chunk_eos,
            turn_eos=ids.turn_eos,
            listen=ids.listen,
            im_end=ids.im_end,
            device=self.device,
        )
        self._id_sets: dict[frozenset[int], Tensor] = {}

    def prefill(self, requests: Sequence[Feed]) -> list[Fed]:
        """Run feeds of different slots."""
        if self.device.type == "cpu":
            # Rows share nothing there, and padding would cost as much as input.
            return [fed for request in requests for fed in self._feed([request], request.n_rows)]
        return self._feed(requests, max(request.bucket for request in requests))

    def _feed(self, requests: Sequence[Feed], width: int) -> list[Fed]:
        """Feed rows of several slots, padded to a width."""
        counts = [request.n_rows for request in requests]
        slots = tuple(request.slot for request in requests)
        ends = tuple(request.start + n for request, n in zip(requests, counts, strict=True))
        x = torch.stack([self._rows(request, width) for request in requests])  # [B, N, D]
        starts = ints([request.start for request in requests], self.device)
        lengths = ints(counts, self.device)
        hidden = self.llm.feed(
            self.cache,
            x,
            ints(slots, self.device),
            self.cache.positions(starts, lengths, width),
            self._reach(slots, ends),
        )
        last = hidden[torch.arange(len(requests), device=self.device), lengths - 1]
        return self._fed(last, [request.choice for request in requests])

    def _rows(self, request: Feed, width: int) -> Tensor:
        """Embeddings of a request's rows, `[N, D]`, zeros behind them."""
        parts = [
            piece.to(self.dtype)
            if isinstance(piece, Tensor)
            else self.llm.embed(ints(piece, self.device))
            for piece in request.pieces
        ]
        n_missing = width - request.n_rows
        if n_missing:
            parts.append(parts[0].new_zeros(n_missing, self.llm.config.hidden_size))
        return torch.cat(parts)

    def decode(self, requests: Sequence[Step]) -> list[Fed]:
        """Feed one token of each slot."""
        slots = tuple(request.slot for request in requests)
        starts = tuple(request.start for request in requests)
        hidden = self.llm.decode(
            self.cache,
            ints([request.token for request in requests], self.device),
            ints(slots, self.device),
            ints(starts, self.device),
            self._reach(slots, tuple(start + 1 for start in starts)),
        )
        return self._fed(hidden, [request.choice for request in requests])

    def poison(self, slot: int) -> None:
        """Make the slot unreadable: whoever still looks at it gets NaN."""
        self.cache.poison(slot)

    # ---- choosing

    def _fed(self, hidden: Tensor, choices: Sequence[Choice | None]) -> list[Fed]:
        """What is chosen behind the last rows `[B, D]`: one read-back."""
        decided = _rows_of(choices, DuplexSampling)
        sampled = _rows_of(choices, Sampling)
        fed = [Fed(None, state) for state in hidden]
        if not (decided or sampled):  # the head is 8 % of the weights
            return fed
        logits = self.llm.head(hidden).float()  # [B, V]
        chosen = []
        if decided:
            chosen.append(
                self._decide(logits[ints(decided, self.device)], [choices[i] for i in decided])
            )
        if sampled:
            chosen.append(
                self._sample(logits[ints(sampled, self.device)], [choices[i] for i in sampled])
            )
        table = torch.cat(chosen, dim=1).tolist()
        for row, token, is_direct in zip([*decided, *sampled], *table, strict=True):
            fed[row] = Fed(token, hidden[row], bool(is_direct))
        return fed

    def _decide(self, logits: Tensor, choices: Sequence[Choice | None]) -> Tensor:
        """Ids and whether a listen setting alone settled them, int64 `[2, B]`."""
        taken = [choice for choice in choices if choice is not None]
        inputs = decision_inputs(
            [choice.sampling for choice in taken if isinstance(choice.sampling, DuplexSampling)],
            [choice.recent for choice in taken],
            [choice.draws for choice in taken],
            logits.shape[-1],
            self.device,
        )
        decision = decide_stages(
            logits,
            inputs,
            self._vocabulary,
            self.compat.listen_settings_act_on_im_end,
            self.compat.penalty_divides_negative_logits,
        )
        return torch.stack((decision.chosen, decision.is_direct.long()))

    def _sample(self, logits: Tensor, choices: Sequence[Choice | None]) -> Tensor:
        """Ids and zeros, int64 `[2, B]`."""
        taken = [choice for choice in choices if choice is not None]
        for row, choice in enumerate(taken):
            if choice.forbidden:
                logits[row, self._id_set(choice.forbidden)] = -torch.inf
        ids = sample(
            logits,
            [choice.sampling for choice in taken if isinstance(choice.sampling, Sampling)],
            [choice.recent.tolist() for choice in taken],
            [choice.draws[1] for choice in taken],
        )
        return torch.stack((ids, torch.zeros_like(ids)))

    def _id_set(self, ids: frozenset[int]) -> Tensor:
        """Ids as a tensor, which is kept: the programs know two such sets, thousands of ids."""
        if ids not in self._id_sets:
            self._id_sets[ids] = ints(sorted(ids), self.device)
        return self._id_sets[ids]

    def _reach(self, slots: tuple[int, ...], ends: tuple[int, ...]) -> Rows | int:
        if self.device.type == "cpu":
            return Rows(slots, ends)
        return min(rounded_up(max(ends), SPAN_STEP), self.cache.n_tokens)


def _rows_of(choices: Sequence[Choice | None], kind: type) -> list[int]:
    return [
        row
        for row, choice in enumerate(choices)
        if choice is not None and isinstance(choice.sampling, kind)
    ]
