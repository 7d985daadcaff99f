"""The speech head's op as stages: the inputs of a run, then one replay per speech token.

A run of B rows keeps where it stands on the device (`Run`): the inputs' stage begins it, every
step draws a code and feeds it, a draw alone closes it if the last code need not be fed. The host
does nothing in between and reads once. Rows that are over, and those that fill up a bucket, go on
at the cache's spare position, where nobody looks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from worker.compile.buckets import batch_sizes, fit
from worker.compile.compiler import Compiler
from worker.compile.graphs import Input, Inputs, Layout, Outputs, fill
from worker.compile.regions import Dim, Region, fix_sizes
from worker.nn.code_sampling import CodeRows, fill_code_rows, longest_list
from worker.nn.decoder import KvCache
from worker.nn.speech import SpeechHead, SpeechRequest

RUN = 26
"""Most draws of a run, behind which the host looks who has ended: a duplex unit is one run."""
WIDTHS = (32, 64, 96)
"""Input rows of one piece; longer inputs are fed in several."""
WINDOW = 16
"""Codes that the penalty looks back at: the widest window that any setting of ours has."""

InputsBucket = tuple[int, int, int]
"""Rows of the batch, input rows, window."""
StepBucket = tuple[int, int, int]
"""Rows of the batch, length of the candidate lists, window."""


@dataclass(frozen=True, slots=True)
class Run:
    """Where a run stands; one for every number of rows, written in place by all its stages."""

    rows: CodeRows
    """Of this run; its `recent` goes along."""
    slots: Tensor
    positions: Tensor
    """Where a row's next code is fed; the spare position or more: the row is over."""
    limits: Tensor
    """Most draws, int64 `[B]` as the two before."""
    step: Tensor
    """Codes drawn so far, int64 `[1]`."""
    drawn: Tensor
    """int64 `[B, RUN]`."""
    hidden: Tensor
    """What the next code is drawn from, `[B, D]`."""

    @classmethod
    def allocate(cls, n_rows: int, window: int, head: SpeechHead) -> Run:
        weight = head.emb_code.weight

        def numbers(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=weight.device)

        return cls(
            rows=CodeRows.allocate(n_rows, RUN, window, weight.device),
            slots=numbers(n_rows),
            positions=numbers(n_rows),
            limits=numbers(n_rows),
            step=numbers(1),
            drawn=numbers(n_rows, RUN),
            hidden=weight.new_zeros(n_rows, head.config.hidden_size),
        )

    def begin(self, inputs: Inputs) -> None:
        """Set everything but `hidden` to what the host has sent."""
        for name, tensor in self.rows.tensors().items():
            tensor.copy_(inputs[name])
        self.slots.copy_(inputs["slots"])
        self.limits.copy_(inputs["limits"])
        self.positions.copy_(inputs["starts"] + inputs["counts"])
        self.step.zero_()


