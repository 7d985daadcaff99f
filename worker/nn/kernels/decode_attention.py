"""Attention of one new token per row over caches with a slot dimension, grouped queries.

Flash decoding (Dao et al., "Flash-Decoding for long-context inference", 2023): the live positions
of a row are shared among several programs, each with its own running softmax, and a second kernel
merges their parts. Unlike attention over a common span it reads what a row has and nothing else,
so time follows the true lengths, and what lies behind them is never loaded, NaN or not.

The eager twin is `worker.nn.attention.Span` with one new token. Needs Triton; plain kernels
rather than a registered operator, so that the compiler sees them and keeps them with the graph.
"""

import torch
import triton
from torch import Tensor
from triton import language as tl

LOG2_E = 1.4426950408889634
BLOCK = 64
"""Positions per step of a program."""
TARGET_PROGRAMS = 512
"""About two waves of programs on 132 multiprocessors with two programs each."""
MIN_SPLITS, MAX_SPLITS = 8, 32
"""Rows of a batch differ in length, so even a large batch is split: the longest must not wait."""


@triton.jit
def _attend_part(
    q_ptr,
    keys_ptr,
    values_ptr,
    slots_ptr,
    lengths_ptr,
    mixed_ptr,
    highest_ptr,
    total_ptr,
    n_kv_heads,
    n_tokens,
    SCALE: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One row, one key head, one share of the positions: unnormalised result and its softmax."""
    row, kv, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    slot, length = tl.load(slots_ptr + row), tl.load(lengths_ptr + row).to(tl.int32)
    share = tl.cdiv(tl.cdiv(length, SPLITS), BLOCK) * BLOCK
    start = split * share
    end = tl.minimum(start + share, length)

    heads, dims = tl.arange(0, GROUP_PAD), tl.arange(0, D_PAD)
    is_head, is_dim = heads < GROUP, dims < D
    first = (row * n_kv_heads + kv) * GROUP  # the head index of this group, over all rows
    of_heads = (first + heads)[:, None] * D + dims[None, :]
    q_mask = is_head[:, None] & is_dim[None, :]
    q = tl.load(q_ptr + of_heads, q_mask, 0.0)  # [G, d]
    base = (slot * n_kv_heads + kv) * n_tokens * D

    highest = tl.full((GROUP_PAD,), float("-inf"), tl.float32)
    total = tl.zeros((GROUP_PAD,), tl.float32)
    mixed = tl.zeros((GROUP_PAD, D_PAD), tl.float32)
    for block in range(start, end, BLOCK):
        index = block + tl.arange(0, BLOCK)
        is_live = index < end
        place = base + index[:, None] * D + dims[None, :]
        mask = is_live[:, None] & is_dim[None, :]
        k = tl.load(keys_ptr + place, mask, 0.0)  # [BLOCK, d]
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * SCALE
        scores = tl.where(is_live[None, :], scores, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, 1))
        weights = tl.exp2(scores - new_highest[:, None])
        shrink = tl.exp2(highest - new_highest)
        v = tl.load(values_ptr + place, mask, 0.0)
        mixed = mixed * shrink[:, None]
        mixed += tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
        total = total * shrink + tl.sum(weights, 1)
        highest = new_highest

    parts = (first + heads) * SPLITS + split
    tl.store(highest_ptr + parts, highest, is_head)
    tl.store(total_ptr + parts, total, is_head)
    if start < end:
        tl.store(mixed_ptr + parts[:, None] * D + dims[None, :], mixed, q_mask)


@triton.jit
def _merge_parts(
    mixed_ptr,
    highest_ptr,
    total_ptr,
    out_ptr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """One head of one row: the weighted mean of its parts; zeros for a row without any."""
    head = tl.program_id(0)
    parts, dims = head * SPLITS + tl.arange(0, SPLITS), tl.arange(0, D_PAD)
    highest, total = tl.load(highest_ptr + parts), tl.load(total_ptr + parts)
    has_any = total > 0.0
    weights = tl.where(has_any, tl.exp2(highest - tl.max(highest, 0)), 0.0)
    mask = has_any[:, None] & (dims < D)[None, :]  # an empty part was never written
    mixed = tl.load(mixed_ptr + parts[:, None] * D + dims[None, :], mask, 0.0)
    whole = tl.sum(total * weights, 0)
    out = tl.sum(mixed * weights[:, None], 0) / tl.where(whole > 0.0, whole, 1.0)
    tl.store(out_ptr + head * D + dims, out.to(out_ptr.dtype.element_ty), dims < D)


def n_splits(n_pairs: int) -> int:
    """Return among how many programs the positions of a row and key head are shared."""
    splits = MIN_SPLITS
    while splits < MAX_SPLITS and splits * n_pairs < TARGET_PROGRAMS:
        splits *= 2
    return splits


def padded(size: int) -> int:
    """Return the power of two that holds `size`; a matrix unit takes 16 at least."""
    return max(16, 1 << (size - 1).bit_length())


def decode_attention(
    q: Tensor, keys: Tensor, values: Tensor, slots: Tensor, lengths: Tensor
) -> Tensor:
    """Return the attention of one query per head and row, `[B, H, d]`.

    Args:
        q: `[B, H, d]`, contiguous; fp32, bf16 or fp16, as the caches.
        keys, values: `[slots, K, T, d]`, contiguous; the query heads of one key head stand
            together.
        slots: cache row of each row, int64 `[B]`.
        lengths: how many positions of its slot a row sees, int64 `[B]`; at most T. 0 gives zeros.
    """
    b, n_heads, d = q.shape
    n_kv_heads, n_tokens = keys.shape[1], keys.shape[2]
    splits = n_splits(b * n_kv_heads)
    group = n_heads // n_kv_heads
    d_pad, group_pad = padded(d), padded(group)
    is_single = q.dtype == torch.float32
    mixed = torch.empty((b, n_heads, splits, d), dtype=torch.float32, device=q.device)
    highest = torch.empty((b, n_heads, splits), dtype=torch.float32, device=q.device)
    total = torch.empty((b, n_heads, splits), dtype=torch.float32, device=q.device)
    out = torch.empty_like(q)
    _attend_part[(b, n_kv_heads, splits)](
        q,
        keys,
        values,
        slots,
        lengths,
        mixed,
        highest,
        total,
        n_kv_heads,
        n_tokens,
        SCALE=d**-0.5 * LOG2_E,
        GROUP=group,
        GROUP_PAD=group_pad,
        D=d,
        D_PAD=d_pad,
        SPLITS=splits,
        BLOCK=BLOCK,
        PRECISION="ieee" if is_single else "tf32",
        num_warps=4,
        num_stages=2 if is_single else 3,
    )
    _merge_parts[(b * n_heads,)](
        mixed, highest, total, out, D=d, D_PAD=d_pad, SPLITS=splits, num_warps=4
    )
    return out
