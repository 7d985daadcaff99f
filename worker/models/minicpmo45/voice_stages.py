"""The next second of sound as a stage: flow and vocoder of some rows in one run.

How far a row is stands in tensors, so a run's sizes follow from the number of codes, from whether
the turn ends, and from the number of rows. A steady stream of speech has one number of codes; rows
that meet there run together. All other numbers occur at ends, and in full duplex where the words of
a unit are few: those run one by one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, _dynamo

from worker.compile.buckets import batch_sizes, split
from worker.compile.compiler import Compiler
from worker.compile.graphs import Input, Inputs, Layout, Outputs
from worker.compile.regions import Dim, Region, fix_sizes
from worker.models.minicpmo45.speaking import CHUNK_CODES, LOOK_AHEAD, MIN_CHUNK_CODES
from worker.nn.conformer import FRAMES_PER_TOKEN
from worker.nn.dit import GUIDED
from worker.nn.flow import Flow, FlowCache
from worker.nn.vocoder import Vocoder

STEADY_CODES = CHUNK_CODES + LOOK_AHEAD
"""What `CodeBuffer` gives while there is enough."""
MOST_ROWS = 32
"""Rows of one run."""

VoiceBucket = tuple[int, bool, int]
"""Codes, the look-ahead included; whether the turn ends; rows."""


class VoiceStages:
    """Declares `voice.chunk`, fills its inputs and runs it."""

    def __init__(self, flow: Flow, cache: FlowCache, vocoder: Vocoder, compiler: Compiler) -> None:
        self._flow, self._cache, self._vocoder = flow, cache, vocoder
        self._sizes = batch_sizes(min(len(cache.seen), MOST_ROWS))
        self._fix_sizes()
        for region in self._regions():
            compiler.region(region)
        self._chunk = compiler.stage(
            "voice.chunk",
            self._layout,
            self._run,
            list(self._buckets()),
            cache.seen.device,
            (
                lambda: cache.dit.stacks[0],
                lambda: cache.encoder.stacks[-1][0],
                lambda: vocoder.mel,
                lambda: flow.codes.weight,
                lambda: vocoder.hift.conv_post.weight,
            ),
        )

    def _fix_sizes(self) -> None:
        """Say that caches never change their sizes.

        A compiler that took them for variable would also take it for a rule if one of them equals
        the batch, such as the number of heads.
        """
        dit, lists = self._cache.dit, self._cache.encoder
        for step in (*dit.keys, *dit.values, *dit.first, *dit.second):
            fix_sizes(step)
        self._flow.encoder.prepare(lists)
        # Only their length varies, between the two rates, which share graphs.
        for one in (*lists.keys, *lists.values):
            _dynamo.mark_static(one, [0, 1, 3])
        for one in lists.distances:
            _dynamo.mark_static(one, [0, 2])

    def _regions(self) -> Iterator[Region]:
        most, frames = self._sizes[-1], FRAMES_PER_TOKEN * STEADY_CODES
        guided = Dim("x", 0, GUIDED, GUIDED * most), Dim("x", 1, 2, frames)
        yield Region("flow.dit", "flow", self._flow.dit.stream_calls, guided)
        tokens = Dim("x", 0, 1, most), Dim("x", 1, 2, frames)
        yield Region("flow.conformer", "flow", self._flow.encoder.stream_calls, tokens)
        hift = self._vocoder.hift
        samples = hift.config.columns * (self._vocoder.past_frames + frames) + 1
        positions = Dim("x", 0, 1, most), Dim("x", 2, 2, samples)
        yield Region("vocoder", "vocoder", hift.stream_calls, positions)

    def _buckets(self) -> Iterator[VoiceBucket]:
        """What `CodeBuffer.take` gives in full duplex.

        A turn ends with the look-ahead and what is too little for a chunk of its own. (The other
        modes wait for whole seconds, so their turns end with anything up to that, uncaptured.)
        """
        # One row is compiled apart: any other number comes first, and stands for all of them.
        for n_rows in (*self._sizes[1:], 1):
            yield STEADY_CODES, False, n_rows
        for n_codes in reversed(range(LOOK_AHEAD + MIN_CHUNK_CODES, STEADY_CODES)):
            yield n_codes, False, 1
        for n_codes in reversed(range(LOOK_AHEAD, LOOK_AHEAD + MIN_CHUNK_CODES)):
            yield n_codes, True, 1

    # ---- what runs on the device

    def _layout(self, bucket: VoiceBucket) -> Layout:
        n_codes, _, n_rows = bucket
        return {
            "rows": Input((n_rows,), torch.int64),
            "codes": Input((n_rows, n_codes), torch.int64),
        }

    def _run(self, bucket: VoiceBucket, inputs: Inputs) -> Outputs:
        _, is_last, _ = bucket
        rows = inputs["rows"]
        mel = self._flow.chunk(self._cache, rows, inputs["codes"], is_last)
        return (self._vocoder.advance(rows, mel, is_last),)

    # ---- what the host does

    def chunk(self, rows: Sequence[int], codes: Sequence[Sequence[int]], is_last: bool) -> Tensor:
        """Return the next samples `[B, n]` of rows that `Vocoder.book` has noted; the caller's own.

        Args:
            rows, codes, is_last: as of `Token2Wav.stream`.
        """
        n_codes = len(codes[0])
        is_steady = (n_codes, is_last) == (STEADY_CODES, False)
        made, begin = [], 0
        for n_rows in split(len(rows), self._sizes if is_steady else (1,)):
            end = begin + n_rows
            call = self._chunk.at((n_codes, is_last, n_rows))
            host = call.begin()
            host["rows"][:] = rows[begin:end]
            host["codes"][:] = codes[begin:end]
            # The next run may be of the same bucket.
            made.append(call.run()[0].clone())
            begin = end
        return torch.cat(made) if len(made) > 1 else made[0]
