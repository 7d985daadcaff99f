"""Bicubic resizing of 8-bit pictures on any device, bit for bit as Pillow 13 does it on a CPU.

Found by experiment. Along each axis an output pixel is a sum of the input pixels in its window
(Keys 1981, a = -0.5, widened where a picture shrinks), by weights that add up to 1 and are rounded
to whole numbers of 22 bits; the sum is rounded and cut to 8 bits after each of the two passes. So
the order of the passes shows in the result: rows are resized first, unless the height loses more
than twice as many pixels as the width. (Older versions always begin with the rows, which can
change a tall picture by a few shades.) A pass that changes nothing has weights of 0 and 1.

The weights are made on the host, in double precision, and kept for the sizes used last.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from worker.nn.attention import HAS_TRITON, has_kernels
from worker.nn.transfer import to_device

if HAS_TRITON:
    from worker.nn.kernels.resize import resize_pass

Size = tuple[int, int]
"""Height and width."""

BITS = 22
"""Of the weights' fractions: 8 for a shade and 2 for sums beyond white are left of 32."""
REACH = 2.0
"""Pixels that the cubic reaches to each side."""
N_CHANNELS = 3
N_KEPT = 128
"""Axes whose windows are kept: about 30 KB each, up to 1.6 MB for an endless strip."""


def resize_bicubic(pixels: Tensor, height: int, width: int) -> Tensor:
    """Return a picture in another size, uint8 `[height, width, 3]`.

    Args:
        pixels: uint8 `[H, W, 3]`, contiguous, at least one.
    """
    out = pixels.new_empty(1, height * width * N_CHANNELS)
    resize_into(pixels, (height, width), (1, 1), out)
    return out.view(height, width, N_CHANNELS)


def resize_into(pixels: Tensor, size: Size, grid: tuple[int, int], out: Tensor) -> None:
    """Write a picture in another size, cut into equal tiles.

    Args:
        pixels: uint8 `[H, W, 3]`, contiguous, at least one; fewer than 2**31 values.
        size: height and width of the whole, multiples of the grid's rows and columns.
        grid: rows and columns of tiles.
        out: uint8 `[rows * columns, R]`, its rows contiguous. The k-th one, row by row, begins with
            tile k (`[h, w, 3]`); what is behind it in the row stays as it is.
    """
    height, width = pixels.shape[:2]
    is_vertical = is_height_first((height, width), size)
    between = (size[0], width) if is_vertical else (height, size[1])
    middle = pixels.new_empty(1, between[0] * between[1] * N_CHANNELS)
    _pass(pixels, middle, between, (1, 1), is_vertical)
    _pass(middle.view(*between, N_CHANNELS), out, size, grid, not is_vertical)


def is_height_first(before: Size, after: Size) -> bool:
    """Whether the columns are resized before the rows."""
    return before[0] - after[0] > max(0, 2 * (before[1] - after[1]))


@lru_cache(maxsize=N_KEPT)
def windows(n_in: int, n_out: int) -> NDArray[np.int32]:
    """Return where the window of each output pixel begins, and its weights below; not to be
    written to.

    Returns:
        `[1 + n_taps, n_out]`. All windows have the same length and none leaves the input; entries
        that are too many have weight 0.
    """
    scale = n_in / n_out
    widening = max(scale, 1.0)
    center = (np.arange(n_out) + 0.5) * scale
    first = np.maximum((center - REACH * widening + 0.5).astype(np.int64), 0)
    behind = np.minimum((center + REACH * widening + 0.5).astype(np.int64), n_in)
    n_taps = int((behind - first).max())
    start = np.minimum(first, n_in - n_taps)
    index = start + np.arange(n_taps)[:, None]  # [n_taps, n_out]
    weights = _cubic((index - center + 0.5) * (1.0 / widening))
    weights[(index < first) | (index >= behind)] = 0.0
    # One after the other: `sum` may add in pairs, which gives other last digits.
    weights /= np.cumsum(weights, axis=0)[-1]
    rounded = np.trunc(weights * (1 << BITS) + np.copysign(0.5, weights))
    return np.concatenate((start[None], rounded)).astype(np.int32)


def _cubic(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """The kernel of a = -0.5; the order of operations decides about last digits."""
    x = np.abs(x)
    near = (1.5 * x - 2.5) * x * x + 1.0
    far = (((x - 5.0) * x + 8.0) * x - 4.0) * -0.5
    return np.where(x < 1.0, near, np.where(x < REACH, far, 0.0))


@lru_cache(maxsize=N_KEPT)
def _windows_on(n_in: int, n_out: int, device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # kept for callers of both kinds
        return to_device(windows(n_in, n_out).copy(), device)


def _pass(
    source: Tensor, out: Tensor, size: Size, grid: tuple[int, int], is_vertical: bool
) -> None:
    axis = 0 if is_vertical else 1
    table = _windows_on(source.shape[axis], size[axis], source.device)
    run = resize_pass if has_kernels(source) else plain_pass
    run(source, table, out, size, grid, BITS, is_vertical=is_vertical)


def plain_pass(
    source: Tensor,
    windows: Tensor,
    out: Tensor,
    size: Size,
    grid: tuple[int, int],
    bits: int,
    *,
    is_vertical: bool,
) -> None:
    """Resize along one axis into tiles.

    Args:
        source: uint8 `[H, W, 3]`, contiguous.
        windows: int32 `[1 + n_taps, n]` of `windows`, n being the new height or width.
        out, size, grid: as of `resize_into`.
        bits: of the weights' fractions.
        is_vertical: whether the height changes; else the width.
    """
    starts, weights = windows[0].long(), windows[1:]
    if is_vertical:
        weights = weights[..., None]
    total = source.new_full((*size, N_CHANNELS), 1 << (bits - 1), dtype=torch.int32)
    for tap, weight in enumerate(weights):
        total += source.index_select(0 if is_vertical else 1, starts + tap) * weight[..., None]
    shades = (total >> bits).clamp_(0, 255).to(torch.uint8)
    (height, width), (n_rows, n_columns) = size, grid
    tiles = shades.view(n_rows, height // n_rows, n_columns, width // n_columns, N_CHANNELS)
    tiles = tiles.transpose(1, 2).flatten(2).flatten(0, 1)  # [n_tiles, h * w * 3]
    out[:, : tiles.shape[1]] = tiles
