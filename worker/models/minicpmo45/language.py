"""The language model's ops: feed rows, feed a token, choose the next one. For all slots at once.

Two ways lead to the same results. Exact rows know on the host what they need, which is the right
way for a CPU; stages (`language_stages.py`) come in few shapes, can be compiled and captured, and
serve an accelerator.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shared.config import Compat
from worker.compile.compiler import Compiler
from worker.models.minicpmo45.choosing import Chooser
from worker.models.minicpmo45.language_stages import LanguageStages, Ran
from worker.models.minicpmo45.moving import Mover
from worker.models.minicpmo45.ops import Choice, Fed, Feed, MoveRequest, Step
from worker.models.minicpmo45.tokenizer import Tokenizer
from worker.nn.decoder import Decoder, KvCache, Rows
from worker.nn.transfer import ints


class Language:
    """Weights and caches.

    Args:
        n_positions: size of every slot's context.
        compiler: is told of the stages; None = nothing is compiled.
    """

    def __init__(
        self,
        llm: Decoder,
        tokenizer: Tokenizer,
        compat: Compat,
        n_slots: int,
        n_positions: int,
        compiler: Compiler | None = None,
    ) -> None:
        weight = llm.head.weight
        self.llm = llm
        self.device, self.dtype = weight.device, weight.dtype
        self.cache = KvCache.allocate(llm.config, n_slots, n_positions, self.dtype, self.device)
        self._chooser = Chooser(llm, tokenizer, compat)
        self._stages: LanguageStages | None = None
        compiler = compiler or Compiler()
        self._mover = Mover("llm.move", self.cache, llm.config.rope_theta, compiler)
        if compiler.uses_stages(self.device):
            self._stages = LanguageStages(llm, self.cache, self._chooser, compiler)

    def prefill(self, requests: Sequence[Feed]) -> list[Fed]:
        """Run feeds of different slots."""
        if self._stages is None:
            # Rows share nothing there, and padding would cost as much as input.
            return [self._feed(request) for request in requests]
        parts = self._stages.parts(requests)
        return [fed for part in parts for fed in self._fed(part, self._stages.prefill(part))]

    def decode(self, requests: Sequence[Step]) -> list[Fed]:
        """Feed one token of each slot."""
        if self._stages is not None:
            return self._fed(requests, self._stages.decode(requests))
        slots = tuple(request.slot for request in requests)
        starts = tuple(request.start for request in requests)
        hidden = self.llm.decode(
            self.cache,
            ints([request.token for request in requests], self.device),
            ints(slots, self.device),
            ints(starts, self.device),
            Rows(slots, tuple(start + 1 for start in starts)),
        )
        return self._fed(requests, Ran(hidden))

    def move(self, request: MoveRequest) -> None:
        """Move a part of a slot's context."""
        self._mover.move(request)

    def poison(self, slot: int) -> None:
        """Make the slot unreadable: whoever still looks at it gets NaN."""
        self.cache.poison(slot)

    def _feed(self, request: Feed) -> Fed:
        """Feed one slot's rows, exactly as many as there are."""
        end = request.start + request.n_rows
        positions = torch.arange(request.start, end, device=self.device)[None]
        reach = Rows((request.slot,), (end,))
        slot = ints((request.slot,), self.device)
        hidden = self.llm.feed(self.cache, self._rows(request)[None], slot, positions, reach)
        (fed,) = self._fed([request], Ran(hidden[:, -1]))
        return fed

    def _rows(self, request: Feed) -> Tensor:
        """Embeddings of a request's rows, `[N, D]`."""
        parts = [
            piece.to(self.dtype)
            if isinstance(piece, Tensor)
            else self.llm.embed(ints(piece, self.device))
            for piece in request.pieces
        ]
        return torch.cat(parts)

    def _fed(self, requests: Sequence[Feed | Step], ran: Ran) -> list[Fed]:
        """What is chosen behind the last rows: at most one read-back."""
        tables = [] if ran.table is None else [ran.table]
        columns = {row: row for row in ran.settled}
        left: dict[int, Choice] = {
            row: request.choice
            for row, request in enumerate(requests)
            if request.choice is not None and row not in columns
        }
        if left:  # the head is 8 % of the weights
            if self._stages is not None:
                self._stages.outside.runs += 1
            states = ran.hidden[ints(list(left), self.device)]
            order, table = self._chooser.choose(states, list(left.values()))
            offset, rows = sum(one.shape[1] for one in tables), list(left)
            columns |= {rows[index]: offset + place for place, index in enumerate(order)}
            tables.append(table)
        states_of_rows = ran.hidden.unbind()[: len(requests)]
        if not tables:
            return [Fed(None, state) for state in states_of_rows]
        tokens, are_direct = (tables[0] if len(tables) == 1 else torch.cat(tables, dim=1)).tolist()
        return [
            Fed(tokens[columns[row]], state, bool(are_direct[columns[row]]))
            if row in columns
            else Fed(None, state)
            for row, state in enumerate(states_of_rows)
        ]
