"""Resizing in whole numbers against Pillow, bit for bit. The kernels need Triton, which a torch for
CPUs does not bring, and a GPU or Triton's interpreter:
`TRITON_INTERPRET=1 python -m pytest tests/worker/nn/test_resize.py`."""

import os
from unittest.mock import patch

import numpy as np
import PIL
import pytest
import torch
from PIL import Image

from worker.nn import resize
from worker.nn.attention import HAS_TRITON
from worker.nn.resize import is_height_first, resize_bicubic, resize_into, windows

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
IN_INTERPRETER = os.environ.get("TRITON_INTERPRET") == "1"
WITH_KERNELS = HAS_TRITON and (DEVICE == "cuda" or IN_INTERPRETER)
ALWAYS_ROWS_FIRST = int(PIL.__version__.split(".")[0]) < 13

# Of the interpreter, where a loop ends at an argument.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")


@pytest.fixture(params=[False, True], ids=["plain", "kernels"])
def kernels(request):
    """Whether the kernels resize."""
    if request.param and not WITH_KERNELS:
        pytest.skip("needs Triton and a GPU or its interpreter")
    with patch.object(resize, "has_kernels", lambda _: request.param):
        yield request.param


def pixels(random, height, width):
    """Noise of black and white every other time: sums far below 0 and above 255."""
    made = random.integers(0, 256, (height, width, 3), dtype=np.uint8)
    return np.where(made > 127, np.uint8(255), np.uint8(0)) if random.integers(2) else made


def check(random, before, after):
    picture = pixels(random, *before)
    if ALWAYS_ROWS_FIRST and is_height_first(before, after):
        return
    wanted = Image.fromarray(picture).resize(after[::-1], Image.Resampling.BICUBIC)
    got = resize_bicubic(torch.from_numpy(picture).to(DEVICE), *after)
    np.testing.assert_array_equal(got.cpu().numpy(), np.asarray(wanted), f"{before} {after}")


@pytest.mark.parametrize("seed", range(8))
def test_any_size_becomes_any_other_as_in_pillow(seed, kernels):
    random = np.random.default_rng(seed)
    n_pictures, most = (3, 20) if kernels and IN_INTERPRETER else (50, 200)
    for _ in range(n_pictures):
        height, width, *after = np.exp(random.uniform(0, np.log(most), 4)).astype(int).tolist()
        check(random, (height, width), tuple(after))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((1, 1), (7, 5)),
        ((9, 8), (1, 1)),
        ((1, 30), (14, 6)),
        ((30, 1), (6, 14)),
        ((4, 80), (14, 16)),
        ((80, 4), (16, 14)),
        ((11, 13), (11, 13)),
        ((11, 13), (11, 5)),
        ((11, 13), (11, 40)),
        ((11, 13), (4, 13)),
        ((11, 13), (30, 13)),
        ((90, 120), (8, 10)),
        ((3, 300), (2, 90)),
    ],
)
@pytest.mark.usefixtures("kernels")
def test_strips_single_pixels_and_sides_that_stay(before, after):
    check(np.random.default_rng(0), before, after)


@pytest.mark.parametrize(("height", "is_first"), [(30, False), (31, True)])
@pytest.mark.usefixtures("kernels")
def test_the_height_goes_first_when_it_loses_more_than_twice_as_much(height, is_first):
    random = np.random.default_rng(1)
    assert is_height_first((height, 20), (10, 10)) == is_first
    for _ in range(5):
        check(random, (height, 20), (10, 10))


@pytest.mark.parametrize(("before", "after"), [((20, 31), (12, 18)), ((50, 12), (12, 18))])
@pytest.mark.usefixtures("kernels")
def test_tiles_are_parts_of_the_whole_and_nothing_else_is_written(before, after):
    random = np.random.default_rng(2)
    picture = torch.from_numpy(pixels(random, *before)).to(DEVICE)
    whole = resize_bicubic(picture, *after)
    n_rows, n_columns, n_values = 2, 3, 6 * 6 * 3
    out = torch.full((6, n_values + 5), 77, dtype=torch.uint8, device=DEVICE)

    resize_into(picture, after, (n_rows, n_columns), out)

    for index, row in enumerate(out):
        top, left = index // n_columns * 6, index % n_columns * 6
        tile = row[:n_values].view(6, 6, 3)
        assert torch.equal(tile, whole[top : top + 6, left : left + 6])
    assert (out[:, n_values:] == 77).all()


@pytest.mark.parametrize("sizes", [(1, 14), (5, 3), (100, 7), (7, 100), (64, 64), (5000, 14)])
def test_windows_lie_within_the_picture_and_weigh_one(sizes):
    n_in, n_out = sizes
    start, weights = windows(*sizes)[0], windows(*sizes)[1:]

    assert weights.shape[1] == n_out
    assert start.min() >= 0
    assert (start + len(weights)).max() <= n_in
    # Each weight is rounded on its own.
    assert np.abs(weights.sum(axis=0) - 2**22).max() <= len(weights)


def test_windows_of_the_sizes_used_last_are_kept_and_no_more():
    for size in range(1, 2 * resize.N_KEPT):
        check(np.random.default_rng(3), (2, 3), (1, size))

    assert resize.windows.cache_info().currsize == resize.N_KEPT
    assert resize._windows_on.cache_info().currsize == resize.N_KEPT


@pytest.mark.skipif(not HAS_TRITON or IN_INTERPRETER, reason="needs Triton, not its interpreter")
def test_no_kernel_is_compiled_for_a_size():
    from worker.nn.kernels.resize import _weigh  # noqa: PLC0415

    for parameter in _weigh.params:
        kinds = (parameter.do_not_specialize, parameter.do_not_specialize_on_alignment)
        assert parameter.is_constexpr or any(kinds), parameter.name
