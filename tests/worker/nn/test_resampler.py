"""Resampler against torch's own attention layer, and its padding."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional

from worker.nn.resampler import Resampler, ResamplerConfig, axis_table, resampler_weights
from worker.nn.siglip import Grids

TINY = ResamplerConfig(llm_dim=32, vision_width=12, n_queries=5, n_heads=4, max_side=6)
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


@pytest.fixture(scope="module")
def source():
    seeded = torch.Generator().manual_seed(0)
    width = TINY.llm_dim
    shapes = {
        "query": (TINY.n_queries, width),
        "kv_proj.weight": (width, TINY.vision_width),
        "attn.in_proj_weight": (3 * width, width),
        "attn.in_proj_bias": (3 * width,),
        "attn.out_proj.weight": (width, width),
        "attn.out_proj.bias": (width,),
        "proj": (width, width),
    } | {
        f"ln_{name}.{part}": (width,) for name in ("q", "kv", "post") for part in ("weight", "bias")
    }
    return {name: 0.4 * torch.randn(shape, generator=seeded) for name, shape in shapes.items()}


def load(source, config=TINY):
    with torch.device("meta"):
        model = Resampler(config)
    model.load_state_dict(resampler_weights(source, config), strict=True, assign=True)
    return model.eval().requires_grad_(False)


@pytest.fixture(scope="module")
def ours(source):
    return load(source)


def random_states(*shape):
    seeded = torch.Generator().manual_seed(1)
    return torch.randn(*shape, TINY.vision_width, generator=seeded)


def plain(source, x, grid):
    """One slice by the definition, `[N, vision_width]` -> `[n_queries, D]`."""
    width, half = TINY.llm_dim, TINY.llm_dim // 2

    def norm(value, name):
        return functional.layer_norm(
            value, (width,), source[f"{name}.weight"], source[f"{name}.bias"], TINY.norm_eps
        )

    def axis(p):
        angles = [p * 10_000 ** (-i / (half / 2)) for i in range(half // 2)]
        return [math.sin(a) for a in angles] + [math.cos(a) for a in angles]

    places = torch.tensor(
        [axis(column) + axis(row) for row in range(grid[0]) for column in range(grid[1])]
    )
    attention = nn.MultiheadAttention(width, TINY.n_heads, batch_first=True)
    attention.load_state_dict(
        {k.removeprefix("attn."): v for k, v in source.items() if k.startswith("attn.")}
    )
    seen = norm(functional.linear(x, source["kv_proj.weight"]), "ln_kv")[None]
    q = norm(source["query"], "ln_q")[None]
    mixed, _ = attention(q, seen + places, seen, need_weights=False)
    return (norm(mixed, "ln_post") @ source["proj"])[0]


@pytest.mark.parametrize("grid", [(1, 1), (2, 5), (6, 6), (3, 11), (17, 1)])
def test_it_equals_the_definition_beyond_the_largest_side_too(source, ours, grid):
    states = random_states(1, grid[0] * grid[1])
    got = ours(states, [grid])
    assert got.shape == (1, TINY.n_queries, TINY.llm_dim)
    torch.testing.assert_close(got[0], plain(source, states[0], grid), **CLOSE)


def test_a_padded_batch_equals_single_slices_whatever_the_padding_holds(ours):
    grids = [(2, 3), (4, 5), (1, 7), (5, 4)]
    states = random_states(4, 20)
    single = [ours(states[i : i + 1, : h * w], [(h, w)])[0] for i, (h, w) in enumerate(grids)]
    for row, (h, w) in enumerate(grids):
        states[row, h * w :] = torch.nan
    torch.testing.assert_close(ours(states, grids), torch.stack(single), **CLOSE)


def test_slices_of_one_grid_share_their_positions(ours):
    assert ours.positions([(2, 3)] * 4, 6).shape == (1, 6, TINY.llm_dim)
    states = random_states(3, 6)
    single = [ours(states[i : i + 1], [(2, 3)])[0] for i in range(3)]
    torch.testing.assert_close(ours(states, [(2, 3)] * 3), torch.stack(single), **CLOSE)


def test_equal_grids_that_are_all_padded(ours):
    states = random_states(2, 9)
    wanted = ours(states[:, :6], [(2, 3)] * 2)
    states[:, 6:] = torch.nan
    torch.testing.assert_close(ours(states, [(2, 3)] * 2), wanted, **CLOSE)


def test_slices_of_fixed_size_equal_single_ones_whatever_the_padding_holds(ours):
    grids = [(2, 3), (4, 5), (1, 7), (20, 1)]
    states = random_states(4, 24)
    single = [ours(states[i : i + 1, : h * w], [(h, w)])[0] for i, (h, w) in enumerate(grids)]
    for row, (h, w) in enumerate(grids):
        states[row, h * w :] = torch.nan
    places = Grids(
        torch.tensor([w for _, w in grids], dtype=torch.int32),
        torch.tensor([h * w for h, w in grids], dtype=torch.int32),
    )
    got = ours.padded(states, places, ours.axis_positions(24))
    torch.testing.assert_close(got, torch.stack(single), **CLOSE)


def test_queries_stay_exact_when_the_checkpoint_is_bf16(source):
    halves = {name: tensor.bfloat16() for name, tensor in source.items()}
    exact = resampler_weights({name: t.float() for name, t in halves.items()}, TINY)["queries"]
    made = resampler_weights(halves, TINY)
    assert torch.equal(made["queries"], exact)
    assert {t.dtype for name, t in made.items() if name != "queries"} == {torch.bfloat16}


def test_bf16_stays_near_fp32(source, ours):
    half = load({name: tensor.bfloat16() for name, tensor in source.items()})
    states, grids = random_states(2, 12), [(3, 4), (2, 2)]
    got = half(states.bfloat16(), grids)
    assert got.dtype == torch.bfloat16
    assert torch.cosine_similarity(got.float(), ours(states, grids), dim=-1).min() > 0.998


def test_a_table_made_in_inference_mode_serves_training_too(ours):
    axis_table.cache_clear()
    states = random_states(1, 6).requires_grad_()
    with torch.inference_mode():
        ours(states, [(2, 3)])
    ours(states, [(2, 3)]).sum().backward()
    assert states.grad is not None


def test_a_missing_tensor_is_a_key_error(source):
    part = {name: tensor for name, tensor in source.items() if name != "ln_post.bias"}
    with pytest.raises(KeyError, match=r"ln_post\.bias"):
        resampler_weights(part, TINY)
