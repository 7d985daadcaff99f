"""Vision transformer: positions, padding, and transformers' SigLIP on a tiny random model."""

import numpy as np
import pytest
import torch
from transformers import SiglipVisionConfig, SiglipVisionModel

from worker.nn.siglip import (
    SHADE,
    Grids,
    VisionConfig,
    VisionEncoder,
    VisionLayer,
    axis_bins,
    cut_patches,
    normalise,
    padded_position_ids,
    patchify,
    position_ids,
    vision_weights,
)

SIDE = 8
TINY = VisionConfig(
    width=32,
    n_layers=2,
    n_heads=2,
    ffn_size=48,
    patch_size=2,
    n_positions_side=SIDE,
    norm_eps=1e-6,
)
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


@pytest.fixture(scope="module")
def theirs():
    torch.manual_seed(0)
    model = SiglipVisionModel(
        SiglipVisionConfig(
            hidden_size=TINY.width,
            intermediate_size=TINY.ffn_size,
            num_hidden_layers=TINY.n_layers,
            num_attention_heads=TINY.n_heads,
            image_size=SIDE * TINY.patch_size,
            patch_size=TINY.patch_size,
            layer_norm_eps=TINY.norm_eps,
            vision_use_head=False,
        )
    ).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model.requires_grad_(False)


@pytest.fixture(scope="module")
def source(theirs):
    """Their tensors under the names that our checkpoint has."""
    return {
        name.removeprefix("vision_model."): value for name, value in theirs.state_dict().items()
    }


@pytest.fixture(scope="module")
def ours(source):
    with torch.device("meta"):
        model = VisionEncoder(TINY)
    model.load_state_dict(vision_weights(source, TINY), strict=True, assign=True)
    return model.eval().requires_grad_(False)


def random_patches(*shape):
    return torch.randn(*shape, TINY.patch_values, generator=torch.Generator().manual_seed(1))


# ---- positions


def slow_arange(start, step, n):
    """Eight values at a time: the first is rounded to fp32, the others are added to it in fp64."""
    first = np.float32(start + step * (np.arange(n) // 8 * 8))
    rest = np.arange(n) % 8 * np.float64(np.float32(step))
    return (first.astype(np.float64) + rest).astype(np.float32)


def slow_bins(n, side):
    places = slow_arange(0.0, float(np.float32(1) / np.float32(n)), n)
    bounds = slow_arange(1 / side, 1 / side, side - 1)
    return [sum(1 for bound in bounds if bound <= place) for place in places]


@pytest.mark.parametrize("n", range(1, 141))
def test_bins_of_every_side_are_those_of_fp32_arithmetic(n):
    assert axis_bins(n, 70).tolist() == slow_bins(n, 70)


def test_bins_differ_from_exact_arithmetic_where_the_original_does():
    different = {}
    for n in range(1, 99):
        off = torch.arange(n) * 70 // n - axis_bins(n, 70)
        if off.any():
            different[n] = int(off.count_nonzero())
            assert set(off.tolist()) <= {0, 1} or set(off.tolist()) <= {0, -1}
    assert list(different) == [25, 49, 50, 55, 58, 77, 82, 86, 94, 98]
    assert all(1 <= count <= 7 for count in different.values())


def test_position_ids_go_row_by_row():
    rows, columns = axis_bins(3, 70), axis_bins(5, 70)
    ids = position_ids((3, 5), 70)
    assert ids.tolist() == [70 * int(row) + int(column) for row in rows for column in columns]


def test_bins_do_not_change_with_the_default_dtype():
    axis_bins.cache_clear()
    torch.set_default_dtype(torch.float64)
    try:
        assert axis_bins(50, 70).tolist() == slow_bins(50, 70)
    finally:
        torch.set_default_dtype(torch.float32)


def test_ids_made_in_inference_mode_serve_training_too(ours):
    grids = [(3, 7)]  # of no other test
    with torch.inference_mode():
        ours(random_patches(1, 21), grids)
    patches = random_patches(1, 21).requires_grad_()
    ours(patches, grids).sum().backward()
    assert patches.grad is not None


# ---- the model


def test_a_whole_grid_equals_transformers(theirs, ours):
    seeded = torch.Generator().manual_seed(2)
    pixels = torch.randn(2, 3, 16, 16, generator=seeded)
    wanted = theirs(pixels).last_hidden_state
    patches = torch.stack([patchify(one, TINY.patch_size) for one in pixels.permute(0, 2, 3, 1)])
    torch.testing.assert_close(ours(patches, [(SIDE, SIDE)] * 2), wanted, **CLOSE)


def test_a_padded_batch_equals_single_slices_whatever_the_padding_holds(ours):
    grids = [(4, 3), (8, 9), (1, 5), (8, 9)]
    patches = random_patches(4, 72)
    single = [ours(patches[i : i + 1, : h * w], [(h, w)])[0] for i, (h, w) in enumerate(grids)]
    for row, (h, w) in enumerate(grids):
        patches[row, h * w :] = torch.nan
    states = ours(patches, grids)
    assert states.isfinite().all()
    for row, (h, w) in enumerate(grids):
        torch.testing.assert_close(states[row, : h * w], single[row], **CLOSE)


def test_a_slice_alone_takes_no_mask():
    seen = []
    model = VisionEncoder(TINY)
    for layer in model.layers:
        layer.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[1]))
    model(random_patches(2, 12), [(4, 3), (3, 4)])
    assert seen == [None, None]
    model(random_patches(2, 12), [(4, 3), (3, 3)])
    assert seen[-1].shape == (2, 1, 1, 12)


