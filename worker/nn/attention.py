"""Attention of new tokens over caches with a slot dimension, in three ways that agree.

Keys and values of a layer are `[slots, K, T, d]`. Whatever way reads them, a position that its row
has not reached has no influence, even if it holds NaN.

* `ExactRows`: the host knows slots and lengths, and each row reads its own slices. For a CPU.
* `Span`: all rows read the same number of positions, under masks. Nothing depends on the host.
* `LiveRows`: a kernel that reads only what each row has. For a GPU. (One new token per row has a
  kernel of its own, which does more than attention: `kernels/decode_attention.py`.)
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

HAS_TRITON = importlib.util.find_spec("triton") is not None
"""Builds of torch for a CPU come without it."""
if HAS_TRITON:
    from worker.nn.kernels.prefill_attention import prefill_attention


@dataclass(frozen=True, slots=True)
class Rows:
    """What the host knows of a batch: cache row and live length (this step included) of each row.

    With it attention reads exact slices of the caches: no copies, no masks, one small product a
    row. That is the right way for a CPU (B = 2 at 500 tokens: 105 ms -> 75 ms a step). Compiled
    regions take a span instead and find everything in tensors.
    """

    slots: tuple[int, ...]
    lengths: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ExactRows:
    rows: Rows
    visible: Tensor | None
    """Which positions a token may look at, bool `[B, 1, N, S]`; None: all of its row's."""

    def read(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Attention of queries `[B, N, H, d]`; `[B, N, H, d]`."""
        parts = [
            grouped_attention(
                q[row : row + 1],
                keys[slot : slot + 1, :, :length],
                values[slot : slot + 1, :, :length],
                None if self.visible is None else self.visible[row : row + 1, ..., :length],
            )
            for row, (slot, length) in enumerate(
                zip(self.rows.slots, self.rows.lengths, strict=True)
            )
        ]
        return torch.cat(parts) if len(parts) > 1 else parts[0]


@dataclass(frozen=True, slots=True)
class Span:
    slots: Tensor
    """Cache row of each row, int64 `[B]`."""
    visible: Tensor
    """Which positions a token may look at, bool `[B, 1, N, S]`."""
    dead: Tensor
    """Positions that the row has not reached, bool `[B, 1, S, 1]`."""

    def read(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Attention of queries `[B, N, H, d]`; `[B, N, H, d]`."""
        span = self.visible.shape[-1]
        # A probability of zero times NaN is NaN, so unwritten positions become zeros first.
        k = keys[:, :, :span].index_select(0, self.slots).masked_fill(self.dead, 0.0)
        v = values[:, :, :span].index_select(0, self.slots).masked_fill(self.dead, 0.0)
        return grouped_attention(q, k, v, self.visible)


@dataclass(frozen=True, slots=True)
class LiveRows:
    slots: Tensor
    """Cache row of each row, int64 `[B]`."""
    positions: Tensor
    """`[B, N]`; the last position of a cache is padding."""

    def read(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Attention of queries `[B, N, H, d]`; `[B, N, H, d]`."""
        # The kernel finds a head by counting, so the heads have to lie without gaps.
        return prefill_attention(q.contiguous(), keys, values, self.slots, self.positions)


Reader = ExactRows | Span | LiveRows


def has_kernels(x: Tensor) -> bool:
    """Whether the kernels can work on this tensor."""
    return HAS_TRITON and x.is_cuda


def choose_reader(slots: Tensor, positions: Tensor, spare: int, reach: Rows | int) -> Reader:
    """Return how the caches are read in one call, the same in all layers.

    Args:
        slots: `[B]`.
        positions: `[B, N]`; `spare` is padding.
        spare: the last position of a cache, which is nobody's.
        reach: exact rows, or a span larger than every live position.
    """
    if isinstance(reach, Rows):
        visible = None
        if positions.shape[1] > 1:
            index = torch.arange(max(reach.lengths), device=positions.device)
            visible = (index <= positions[..., None])[:, None]
        return ExactRows(reach, visible)
    if has_kernels(positions):
        return LiveRows(slots, positions.contiguous())
    index = torch.arange(reach, device=positions.device)
    visible = (index <= positions[..., None])[:, None]
    lengths = (positions + 1).masked_fill(positions == spare, 0).amax(1)  # [B]
    return Span(slots, visible, (index >= lengths[:, None])[:, None, :, None])


def grouped_attention(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None) -> Tensor:
    """Attention of H query heads `[B, N, H, d]` over K shared heads `[B, K, S, d]`.

    The query heads of one key head stand together, so the products need no repeated keys.
    """
    b, n, n_heads, d = q.shape
    per_group = n_heads // k.shape[1]
    if visible is not None and n > 1:
        visible = visible.repeat(1, 1, per_group, 1)
    mixed = functional.scaled_dot_product_attention(
        q.transpose(1, 2).reshape(b, -1, per_group * n, d), k, v, attn_mask=visible
    )  # [B, K, H/K * N, d]
    return mixed.reshape(b, n_heads, n, d).transpose(1, 2)
