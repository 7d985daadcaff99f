"""What the layers of HiFT are made of: padded convolutions, Snake, residual blocks.

All of them keep a row's begin: what lies before it is zero, as if the padding stood there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


def blank(x: Tensor, dead: Tensor | None) -> Tensor:
    """Zero the positions of `x` that lie before a row's begin (they may be NaN)."""
    return x if dead is None else x.masked_fill(dead, 0.0)


def before(start: Tensor | None, per_frame: int, n: int) -> Tensor | None:
    """Return which of `n` positions lie before frame `start` `[B]`: bool `[B, 1, n]`."""
    if start is None:
        return None
    return (torch.arange(n, device=start.device) < start[:, None] * per_frame)[:, None]


def snake(x: Tensor, alpha: Tensor, dead: Tensor | None) -> Tensor:
    """x + sin^2(a x) / a with one frequency a per channel (Ziyin et al. 2020).

    Args:
        x: `[B, C, N]`.
        alpha: `[C, 1]`.
        dead: positions that are zero before and after, bool `[B, 1, N]`.
    """
    x = blank(x, dead)
    return x + (x * alpha).sin().square() / (alpha + 1e-9)


def join(x: Tensor, y: Tensor, dead: Tensor | None) -> Tensor:
    """x `[B, C, N]` and what a convolution made of it, which does not keep the zeros."""
    return x + blank(y, dead)


POINTWISE: Sequence[Callable[..., Any]] = (snake, join)
"""What lies between the convolutions. Compiled they are one kernel each instead of seven and two;
a net's twelve blocks share them, so two small graphs serve all."""


class PaddedConv(nn.Conv1d):
    """A convolution with different padding on both sides."""

    def __init__(
        self,
        n_in: int,
        n_out: int,
        kernel: int,
        padding: tuple[int, int],
        stride: int = 1,
        dilation: int = 1,
    ) -> None:
        left, right = padding
        is_even = left == right  # then it needs no copy
        super().__init__(n_in, n_out, kernel, stride, left if is_even else 0, dilation)
        self.sides = (0, 0) if is_even else padding

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(functional.pad(x, self.sides) if any(self.sides) else x)


def same_padding(kernel: int, dilation: int, is_causal: bool) -> tuple[int, int]:
    """Return the padding that keeps the length."""
    reach = (kernel - 1) * dilation
    return (reach, 0) if is_causal else (reach // 2, reach - reach // 2)


class Snake(nn.Module):
    """Frequencies of a layer's channels."""

    def __init__(self, n_channels: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.ones(n_channels))

    def forward(self) -> Tensor:
        """`[C, 1]`. A view, as a compiler takes a parameter's size for a constant."""
        return self.alpha[:, None]


class ResBlock(nn.Module):
    """Residual pairs of a dilated and a plain convolution."""

    def __init__(
        self, n_channels: int, kernel: int, dilations: tuple[int, ...], is_causal: bool
    ) -> None:
        super().__init__()

        def conv(dilation: int) -> PaddedConv:
            padding = same_padding(kernel, dilation, is_causal)
            return PaddedConv(n_channels, n_channels, kernel, padding, dilation=dilation)

        self.convs1 = nn.ModuleList(conv(dilation) for dilation in dilations)
        self.convs2 = nn.ModuleList(conv(1) for _ in dilations)
        self.snakes1 = nn.ModuleList(Snake(n_channels) for _ in dilations)
        self.snakes2 = nn.ModuleList(Snake(n_channels) for _ in dilations)

    def forward(
        self,
        x: Tensor,
        dead: Tensor | None,
        calls: Sequence[Callable[..., Any]] = POINTWISE,
    ) -> Tensor:
        """`[B, C, N]` -> `[B, C, N]`; `x` is zero where `dead`."""
        activate, add = calls
        for conv1, conv2, snake1, snake2 in zip(
            self.convs1, self.convs2, self.snakes1, self.snakes2, strict=True
        ):
            inner = conv1(activate(x, snake1(), dead))
            x = add(x, conv2(activate(inner, snake2(), dead)), dead)
        return x


class Upsample(nn.Module):
    """Causal: every position repeated, then a convolution to the left."""

    def __init__(self, n_in: int, n_out: int, kernel: int, rate: int) -> None:
        super().__init__()
        self.rate = rate
        self.conv = PaddedConv(n_in, n_out, kernel, (kernel - 1, 0))

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x.repeat_interleave(self.rate, dim=2))
