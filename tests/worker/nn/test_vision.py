"""Slices of all sizes through transformer and resampler: order, batches, padding."""

import copy

import numpy as np
import pytest
import torch

from worker.nn.resampler import ResamplerConfig
from worker.nn.siglip import Grids, VisionConfig, padded_position_ids
from worker.nn.vision import VisionTower

P = 2
CLOSE = {"rtol": 1e-4, "atol": 1e-5}
DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=(
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
        ),
    ),
]
GRIDS = [(3, 4), (2, 5), (4, 3), (3, 4), (1, 1), (2, 5), (3, 4), (1, 9)]


@pytest.fixture(scope="module")
def tower():
    torch.manual_seed(0)
    made = VisionTower(
        VisionConfig(16, 1, 2, 24, P, 6, 1e-6),
        ResamplerConfig(llm_dim=24, vision_width=16, n_queries=3, n_heads=2),
        batch_size=2,
    )
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return made.eval().requires_grad_(False)


@pytest.fixture(scope="module")
def slices():
    rng = np.random.default_rng(0)
    return [rng.integers(0, 256, (h * P, w * P, 3), dtype=np.uint8) for h, w in GRIDS]


def test_rows_come_in_the_order_of_the_slices(tower, slices):
    wanted = torch.cat([tower.encode_batch([pixels]) for pixels in slices])
    got = tower.encode(slices)
    assert got.shape == (len(GRIDS), 3, 24)
    torch.testing.assert_close(got, wanted, **CLOSE)
    torch.testing.assert_close(tower.encode(slices[::-1]), wanted.flip(0), **CLOSE)


def test_a_padded_batch_equals_single_slices(tower, slices):
    wanted = torch.cat([tower.encode_batch([pixels]) for pixels in slices])
    torch.testing.assert_close(tower.encode_batch(slices), wanted, **CLOSE)


def test_a_cpu_batch_holds_equal_grids_and_no_more_than_the_limit(tower, slices, monkeypatch):
    batches = []
    encode_batch = tower.encode_batch

    def watched(batch):
        batches.append([tower.grid_of(pixels) for pixels in batch])
        return encode_batch(batch)

    monkeypatch.setattr(tower, "encode_batch", watched)
    tower.encode(slices)
    assert all(len(batch) <= 2 and len(set(batch)) == 1 for batch in batches)
    assert sorted(grid for batch in batches for grid in batch) == sorted(GRIDS)
    assert len(batches) == 6  # three of (3, 4) are two batches


def test_no_slices_give_no_rows(tower):
    assert tower.encode([]).shape == (0, 3, 24)


def test_read_only_and_strided_pixels_are_taken(tower, slices):
    wide = np.zeros((6, 16, 3), np.uint8)
    wide[:, 4:12] = slices[0]
    view = wide[:, 4:12]
    view.flags.writeable = False
    torch.testing.assert_close(tower.encode([view]), tower.encode(slices[:1]), rtol=0, atol=0)


def test_slices_in_tensors_equal_single_slices(tower, slices):
    n, size = 14, 3 * P**2
    pixels = torch.full((len(slices), n, size), 255, dtype=torch.uint8)
    for row, one in enumerate(slices):
        pixels[row].view(-1)[: one.size] = torch.from_numpy(one).flatten()
    grids = Grids(
        torch.tensor([w for _, w in GRIDS], dtype=torch.int32),
        torch.tensor([h * w for h, w in GRIDS], dtype=torch.int32),
    )
    ids = torch.stack([torch.from_numpy(padded_position_ids(grid, n, 6)) for grid in GRIDS])
    got = tower.encode_padded(pixels, grids, ids, tower.resampler.axis_positions(n))
    torch.testing.assert_close(got, tower.encode(slices), **CLOSE)


def loaded_like(tower):
    with torch.device("meta"):
        loaded = VisionTower(tower.encoder.config, tower.resampler.config)
    loaded.load_state_dict(copy.deepcopy(tower.state_dict()), strict=True, assign=True)
    return loaded.eval().requires_grad_(False)


def test_it_loads_from_the_meta_device(tower, slices):
    loaded = loaded_like(tower)
    torch.testing.assert_close(loaded.encode(slices), tower.encode(slices), **CLOSE)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_device_and_dtype_gives_the_same(tower, slices, device, dtype):
    there = loaded_like(tower).to(device, dtype)
    got = there.encode(slices)
    assert got.device.type == device
    assert got.dtype == dtype
    likeness = torch.cosine_similarity(got.cpu().float(), tower.encode(slices), dim=-1)
    assert likeness.min() > (0.9999 if dtype == torch.float32 else 0.998)
