"""Trace `vision`: slicing, positions, vision transformer, resampler, and all of them together."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

import numpy as np
import PIL
import torch

from tests.golden.compare import Trace, image
from tests.golden.loaded import load_parts
from worker.models.minicpmo45.images import UNK, SliceConfig, Sliced, image_layout, slice_image
from worker.nn.siglip import normalise, position_ids
from worker.nn.vision import VisionTower

TARGETS_PILLOW = "13"
"""Major version of the Pillow that resized the pictures of the targets (README, 1)."""
PIXEL_START = 5
"""First row and column of `pix_u8_subK` (README, 1)."""


def replay(trace: Trace, folder: Path) -> None:
    parts = load_parts(folder)
    tower, slicing = parts.vision, parts.config.slices
    for index in range(len(trace.fields["images"])):
        _replay_image(trace, f"images[{index}]", tower, slicing)
    for index in range(len(trace.fields["vit"])):
        _replay_random_patches(trace, f"vit[{index}]", tower)
    for name in [name for name in trace.tensors if name.startswith("pos.")]:
        n_rows, n_columns = map(int, name.split(".")[1].split("x"))
        side = tower.encoder.config.n_positions_side
        trace.check(name, position_ids((n_rows, n_columns), side))
    _replay_padded_batch(trace, tower, slicing)


def _replay_image(trace: Trace, path: str, tower: VisionTower, slicing: SliceConfig) -> None:
    width, height = trace.given(f"{path}.width"), trace.given(f"{path}.height")
    shift, most = trace.given(f"{path}.shift"), trace.given(f"{path}.max_slice_nums")
    name = f"i{width}x{height}_m{most}"
    trace.equal(f"{path}.name", name)
    sliced = slice_image(image(width, height, shift), most, slicing)
    trace.equal(f"{path}.grid", None if sliced.grid is None else list(sliced.grid))
    _check_layout(trace, path, sliced, tower.resampler.config.n_queries)

    n_theirs = len(trace.fields["images"][_index(path)]["slices"])
    if len(sliced.slices) != n_theirs:
        trace.fail(f"{path}: {len(sliced.slices)} slices, expected {n_theirs}")
        return
    rows = tower.encode(sliced.slices)
    for number, pixels in enumerate(sliced.slices):
        _check_pixels(trace, f"{path}.slices[{number}]", pixels, tower)
        target, step = trace.find(f"{name}.s{number}.pix_u8")
        channels = pixels.transpose(2, 0, 1)
        trace.check_pixels(target, channels[:, PIXEL_START::step, PIXEL_START::step])
        target, step = trace.find(f"{name}.s{number}.emb")
        trace.check(target, rows[number, ::step])


def _check_layout(trace: Trace, path: str, sliced: Sliced, n_queries: int) -> None:
    for key, image_id in (("placeholder", 0), ("placeholder_no_id", None)):
        text = image_layout(sliced.grid, image_id, n_queries)
        trace.equal(f"{path}.{key}", text.replace(UNK * n_queries, f"[{n_queries}]"))


def _check_pixels(
    trace: Trace, path: str, pixels: np.ndarray[Any, np.dtype[np.uint8]], tower: VisionTower
) -> None:
    trace.equal(f"{path}.tgt", list(tower.grid_of(pixels)))
    if PIL.__version__.split(".")[0] == TARGETS_PILLOW:
        trace.equal(f"{path}.sha256", hashlib.sha256(pixels.tobytes()).hexdigest())
    else:
        trace.excuse(f"{path}.sha256", "another Pillow may round a pixel by 1 (README, 3)")
    values = normalise(torch.from_numpy(pixels)).double()
    # The mean is rounded to nine digits; the original normalises in single precision.
    trace.equal(f"{path}.mean", values.mean(dim=(0, 1)).tolist(), abs_=2e-6)
    # How far the normalised values are from whole uint8 values.
    restored = (values * 0.5 + 0.5) * 255
    off = float((restored - restored.round()).abs().max())
    trace.equal(f"{path}.max_uint8_error", off, abs_=1e-3)


def _replay_random_patches(trace: Trace, path: str, tower: VisionTower) -> None:
    n_rows, n_columns = trace.given(f"{path}.th"), trace.given(f"{path}.tw")
    recipe, name = trace.given(f"{path}.input"), f"{n_rows}x{n_columns}"
    trace.equal(f"{path}.name", name)
    patch, n = tower.encoder.config.patch_size, n_rows * n_columns
    assert recipe == (
        f"torch.randn(1,3,{patch},{patch}*th*tw, "
        "generator=torch.Generator().manual_seed(100*th+tw))"
    )
    seeded = torch.Generator().manual_seed(100 * n_rows + n_columns)
    strip = torch.randn(1, 3, patch, patch * n, generator=seeded)  # patches side by side
    trace.equal(f"{path}.in_sum", float(strip.double().sum()), abs_=1e-6)
    patches = strip.view(3, patch, n, patch).permute(2, 0, 1, 3).reshape(1, n, -1)
    grids = [(n_rows, n_columns)]
    states = tower.encoder(patches, grids)
    target, step = trace.find(f"vit.{name}.out")
    trace.check(target, states[0, ::step])
    target, step = trace.find(f"resampler.{name}.out")
    trace.check(target, tower.resampler(states, grids)[0, ::step])


def _replay_padded_batch(trace: Trace, tower: VisionTower, slicing: SliceConfig) -> None:
    text = trace.given("batch2")
    pictures = [
        tuple(map(int, found)) for found in re.findall(r"\((\d+),(\d+),shift (\d+)\)", text)
    ]
    most = int(re.findall(r"max_slice_nums (\d+)", text)[0])
    slices = [
        pixels
        for width, height, shift in pictures
        for pixels in slice_image(image(width, height, shift), most, slicing).slices
    ]
    for number, rows in enumerate(tower.encode_batch(slices)):
        trace.check(f"batch2.s{number}.emb", rows)


def _index(path: str) -> int:
    return int(path[path.index("[") + 1 : path.index("]")])
