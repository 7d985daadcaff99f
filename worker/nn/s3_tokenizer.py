"""S3 tokenizer v2: 16 kHz speech -> 25 codes a second, each one of 3^8.

Written from the CosyVoice 2 paper (Du et al. 2024: a speech encoder with finite scalar
quantisation) and the sizes in MiniCPM-o 4.5's asset folder. At run time the published ONNX file
does this work (`worker/models/minicpmo45/voice.py`): its graph numbers its weights, so they cannot
be mapped by name. This module is the same algorithm in the open: the golden data proves it, both
share the cutting and joining of long clips, and converted weights run here on any device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from worker.nn.decoder import rotary_table, rotate

FRAMES_PER_CODE = 4
CODES_PER_S = 25
WINDOW_S = 30
OVERLAP_S = 4
"""Neighbouring windows of a long clip share this much; each gives half of it."""
N_DIGITS = 8
N_LEVELS = 3
ROPE_THETA = 10_000.0


@dataclass(frozen=True, slots=True)
class S3Config:
    """Sizes; the defaults are those of the published file."""

    n_mels: int = 128
    width: int = 1280
    ffn_size: int = 5120
    n_layers: int = 6
    head_dim: int = 64
    memory_kernel: int = 31
    """Width of the depthwise convolution over the values."""


def windows(n_frames: int) -> list[tuple[int, int]]:
    """Return begin and end of the windows that a clip of mel frames is cut into."""
    frames_per_s = FRAMES_PER_CODE * CODES_PER_S
    size, step = WINDOW_S * frames_per_s, (WINDOW_S - OVERLAP_S) * frames_per_s
    begins = range(0, max(1, n_frames - OVERLAP_S * frames_per_s), step)
    return [(begin, min(begin + size, n_frames)) for begin in begins]


def joined(codes: Sequence[Tensor]) -> Tensor:
    """Return one row of codes of those `[n]` of all windows: half an overlap from each."""
    half = OVERLAP_S * CODES_PER_S // 2
    last = len(codes) - 1
    return torch.cat(
        [
            part[half if i else 0 : len(part) if i == last else len(part) - half]
            for i, part in enumerate(codes)
        ]
    )


class S3Layer(nn.Module):
    """Pre-norm block; beside attention a convolution remembers the neighbourhood (FSMN)."""

    def __init__(self, config: S3Config) -> None:
        super().__init__()
        width = config.width
        self.head_dim = config.head_dim
        self.attn_norm = nn.LayerNorm(width, eps=1e-6)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.memory = nn.Conv1d(
            width,
            width,
            config.memory_kernel,
            padding=config.memory_kernel // 2,
            groups=width,
            bias=False,
        )
        self.ffn_norm = nn.LayerNorm(width, eps=1e-5)
        self.up = nn.Linear(width, config.ffn_size)
        self.down = nn.Linear(config.ffn_size, width)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """`[B, N, D]` -> `[B, N, D]`; the tables are those of `rotary_table`."""
        b, n, width = x.shape
        q, k, v = self.qkv(self.attn_norm(x)).split(width, dim=-1)
        memory = v + self.memory(v.transpose(1, 2)).transpose(1, 2)
        q, k, heads = (part.view(b, n, -1, self.head_dim) for part in (q, k, v))
        mixed = functional.scaled_dot_product_attention(
            rotate(q, cos, sin).transpose(1, 2),
            rotate(k, cos, sin).transpose(1, 2),
            heads.transpose(1, 2),
        )
        x = x + self.out(mixed.transpose(1, 2).flatten(2)) + memory
        return x + self.down(functional.gelu(self.up(self.ffn_norm(x))))


class S3Tokenizer(nn.Module):
    def __init__(self, config: S3Config) -> None:
        super().__init__()
        self.config = config
        self.conv1 = nn.Conv1d(config.n_mels, config.width, 3, stride=2, padding=1)
        self.conv2 = nn.Conv1d(config.width, config.width, 3, stride=2, padding=1)
        self.layers = nn.ModuleList(S3Layer(config) for _ in range(config.n_layers))
        self.digits = nn.Linear(config.width, N_DIGITS)

    def unrounded(self, mel: Tensor) -> Tensor:
        """Return the digits of each code before rounding, fp32 `[B, N, 8]` in (0, 2).

        Args:
            mel: log-mel `[B, n_mels, F]` of at most one window; N = F / 4, rounded up.
        """
        x = functional.gelu(self.conv1(mel.to(self.conv1.weight.dtype)))
        x = functional.gelu(self.conv2(x)).transpose(1, 2)
        positions = torch.arange(x.shape[1], device=x.device)[None]
        cos, sin = rotary_table(positions, self.config.head_dim, ROPE_THETA)
        for layer in self.layers:
            x = layer(x, cos, sin)
        # Rounding decides, so the last product is in fp32 whatever the rest is.
        digits = functional.linear(x.float(), self.digits.weight.float(), self.digits.bias.float())
        return digits.tanh().clamp(-1 + 1e-6, 1 - 1e-6) + 1

    def forward(self, mel: Tensor) -> Tensor:
        """Return the codes `[N]` of a clip of any length, log-mel `[n_mels, F]`."""
        parts = [
            codes_of(self.unrounded(mel[None, :, begin:end]))[0]
            for begin, end in windows(mel.shape[1])
        ]
        return joined(parts)


def codes_of(unrounded: Tensor) -> Tensor:
    """Return codes `[..., N]`, int64, of digits `[..., N, 8]`, the first one counting least."""
    values = N_LEVELS ** torch.arange(N_DIGITS, device=unrounded.device)
    return (unrounded.round().long() * values).sum(-1)


def s3_config(source: Mapping[str, Tensor]) -> S3Config:
    """Return the sizes that the tensors have; see `s3_weights`."""
    first = source["encoder.conv1.weight"]
    layers = {name.split(".")[2] for name in source if name.startswith("encoder.blocks.")}
    return S3Config(
        n_mels=first.shape[1],
        width=first.shape[0],
        ffn_size=source["encoder.blocks.0.mlp.0.weight"].shape[0],
        n_layers=len(layers),
        memory_kernel=source["encoder.blocks.0.attn.fsmn_block.weight"].shape[2],
    )


def s3_weights(source: Mapping[str, Tensor], config: S3Config) -> dict[str, Tensor]:
    """Rename tensors and stack the projections.

    Args:
        source: names of the published PyTorch version, such as
            "encoder.blocks.0.attn.query.weight".

    Raises:
        KeyError: a tensor is missing.
    """
    weights: dict[str, Tensor] = {}

    def affine(ours: str, theirs: str) -> None:
        for part in ("weight", "bias"):
            weights[f"{ours}.{part}"] = source[f"{theirs}.{part}"]

    affine("conv1", "encoder.conv1")
    affine("conv2", "encoder.conv2")
    affine("digits", "quantizer._codebook.project_down")
    for i in range(config.n_layers):
        theirs, ours = f"encoder.blocks.{i}", f"layers.{i}"
        attention = f"{theirs}.attn"
        names = ("query", "key", "value")
        bias = source[f"{attention}.query.bias"]
        weights[f"{ours}.qkv.weight"] = torch.cat(
            [source[f"{attention}.{name}.weight"] for name in names]
        )
        # Keys have no bias; a stacked product needs one.
        weights[f"{ours}.qkv.bias"] = torch.cat(
            (bias, torch.zeros_like(bias), source[f"{attention}.value.bias"])
        )
        weights[f"{ours}.memory.weight"] = source[f"{attention}.fsmn_block.weight"]
        affine(f"{ours}.out", f"{attention}.out")
        affine(f"{ours}.attn_norm", f"{theirs}.attn_ln")
        affine(f"{ours}.ffn_norm", f"{theirs}.mlp_ln")
        affine(f"{ours}.up", f"{theirs}.mlp.0")
        affine(f"{ours}.down", f"{theirs}.mlp.2")
    return weights
