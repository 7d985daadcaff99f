"""One new token per row: head norms, rotation, cache write and attention in one go.

At one token per row a decoder layer is many small kernels, and each costs its start; together
these steps take about as long as the attention alone. The kernel reads what a row has and nothing
else, so time follows the true lengths. Plain kernels rather than a registered operator, so that
the compiler sees them and keeps them with the graph. The eager twin is the plain way through
`worker.nn.decoder.DecoderLayer` over a span. Needs Triton.
"""

import torch
import triton
from torch import Tensor
from triton import language as tl
from triton.language.extra import cuda as tl_cuda

from worker.nn.kernels.parts import (
    LOG2_E,
    merge_parts,
    n_splits,
    overlap,
    padded,
    part_buffers,
    walk,
)

# The fastest of 16 combinations on an H200 (8B shapes, 1 to 32 rows at 500 to 4000 positions).
BLOCK = 64
"""Positions per step of a program."""
WARPS, STAGES = 4, 2
MIN_SPLITS, MAX_SPLITS = 8, 64
"""Rows of a batch differ in length, so even a large batch is split: the longest must not wait."""


@triton.jit
def _load_turned(
    heads_ptr,
    weight_ptr,
    cos_ptr,
    sin_ptr,
    offsets,
    mask,
    EPS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
):
    """Heads at `offsets` `[R]`, normed and turned, in their own dtype: `[R, d]`."""
    dtype = heads_ptr.dtype.element_ty
    dims = tl.arange(0, D_PAD)
    partner = (dims + D // 2) % D
    both = mask[:, None] & (dims < D)[None, :]
    x = tl.load(heads_ptr + offsets[:, None] + dims[None, :], both, 0.0).to(tl.float32)
    y = tl.load(heads_ptr + offsets[:, None] + partner[None, :], both, 0.0).to(tl.float32)
    if HAS_NORM:
        scale = tl.rsqrt(tl.sum(x * x, 1) / D + EPS)[:, None]
        # Rounded where plain operations round: after the norm and after its weight.
        x_weight = tl.load(weight_ptr + dims, dims < D, 0.0).to(tl.float32)[None, :]
        y_weight = tl.load(weight_ptr + partner, dims < D, 0.0).to(tl.float32)[None, :]
        x = ((x * scale).to(dtype).to(tl.float32) * x_weight).to(dtype).to(tl.float32)
        y = ((y * scale).to(dtype).to(tl.float32) * y_weight).to(dtype).to(tl.float32)
    cos = tl.load(cos_ptr + dims, dims < D, 0.0)[None, :]
    sin = tl.load(sin_ptr + dims, dims < D, 0.0)[None, :]
    return (x * cos + y * sin).to(dtype)


@triton.jit
def _decode_part(
    qkv_ptr,
    q_weight_ptr,
    k_weight_ptr,
    table_ptr,
    keys_ptr,
    values_ptr,
    slots_ptr,
    positions_ptr,
    mixed_ptr,
    highest_ptr,
    total_ptr,
    n_kv_heads,
    n_places,
    SCALE: tl.constexpr,
    EPS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """One row, one key head, one share of the positions; the first share has the new token too."""
    if OVERLAPS:
        tl_cuda.gdc_launch_dependents()
        tl_cuda.gdc_wait()
    row, kv, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    slot = tl.load(slots_ptr + row)
    position = tl.minimum(tl.load(positions_ptr + row), n_places - 1).to(tl.int32)
    length = tl.where(position < n_places - 1, position, 0)  # padding looks at nothing
    share = tl.cdiv(tl.cdiv(length, SPLITS), BLOCK) * BLOCK
    start = split * share
    end = tl.minimum(start + share, length)

    heads, dims = tl.arange(0, GROUP_PAD), tl.arange(0, D_PAD)
    is_head, is_dim = heads < GROUP, dims < D
    row_ptr = qkv_ptr + row * (n_kv_heads * (GROUP + 2)) * D  # [H + 2 K, d]
    cos_ptr, sin_ptr = table_ptr + position * D, table_ptr + (n_places + position) * D
    q_offsets = (kv * GROUP + heads) * D
    q = _load_turned(
        row_ptr, q_weight_ptr, cos_ptr, sin_ptr, q_offsets, is_head, EPS, HAS_NORM, D, D_PAD
    )
    base = (slot * n_kv_heads + kv) * n_places * D

    highest = tl.full((GROUP_PAD,), float("-inf"), tl.float32)
    total = tl.zeros((GROUP_PAD,), tl.float32)
    mixed = tl.zeros((GROUP_PAD, D_PAD), tl.float32)
    if split == 0:
        # Straight from the registers: nobody has to wait for its own write.
        k_offset = (n_kv_heads * GROUP + kv) * D + tl.arange(0, 1)
        k = _load_turned(
            row_ptr,
            k_weight_ptr,
            cos_ptr,
            sin_ptr,
            k_offset,
            k_offset >= 0,
            EPS,
            HAS_NORM,
            D,
            D_PAD,
        )
        v = tl.load(row_ptr + (n_kv_heads * (GROUP + 1) + kv) * D + dims, is_dim, 0.0)
        place = base + position.to(tl.int64) * D + dims
        tl.store(keys_ptr + place[None, :], k, is_dim[None, :])
        tl.store(values_ptr + place, v, is_dim)
        highest = tl.sum(q.to(tl.float32) * k.to(tl.float32), 1) * SCALE
        total += 1.0
        mixed += v.to(tl.float32)[None, :]
    highest, total, mixed = walk(
        q,
        tl.full((GROUP_PAD,), length, tl.int32),
        highest,
        total,
        mixed,
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
    parts = ((row * n_kv_heads + kv) * GROUP + heads) * SPLITS + split
    tl.store(highest_ptr + parts, highest, is_head)
    tl.store(total_ptr + parts, total, is_head)
    if (split == 0) | (start < end):
        of_parts = parts[:, None] * D + dims[None, :]
        tl.store(mixed_ptr + of_parts, mixed, is_head[:, None] & is_dim[None, :])


def decode_attention(
    qkv: Tensor,
    norms: tuple[Tensor, Tensor, float] | None,
    table: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    positions: Tensor,
    overlaps: bool = False,
) -> Tensor:
    """Write one token of each row to the caches and return its attention, `[B, H, d]`.

    Args:
        qkv: queries, keys and values as the layer's one matrix made them, `[B, H + 2 K, d]`,
            contiguous; fp32, bf16 or fp16, as the caches.
        norms: weights `[d]` of the queries' and the keys' norm and its epsilon, if there is one.
        table: cosine and signed sine of every position, fp32 `[2, T, d]`.
        keys, values: `[slots, K, T, d]`, contiguous, written in place.
        slots: cache row of each row, int64 `[B]`.
        positions: int64 `[B]`. T - 1 and more is padding: it is written to T - 1 and sees itself.
        overlaps: whether the kernels begin before the one in front of them has ended (`parts`);
            not within compiled regions.
    """
    b, n_all, d = qkv.shape
    n_kv_heads, n_places = keys.shape[1], keys.shape[2]
    n_heads = n_all - 2 * n_kv_heads
    group, d_pad = n_heads // n_kv_heads, padded(d)
    splits = n_splits(b * n_kv_heads, MIN_SPLITS, MAX_SPLITS)
    out = torch.empty((b, n_heads, d), dtype=qkv.dtype, device=qkv.device)
    mixed, highest, total = part_buffers(out, splits)
    q_weight, k_weight, eps = (qkv, qkv, 0.0) if norms is None else norms
    is_single = qkv.dtype == torch.float32
    _decode_part[(b, n_kv_heads, splits)](
        qkv,
        q_weight,
        k_weight,
        table,
        keys,
        values,
        slots,
        positions,
        mixed,
        highest,
        total,
        n_kv_heads,
        n_places,
        SCALE=d**-0.5 * LOG2_E,
        EPS=eps,
        HAS_NORM=norms is not None,
        GROUP=group,
        GROUP_PAD=padded(group),
        D=d,
        D_PAD=d_pad,
        SPLITS=splits,
        BLOCK=BLOCK,
        PRECISION="ieee" if is_single else "tf32",
        num_warps=WARPS,
        num_stages=2 if is_single else STAGES,
        **overlap(overlaps),
    )
    merge_parts[(b * n_heads,)](
        mixed,
        highest,
        total,
        out,
        D=d,
        D_PAD=d_pad,
        SPLITS=splits,
        num_warps=4,
        **overlap(overlaps),
    )
    return out
