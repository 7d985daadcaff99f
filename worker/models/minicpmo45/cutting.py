"""Pictures that are resized and cut where the model is: on its device.

The same pixels as of `images.slice_image`, bit for bit. A picture is planned on the host lane; its
bytes travel when its first slice is needed, and all of its slices are made at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from worker.compile.buckets import fit
from worker.models.minicpmo45.images import (
    Pixels,
    SliceConfig,
    SlicePlan,
    plan_slices,
    slice_image,
)
from worker.nn.resize import N_CHANNELS, resize_into, windows
from worker.nn.transfer import N_SIDES, SIDE_BYTES, Staging

MAX_CUT_BYTES = N_SIDES * SIDE_BYTES
"""Of a picture that travels whole: no wait, 11 megapixels. A larger one is sliced on the host lane,
where nobody else waits for it, and a session's pictures never need much of the device's memory."""


@dataclass(slots=True, eq=False)
class PlannedPicture:
    pixels: Pixels
    plan: SlicePlan
    row_values: int
    """Room of a slice in `rows`."""
    rows: Tensor | None = None
    """Once they are made: uint8 `[n_slices, row_values]` on the device, each beginning with a slice
    as it lies in memory (`[h, w, 3]`); what follows may be anything."""


@dataclass(frozen=True, slots=True)
class PlannedSlice:
    picture: PlannedPicture
    index: int
    """0 is the overview; tiles follow row by row."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """As of an array `[h, w, 3]`."""
        width, height = self.picture.plan.size(self.index)
        return height, width, N_CHANNELS


AnySlice = Pixels | PlannedSlice


class Cutter:
    """Makes planned slices.

    Args:
        sizes: patches that a slice is padded to, ascending.
    """

    def __init__(self, config: SliceConfig, sizes: Sequence[int], device: torch.device) -> None:
        self._config, self._sizes, self._device = config, sizes, device
        self._staging = Staging(device)
        # Kernels are made here, not at the first picture.
        for blank in self.plan(np.zeros((1, 1, N_CHANNELS), np.uint8), 1):
            assert isinstance(blank, PlannedSlice)
            self._cut(blank.picture)

    def plan(self, rgb: Pixels, max_slice_nums: int) -> tuple[AnySlice, ...]:
        """Return a picture's slices to be made; `slice_image` made those of one that is too large.

        From any thread. Raises BadImage as `slice_image` does.
        """
        height, width, _ = rgb.shape
        plan = plan_slices(width, height, max_slice_nums, self._config)
        patch = self._config.patch_size
        largest = max(math.prod(plan.size(index)) for index in range(plan.n_slices))
        padded = fit(largest // patch**2, self._sizes)
        if padded is None or rgb.nbytes > MAX_CUT_BYTES:
            return slice_image(rgb, max_slice_nums, self._config).slices
        for size in (plan.overview, plan.refined):
            if size is not None:  # found in the cache when they are needed
                windows(width, size[0])
                windows(height, size[1])
        picture = PlannedPicture(rgb, plan, padded * patch**2 * N_CHANNELS)
        return tuple(PlannedSlice(picture, index) for index in range(plan.n_slices))

    def fill(self, slices: Sequence[AnySlice], target: Tensor) -> None:
        """Copy slices to the rows of a tensor, whatever is behind them in a row.

        Args:
            target: uint8 `[B, R]`, its rows contiguous.
        """
        for row, pixels in enumerate(slices):
            if not isinstance(pixels, PlannedSlice):
                self._staging.send(pixels, target[row])
        for (picture, first), run in groupby(enumerate(slices), _run_of):
            if picture is None:
                continue
            placed = list(run)
            row, n = placed[0][0], len(placed)
            rows = picture.rows if picture.rows is not None else self._cut(picture)
            n_values = min(rows.shape[1], target.shape[1])
            made = rows[first + row : first + row + n, :n_values]
            target[row : row + n, :n_values].copy_(made)

    def _cut(self, picture: PlannedPicture) -> Tensor:
        plan, shape = picture.plan, picture.pixels.shape
        sent = torch.empty(picture.pixels.size, dtype=torch.uint8, device=self._device)
        self._staging.send(picture.pixels, sent)
        rows = picture.rows = sent.new_empty(plan.n_slices, picture.row_values)
        there = sent.view(shape)
        resize_into(there, plan.overview[::-1], (1, 1), rows[:1])
        if plan.grid is not None and plan.refined is not None:
            resize_into(there, plan.refined[::-1], plan.grid[::-1], rows[1:])
        return rows


def _run_of(placed: tuple[int, AnySlice]) -> tuple[PlannedPicture | None, int]:
    """Slices of one picture that follow each other, in it and here, have the same."""
    row, pixels = placed
    if isinstance(pixels, PlannedSlice):
        return pixels.picture, pixels.index - row
    return None, 0