class SpeechStages:
    """Declares `tts.inputs`, `tts.step` and `tts.draw`, fills their inputs and runs them.

    Args:
        cache: of the speech head.
        n_rows: most requests of one call.
    """

    def __init__(self, head: SpeechHead, cache: KvCache, compiler: Compiler, n_rows: int) -> None:
        self._head, self._cache = head, cache
        self._sizes = batch_sizes(n_rows)
        planned = {0, longest_list([head.config.text_sampling()], head.config.n_codes)}
        self._list_lengths = sorted({*planned, head.config.n_codes})
        self._runs: dict[tuple[int, int], Run] = {}
        fix_sizes((*cache.keys, *cache.values))
        for region in self._regions():
            compiler.region(region)
        device = head.emb_code.weight.device
        sentinels = (
            lambda: cache.keys[0],
            lambda: cache.values[-1],
            lambda: head.emb_code.weight,
            lambda: head.head_code.weight,
        )
        self._inputs = compiler.stage(
            "tts.inputs",
            self._inputs_layout,
            self._feed_inputs,
            [(rows, width, WINDOW) for width in WIDTHS for rows in self._sizes],
            device,
            sentinels,
        )
        steps = [(rows, n, WINDOW) for rows in self._sizes for n in sorted(planned)]
        self._step = compiler.stage(
            "tts.step", _no_inputs, self._draw_and_feed, steps, device, sentinels
        )
        self._draw = compiler.stage(
            "tts.draw", _no_inputs, self._only_draw, steps, device, sentinels
        )

    def _regions(self) -> Iterator[Region]:
        stack = self._head.stack
        rows = Dim("x", 0, 1, self._sizes[-1]), Dim("x", 1, WIDTHS[0], WIDTHS[-1])
        yield Region("tts.prefill", "tts", stack.prefill_layers, rows)
        yield Region("tts.decode", "tts", stack.decode_layers)
        yield Region("tts.draw", "heads", self._head.draw_calls)

    # ---- what runs on the device

    def _inputs_layout(self, bucket: InputsBucket) -> Layout:
        n_rows, width, window = bucket
        weight = self._head.projector_in.weight
        layout = {name: Input((n_rows, width), torch.int64) for name in ("ids", "kinds", "places")}
        layout["states"] = Input((n_rows * width, weight.shape[1]), weight.dtype, False)
        for name in ("slots", "starts", "counts", "limits"):
            layout[name] = Input((n_rows,), torch.int64)
        rows = CodeRows.allocate(n_rows, RUN, window, "meta")
        for name, tensor in rows.tensors().items():
            layout[name] = Input(tuple(tensor.shape), tensor.dtype)
        return layout

    def _feed_inputs(self, bucket: InputsBucket, inputs: Inputs) -> Outputs:
        n_rows, width, window = bucket
        head, cache, run = self._head, self._cache, self._run_of(n_rows, window)
        run.begin(inputs)
        hidden = inputs["states"][inputs["places"]]  # [B, N, D_llm]
        x = head.input_rows(inputs["ids"], inputs["kinds"], hidden)
        counts = inputs["counts"]
        positions = cache.positions(inputs["starts"], counts, width)
        x = head.stack.feed(cache, x, run.slots, positions, cache.n_tokens)
        last = x[torch.arange(n_rows, device=x.device), (counts - 1).clamp(min=0)]
        # A row that has no inputs in this piece had them in an earlier one.
        run.hidden.copy_(torch.where(counts[:, None] > 0, last, run.hidden))
        return ()

    def _draw_and_feed(self, bucket: StepBucket, inputs: Inputs) -> Outputs:
        n_rows, n_candidates, window = bucket
        head, cache, run = self._head, self._cache, self._run_of(n_rows, window)
        codes = self._drawn(run, n_candidates)
        run.step.add_(1)
        recent = run.rows.recent
        recent.copy_(torch.cat((recent[:, 1:], codes[:, None]), dim=1))
        is_over = (codes == head.config.end_code) | (run.limits <= run.step)
        run.positions.masked_fill_(is_over, cache.spare)  # from here on padding
        x = head.emb_code(codes)[:, None]  # [B, 1, D]
        x = head.stack.feed(cache, x, run.slots, run.positions[:, None], cache.n_tokens)
        run.hidden.copy_(x[:, 0])
        run.positions.add_(1)
        return (run.drawn,)

    def _only_draw(self, bucket: StepBucket, inputs: Inputs) -> Outputs:
        n_rows, n_candidates, window = bucket
        run = self._run_of(n_rows, window)
        self._drawn(run, n_candidates)
        return (run.drawn,)

    def _drawn(self, run: Run, n_candidates: int) -> Tensor:
        """Draw the next code of every row, int64 `[B]`."""
        # A start takes more steps in a row than a run has.
        column = run.step.clamp(max=RUN - 1)
        rows = replace(run.rows, n_candidates=n_candidates)
        (draw,) = self._head.draw_calls
        codes, _ = draw(run.hidden, rows, rows.recent, column)
        run.drawn.index_copy_(1, column, codes[:, None])
        return codes

    def _run_of(self, n_rows: int, window: int) -> Run:
        """Return the run of a bucket. It is made once, before anything is captured."""
        run = self._runs.get((n_rows, window))
        if run is None:
            run = self._runs[n_rows, window] = Run.allocate(n_rows, window, self._head)
        return run

    # ---- what the host does

    def speak(self, requests: Sequence[SpeechRequest]) -> list[tuple[tuple[int, ...], bool]]:
        """Run requests of different slots in lockstep, as `SpeechHead.speak` does.

        Raises:
            ValueError: a request does not fit into its slot, or lacks draws or hidden states.
        """
        for request in requests:
            request.check(self._cache.n_tokens)
        results: list[tuple[tuple[int, ...], bool]] = [((), False) for _ in requests]
        left, n_done = list(range(len(requests))), 0
        while left:
            pieces = [requests[row].piece(results[row][0], RUN) for row in left]
            for row, (codes, has_ended) in zip(left, self._speak(pieces), strict=True):
                results[row] = (*results[row][0], *codes), has_ended
            n_done += RUN
            left = [r for r in left if not results[r][1] and n_done < requests[r].max_new]
        return results

    def _speak(self, requests: Sequence[SpeechRequest]) -> list[tuple[tuple[int, ...], bool]]:
        """Run requests of `RUN` draws at most."""
        head = self._head
        n_rows = fit(len(requests), self._sizes) or len(requests)
        window = _window(requests)
        self._send(requests, n_rows, window)
        n_draws = max(request.n_draws for request in requests)
        # The code of the very last draw is not fed.
        n_fed = min(n_draws, max(0, max(request.max_new for request in requests) - 1))
        kept = longest_list([request.sampling for request in requests], head.config.n_codes)
        bucket = (n_rows, fit(kept, self._list_lengths), window)
        outputs: Outputs = ()
        step = self._step.at(bucket)
        for index in range(n_fed):
            outputs = step.again() if index else step.run()
        if n_fed < n_draws:
            outputs = self._draw.at(bucket).run()
        drawn = outputs[0].tolist() if outputs else [[]] * n_rows  # the one read-back
        return [
            request.outcome(codes[: min(request.max_new, n_draws)], head.config.end_code)
            for request, codes in zip(requests, drawn, strict=False)
        ]

    def _send(self, requests: Sequence[SpeechRequest], n_rows: int, window: int) -> None:
        """Feed the inputs, piece by piece; every piece sends the whole begin of the run."""
        config, offset = self._head.config, 0
        n_inputs = [request.n_inputs for request in requests]
        while offset < max(n_inputs):
            width = fit(max(n_inputs) - offset, WIDTHS) or WIDTHS[-1]
            call = self._inputs.at((n_rows, width, window))
            host = call.begin()
            states = self._head.fill_inputs(host, requests, offset)
            if states:
                n_states = sum(one.shape[0] for one in states)
                torch.cat(states, out=call.tensors["states"][:n_states])
            before = [min(n, offset) for n in n_inputs]
            fill(host["slots"], [request.slot for request in requests])
            fill(host["starts"], [r.start + n for r, n in zip(requests, before, strict=True)])
            fill(
                host["counts"],
                [min(n - old, width) for n, old in zip(n_inputs, before, strict=True)],
            )
            fill(host["limits"], [request.max_new for request in requests])
            fill_code_rows(
                host,
                [request.sampling for request in requests],
                [request.recent for request in requests],
                [request.draws for request in requests],
                [request.min_new for request in requests],
                [request.is_free for request in requests],
                config.n_codes,
            )
            call.run()
            offset += width


def _no_inputs(bucket: StepBucket) -> Layout:
    return {}


def _window(requests: Sequence[SpeechRequest]) -> int:
    """Return how far the penalty may have to look back, a power of two."""
    most = max(min(r.sampling.window, len(r.recent) + r.max_new) for r in requests)
    return max(WINDOW, 1 << max(0, most - 1).bit_length())
