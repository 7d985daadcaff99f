"""Resampler: any number of patch states of a slice -> a fixed number of language model rows.

Written from the published description of MiniCPM-V's compression layer (Yao et al. 2024): one
cross attention of learned queries over the patches, whose keys carry a fixed 2D position. The
queries depend on no input, so they are kept after their norm and projection.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from worker.nn.siglip import Grid, Grids, patch_mask

ResamplerCall = Callable[[Tensor, Grids, Tensor], Tensor]
"""Signature of `Resampler.padded`."""


@dataclass(frozen=True, slots=True)
class ResamplerConfig:
    llm_dim: int
    vision_width: int
    n_queries: int
    n_heads: int
    """The original has heads of 128: `llm_dim // 128`."""
    norm_eps: float = 1e-6
    max_side: int = 70
    """Patches along one side for which the table of positions is made at first."""


@lru_cache(maxsize=8)
def axis_table(size: int, n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return sines, then cosines, of positions 0 to n - 1 along one axis: `[n, size]`."""
    omega = 1.0 / 10_000 ** (np.arange(size // 2, dtype=np.float32) / np.float32(size / 2))
    angles = np.arange(n, dtype=np.float32)[:, None] * omega.astype(np.float32)
    table = np.concatenate((np.sin(angles), np.cos(angles)), axis=1)
    with torch.inference_mode(False):  # kept for callers of both kinds
        return torch.from_numpy(table).to(device, dtype)


class Resampler(nn.Module):
    def __init__(self, config: ResamplerConfig) -> None:
        super().__init__()
        self.config = config
        width, eps = config.llm_dim, config.norm_eps
        self.queries = nn.Parameter(torch.zeros(config.n_queries, width))
        """Normed and projected, heads side by side."""
        self.embed = nn.Linear(config.vision_width, width, bias=False)
        self.embed_norm = nn.LayerNorm(width, eps)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.out = nn.Linear(width, width)
        self.out_norm = nn.LayerNorm(width, eps)
        self.head = nn.Linear(width, width, bias=False)
        self.run_calls: list[ResamplerCall] = [self.padded]
        """The call site of a whole pass; a compiled region takes its place."""

    def forward(self, x: Tensor, grids: Sequence[Grid]) -> Tensor:
        """Return `[B, n_queries, D]` of patch states `[B, N, vision_width]`.

        A slice with fewer than N patches is padded at its end; the padding may hold anything,
        NaN included.

        Args:
            grids: one per slice.
        """
        is_patch = patch_mask(tuple(grids), x.shape[1], x.device)
        return self.run(x, self.positions(grids, x.shape[1]), is_patch)

    def positions(self, grids: Sequence[Grid], n: int) -> Tensor:
        """Return what is added to the keys of slices padded to n patches, `[B, n, D]`.

        `[1, n, D]` if all grids are the same. The first half of a row says the patch's column,
        the second half its row.
        """
        weight, half = self.key.weight, self.config.llm_dim // 2
        longest = max(max(grid) for grid in grids)
        # A longer side only adds rows. Powers of two, so that there are few different tables.
        length = self.config.max_side
        if longest > length:
            length = 1 << (longest - 1).bit_length()
        table = self.axis_positions(length)
        different = grids if len(set(grids)) > 1 else grids[:1]
        made = weight.new_zeros(len(different), n, 2 * half)
        for row, (n_rows, n_columns) in enumerate(different):
            places = made[row, : n_rows * n_columns].view(n_rows, n_columns, 2 * half)
            places[..., :half] = table[:n_columns]
            places[..., half:] = table[:n_rows, None]
        return made

    def padded(self, x: Tensor, grids: Grids, table: Tensor) -> Tensor:
        """`forward` with everything in tensors, and no case in which nothing is padded.

        Args:
            table: `axis_positions` of as many patches as a side may have.
        """
        rows, columns, is_patch = grids.places(x.shape[1])
        return self.run(x, torch.cat((table[columns], table[rows]), -1), is_patch)

    def axis_positions(self, n: int) -> Tensor:
        """Return what places 0 to n - 1 of one axis add to half a key, `[n, D / 2]`."""
        weight = self.key.weight
        return axis_table(self.config.llm_dim // 2, n, weight.dtype, weight.device)

    def run(self, x: Tensor, positions: Tensor, is_patch: Tensor | None) -> Tensor:
        """`forward` with everything in tensors.

        Args:
            positions: `[B, N, D]` or `[1, N, D]`.
            is_patch: bool `[B, N]`; None = no padding.
        """
        visible = None
        if is_patch is not None:
            # A probability of zero times NaN is NaN, so the padding becomes zero first.
            x = x.masked_fill(~is_patch[..., None], 0.0)
            visible = is_patch[:, None, None]
        x = self.embed_norm(self.embed(x))
        q = self.queries.to(x.dtype).expand(len(x), -1, -1)
        mixed = functional.scaled_dot_product_attention(
            self._heads(q),
            self._heads(self.key(x + positions)),
            self._heads(self.value(x)),
            attn_mask=visible,
        )  # [B, H, n_queries, d]
        made: Tensor = self.head(self.out_norm(self.out(mixed.transpose(1, 2).flatten(2))))
        return made

    def _heads(self, x: Tensor) -> Tensor:
        """`[B, N, D]` -> `[B, H, N, d]`."""
        b, n, _ = x.shape
        return x.view(b, n, self.config.n_heads, -1).transpose(1, 2)


def resampler_weights(source: Mapping[str, Tensor], config: ResamplerConfig) -> dict[str, Tensor]:
    """Rename the published tensors; work out the queries, which are fp32 whatever the source is.

    Args:
        source: names below "resampler.", such as "kv_proj.weight".

    Raises:
        KeyError: a tensor is missing.
    """
    matrices = dict(zip("qkv", source["attn.in_proj_weight"].chunk(3), strict=True))
    biases = dict(zip("qkv", source["attn.in_proj_bias"].chunk(3), strict=True))
    norm = (source["ln_q.weight"].float(), source["ln_q.bias"].float())
    normed = functional.layer_norm(
        source["query"].float(), (config.llm_dim,), *norm, config.norm_eps
    )
    return {
        "queries": functional.linear(normed, matrices["q"].float(), biases["q"].float()),
        "embed.weight": source["kv_proj.weight"],
        "embed_norm.weight": source["ln_kv.weight"],
        "embed_norm.bias": source["ln_kv.bias"],
        # Copies: a part of the stacked matrix would keep all of it in memory.
        "key.weight": matrices["k"].clone(),
        "key.bias": biases["k"].clone(),
        "value.weight": matrices["v"].clone(),
        "value.bias": biases["v"].clone(),
        "out.weight": source["attn.out_proj.weight"],
        "out.bias": source["attn.out_proj.bias"],
        "out_norm.weight": source["ln_post.weight"],
        "out_norm.bias": source["ln_post.bias"],
        "head.weight": source["proj"].T.contiguous(),  # published for use as x @ proj
    }
