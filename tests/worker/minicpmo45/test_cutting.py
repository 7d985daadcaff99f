"""Pictures that the device cuts: the pixels of `slice_image`, and copies of what is asked for."""

from unittest.mock import patch

import numpy as np
import pytest
import torch

from shared.errors import BadImage
from worker.models.minicpmo45 import cutting
from worker.models.minicpmo45.cutting import Cutter, PlannedSlice
from worker.models.minicpmo45.images import SliceConfig, slice_image
from worker.models.minicpmo45.senses import patch_sizes

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CONFIG = SliceConfig()
SMALL = SliceConfig(patch_size=2, scale_resolution=16)


@pytest.fixture(autouse=True)
def _in_inference_mode():
    with torch.inference_mode():
        yield


def cutter(config):
    return Cutter(config, patch_sizes(config), DEVICE)


def picture(height, width, seed=0):
    random = np.random.default_rng([seed, height, width])
    return random.integers(0, 256, (height, width, 3), dtype=np.uint8)


def filled(cutter, slices, config):
    """The slices as arrays, from a buffer that held something else."""
    n_values = patch_sizes(config)[1] * config.patch_size**2 * 3
    target = torch.full((len(slices), n_values), 99, dtype=torch.uint8, device=DEVICE)
    cutter.fill(slices, target)
    return [
        row[: np.prod(one.shape)].view(one.shape).cpu().numpy()
        for row, one in zip(target, slices, strict=True)
    ]


def check(cutter, rgb, most, config):
    planned = cutter.plan(rgb, most)
    wanted = slice_image(rgb, most, config).slices
    assert all(isinstance(one, PlannedSlice) for one in planned)
    assert [one.shape for one in planned] == [one.shape for one in wanted]
    for ours, theirs in zip(filled(cutter, planned, config), wanted, strict=True):
        np.testing.assert_array_equal(ours, theirs, f"{rgb.shape} {most}")


@pytest.mark.parametrize("seed", range(5))
def test_small_pictures_of_all_sizes_are_cut_as_pillow_cuts_them(seed):
    random, made = np.random.default_rng(seed), cutter(SMALL)
    for _ in range(20):
        height, width = np.exp(random.uniform(0, np.log(90), 2)).astype(int).tolist()
        check(made, picture(height, width), int(random.integers(1, 10)), SMALL)


@pytest.mark.parametrize(
    ("height", "width", "most"),
    [(448, 448, 1), (720, 1280, 1), (480, 640, 9), (40, 800, 9), (1000, 37, 4)],
)
def test_usual_pictures_are_cut_as_pillow_cuts_them(height, width, most):
    check(cutter(CONFIG), picture(height, width), most, CONFIG)


def test_slices_may_be_asked_for_in_any_order_and_mixed_with_others():
    made = cutter(SMALL)
    rgb, other, array = picture(40, 60), picture(50, 20, 1), picture(6, 8, 2)
    planned, more = made.plan(rgb, 9), made.plan(other, 9)
    arrays, more_arrays = slice_image(rgb, 9, SMALL).slices, slice_image(other, 9, SMALL).slices
    asked = [planned[3], array, planned[1], planned[2], more[0], more[2], more[1], planned[0]]
    wanted = [arrays[3], array, arrays[1], arrays[2], *(more_arrays[i] for i in (0, 2, 1))]

    got = filled(made, asked, SMALL)

    for ours, theirs in zip(got, [*wanted, arrays[0]], strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_a_picture_travels_once_however_its_slices_are_asked_for():
    made = cutter(SMALL)
    planned = made.plan(picture(60, 60), 9)
    assert len(planned) > 3

    with patch.object(made, "_cut", wraps=made._cut) as cut:
        filled(made, planned[:3], SMALL)
        filled(made, planned[3:], SMALL)

    cut.assert_called_once()


def test_a_picture_that_is_too_large_to_travel_is_sliced_at_once():
    made = cutter(SMALL)
    rgb = picture(40, 60)

    with patch.object(cutting, "MAX_CUT_BYTES", rgb.nbytes - 1):
        sliced = made.plan(rgb, 9)

    for ours, theirs in zip(sliced, slice_image(rgb, 9, SMALL).slices, strict=True):
        assert isinstance(ours, np.ndarray)
        np.testing.assert_array_equal(ours, theirs)


def test_slices_that_fit_no_size_are_made_at_once():
    made = Cutter(SMALL, (64,), DEVICE)

    (square,), (wide,) = made.plan(picture(40, 40), 1), made.plan(picture(40, 84), 1)

    assert isinstance(square, PlannedSlice)  # 8 x 8 patches
    assert isinstance(wide, np.ndarray)  # 6 x 12


def test_a_picture_that_cannot_be_sliced_is_refused():
    with pytest.raises(BadImage):
        cutter(SMALL).plan(picture(1, 1025), 1)
