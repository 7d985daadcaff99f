"""Convolutions along the rows of `[B, N, D]` that go on where the row's last call ended.

As products of windows with a matrix: a chunk is some 50 frames wide, and every number of frames
would otherwise ask the convolution library for a plan of its own.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class RowConv(nn.Module):
    """`[B, N + width - 1, n_in]` -> `[B, N, n_out]`; pads nothing itself."""

    def __init__(self, n_in: int, n_out: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(n_out, n_in, width))
        self.bias = nn.Parameter(torch.zeros(n_out))

    @property
    def n_before(self) -> int:
        """Rows of history that a causal use of this convolution needs."""
        return self.weight.shape[-1] - 1

    def forward(self, x: Tensor) -> Tensor:
        windows = x.unfold(1, self.weight.shape[-1], 1)  # [B, N, n_in, width]
        return functional.linear(windows.flatten(2), self.weight.flatten(1), self.bias)


def resume(x: Tensor, n_before: int, history: Tensor | None, rows: Tensor | None) -> Tensor:
    """Return `[B, n_before + N, D]`: what came before, then x `[B, N, D]`.

    Args:
        history: last rows of earlier calls, `[rows, n_before, D]`; x's own take their place.
            None: nothing came before and nothing is kept.
        rows: history's row of each row of x, int64 `[B]`.
    """
    if history is None or rows is None:
        return functional.pad(x, (0, 0, n_before, 0))
    joined = torch.cat((history.index_select(0, rows).to(x.dtype), x), dim=1)
    history.index_copy_(0, rows, joined[:, -n_before:].to(history.dtype))
    return joined
