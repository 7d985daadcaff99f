"""What is seen and heard, as rows for the language model: two stages of fixed sizes.

Which sizes of slices occur (the plan of `images.py` for every picture up to 4000 x 4000 and every
limit of slices, patches of 14 and slices of 448 squared): as long as no side of the picture is
more than three times the other, an overview has 987 to 1056 patches and a tile 988 to 1056.
Narrower strips go from 650 to 1366, most of them below 1056 too. So there are two sizes, that of
all usual pictures and one for strips; a slice is rarely padded by more than 6 %.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from worker.compile.buckets import batch_sizes, fit, split
from worker.compile.compiler import Compiler
from worker.compile.graphs import Input, Inputs, Layout, Outputs
from worker.compile.regions import Dim, Region
from worker.models.minicpmo45.cutting import AnySlice, Cutter
from worker.models.minicpmo45.images import Pixels, SliceConfig, slice_image
from worker.models.minicpmo45.ops import AudioRequest
from worker.nn.attention import Rows
from worker.nn.audio_encoder import AudioCache, AudioEncoder
from worker.nn.mel import FRAMES_PER_S, StreamingMel
from worker.nn.shapes import rounded_up
from worker.nn.siglip import Grid, Grids, padded_position_ids
from worker.nn.transfer import ints, to_device
from worker.nn.vision import VisionTower

MAX_STREAMS = 32
"""Seconds of sound that are heard together."""
SLICE_BATCHES = (1, 2, 4, 8)
"""Slices that are seen together."""

VisionBucket = tuple[int, int]
"""Slices, patches of each."""
AudioBucket = tuple[int, bool]
"""Streams, whether it is their very first second."""


def patch_sizes(config: SliceConfig) -> tuple[int, int]:
    """Return how many patches a slice of a usual picture may have, and one of a strip.

    For patches of 14 and slices of 448 squared that is 1056 and 1408.
    """
    side = config.scale_resolution // config.patch_size
    # Rounding to whole patches adds half a patch to each side, at most. A strip of one and a half
    # patches is rounded to two: a third more.
    return side * (side + 1), rounded_up(side * side * 4 // 3 + 1, 64)


class Senses:
    """The two encoders, the cache of the ears, and their stages.

    Args:
        compiler: takes the declarations; without a plan a CPU works without stages.
    """

    def __init__(
        self,
        vision: VisionTower,
        audio: AudioEncoder,
        slices: SliceConfig,
        n_slots: int,
        compiler: Compiler,
    ) -> None:
        weight = audio.conv1.weight
        self.vision, self.audio = vision, audio
        self.device = weight.device
        self.cache = AudioCache.allocate(audio.config, n_slots, weight.dtype, self.device)
        self.uses_stages = compiler.uses_stages(self.device)
        self._slicing = slices
        if not self.uses_stages:
            return
        self._sizes = patch_sizes(slices)
        self._cutter = Cutter(slices, self._sizes, self.device)
        usual, longest = self._sizes
        # Kept here, as captured graphs read it. No side has more patches than the slice; one place
        # more, as the compiler takes equal sizes for one and the same.
        self._axis = vision.resampler.axis_positions(longest + 1)
        self._slices_stage = compiler.stage(
            "vpm.slices",
            self._slices_layout,
            self._see,
            # Strips are rare, and come one by one.
            [*((b, usual) for b in SLICE_BATCHES), (1, longest)],
            self.device,
            (
                lambda: vision.encoder.embed.weight,
                lambda: vision.resampler.head.weight,
                lambda: self._axis,
            ),
        )
        self._batches = batch_sizes(min(n_slots, MAX_STREAMS))
        self._second_stage = compiler.stage(
            "apm.second",
            self._second_layout,
            self._hear,
            [(b, is_first) for b in self._batches for is_first in (False, True)],
            self.device,
            (
                lambda: audio.conv1.weight,
                lambda: audio.linear2.weight,
                lambda: self.cache.keys[0],
                lambda: self.cache.values[-1],
            ),
        )
        self._declare_regions(compiler, longest)

    def _declare_regions(self, compiler: Compiler, longest: int) -> None:
        def sizes(argument: str) -> tuple[Dim, Dim]:
            return Dim(argument, 0, 1, SLICE_BATCHES[-1]), Dim(argument, 1, 2, longest)

        encoder, resampler = self.vision.encoder, self.vision.resampler
        for region in (
            Region("vpm.layer", "vpm", encoder.layer_calls, sizes("x")),
            Region("resampler", "resampler", resampler.run_calls, sizes("x")),
            # A graph per batch: tracing one of a fixed size takes a quarter of the time.
            Region("apm.layer", "apm", self.audio.stream_calls),
        ):
            compiler.region(region)

    def poison(self, slot: int) -> None:
        """Make the slot unreadable: whoever still looks at it gets NaN."""
        self.cache.poison(slot)

    # ---- pictures

    def slice(self, rgb: Pixels, max_slice_nums: int) -> tuple[AnySlice, ...]:
        """Return a picture's slices, or the plan of them where the device makes them.

        From any thread. Raises BadImage as `slice_image` does.
        """
        if self.uses_stages:
            return self._cutter.plan(rgb, max_slice_nums)
        return slice_image(rgb, max_slice_nums, self._slicing).slices

    def encode_images(self, requests: Sequence[Sequence[AnySlice]]) -> list[Tensor]:
        """Return the embeddings `[n_slices, n_queries, D]` of every request's slices."""
        if not self.uses_stages:
            return [self._seen_exactly(slices) for slices in requests]
        slices = [pixels for request in requests for pixels in request]
        sizes = [self._size_of(pixels) for pixels in slices]
        order = sorted(range(len(slices)), key=lambda index: sizes[index] or 0)
        made: list[Tensor] = []
        for size in (None, *self._sizes):
            group = [slices[index] for index in order if sizes[index] == size]
            if group:
                made += [self._seen_exactly(group)] if size is None else self._seen(group, size)
        if not made:
            return [self.vision.encode(()) for _ in requests]
        rows = torch.cat(made) if len(made) > 1 else made[0]
        if order != sorted(order):
            rows = rows[ints(np.argsort(order).tolist(), self.device)]
        return list(rows.split([len(request) for request in requests]))

    def _grid_of(self, pixels: AnySlice) -> Grid:
        height, width, _ = pixels.shape
        patch = self.vision.encoder.config.patch_size
        return height // patch, width // patch

    def _size_of(self, pixels: AnySlice) -> int | None:
        """Patches that a slice is padded to; None = it is larger than any picture's."""
        n_rows, n_columns = self._grid_of(pixels)
        return fit(n_rows * n_columns, self._sizes)

    def _seen_exactly(self, slices: Sequence[AnySlice]) -> Tensor:
        """Embeddings of slices without a stage; no planned ones, which always fit one."""
        arrays = [pixels for pixels in slices if isinstance(pixels, np.ndarray)]
        assert len(arrays) == len(slices)
        return self.vision.encode(arrays)

    def _seen(self, slices: Sequence[AnySlice], size: int) -> list[Tensor]:
        """Embeddings of slices that are padded to one size, batch by batch."""
        batches = SLICE_BATCHES if size == self._sizes[0] else SLICE_BATCHES[:1]
        side = self.vision.encoder.config.n_positions_side
        made, start = [], 0
        for n in split(len(slices), batches):
            call = self._slices_stage.at((n, size))
            host = call.begin()
            part = slices[start : start + n]
            # What an earlier slice left behind these is hidden.
            self._cutter.fill(part, call.tensors["pixels"].flatten(1))
            for row, pixels in enumerate(part):
                grid = self._grid_of(pixels)
                host["n_columns"][row] = grid[1]
                host["n_patches"][row] = grid[0] * grid[1]
                host["ids"][row] = padded_position_ids(grid, size, side)
            (rows,) = call.run()
            made.append(rows.clone())
            start += n
        return made

    def _slices_layout(self, bucket: VisionBucket) -> Layout:
        b, n = bucket
        return {
            "pixels": Input(
                (b, n, self.vision.encoder.config.patch_values), torch.uint8, is_from_host=False
            ),
            "n_columns": Input((b,), torch.int32),
            "n_patches": Input((b,), torch.int32),
            "ids": Input((b, n), torch.int32),
        }

    def _see(self, bucket: VisionBucket, inputs: Inputs) -> Outputs:
        grids = Grids(inputs["n_columns"], inputs["n_patches"])
        return (self.vision.encode_padded(inputs["pixels"], grids, inputs["ids"], self._axis),)

    # ---- sound

    def encode_audio(self, requests: Sequence[AudioRequest]) -> list[Tensor]:
        """Return the embeddings `[n, D]` of one streamed second of each request.

        All of them, or none, are the first second of their streams.
        """
        if not self.uses_stages:
            return self._heard_exactly(requests)
        is_first = requests[0].is_first
        heard: list[Tensor] = []
        for n in split(len(requests), self._batches):
            part = requests[len(heard) : len(heard) + n]
            call = self._second_stage.at((n, is_first))
            host = call.begin()
            for row, request in enumerate(part):
                host["mel"][row] = request.mel.numpy()
            host["slots"][:] = [request.slot for request in part]
            host["past"][:] = [request.past for request in part]
            (rows,) = call.run()
            heard += rows.clone().unbind()
        return heard

    def _heard_exactly(self, requests: Sequence[AudioRequest]) -> list[Tensor]:
        """Without a stage: every row reads just what it has."""
        mel = to_device(torch.stack([request.mel for request in requests]).numpy(), self.device)
        is_first = requests[0].is_first
        slots = tuple(request.slot for request in requests)
        past = [request.past for request in requests]
        n_new = self.audio.config.stream_frames(mel.shape[-1], is_first)
        encoded = self.audio.stream(
            self.cache,
            mel,
            ints(slots, self.device),
            ints(past, self.device),
            is_first,
            Rows(slots, tuple(frames + n_new for frames in past)),
        )
        return list(encoded)

    def _second_layout(self, bucket: AudioBucket) -> Layout:
        b, is_first = bucket
        n_mel_frames = FRAMES_PER_S + StreamingMel.OVERLAP * (1 if is_first else 2)
        return {
            "mel": Input((b, self.audio.config.n_mels, n_mel_frames), torch.float32),
            "slots": Input((b,), torch.int64),
            "past": Input((b,), torch.int64),
        }

    def _hear(self, bucket: AudioBucket, inputs: Inputs) -> Outputs:
        mel, slots, past = inputs["mel"], inputs["slots"], inputs["past"]
        return (self.audio.stream(self.cache, mel, slots, past, is_first=bucket[1]),)
