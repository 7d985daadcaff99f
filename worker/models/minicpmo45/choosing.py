"""Which token comes next: the output head and the two ways of choosing, for all rows at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from shared.config import Compat
from worker.models.minicpmo45.ops import Choice
from worker.models.minicpmo45.tokenizer import Tokenizer
from worker.nn.decoder import Decoder
from worker.nn.sampling import Sampling, sample
from worker.nn.text_sampling import (
    DecisionInputs,
    DuplexSampling,
    DuplexVocabulary,
    decide_stages,
    decision_inputs,
)
from worker.nn.transfer import ints


class Chooser:
    """The head's weights and the rules of choosing; a row depends on itself only."""

    def __init__(self, llm: Decoder, tokenizer: Tokenizer, compat: Compat) -> None:
        ids = tokenizer.ids
        self.llm = llm
        self.compat = compat
        self.device = llm.head.weight.device
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
        self.calls: list[Callable[[Tensor, DecisionInputs], tuple[Tensor, Tensor]]] = [self.close]
        """The call site of `close`; a compiled region takes its place."""

    def close(self, x: Tensor, inputs: DecisionInputs) -> tuple[Tensor, Tensor]:
        """Norm last rows as the blocks left them, `[B, D]`, and decide what follows them.

        Returns:
            The states `[B, D]`, and ids and whether a listen setting alone settled them, int64
            `[2, B]`.
        """
        hidden = self.llm.norm(x)
        return hidden, self._decide(self.llm.logits(hidden), inputs)

    def choose(self, hidden: Tensor, choices: Sequence[Choice]) -> tuple[list[int], Tensor]:
        """Choose behind states `[B, D]`, with any settings.

        Returns:
            Row of each column of the table, and the table as of `close`, on the device.
        """
        decided = _rows_of(choices, DuplexSampling)
        sampled = _rows_of(choices, Sampling)
        logits = self.llm.logits(hidden).float()  # [B, V]
        tables = []
        if decided:
            rows = logits[ints(decided, self.device)]
            inputs = self._decision_inputs([choices[row] for row in decided])
            tables.append(self._decide(rows, inputs))
        if sampled:
            rows = logits[ints(sampled, self.device)]
            tables.append(self._sample(rows, [choices[row] for row in sampled]))
        return [*decided, *sampled], torch.cat(tables, dim=1)

    def _decision_inputs(self, choices: Sequence[Choice]) -> DecisionInputs:
        return decision_inputs(
            [choice.sampling for choice in choices if isinstance(choice.sampling, DuplexSampling)],
            [choice.recent for choice in choices],
            [choice.draws for choice in choices],
            self.llm.config.vocab_size,
            self.device,
        )

    def _decide(self, logits: Tensor, inputs: DecisionInputs) -> Tensor:
        """Ids and whether a listen setting alone settled them, int64 `[2, B]`."""
        decision = decide_stages(
            logits,
            inputs,
            self._vocabulary,
            self.compat.listen_settings_act_on_im_end,
            self.compat.penalty_divides_negative_logits,
        )
        return torch.stack((decision.chosen, decision.is_direct.long()))

    def _sample(self, logits: Tensor, choices: Sequence[Choice]) -> Tensor:
        """Ids and zeros, int64 `[2, B]`; writes into the logits."""
        for row, choice in enumerate(choices):
            if choice.forbidden:
                logits[row, self._id_set(choice.forbidden)] = -torch.inf
        ids = sample(
            logits,
            [choice.sampling for choice in choices if isinstance(choice.sampling, Sampling)],
            [choice.recent.tolist() for choice in choices],
            [choice.draws[1] for choice in choices],
        )
        return torch.stack((ids, torch.zeros_like(ids)))

    def _id_set(self, ids: frozenset[int]) -> Tensor:
        """Ids as a tensor, which is kept: the programs know two such sets, thousands of ids."""
        if ids not in self._id_sets:
            self._id_sets[ids] = ints(sorted(ids), self.device)
        return self._id_sets[ids]


def _rows_of(choices: Sequence[Choice], kind: type) -> list[int]:
    return [row for row, choice in enumerate(choices) if isinstance(choice.sampling, kind)]
