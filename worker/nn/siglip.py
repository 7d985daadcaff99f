"""Vision transformer of the SigLIP family over slices of any aspect ratio.

Written from the architecture as published (SigLIP, Zhai et al. 2023; pre-norm blocks, learned
positions, GELU by tanh) with the positions of NaViT as MiniCPM-o 4.5 uses them: a slice of h x w
patches picks h x w of the square table's rows, each by its relative place. A batch of slices is
padded to the largest one; there is a mask only if some slice is shorter.

A second way (`padded`) is for batches whose sizes are fixed ahead. It takes pixels as they lie in
memory and everything else in tensors, and knows of no case in which nothing is padded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

Grid = tuple[int, int]
"""Patch rows and patch columns of a slice; patches lie row by row."""

LayerCall = Callable[[Tensor, Tensor], Tensor]
"""Signature of `VisionLayer.padded`."""

N_CHANNELS = 3

N_SHADES = 8
"""Entries by which heads grow to hide padding: kernels want heads of a multiple of 8."""
SHADE = -30_000.0
"""Such an entry of a padding patch's key. Far below all scores, within the range of 16 bit."""


@dataclass(frozen=True, slots=True)
class VisionConfig:
    width: int
    n_layers: int
    n_heads: int
    ffn_size: int
    patch_size: int
    n_positions_side: int
    """Side of the square table of positions (image size // patch size)."""
    norm_eps: float

    @property
    def patch_values(self) -> int:
        """Values of one patch: channel, row, column."""
        return N_CHANNELS * self.patch_size**2


