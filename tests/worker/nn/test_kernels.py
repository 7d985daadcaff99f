"""The decoder with kernels against the decoder without. They need Triton, which a torch for CPUs
does not bring, and a GPU or Triton's interpreter:
`TRITON_INTERPRET=1 python -m pytest tests/worker/nn/test_kernels.py`."""

import importlib.util
import os
from unittest.mock import patch

import pytest
import torch

from worker.compile.regions import CompilePlan, Dim, Region, compile_region, fix_sizes
from worker.compile.report import CompileReport
from worker.nn import attention, decoder
from worker.nn.decoder import Decoder, DecoderConfig, KvCache

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CAN_RUN = DEVICE == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"
if importlib.util.find_spec("triton") is None or not CAN_RUN:
    pytest.skip("needs Triton and a GPU or its interpreter", allow_module_level=True)

from worker.nn.kernels.parts import TARGET_PROGRAMS, n_splits  # noqa: E402

N_SLOTS, N_TOKENS = 4, 300
DTYPES = [torch.float32, torch.bfloat16] if DEVICE == "cuda" else [torch.float32]
SHAPES = {
    "grouped, with norms": (8, 2, 32, True),
    "one key head per head": (3, 3, 64, False),
    "odd sizes": (6, 2, 24, True),
}


@pytest.fixture(autouse=True)
def _in_inference_mode():
    with torch.inference_mode():
        yield


@pytest.fixture(params=SHAPES.values(), ids=SHAPES)
def model(request):
    n_heads, n_kv_heads, d, qk_norm = request.param
    torch.manual_seed(0)
    config = DecoderConfig(
        vocab_size=31,
        hidden_size=40,
        n_layers=2,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=d,
        ffn_size=64,
        rope_theta=1e6,
        norm_eps=1e-6,
        qk_norm=qk_norm,
    )
    made = Decoder(config).to(DEVICE).requires_grad_(False)
    for name, parameter in made.named_parameters():
        if "norm" in name:
            parameter.uniform_(0.5, 1.5)
    return made


def cache_of(model, lengths, dtype=torch.float32):
    """Random content up to each slot's length, NaN everywhere else."""
    cache = KvCache.allocate(model.config, N_SLOTS, N_TOKENS, dtype, DEVICE)
    generator = torch.Generator().manual_seed(1)
    for tensor in (*cache.keys, *cache.values):
        tensor.fill_(torch.nan)
        content = torch.randn(tensor.shape, generator=generator)
        for slot, length in lengths.items():
            tensor[slot, :, :length] = content[slot, :, :length].to(tensor)
    return cache


def ints(*values):
    return torch.tensor(values, device=DEVICE)


def embeddings(model, b, n, dtype=torch.float32):
    x = torch.randn((b, n, model.config.hidden_size), generator=torch.Generator().manual_seed(2))
    return x.to(DEVICE, dtype)


def feed(model, cache, x, slots, positions, kernels):
    def chosen(tensor):
        return kernels

    with (
        patch.object(attention, "has_kernels", chosen),
        patch.object(decoder, "has_kernels", chosen),
    ):
        return model.feed(cache, x, ints(*slots), positions, N_TOKENS)


def close(dtype):
    limit = 1e-4 if dtype == torch.float32 else 0.05
    return {"rtol": limit, "atol": limit}


def assert_same(model, lengths, slots, counts, n_new, dtype):
    """Feed the same rows with and without kernels; compare states and caches of all tokens."""
    model = model.to(dtype)
    starts = ints(*(lengths[slot] for slot in slots))
    results = []
    for kernels in (False, True):
        cache = cache_of(model, lengths, dtype)
        positions = cache.positions(starts, ints(*counts), n_new)
        x = embeddings(model, len(slots), n_new, dtype)
        x[positions == cache.spare] = torch.nan
        hidden = feed(model, cache, x, slots, positions, kernels)
        results.append((hidden[positions < cache.spare], cache))
    (plain, plain_cache), (fast, fast_cache) = results
    assert plain.isfinite().all()
    torch.testing.assert_close(fast, plain, **close(dtype))
    for slot, count in zip(slots, counts, strict=True):
        written = slice(lengths[slot] + count)
        for ours, theirs in zip(fast_cache.keys, plain_cache.keys, strict=True):
            torch.testing.assert_close(
                ours[slot, :, written], theirs[slot, :, written], **close(dtype)
            )
        for ours, theirs in zip(fast_cache.values, plain_cache.values, strict=True):
            torch.testing.assert_close(
                ours[slot, :, written], theirs[slot, :, written], **close(dtype)
            )


@pytest.mark.usefixtures("compiling")
def test_compiled_feeds_of_all_sizes_share_two_graphs(model):
    """How the kernel cuts its work depends on the sizes; the compiler saw that, and made a graph
    for nearly every one of them. One row is always a graph of its own."""
    region = Region("llm.prefill", "llm", model.prefill_layers, [Dim("x", 1, 2, 96)])
    report = CompileReport()
    compile_region(region, CompilePlan(backend="eager"), report)
    cache = cache_of(model, {})
    fix_sizes((*cache.keys, *cache.values))

    for b, n in ((3, 9), (2, 3), (1, 5), (1, 18)):
        positions = cache.positions(ints(*[0] * b), ints(*[n] * b), n)
        feed(model, cache, embeddings(model, b, n), range(b), positions, kernels=True)

    assert report.region_graphs == {"llm.prefill": 2}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_decode_step_equals_the_plain_way(model, dtype):
    lengths = {2: 0, 0: 299, 3: 128}

    assert_same(model, lengths, slots=(2, 0, 3), counts=(1, 1, 1), n_new=1, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_padded_prefill_equals_the_plain_way(model, dtype):
    lengths = {1: 0, 0: 255, 3: 70}

    assert_same(model, lengths, slots=(1, 0, 3), counts=(19, 45, 1), n_new=45, dtype=dtype)


def test_padding_row_may_point_at_the_slot_of_another_row(model):
    lengths = {0: 77, 1: 5}

    x = embeddings(model, 2, 1)
    alone = feed(model, cache_of(model, lengths), x[:1], (0,), ints(77)[:, None], True)
    cache = cache_of(model, lengths)
    x[1] = torch.nan
    padded = feed(model, cache, x, (0, 0), ints(77, cache.spare)[:, None], True)

    torch.testing.assert_close(padded[:1], alone, rtol=1e-5, atol=1e-5)
    assert cache.keys[1][0, :, 77].isfinite().all()


def test_row_in_a_batch_equals_the_row_alone(model):
    lengths = {0: 290, 1: 5, 2: 64}

    x = embeddings(model, 3, 1)
    positions = ints(290, 5, 64)[:, None]
    batch = feed(model, cache_of(model, lengths), x, (0, 1, 2), positions, True)
    cache = cache_of(model, lengths)
    alone = [
        feed(model, cache, x[row : row + 1], (row,), positions[row : row + 1], True)
        for row in range(3)
    ]

    torch.testing.assert_close(batch, torch.cat(alone), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("least", [1, 8])
@pytest.mark.parametrize("n_groups", [1, 8, 12, 64, 256, 5000])
def test_work_is_shared_among_a_power_of_two_of_programs(n_groups, least):
    splits = n_splits(n_groups, least, 32)

    assert splits & (splits - 1) == 0  # the merging kernel counts on it
    assert least <= splits <= 32
    assert splits == 32 or splits * n_groups >= TARGET_PROGRAMS