def test_bf16_stays_near_fp32(source, ours):
    half = VisionEncoder(TINY).bfloat16()
    half.load_state_dict(vision_weights(source, TINY))
    patches, grids = random_patches(2, 20), [(4, 5), (3, 3)]
    wanted, got = ours(patches, grids), half(patches, grids)
    assert got.dtype == torch.bfloat16
    for row, n in enumerate((20, 9)):
        likeness = torch.cosine_similarity(got[row, :n].float(), wanted[row, :n], dim=-1)
        assert likeness.min() > 0.998


def test_patches_hold_channels_first_row_by_row():
    pixels = torch.arange(4 * 6 * 3).view(4, 6, 3)
    patches = patchify(pixels, 2)
    assert patches.shape == (6, 12)
    second_of_second_row = pixels[2:4, 2:4].permute(2, 0, 1).flatten()
    assert torch.equal(patches[4], second_of_second_row)


def test_normalised_pixels_span_minus_one_to_one():
    assert normalise(torch.tensor([0, 255], dtype=torch.uint8)).tolist() == [-1.0, 1.0]


# ---- padded to fixed sizes

N = 20
GRIDS = [(4, 3), (1, 5), (4, 5), (1, 1), (7, 2)]


def padded_inputs(grids, garbage=0):
    """Random slices as they lie in memory, garbage behind each; and where their patches are."""
    random = np.random.default_rng(3)
    p = TINY.patch_size
    slices = [random.integers(0, 256, (h * p, w * p, 3), dtype=np.uint8) for h, w in grids]
    pixels = np.full((len(grids), N * TINY.patch_values), garbage, dtype=np.uint8)
    for row, one in enumerate(slices):
        pixels[row, : one.size] = one.flatten()
    places = Grids(
        torch.tensor([w for _, w in grids], dtype=torch.int32),
        torch.tensor([h * w for h, w in grids], dtype=torch.int32),
    )
    ids = np.stack([padded_position_ids(grid, N, SIDE) for grid in grids])
    pixels = torch.from_numpy(pixels).view(len(grids), N, -1)
    return [torch.from_numpy(one) for one in slices], (pixels, places, torch.from_numpy(ids))


def test_patches_are_cut_from_memory_whatever_lies_behind_a_slice():
    slices, (pixels, places, _) = padded_inputs(GRIDS, garbage=255)
    patches = cut_patches(pixels, places, TINY.patch_size)
    for row, one in zip(patches, slices, strict=True):
        wanted = normalise(patchify(one, TINY.patch_size))
        assert torch.equal(row[: len(wanted)], wanted)
        assert not row[len(wanted) :].any()


def test_slices_of_fixed_size_equal_single_ones(ours):
    slices, inputs = padded_inputs(GRIDS)
    states = ours.padded(*inputs)
    assert states.isfinite().all()
    for row, one, grid in zip(states, slices, GRIDS, strict=True):
        wanted = ours(normalise(patchify(one, TINY.patch_size))[None], [grid])[0]
        torch.testing.assert_close(row[: len(wanted)], wanted, **CLOSE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_padding_adds_nothing_at_all_even_to_large_scores(dtype):
    torch.manual_seed(4)
    layer = VisionLayer(TINY).to(dtype)
    torch.nn.init.normal_(layer.qkv.weight, std=3)  # scores of some hundreds
    x = torch.randn(2, N, TINY.width).to(dtype)
    shade = torch.zeros(2, N, dtype=dtype)
    shade[:, 12:] = SHADE
    states = layer.padded(x, shade)[:, :12]
    x[:, 12:] *= -5
    assert torch.equal(layer.padded(x, shade)[:, :12], states)
    wanted = layer(x[:, :12], None)
    likeness = torch.cosine_similarity(states.float(), wanted.float(), dim=-1)
    assert likeness.min() > (0.9999 if dtype == torch.float32 else 0.99)


def test_inputs_of_zeros_are_valid(ours):
    nothing = torch.zeros(2, dtype=torch.int32)
    pixels = torch.zeros(2, N, TINY.patch_values, dtype=torch.uint8)
    states = ours.padded(pixels, Grids(nothing, nothing), torch.zeros(2, N, dtype=torch.int32))
    assert states.isfinite().all()


def test_places_go_row_by_row_and_padding_stays_inside():
    rows, columns, is_patch = Grids(torch.tensor([3]), torch.tensor([6])).places(9)
    assert rows.tolist() == [[0, 0, 0, 1, 1, 1, 1, 1, 1]]
    assert columns.tolist() == [[0, 1, 2, 0, 1, 2, 2, 2, 2]]
    assert is_patch.tolist() == [[True] * 6 + [False] * 3]


# ---- weights


def test_layers_beyond_the_config_are_left_out(source):
    short = VisionConfig(32, 1, 2, 48, 2, SIDE, 1e-6)
    assert set(vision_weights(source, short)) == set(VisionEncoder(short).state_dict())


def test_a_missing_tensor_is_a_key_error(source):
    part = dict(source)
    del part["encoder.layers.1.self_attn.k_proj.bias"]
    with pytest.raises(KeyError, match="k_proj"):
        vision_weights(part, TINY)