def patchify(pixels: Tensor, patch_size: int) -> Tensor:
    """Cut a slice `[h, w, 3]` into patches `[n, 3 * p * p]`, row by row, on the slice's device."""
    height, width, _ = pixels.shape
    cut = pixels.view(height // patch_size, patch_size, width // patch_size, patch_size, -1)
    return cut.permute(0, 2, 4, 1, 3).reshape(-1, N_CHANNELS * patch_size**2)


def normalise(pixels: Tensor) -> Tensor:
    """Map uint8 values to [-1, 1], fp32."""
    return (pixels.float() / 255 - 0.5) / 0.5


@dataclass(frozen=True, slots=True)
class Grids:
    """Grids of a batch, in tensors."""

    n_columns: Tensor
    n_patches: Tensor
    """Integers `[B]`; an empty grid (zeros) counts as one patch."""

    def places(self, n: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return row and column (int64) of every patch and whether there is one, all `[B, n]`.

        Padding behind a grid gets the place of its last patch.
        """
        n_columns = self.n_columns.long().clamp(min=1)[:, None]
        n_patches = self.n_patches.long().clamp(min=1)[:, None]
        index = torch.arange(n, device=n_columns.device)
        place = torch.minimum(index, n_patches - 1)
        return place // n_columns, place % n_columns, index < n_patches


def cut_patches(pixels: Tensor, grids: Grids, patch_size: int) -> Tensor:
    """`patchify` and `normalise` of padded slices, fp32 `[B, N, 3 * p * p]`; padding becomes 0.

    Args:
        pixels: uint8 `[B, N, 3 * p * p]`; a row begins with a slice as it lies in memory
            (`[h, w, 3]`), what follows may be anything.
    """
    b, n, n_values = pixels.shape
    rows, columns, is_patch = grids.places(n)
    value = torch.arange(n_values, device=pixels.device)
    channel, inner = value // patch_size**2, value % patch_size**2
    line = rows[..., None] * patch_size + inner // patch_size  # [B, N, 3 * p * p]
    column = columns[..., None] * patch_size + inner % patch_size
    width = grids.n_columns.long()[:, None, None] * patch_size
    source = (line * width + column) * N_CHANNELS + channel
    cut = pixels.flatten(1).gather(1, source.flatten(1)).view(b, n, n_values)
    return normalise(cut).masked_fill(~is_patch[..., None], 0.0)


@lru_cache(maxsize=512)
def axis_bins(n: int, side: int) -> Tensor:
    """Return which of `side` table rows each of n patches along an axis takes, int64 `[n]`.

    That is the nearest lower one of its relative place, but rounding decides where the two grids
    meet: for some n (25, 49, 50, 55, ...) the original differs by one from `side * i // n`. Only
    fp32 and the CPU's own `arange` give its values, so neither may be changed.
    """
    with torch.inference_mode(False):  # kept for callers of both kinds
        step = float(np.float32(1) / np.float32(n))
        options = {"dtype": torch.float32, "device": "cpu"}
        places = torch.arange(0, 1 - 1e-6, step, **options)  # type: ignore[call-overload]
        bounds = torch.arange(1 / side, 1.0, 1 / side, **options)  # type: ignore[call-overload]
        return torch.bucketize(places, bounds, right=True)


def position_ids(grid: Grid, side: int) -> Tensor:
    """Return rows of the table of positions, int64 `[h * w]` on the CPU."""
    n_rows, n_columns = grid
    return (axis_bins(n_rows, side)[:, None] * side + axis_bins(n_columns, side)).flatten()


@lru_cache(maxsize=256)
def padded_position_ids(grid: Grid, n: int, side: int) -> NDArray[np.int32]:
    """Return `position_ids` of a grid padded with 0 to n patches, `[n]`; not to be written to."""
    ids = np.zeros(n, dtype=np.int32)
    ids[: grid[0] * grid[1]] = position_ids(grid, side).numpy()
    return ids


@lru_cache(maxsize=64)
def batch_position_ids(grids: tuple[Grid, ...], n: int, side: int, device: torch.device) -> Tensor:
    """Return the position ids of slices padded to n patches, int64 `[B, n]`; padding gets 0."""
    with torch.inference_mode(False):  # kept for callers of both kinds
        ids = torch.zeros(len(grids), n, dtype=torch.int64)
        for row, (n_rows, n_columns) in enumerate(grids):
            ids[row, : n_rows * n_columns] = position_ids((n_rows, n_columns), side)
        return ids.to(device)


@lru_cache(maxsize=64)
def patch_mask(grids: tuple[Grid, ...], n: int, device: torch.device) -> Tensor | None:
    """Return where slices padded to n patches have one, bool `[B, n]`; None if all are full."""
    n_patches = [n_rows * n_columns for n_rows, n_columns in grids]
    if all(count == n for count in n_patches):
        return None
    with torch.inference_mode(False):  # kept for callers of both kinds
        return (torch.arange(n) < torch.tensor(n_patches)[:, None]).to(device)


class VisionLayer(nn.Module):
    """One block. Query, key and value matrices are stacked."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        width, eps = config.width, config.norm_eps
        self.n_heads = config.n_heads
        self.attn_norm = nn.LayerNorm(width, eps)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.ffn_norm = nn.LayerNorm(width, eps)
        self.up = nn.Linear(width, config.ffn_size)
        self.down = nn.Linear(config.ffn_size, width)

    def forward(self, x: Tensor, visible: Tensor | None) -> Tensor:
        """`[B, N, D]` -> `[B, N, D]`.

        Args:
            visible: patches that may be looked at, bool `[B, 1, 1, N]`; None = all.
        """
        q, k, v = self._project(x)
        # Its softmax is in fp32 whatever the activations are, as the original's.
        return self._close(x, functional.scaled_dot_product_attention(q, k, v, attn_mask=visible))

    def padded(self, x: Tensor, shade: Tensor) -> Tensor:
        """`forward` that hides padding without a mask, `[B, N, D]` -> `[B, N, D]`.

        With a mask an accelerator leaves its fastest attention kernel. Here every head gets a few
        more entries, 1 in the queries and the shade in the keys, which add up to a padding patch's
        score. Heads of 72 as the original's are worked on as if they were larger anyway.

        Args:
            shade: 0 where there is a patch, else `SHADE`, `[B, N]`, of x's dtype.
        """
        q, k, v = self._project(x)
        shades = shade[:, None, :, None].expand(-1, self.n_heads, -1, N_SHADES)
        mixed = functional.scaled_dot_product_attention(
            torch.cat((q, torch.ones_like(shades)), -1),
            torch.cat((k, shades), -1),
            functional.pad(v, (0, N_SHADES)),
            scale=q.shape[-1] ** -0.5,
        )
        return self._close(x, mixed[..., : q.shape[-1]])

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values `[B, H, N, d]`."""
        b, n, _ = x.shape
        stacked = self.qkv(self.attn_norm(x)).view(b, n, 3, self.n_heads, -1)
        q, k, v = stacked.permute(2, 0, 3, 1, 4)
        return q, k, v

    def _close(self, x: Tensor, mixed: Tensor) -> Tensor:
        """Add what attention `[B, H, N, d]` found, then the feed-forward part; `[B, N, D]`."""
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        hidden = functional.gelu(self.up(self.ffn_norm(x)), approximate="tanh")
        return x + self.down(hidden)


class VisionEncoder(nn.Module):
    """Patches of a batch of slices -> their states after the closing norm."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Linear(config.patch_values, config.width)
        self.positions = nn.Embedding(config.n_positions_side**2, config.width)
        layers = [VisionLayer(config) for _ in range(config.n_layers)]
        self.layers = nn.ModuleList(layers)
        self.norm = nn.LayerNorm(config.width, config.norm_eps)
        self.layer_calls: list[LayerCall] = [layer.padded for layer in layers]
        """The call site of each layer in `padded`; compiled regions take their places."""

    def forward(self, patches: Tensor, grids: Sequence[Grid]) -> Tensor:
        """Return states `[B, N, D]` of normalised patches `[B, N, 3 * p * p]`.

        A slice with fewer than N patches is padded at its end. The padding may hold anything,
        NaN included; what comes out there is finite and means nothing.

        Args:
            grids: one per slice.
        """
        n, device, side = patches.shape[1], patches.device, self.config.n_positions_side
        ids = batch_position_ids(tuple(grids), n, side, device)
        return self.run(patches, ids, patch_mask(tuple(grids), n, device))

    def run(self, patches: Tensor, ids: Tensor, is_patch: Tensor | None) -> Tensor:
        """`forward` with everything in tensors.

        Args:
            ids: rows of the table of positions, int64 `[B, N]`.
            is_patch: bool `[B, N]`; None = no padding.
        """
        patches = patches.to(self.embed.weight.dtype)
        visible = None
        if is_patch is not None:
            patches = patches.masked_fill(~is_patch[..., None], 0.0)
            visible = is_patch[:, None, None]
        x = self.embed(patches) + self.positions(ids)
        for layer in self.layers:
            x = layer(x, visible)
        normed: Tensor = self.norm(x)
        return normed

    def padded(self, pixels: Tensor, grids: Grids, ids: Tensor) -> Tensor:
        """Return states `[B, N, D]` of slices as they lie in memory; in padding they mean nothing.

        Args:
            pixels: uint8 `[B, N, 3 * p * p]`, as in `cut_patches`.
            ids: rows of the table of positions, integers `[B, N]` (`padded_position_ids`).
        """
        x, shade = self.begin(pixels, grids, ids)
        for layer in self.layer_calls:
            x = layer(x, shade)
        normed: Tensor = self.norm(x)
        return normed

    def begin(self, pixels: Tensor, grids: Grids, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return what the layers of `padded` take: `[B, N, D]` and the shades `[B, N]`."""
        patches = cut_patches(pixels, grids, self.config.patch_size)
        x = self.embed(patches.to(self.embed.weight.dtype)) + self.positions(ids)
        _, _, is_patch = grids.places(pixels.shape[1])
        return x, x.new_zeros(is_patch.shape).masked_fill(~is_patch, SHADE)


def vision_weights(source: Mapping[str, Tensor], config: VisionConfig) -> dict[str, Tensor]:
    """Rename the published tensors and stack what is stacked here.

    Args:
        source: names below "vpm.", such as "encoder.layers.0.self_attn.q_proj.weight". Layers
            from `config.n_layers` on are left out.

    Raises:
        KeyError: a tensor is missing.
    """

    def affine(ours: str, theirs: str) -> dict[str, Tensor]:
        return {f"{ours}.{part}": source[f"{theirs}.{part}"] for part in ("weight", "bias")}

    weights = {
        # A convolution whose stride is its size is a product with the flattened patch.
        "embed.weight": source["embeddings.patch_embedding.weight"].flatten(1),
        "embed.bias": source["embeddings.patch_embedding.bias"],
        "positions.weight": source["embeddings.position_embedding.weight"],
        **affine("norm", "post_layernorm"),
    }
    for index in range(config.n_layers):
        theirs, ours = f"encoder.layers.{index}", f"layers.{index}"
        for part in ("weight", "bias"):
            weights[f"{ours}.qkv.{part}"] = torch.cat(
                [source[f"{theirs}.self_attn.{name}_proj.{part}"] for name in "qkv"]
            )
        weights |= affine(f"{ours}.attn_norm", f"{theirs}.layer_norm1")
        weights |= affine(f"{ours}.out", f"{theirs}.self_attn.out_proj")
        weights |= affine(f"{ours}.ffn_norm", f"{theirs}.layer_norm2")
        weights |= affine(f"{ours}.up", f"{theirs}.mlp.fc1")
        weights |= affine(f"{ours}.down", f"{theirs}.mlp.fc2")
    return weights
