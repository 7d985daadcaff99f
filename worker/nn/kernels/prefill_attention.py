"""Attention of several new tokens per row over caches with a slot dimension, grouped queries.

Reads what a row's tokens see and nothing else, under the causal mask that their positions make. A
registered operator rather than plain kernels: how a call is shared among programs depends on the
sizes of the batch, and a compiler that saw it would make another graph for almost every size (14
for 17 sizes of prefill; with the operator 2). The eager twin is `worker.nn.attention.Span`. Needs
Triton.
"""

import torch
import triton
from torch import Tensor
from triton import language as tl

from worker.nn.kernels.parts import (
    LOG2_E,
    merge_parts,
    n_splits,
    overlap,
    padded,
    part_buffers,
    walk,
)

# The fastest of 9 combinations on an H200 (8B shapes, 32 to 1024 tokens at 3000 to 3900).
MAX_QUERIES = 64
"""Queries (tokens times heads of a group) of one program."""
BLOCK = 64
"""Positions per step of a program."""
WARPS, STAGES = 4, 3
MAX_SPLITS = 8


@triton.jit
def _prefill_part(
    q_ptr,
    keys_ptr,
    values_ptr,
    slots_ptr,
    positions_ptr,
    mixed_ptr,
    highest_ptr,
    total_ptr,
    n_new,
    n_kv_heads,
    n_places,
    SCALE: tl.constexpr,
    GROUP: tl.constexpr,
    QUERIES: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Some queries of one row and key head, one share of the positions they see."""
    row, kv = tl.program_id(0) // n_kv_heads, tl.program_id(0) % n_kv_heads
    tile, split = tl.program_id(1), tl.program_id(2)
    index, dims = tile * QUERIES + tl.arange(0, QUERIES), tl.arange(0, D_PAD)
    token, is_query = index // GROUP, index < n_new * GROUP
    positions = tl.load(positions_ptr + row * n_new + token, is_query, n_places).to(tl.int32)
    limits = tl.where(positions < n_places - 1, positions + 1, 0)  # padding sees nothing
    length = tl.max(limits, 0)
    share = tl.cdiv(tl.cdiv(length, SPLITS), BLOCK) * BLOCK
    start = split * share
    end = tl.minimum(start + share, length)

    head = ((row * n_new + token) * n_kv_heads + kv) * GROUP + index % GROUP  # over all rows
    q_mask = is_query[:, None] & (dims < D)[None, :]
    q = tl.load(q_ptr + head[:, None] * D + dims[None, :], q_mask, 0.0)  # [Q, d]
    base = (tl.load(slots_ptr + row) * n_kv_heads + kv) * n_places * D
    highest, total, mixed = walk(
        q,
        limits,
        tl.full((QUERIES,), float("-inf"), tl.float32),
        tl.zeros((QUERIES,), tl.float32),
        tl.zeros((QUERIES, D_PAD), tl.float32),
        keys_ptr + base,
        values_ptr + base,
        start,
        end,
        SCALE,
        D,
        D_PAD,
        BLOCK,
        PRECISION,
    )
    parts = head.to(tl.int64) * SPLITS + split
    tl.store(highest_ptr + parts, highest, is_query)
    tl.store(total_ptr + parts, total, is_query)
    if start < end:
        tl.store(mixed_ptr + parts[:, None] * D + dims[None, :], mixed, q_mask)


@torch.library.custom_op("worker::prefill_attention", mutates_args=())
def prefill_attention(
    q: Tensor, keys: Tensor, values: Tensor, slots: Tensor, positions: Tensor
) -> Tensor:
    """Return the attention of every query over the positions up to its own, `[B, N, H, d]`.

    Args:
        q: `[B, N, H, d]`, contiguous; fp32, bf16 or fp16, as the caches.
        keys, values: `[slots, K, T, d]`, contiguous, the new tokens among them; the query heads
            of one key head stand together.
        slots: cache row of each row, int64 `[B]`.
        positions: int64 `[B, N]`, contiguous; T - 1 and more is padding, which gives zeros.
    """
    b, n_new, n_heads, d = q.shape
    n_kv_heads, n_places = keys.shape[1], keys.shape[2]
    group, d_pad = n_heads // n_kv_heads, padded(d)
    is_single = q.dtype == torch.float32
    # Exact fp32 products use no matrix unit, and more than 16 rows do not fit the registers.
    queries = 16 if is_single else min(MAX_QUERIES, padded(n_new * group))
    n_tiles = -(-n_new * group // queries)
    splits = n_splits(b * n_kv_heads * n_tiles, 1, MAX_SPLITS)
    mixed, highest, total = part_buffers(q, splits)
    out = torch.empty_like(q)
    _prefill_part[(b * n_kv_heads, n_tiles, splits)](
        q,
        keys,
        values,
        slots,
        positions,
        mixed,
        highest,
        total,
        n_new,
        n_kv_heads,
        n_places,
        SCALE=d**-0.5 * LOG2_E,
        GROUP=group,
        QUERIES=queries,
        D=d,
        D_PAD=d_pad,
        SPLITS=splits,
        BLOCK=BLOCK,
        PRECISION="ieee" if is_single else "tf32",
        num_warps=WARPS,
        num_stages=2 if is_single else STAGES,
    )
    merge_parts[(b * n_new * n_heads,)](
        mixed,
        highest,
        total,
        out,
        D=d,
        D_PAD=d_pad,
        SPLITS=splits,
        num_warps=4,
        **overlap(False),
    )
    return out


@prefill_attention.register_fake
def _shape_of_result(
    q: Tensor, keys: Tensor, values: Tensor, slots: Tensor, positions: Tensor
) -> Tensor:
    return torch.empty_like(q)
