"""Pictures -> rows of the language model: vision transformer and resampler together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from worker.nn.resampler import Resampler, ResamplerConfig
from worker.nn.siglip import Grid, Grids, VisionConfig, VisionEncoder, normalise, patchify
from worker.nn.transfer import to_device

Slice = NDArray[np.uint8]
"""`[h, w, 3]`, both sides multiples of the patch size."""


class VisionTower(nn.Module):
    """Owns weights only; every call stands for itself."""

    def __init__(
        self, vision: VisionConfig, resampler: ResamplerConfig, batch_size: int = 16
    ) -> None:
        super().__init__()
        self.encoder = VisionEncoder(vision)
        self.resampler = Resampler(resampler)
        self.batch_size = batch_size
        """Slices that are worked on at a time, at most."""

    def encode(self, slices: Sequence[Slice]) -> Tensor:
        """Return `[n_slices, n_queries, D]`, in the order of the slices, of whatever grids."""
        rows: dict[int, Tensor] = {}
        grids = [self.grid_of(pixels) for pixels in slices]
        for indices in self._batches(grids):
            made = self.encode_batch([slices[index] for index in indices])
            rows |= dict(zip(indices, made, strict=True))
        if not rows:
            config = self.resampler.config
            return self.resampler.queries.new_zeros(0, config.n_queries, config.llm_dim)
        return torch.stack([rows[index] for index in range(len(slices))])

    def encode_batch(self, slices: Sequence[Slice]) -> Tensor:
        """Return `[B, n_queries, D]` of at least one slice; all are padded to the largest."""
        grids = [self.grid_of(pixels) for pixels in slices]
        patches = self._patches(slices, grids)
        return self.resampler(self.encoder(patches, grids), grids)

    def encode_padded(self, pixels: Tensor, grids: Grids, ids: Tensor, table: Tensor) -> Tensor:
        """`encode_batch` of slices that are in tensors, padded to any size; `[B, n_queries, D]`.

        Args:
            pixels: uint8 `[B, N, 3 * p * p]`; a row begins with a slice as it lies in memory, what
                follows may be anything.
            ids: integers `[B, N]`, one `siglip.padded_position_ids` per slice.
            table: `Resampler.axis_positions` of N places.
        """
        (run,) = self.resampler.run_calls
        return run(self.encoder.padded(pixels, grids, ids), grids, table)

    def grid_of(self, pixels: Slice) -> Grid:
        patch = self.encoder.config.patch_size
        return pixels.shape[0] // patch, pixels.shape[1] // patch

    def _patches(self, slices: Sequence[Slice], grids: Sequence[Grid]) -> Tensor:
        """Return normalised patches `[B, N, 3 * p * p]`, fp32; only bytes travel to the device."""
        config, device = self.encoder.config, self.encoder.embed.weight.device
        n = max(n_rows * n_columns for n_rows, n_columns in grids)
        patches = torch.zeros(len(slices), n, config.patch_values, dtype=torch.uint8, device=device)
        for row, pixels in enumerate(slices):
            # Read-only arrays (a decoded picture may be one) are copied.
            there = to_device(np.require(pixels, requirements=("C", "W")), device)
            cut = patchify(there, config.patch_size)
            patches[row, : len(cut)] = cut
        return normalise(patches)

    def _batches(self, grids: Sequence[Grid]) -> Iterator[list[int]]:
        """Yield indices of slices that go together, similar sizes first to last.

        A CPU gains nothing from more rows, so there only equal grids share a batch: no padding.
        """
        order = sorted(range(len(grids)), key=lambda i: (grids[i][0] * grids[i][1], grids[i]))
        groups = [order]
        if self.encoder.embed.weight.device.type == "cpu":
            groups = [list(group) for _, group in groupby(order, key=lambda i: grids[i])]
        for group in groups:
            for start in range(0, len(group), self.batch_size):
                yield group[start : start + self.batch_size]
