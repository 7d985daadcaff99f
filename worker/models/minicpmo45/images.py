"""Pictures as the model takes them: an overview slice, tiles of it in a grid, and their places
in a text.

Written from the published description of MiniCPM-V's adaptive slicing (Yao et al. 2024) and the
behaviour of MiniCPM-o 4.5. The overview always has about `scale_resolution` squared pixels,
whatever the picture has, in the picture's proportions and in multiples of the patch size. So its
patch grid depends on the proportions only; with `max_slice_nums` 1 (the default of a duplex
frame) that one grid is all there is. Of usual cameras (patch rows, patch columns):

    1:1 (32, 32)   4:3 (28, 37)   3:2 (26, 39)   16:10 (25, 40)   16:9 (24, 43)   2:1 (23, 45)

and upright ones the other way round. Between 1:2 and 2:1 there are 46 grids of 988 to 1056
patches, between 1:3 and 3:1 there are 77 of 987 to 1056, and no picture has more than 1366.
`overview_grid` gives that of any picture, for those who keep something per grid.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from shared.errors import BadImage

Pixels = NDArray[np.uint8]
"""`[H, W, 3]`."""
Size = tuple[int, int]
"""Width and height."""

MAX_ASPECT_RATIO = 1024
"""Longer side / shorter side. A slice then has at most 1366 patches (about 1024 are usual); in the
original there is no bound, and one strip of pixels occupies it for as long as it likes."""

UNK = "<unk>"
"""In a text, one row of an image's embeddings."""


@dataclass(frozen=True, slots=True)
class SliceConfig:
    patch_size: int = 14
    scale_resolution: int = 448
    max_slice_nums: int = 9
    """What a chat picture gets if the request says nothing."""


@dataclass(frozen=True, slots=True)
class SlicePlan:
    overview: Size
    """What the picture is resized to for the first slice."""
    grid: tuple[int, int] | None
    """Columns and rows of tiles; None = there is only the overview."""
    refined: Size | None
    """What the picture is resized to before it is cut into tiles."""

    @property
    def n_slices(self) -> int:
        """The overview and the tiles."""
        return 1 if self.grid is None else 1 + math.prod(self.grid)

    def size(self, index: int) -> Size:
        """Of a slice: 0 is the overview, the others are tiles."""
        if index == 0 or self.grid is None or self.refined is None:
            return self.overview
        return self.refined[0] // self.grid[0], self.refined[1] // self.grid[1]


@dataclass(frozen=True, slots=True)
class Sliced:
    slices: tuple[Pixels, ...]
    """The overview, then the tiles row by row. Tiles are views of one array."""
    grid: tuple[int, int] | None
    """Columns and rows of tiles; None = there is only the overview."""


def slice_image(rgb: Pixels, max_slice_nums: int, config: SliceConfig) -> Sliced:
    """Return the slices of a picture `[H, W, 3]`.

    Args:
        max_slice_nums: most tiles. It is not bounded by `config.max_slice_nums`; a picture of n
            times `scale_resolution` squared pixels gets n + 1 at most, whatever is asked for.

    Raises:
        BadImage: no pixels, or one side is more than `MAX_ASPECT_RATIO` times the other.
    """
    height, width, _ = rgb.shape
    plan = plan_slices(width, height, max_slice_nums, config)
    picture = Image.fromarray(rgb)
    slices = [_resized(picture, plan.overview)]
    if plan.grid is not None and plan.refined is not None:
        refined = _resized(picture, plan.refined)
        tile_width, tile_height = plan.size(1)
        slices += [
            refined[top : top + tile_height, left : left + tile_width]
            for top in range(0, plan.refined[1], tile_height)
            for left in range(0, plan.refined[0], tile_width)
        ]
    return Sliced(tuple(slices), plan.grid)


def plan_slices(width: int, height: int, max_slice_nums: int, config: SliceConfig) -> SlicePlan:
    """Return how a picture of this size is sliced. Raises BadImage as `slice_image` does."""
    if width < 1 or height < 1:
        raise BadImage(f"image is {width}x{height}, it has no pixels")
    if max(width, height) > MAX_ASPECT_RATIO * min(width, height):
        raise BadImage(
            f"image is {width}x{height}, one side may be {MAX_ASPECT_RATIO} times the other"
        )
    overview = _fitted(width, height, config)
    grid = _tile_grid(width, height, max_slice_nums, config)
    if grid is None:
        return SlicePlan(overview, None, None)
    n_columns, n_rows = grid
    tile = _fitted(
        _multiple(width, n_columns) / n_columns, _multiple(height, n_rows) / n_rows, config
    )
    return SlicePlan(overview, grid, (tile[0] * n_columns, tile[1] * n_rows))


def overview_grid(width: int, height: int, config: SliceConfig) -> tuple[int, int]:
    """Return patch rows and patch columns of a picture's first slice; raises BadImage."""
    wide, high = plan_slices(width, height, 1, config).overview
    return high // config.patch_size, wide // config.patch_size


def image_layout(
    grid: tuple[int, int] | None, image_id: int | None, n_queries: int, *, is_duplex: bool = False
) -> str:
    """Return the text that stands for a picture: special tokens, and `UNK` for each embedding row.

    Embeddings come in the order of the slices: the k-th run of `n_queries` times `UNK` belongs to
    slice k. Encoded with the model's tokenizer every name in it is one id, and so is the newline.

    Args:
        grid: columns and rows of tiles.
        image_id: number of the picture in its chat; None = without.
        is_duplex: duplex units have no newline between the rows of tiles.
    """
    rows_of_slice = UNK * n_queries
    text = "" if image_id is None else f"<image_id>{image_id}</image_id>"
    text += f"<image>{rows_of_slice}</image>"
    if grid is None:
        return text
    n_columns, n_rows = grid
    row_of_tiles = f"<slice>{rows_of_slice}</slice>" * n_columns
    return text + ("" if is_duplex else "\n").join([row_of_tiles] * n_rows)


def _tile_grid(
    width: int, height: int, max_slice_nums: int, config: SliceConfig
) -> tuple[int, int] | None:
    """Return columns and rows of tiles whose proportions are closest to the picture's."""
    wanted = min(math.ceil(width * height / config.scale_resolution**2), max_slice_nums)
    if wanted <= 1:
        return None
    grids = [
        (n_columns, count // n_columns)
        for count in (wanted - 1, wanted, wanted + 1)
        if 1 < count <= max_slice_nums
        for n_columns in range(1, count + 1)
        if count % n_columns == 0
    ]
    proportions = math.log(width / height)
    return min(grids, key=lambda grid: abs(proportions - math.log(grid[0] / grid[1])))


def _fitted(width: float, height: float, config: SliceConfig) -> Size:
    """Return the size with `scale_resolution` squared pixels in these proportions, about.

    Smaller pictures are enlarged too. The original cuts to whole pixels before it rounds to whole
    patches, which decides between two grids now and then.
    """
    ratio = width / height
    high = int(config.scale_resolution / math.sqrt(ratio))
    wide = int(high * ratio)
    return _multiple(wide, config.patch_size), _multiple(high, config.patch_size)


def _multiple(value: int, of: int) -> int:
    """Return the nearest multiple, at least one; a half goes to the even one."""
    return max(round(value / of) * of, of)


def _resized(picture: Image.Image, size: Size) -> Pixels:
    return np.array(picture.resize(size, Image.Resampling.BICUBIC))
