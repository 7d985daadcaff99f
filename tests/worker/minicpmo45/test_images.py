"""Slicing of pictures of all sizes, and the text that stands for them."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.errors import BadImage
from worker.models.minicpmo45.images import (
    MAX_ASPECT_RATIO,
    UNK,
    SliceConfig,
    image_layout,
    overview_grid,
    plan_slices,
    slice_image,
)

CONFIG = SliceConfig()


def picture(width, height):
    """Red grows to the right, green downwards."""
    rgb = np.zeros((height, width, 3), np.uint8)
    rgb[..., 0] = np.linspace(0, 255, width).astype(np.uint8)
    rgb[..., 1] = np.linspace(0, 255, height).astype(np.uint8)[:, None]
    return rgb


@pytest.mark.parametrize(
    ("width", "height"),
    [(1, 1), (1, 900), (900, 1), (2, 1), (13, 14), (1, MAX_ASPECT_RATIO), (448, 449)],
)
@pytest.mark.parametrize("most", [1, 9])
def test_odd_pictures_give_whole_patches(width, height, most):
    sliced = slice_image(picture(width, height), most, CONFIG)
    for pixels in sliced.slices:
        assert pixels.dtype == np.uint8
        assert pixels.shape[0] % 14 == pixels.shape[1] % 14 == 0
        assert pixels.size > 0
    assert sliced.grid is None or len(sliced.slices) == 1 + math.prod(sliced.grid)


@pytest.mark.parametrize(
    ("width", "height"),
    [(1, MAX_ASPECT_RATIO + 1), (MAX_ASPECT_RATIO + 1, 1), (300_000, 1), (0, 5), (0, 0)],
)
def test_a_strip_or_nothing_is_a_bad_image(width, height):
    with pytest.raises(BadImage, match=f"{width}x{height}"):
        slice_image(np.zeros((height, width, 3), np.uint8), 1, CONFIG)


@settings(deadline=None, max_examples=300)
@given(st.integers(1, 20_000), st.integers(1, 20_000), st.integers(1, 300))
def test_every_plan_is_bounded(width, height, most):
    if max(width, height) > MAX_ASPECT_RATIO * min(width, height):
        return
    plan = plan_slices(width, height, most, CONFIG)
    rows, columns = overview_grid(width, height, CONFIG)
    assert plan.overview == (14 * columns, 14 * rows)
    assert 1 <= rows * columns <= 1366
    assert (plan.grid is None) == (plan.refined is None)
    if plan.grid is not None:
        n_tiles = math.prod(plan.grid)
        assert 2 <= n_tiles <= min(most, math.ceil(width * height / 448**2) + 1)
        for side, count in zip(plan.refined, plan.grid, strict=True):
            assert side % (14 * count) == 0
        assert 1 <= math.prod(plan.refined) // 14**2 // n_tiles <= 1366


@pytest.mark.parametrize(
    ("width", "height", "grid"),
    [
        (1, 1, (32, 32)),
        (4, 3, (28, 37)),
        (3, 2, (26, 39)),
        (16, 10, (25, 40)),
        (16, 9, (24, 43)),
        (2, 1, (23, 45)),
    ],
)
def test_an_overview_depends_on_proportions_only(width, height, grid):
    for scale in (1, 7, 120):
        assert overview_grid(scale * width, scale * height, CONFIG) == grid
        assert overview_grid(scale * height, scale * width, CONFIG) == grid[::-1]
        sliced = plan_slices(scale * width, scale * height, 9, CONFIG)
        assert sliced.overview == (14 * grid[1], 14 * grid[0])


@pytest.mark.parametrize(
    ("limit", "n_grids", "fewest", "most"), [(2, 46, 988, 1056), (3, 77, 987, 1056)]
)
def test_grids_of_usual_proportions_are_as_many_as_documented(limit, n_grids, fewest, most):
    steps = 40_000
    ratios = (limit ** (step / steps) for step in range(-steps, steps + 1))
    grids = {overview_grid(round(10**7 * ratio), 10**7, CONFIG) for ratio in ratios}
    n_patches = [rows * columns for rows, columns in grids]
    assert (len(n_patches), min(n_patches), max(n_patches)) == (n_grids, fewest, most)


def test_tiles_come_row_by_row():
    sliced = slice_image(picture(1920, 1080), 9, CONFIG)
    assert sliced.grid == (4, 2)
    assert len(sliced.slices) == 9
    means = [tile.mean(axis=(0, 1)) for tile in sliced.slices[1:]]
    order = sorted(range(8), key=lambda i: (round(means[i][1] / 100), means[i][0]))
    assert order == list(range(8))


@pytest.mark.parametrize("size", [(448, 448), (1280, 720), (40, 900)])
def test_a_plan_knows_its_slices(size):
    plan, sliced = plan_slices(*size, 9, CONFIG), slice_image(picture(*size), 9, CONFIG)
    assert plan.n_slices == len(sliced.slices)
    sizes = [plan.size(index)[::-1] for index in range(plan.n_slices)]
    assert sizes == [pixels.shape[:2] for pixels in sliced.slices]


@pytest.mark.parametrize(
    ("size", "most", "grid"),
    [
        ((448, 448), 9, None),
        ((449, 448), 9, (2, 1)),
        ((449, 448), 1, None),
        ((449, 448), 0, None),
        ((640, 480), 2, (2, 1)),
        ((480, 640), 2, (1, 2)),
        ((1280, 720), 9, (3, 2)),
        ((900, 900), 9, (2, 2)),
        ((2000, 2000), 9, (3, 3)),
    ],
)
def test_grids_follow_size_and_proportions(size, most, grid):
    assert plan_slices(*size, most, CONFIG).grid == grid


def test_resolution_and_patch_size_come_from_the_config():
    plan = plan_slices(200, 100, 4, SliceConfig(patch_size=10, scale_resolution=100))
    assert plan.overview == (140, 70)
    assert plan.grid == (2, 1)
    assert plan.refined == (200, 100)


def test_the_text_of_a_picture():
    assert image_layout(None, None, 2) == f"<image>{UNK}{UNK}</image>"
    assert image_layout(None, 3, 1) == f"<image_id>3</image_id><image>{UNK}</image>"
    tile = f"<slice>{UNK}</slice>"
    whole = f"<image>{UNK}</image>"
    assert image_layout((2, 2), None, 1) == f"{whole}{tile}{tile}\n{tile}{tile}"
    assert image_layout((2, 2), None, 1, is_duplex=True) == whole + 4 * tile


def test_there_are_as_many_rows_as_slices_need():
    sliced = slice_image(picture(1280, 720), 9, CONFIG)
    assert image_layout(sliced.grid, 0, 64).count(UNK) == 64 * len(sliced.slices)
