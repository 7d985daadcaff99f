"""The kernel against its eager twin. Without a GPU it runs in Triton's interpreter, if that is on:
`TRITON_INTERPRET=1 python -m pytest tests/worker/nn/test_decode_attention.py`."""

import importlib.util
import os

import pytest
import torch

from worker.nn.attention import Span

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CAN_RUN = DEVICE == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"
if importlib.util.find_spec("triton") is None or not CAN_RUN:
    pytest.skip("needs Triton and a GPU or its interpreter", allow_module_level=True)

from worker.nn.kernels.decode_attention import (  # noqa: E402
    MAX_SPLITS,
    MIN_SPLITS,
    TARGET_PROGRAMS,
    decode_attention,
    n_splits,
)

N_SLOTS, N_TOKENS = 5, 300
DTYPES = [torch.float32, torch.bfloat16] if DEVICE == "cuda" else [torch.float32]


def twin(q, keys, values, slots, lengths):
    """`Span` with one new token per row."""
    index = torch.arange(keys.shape[2], device=q.device)
    is_live = index < lengths[:, None]
    span = Span(slots, is_live[:, None, None], ~is_live[:, None, :, None])
    return span.read(q[:, :, None], keys, values)[:, :, 0]


def random(*shape, dtype, seed):
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return values.to(DEVICE, dtype)


def scene(n_heads, n_kv_heads, d, slots, lengths, dtype):
    """Queries and caches, NaN behind every row's live length and in every other slot."""
    caches = [
        torch.full((N_SLOTS, n_kv_heads, N_TOKENS, d), torch.nan, dtype=dtype, device=DEVICE)
        for _ in range(2)
    ]
    for seed, cache in enumerate(caches):
        content = random(*cache.shape, dtype=dtype, seed=seed)
        for slot, length in zip(slots, lengths, strict=True):
            cache[slot, :, :length] = content[slot, :, :length]
    q = random(len(slots), n_heads, d, dtype=dtype, seed=7)
    return (
        q,
        *caches,
        torch.tensor(slots, device=DEVICE),
        torch.tensor(lengths, device=DEVICE),
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "shape", [(8, 2, 32), (4, 4, 64), (32, 8, 128), (6, 2, 24)], ids=["gqa", "mha", "8b", "odd"]
)
def test_kernel_agrees_with_its_eager_twin(shape, dtype):
    given = scene(*shape, slots=(3, 0, 4), lengths=(1, 300, 129), dtype=dtype)

    mixed = decode_attention(*given)

    limit = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0.02, "atol": 0.02}
    torch.testing.assert_close(mixed, twin(*given), **limit)


def test_row_in_a_batch_equals_the_row_alone():
    q, keys, values, slots, lengths = scene(
        4, 2, 32, slots=(1, 4, 2), lengths=(70, 300, 8), dtype=torch.float32
    )

    batch = decode_attention(q, keys, values, slots, lengths)
    alone = [
        decode_attention(q[r : r + 1], keys, values, slots[r : r + 1], lengths[r : r + 1])
        for r in range(3)
    ]

    torch.testing.assert_close(batch, torch.cat(alone), rtol=1e-5, atol=1e-6)


def test_row_without_any_position_gives_zeros_and_leaves_the_others_alone():
    q, keys, values, slots, lengths = scene(
        4, 2, 32, slots=(1, 4), lengths=(0, 65), dtype=torch.float32
    )

    mixed = decode_attention(q, keys, values, slots, lengths)
    alone = decode_attention(q[1:], keys, values, slots[1:], lengths[1:])

    assert not mixed[0].any()
    torch.testing.assert_close(mixed[1:], alone, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("n_pairs", [1, 8, 12, 64, 256, 5000])
def test_work_is_shared_among_a_power_of_two_of_programs(n_pairs):
    splits = n_splits(n_pairs)

    assert splits & (splits - 1) == 0  # the merging kernel counts on it
    assert MIN_SPLITS <= splits <= MAX_SPLITS
    assert splits == MAX_SPLITS or splits * n_pairs >= TARGET_PROGRAMS
