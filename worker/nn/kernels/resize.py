"""One pass of a bicubic resize in whole numbers: each output pixel is a weighted sum of inputs.

Sizes of pictures are whatever clients send, so nothing is compiled for any of them: there are two
kernels, one per axis, and their numbers and addresses are plain arguments. The eager twin is
`worker.nn.resize.plain_pass`. Needs Triton.
"""

import triton
from torch import Tensor
from triton import language as tl

BLOCK = 256
"""Values (three a pixel) of one program, side by side in a row."""
WARPS = 4

_ADDRESSES = ("source_ptr", "windows_ptr", "out_ptr")
_NUMBERS = (
    "in_width",
    "out_width",
    "n_windows",
    "n_taps",
    "tile_height",
    "tile_width",
    "n_columns",
    "tile_stride",
)


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_ADDRESSES)
def _weigh(
    source_ptr,
    windows_ptr,
    out_ptr,
    in_width,
    out_width,
    n_windows,
    n_taps,
    tile_height,
    tile_width,
    n_columns,
    tile_stride,
    IS_VERTICAL: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A part of one output row; its pixels go to the tiles that they are in."""
    y = tl.program_id(0)
    value = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x, channel = value // 3, value % 3
    is_value = x < out_width
    if IS_VERTICAL:
        window = tl.zeros_like(x) + y
        place = tl.load(windows_ptr + window) * in_width * 3 + value
        step = in_width * 3
    else:
        window = x
        place = (y * in_width + tl.load(windows_ptr + window, is_value, 0)) * 3 + channel
        step = 3
    total = tl.full((BLOCK,), 1 << (BITS - 1), tl.int32)
    for tap in range(n_taps):
        weight = tl.load(windows_ptr + (tap + 1) * n_windows + window, is_value, 0)
        total += weight * tl.load(source_ptr + place + tap * step, is_value, 0).to(tl.int32)
    shade = tl.minimum(tl.maximum(total >> BITS, 0), 255).to(tl.uint8)
    tile = (y // tile_height) * n_columns + x // tile_width
    inner = ((y % tile_height) * tile_width + x % tile_width) * 3 + channel
    tl.store(out_ptr + tile * tile_stride + inner, shade, is_value)


def resize_pass(
    source: Tensor,
    windows: Tensor,
    out: Tensor,
    size: tuple[int, int],
    grid: tuple[int, int],
    bits: int,
    *,
    is_vertical: bool,
) -> None:
    """Resize along one axis into tiles: `worker.nn.resize.plain_pass`, which names the arguments.

    All tensors have less than 2**31 values.
    """
    (height, width), (n_rows, n_columns) = size, grid
    _weigh[(height, triton.cdiv(width * 3, BLOCK))](
        source,
        windows,
        out,
        source.shape[1],
        width,
        windows.shape[1],
        windows.shape[0] - 1,
        height // n_rows,
        width // n_columns,
        n_columns,
        out.stride(0),
        IS_VERTICAL=is_vertical,
        BITS=bits,
        BLOCK=BLOCK,
        num_warps=WARPS,
    )
