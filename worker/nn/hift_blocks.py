"""What the layers of HiFT are made of: padded convolutions, Snake, residual blocks.

All of them keep a row's begin: what lies before it is zero, as if the padding stood there.
"""

from __future__ import annotations

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
        super().__init__(n_in, n_out, kernel, stride, dilation=dilation)
        self.sides = padding

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(functional.pad(x, self.sides))


def same_padding(kernel: int, dilation: int, is_causal: bool) -> tuple[int, int]:
    """Return the padding that keeps the length."""
    reach = (kernel - 1) * dilation
    return (reach, 0) if is_causal else (reach // 2, reach - reach // 2)


class Snake(nn.Module):
    """x + sin^2(a x) / a with one frequency per channel (Ziyin et al. 2020)."""

    def __init__(self, n_channels: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.ones(n_channels))

    def forward(self, x: Tensor) -> Tensor:
        alpha = self.alpha[:, None]
        return x + (x * alpha).sin().square() / (alpha + 1e-9)


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

    def forward(self, x: Tensor, dead: Tensor | None) -> Tensor:
        """`[B, C, N]` -> `[B, C, N]`; `x` is zero where `dead`."""
        for conv1, conv2, snake1, snake2 in zip(
            self.convs1, self.convs2, self.snakes1, self.snakes2, strict=True
        ):
            # Snake keeps zero, a convolution does not (its bias, its right side).
            inner = blank(conv1(snake1(x)), dead)
            x = x + blank(conv2(snake2(inner)), dead)
        return x


class Upsample(nn.Module):
    """Causal: every position repeated, then a convolution to the left."""

    def __init__(self, n_in: int, n_out: int, kernel: int, rate: int) -> None:
        super().__init__()
        self.rate = rate
        self.conv = PaddedConv(n_in, n_out, kernel, (kernel - 1, 0))

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x.repeat_interleave(self.rate, dim=2))
