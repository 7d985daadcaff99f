"""The language model's ops as stages: few shapes, everything that differs in tensors.

Rows are padded to a bucket. A row of padding sits at the cache's spare position of slot 0, where
nobody looks. Choices of fixed sizes are made in the same run as what leads to them; the others
only get their states from it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from worker.compile.buckets import batch_sizes, fit
from worker.compile.compiler import Compiler
from worker.compile.graphs import Call, Input, Inputs, Layout, Outputs, fill
from worker.compile.regions import Dim, Region, fix_sizes
from worker.compile.report import StageCounts
from worker.models.minicpmo45.choosing import Chooser
from worker.models.minicpmo45.ops import FEED_BUCKETS, Choice, Feed, Step
from worker.nn.decoder import Decoder, KvCache
from worker.nn.text_sampling import (
    FIXED_HISTORY,
    DuplexSampling,
    fill_decisions,
    fixed_inputs,
    has_fixed_sizes,
)

MOST_FEEDS = 8
"""Slots of one prefill."""
MOST_STEPS = 64
"""Slots of one decode step."""
MOST_ROWS_TOGETHER = 224
"""Longer feeds run one by one: each of them fills the device."""

FeedBucket = tuple[int, int, bool]
"""Slots, rows, and whether anything is chosen behind them."""
StepBucket = tuple[int, bool]
"""Slots, and whether anything is chosen."""


@dataclass(frozen=True, slots=True)
class Ran:
    """What a run left behind the last row of every slot."""

    hidden: Tensor
    """States after the closing norm, `[B, D]`; the caller's own. There may be more rows than
    requests."""
    settled: Sequence[int] = ()
    """Rows whose choice is in the table."""
    table: Tensor | None = None
    """Ids and whether a listen setting alone settled them, int64 `[2, B]`; valid until the next
    run."""


class LanguageStages:
    """Declares `llm.prefill` and `llm.decode`, fills their inputs and runs them.

    A batch's choices of other sizes are made outside, by some 70 operations that are started one by
    one; they are counted as runs of `llm.choose`, which has no buckets.
    """

    def __init__(self, llm: Decoder, cache: KvCache, chooser: Chooser, compiler: Compiler) -> None:
        self._llm, self._cache, self._chooser = llm, cache, chooser
        n_slots = cache.keys[0].shape[0]
        self._feed_sizes = batch_sizes(min(n_slots, MOST_FEEDS))
        self._step_sizes = batch_sizes(min(n_slots, MOST_STEPS))
        fix_sizes((*cache.keys, *cache.values))
        for region in self._regions():
            compiler.region(region)
        device = llm.head.weight.device
        sentinels = (
            lambda: cache.keys[0],
            lambda: cache.values[-1],
            lambda: llm.embed.weight,
            lambda: llm.head.weight,
        )
        self._prefill = compiler.stage(
            "llm.prefill", self._feed_layout, self._feed, self._feed_buckets(), device, sentinels
        )
        self._decode = compiler.stage(
            "llm.decode", self._step_layout, self._step, self._step_buckets(), device, sentinels
        )
        self.outside = compiler.report.stages["llm.choose"] = StageCounts()

    def _regions(self) -> Iterator[Region]:
        rows = Dim("x", 0, 1, self._feed_sizes[-1]), Dim("x", 1, FEED_BUCKETS[0], FEED_BUCKETS[-1])
        yield Region("llm.prefill", "llm", self._llm.prefill_layers, rows)
        yield Region("llm.decode", "llm", self._llm.decode_layers)
        yield Region("llm.choose", "heads", self._chooser.calls)

    def _feed_buckets(self) -> list[FeedBucket]:
        return [
            (n_slots, width, chooses)
            for width in reversed(FEED_BUCKETS)
            for n_slots in reversed(self._feed_sizes)
            for chooses in (True, False)
            if n_slots == 1 or width <= MOST_ROWS_TOGETHER
        ]

    def _step_buckets(self) -> list[StepBucket]:
        return [
            (n_slots, chooses)
            for n_slots in reversed(self._step_sizes)
            for chooses in (True, False)
        ]

    # ---- what runs on the device

    def _feed_layout(self, bucket: FeedBucket) -> Layout:
        n_slots, width, chooses = bucket
        layout = {
            "ids": Input((n_slots, width), torch.int64),
            "is_given": Input((n_slots, width), torch.bool),
            "given": Input(
                (n_slots, width, self._llm.config.hidden_size),
                self._llm.embed.weight.dtype,
                is_from_host=False,
            ),
            "slots": Input((n_slots,), torch.int64),
            "starts": Input((n_slots,), torch.int64),
            "counts": Input((n_slots,), torch.int64),
        }
        return layout | _choice_layout(n_slots) if chooses else layout

    def _feed(self, bucket: FeedBucket, inputs: Inputs) -> Outputs:
        n_slots, width, chooses = bucket
        llm, cache, counts = self._llm, self._cache, inputs["counts"]
        x = torch.where(inputs["is_given"][..., None], inputs["given"], llm.embed(inputs["ids"]))
        positions = cache.positions(inputs["starts"], counts, width)
        x = llm.run(cache, x, inputs["slots"], positions, cache.n_tokens)  # [B, N, D]
        last = (counts - 1).clamp(min=0)
        return self._close(x[torch.arange(n_slots, device=x.device), last], inputs, chooses)

    def _step_layout(self, bucket: StepBucket) -> Layout:
        n_slots, chooses = bucket
        layout = {name: Input((n_slots,), torch.int64) for name in ("ids", "slots", "starts")}
        return layout | _choice_layout(n_slots) if chooses else layout

    def _step(self, bucket: StepBucket, inputs: Inputs) -> Outputs:
        _, chooses = bucket
        llm, cache = self._llm, self._cache
        x = llm.embed(inputs["ids"])[:, None]  # [B, 1, D]
        x = llm.run(cache, x, inputs["slots"], inputs["starts"][:, None], cache.n_tokens)
        return self._close(x[:, 0], inputs, chooses)

    def _close(self, x: Tensor, inputs: Inputs, chooses: bool) -> Outputs:
        """Norm the last rows `[B, D]`; decide what follows them, if asked."""
        if not chooses:
            return (self._llm.norm(x),)
        (close,) = self._chooser.calls
        return close(x, fixed_inputs(inputs, self._llm.config.vocab_size))

    # ---- what the host does

    def parts(self, requests: Sequence[Feed]) -> Iterator[Sequence[Feed]]:
        """Cut feeds into what runs together."""
        width = max(request.bucket for request in requests)
        most = self._feed_sizes[-1] if width <= MOST_ROWS_TOGETHER else 1
        for first in range(0, len(requests), most):
            yield requests[first : first + most]

    def prefill(self, requests: Sequence[Feed]) -> Ran:
        """Run feeds of different slots together, one of `parts`."""
        settled = _settled(requests)
        size = fit(len(requests), self._feed_sizes) or len(requests)
        width = max(request.bucket for request in requests)
        call = self._prefill.at((size, width, bool(settled)))
        host = call.begin()
        for row, request in enumerate(requests):
            _fill_rows(host["ids"][row], host["is_given"][row], call.tensors["given"], row, request)
        fill(host["slots"], [request.slot for request in requests])
        fill(host["starts"], [request.start for request in requests])
        fill(host["counts"], [request.n_rows for request in requests])
        return self._run(call, host, settled)

    def decode(self, requests: Sequence[Step]) -> Ran:
        """Feed one token of each slot."""
        settled = _settled(requests)
        size = fit(len(requests), self._step_sizes) or len(requests)
        call = self._decode.at((size, bool(settled)))
        host = call.begin()
        fill(host["ids"], [request.token for request in requests])
        fill(host["slots"], [request.slot for request in requests])
        fill(host["starts"], [request.start for request in requests], self._cache.spare)
        return self._run(call, host, settled)

    def _run(
        self, call: Call, host: Mapping[str, NDArray[Any]], settled: Mapping[int, Choice]
    ) -> Ran:
        if not settled:
            (hidden,) = call.run()
            return Ran(hidden.clone())
        choices = list(settled.values())
        fill_decisions(
            host,
            list(settled),
            [choice.sampling for choice in choices if isinstance(choice.sampling, DuplexSampling)],
            [choice.recent for choice in choices],
            [choice.draws for choice in choices],
            self._llm.config.vocab_size,
        )
        hidden, table = call.run()
        return Ran(hidden.clone(), list(settled), table)


def _choice_layout(n_slots: int) -> dict[str, Input]:
    return {
        "numbers": Input((n_slots, 8), torch.float64),
        "draws": Input((n_slots, 2), torch.float64),
        "recent": Input((n_slots, FIXED_HISTORY), torch.int32),
    }


def _settled(requests: Sequence[Feed | Step]) -> dict[int, Choice]:
    """Choices of fixed sizes, by row."""
    return {
        row: choice
        for row, request in enumerate(requests)
        if (choice := request.choice) is not None
        and isinstance(choice.sampling, DuplexSampling)
        and has_fixed_sizes(choice.sampling, choice.recent)
    }


def _fill_rows(
    ids: NDArray[Any], is_given: NDArray[Any], given: Tensor, row: int, request: Feed
) -> None:
    """Write a request's rows into one row of a bucket; what lies behind them may be anything."""
    start = 0
    for piece in request.pieces:
        end = start + len(piece)
        if isinstance(piece, Tensor):
            given[row, start:end].copy_(piece)
            is_given[start:end] = True
        else:
            ids[start:end] = piece
            is_given[start:end] = False
        start = end
