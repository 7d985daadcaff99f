"""Whisper: encoder, and a text decoder over caches with a slot dimension.

Written from the paper (Radford et al. 2022) and the published configuration: pre-norm blocks,
absolute positions (fixed sinusoids in the encoder, learned ones in the decoder), no bias on the
key projections, GELU. Two differences from the published inference code: the encoder takes
windows shorter than 30 s (its positions are cut; not below the shortest of `WINDOWS_S`), and both
caches of the decoder, self and cross, are static tensors with a row per slot.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from worker.nn.mel import FRAMES_PER_S, SAMPLE_RATE_HZ, window_mel

POSITIONS_PER_S = FRAMES_PER_S // 2
"""The second convolution halves the frames."""

WINDOWS_S = (10, 20, 30)
"""In shorter windows the decoder loops: 4 of 10 clips at clip + 5 s, none at 8 s and more."""


@dataclass(frozen=True, slots=True)
class WhisperConfig:
    vocab_size: int = 51_864
    width: int = 384
    n_heads: int = 6
    ffn_size: int = 1536
    n_encoder_layers: int = 4
    n_decoder_layers: int = 4
    n_mels: int = 80
    max_frames: int = 1500
    """Encoder positions of 30 s."""
    max_tokens: int = 448


TINY_EN = WhisperConfig()


def window_for(n_samples: int) -> int:
    """Return the shortest window in seconds that holds the samples (the longest if none does)."""
    return next((s for s in WINDOWS_S if n_samples <= s * SAMPLE_RATE_HZ), WINDOWS_S[-1])


def log_mel(samples: NDArray[np.float32], window_s: int, n_mels: int = 80) -> Tensor:
    """Return log-mel features `[1, n_mels, F]` of samples padded or cut to `window_s` seconds."""
    return window_mel(samples, window_s * SAMPLE_RATE_HZ, n_mels)[None]


class SelfAttention(nn.Module):
    """Projections of one attention; queries, keys and values are stacked."""

    def __init__(self, width: int, n_heads: int) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values `[B, H, N, d]` of `[B, N, D]`."""
        b, n, width = x.shape
        stacked = self.qkv(x).view(b, n, 3, self.n_heads, width // self.n_heads)
        q, k, v = stacked.permute(2, 0, 3, 1, 4)  # each [B, H, N, d]
        return q, k, v


class EncoderLayer(nn.Module):
    def __init__(self, width: int, n_heads: int, ffn_size: int) -> None:
        super().__init__()
        self.attn_norm = nn.LayerNorm(width)
        self.attn = SelfAttention(width, n_heads)
        self.ffn_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, ffn_size)
        self.down = nn.Linear(ffn_size, width)

    def forward(self, x: Tensor, visible: Tensor | None = None) -> Tensor:
        """All frames of a window, `[B, F, D]` -> `[B, F, D]`.

        Args:
            visible: which frames (second dimension) a frame sees, bool `[F, F]`; None = all.
        """
        q, k, v = self.attn.project(self.attn_norm(x))
        return self.close(x, functional.scaled_dot_product_attention(q, k, v, visible))

    def close(self, x: Tensor, mixed: Tensor) -> Tensor:
        """Add what attention `[B, H, F, d]` found, then the feed-forward part; `[B, F, D]`."""
        x = x + self.attn.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.ffn_norm(x))))


class Encoder(nn.Module):
    """Usable whole, or stem, layers and closing norm one after the other (a turn for others)."""

    def __init__(self, config: WhisperConfig) -> None:
        super().__init__()
        self.conv1 = nn.Conv1d(config.n_mels, config.width, 3, padding=1)
        self.conv2 = nn.Conv1d(config.width, config.width, 3, stride=2, padding=1)
        self.positions = nn.Parameter(torch.zeros(config.max_frames, config.width))
        self.layers = nn.ModuleList(
            EncoderLayer(config.width, config.n_heads, config.ffn_size)
            for _ in range(config.n_encoder_layers)
        )
        self.norm = nn.LayerNorm(config.width)

    def stem(self, features: Tensor) -> Tensor:
        """Features `[B, n_mels, 2 F]` -> the first layer's input `[B, F, D]`."""
        x = functional.gelu(self.conv1(features))
        x = functional.gelu(self.conv2(x)).transpose(1, 2)
        return x + self.positions[: x.shape[1]]

    def forward(self, features: Tensor) -> Tensor:
        x = self.stem(features)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


@dataclass(frozen=True, slots=True)
class WhisperCache:
    """Decoder caches of every slot: one tensor per layer.

    keys, values: what the text so far left, `[slots, H, max_tokens, d]`.
    heard_keys, heard_values: the encoded speech, `[slots, H, max_frames, d]`.
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    heard_keys: tuple[Tensor, ...]
    heard_values: tuple[Tensor, ...]

    @classmethod
    def allocate(cls, config: WhisperConfig, n_slots: int) -> WhisperCache:
        head_dim = config.width // config.n_heads

        def side(length: int) -> tuple[Tensor, ...]:
            shape = (n_slots, config.n_heads, length, head_dim)
            return tuple(torch.zeros(shape) for _ in range(config.n_decoder_layers))

        text, speech = config.max_tokens, config.max_frames
        return cls(side(text), side(text), side(speech), side(speech))

    def poison(self, slot: int) -> None:
        """Make the slot unreadable: a step that still looked at it would give NaN."""
        for tensor in (*self.keys, *self.values, *self.heard_keys, *self.heard_values):
            tensor[slot] = torch.nan


@dataclass(frozen=True, slots=True)
class TextRows:
    """What the host knows of a batch of decoder steps, one entry per row."""

    slots: tuple[int, ...]
    positions: tuple[int, ...]
    n_frames: tuple[int, ...]
    """Encoder positions of the slot's speech."""


class TextLayer(nn.Module):
    def __init__(self, config: WhisperConfig) -> None:
        super().__init__()
        self.attn_norm = nn.LayerNorm(config.width)
        self.attn = SelfAttention(config.width, config.n_heads)
        self.cross_norm = nn.LayerNorm(config.width)
        self.cross_query = nn.Linear(config.width, config.width)
        self.cross_key_value = nn.Linear(config.width, 2 * config.width)
        self.cross_out = nn.Linear(config.width, config.width)
        self.ffn_norm = nn.LayerNorm(config.width)
        self.up = nn.Linear(config.width, config.ffn_size)
        self.down = nn.Linear(config.ffn_size, config.width)
        self.n_heads = config.n_heads

    def heard(self, encoded: Tensor) -> tuple[Tensor, Tensor]:
        """Return cross keys and values `[H, F, d]` of encoded speech `[1, F, D]`."""
        _, n, width = encoded.shape
        stacked = self.cross_key_value(encoded).view(n, 2, self.n_heads, width // self.n_heads)
        k, v = stacked.permute(1, 2, 0, 3)
        return k, v

    def forward(self, x: Tensor, layer: int, cache: WhisperCache, rows: TextRows) -> Tensor:
        """One token per row, `[B, 1, D]` -> `[B, 1, D]`; writes its keys and values."""
        q, k, v = self.attn.project(self.attn_norm(x))
        mixed = []
        keys, values = cache.keys[layer], cache.values[layer]
        for row, (slot, position) in enumerate(zip(rows.slots, rows.positions, strict=True)):
            keys[slot, :, position] = k[row, :, 0]
            values[slot, :, position] = v[row, :, 0]
            mixed.append(attend_row(q[row], keys[slot], values[slot], position + 1))
        x = x + self.attn.out(torch.stack(mixed))

        q = self.cross_query(self.cross_norm(x))
        q = q.view(len(rows.slots), 1, self.n_heads, -1).transpose(1, 2)  # [B, H, 1, d]
        keys, values = cache.heard_keys[layer], cache.heard_values[layer]
        mixed = [
            attend_row(q[row], keys[slot], values[slot], n_frames)
            for row, (slot, n_frames) in enumerate(zip(rows.slots, rows.n_frames, strict=True))
        ]
        x = x + self.cross_out(torch.stack(mixed))
        return x + self.down(functional.gelu(self.up(self.ffn_norm(x))))


def attend_row(q: Tensor, keys: Tensor, values: Tensor, length: int) -> Tensor:
    """Attention of one row's query `[H, 1, d]` over the first `length` cached positions: `[1, D]`.

    An exact slice, so whatever an earlier session left behind it is never read.
    """
    mixed = functional.scaled_dot_product_attention(
        q[None], keys[None, :, :length], values[None, :, :length]
    )
    return mixed[0].transpose(0, 1).flatten(1)


class Whisper(nn.Module):
    def __init__(self, config: WhisperConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder = Encoder(config)
        self.embed = nn.Embedding(config.vocab_size, config.width)
        self.text_positions = nn.Parameter(torch.zeros(config.max_tokens, config.width))
        self.text_layers = nn.ModuleList(TextLayer(config) for _ in range(config.n_decoder_layers))
        self.text_norm = nn.LayerNorm(config.width)

    def hear(self, cache: WhisperCache, slot: int, encoded: Tensor) -> None:
        """Put encoded speech `[1, F, D]` into the slot's cross caches."""
        for layer, keys, values in zip(
            self.text_layers, cache.heard_keys, cache.heard_values, strict=True
        ):
            assert isinstance(layer, TextLayer)
            k, v = layer.heard(encoded)
            keys[slot, :, : k.shape[1]] = k
            values[slot, :, : v.shape[1]] = v

    def step(self, cache: WhisperCache, tokens: Sequence[int], rows: TextRows) -> Tensor:
        """Feed one token of each row at its position; return the next token's logits `[B, V]`."""
        x = self.embed(torch.tensor(tokens)) + self.text_positions[torch.tensor(rows.positions)]
        x = x[:, None]
        for index, layer in enumerate(self.text_layers):
            x = layer(x, index, cache, rows)
        return functional.linear(self.text_norm(x[:, 0]), self.embed.weight)


def whisper_weights(source: Mapping[str, Tensor], config: WhisperConfig) -> dict[str, Tensor]:
    """Rename Hugging Face tensors (`WhisperForConditionalGeneration`) and stack what is stacked.

    Raises:
        KeyError: a tensor is missing.
    """

    def affine(ours: str, theirs: str) -> dict[str, Tensor]:
        return {f"{ours}.{part}": source[f"{theirs}.{part}"] for part in ("weight", "bias")}

    def stacked(ours: str, theirs: str, names: Sequence[str]) -> dict[str, Tensor]:
        # The key projection has no bias; a stacked product needs one, so it becomes zero.
        no_bias = torch.zeros(config.width, dtype=source[f"{theirs}.v_proj.bias"].dtype)
        return {
            f"{ours}.weight": torch.cat([source[f"{theirs}.{n}_proj.weight"] for n in names]),
            f"{ours}.bias": torch.cat(
                [no_bias if n == "k" else source[f"{theirs}.{n}_proj.bias"] for n in names]
            ),
        }

    encoder, decoder = "model.encoder", "model.decoder"
    weights = {
        "encoder.positions": source[f"{encoder}.embed_positions.weight"],
        "embed.weight": source[f"{decoder}.embed_tokens.weight"],
        "text_positions": source[f"{decoder}.embed_positions.weight"],
        **affine("encoder.conv1", f"{encoder}.conv1"),
        **affine("encoder.conv2", f"{encoder}.conv2"),
        **affine("encoder.norm", f"{encoder}.layer_norm"),
        **affine("text_norm", f"{decoder}.layer_norm"),
    }
    blocks = [
        (f"encoder.layers.{i}", f"{encoder}.layers.{i}") for i in range(config.n_encoder_layers)
    ] + [(f"text_layers.{i}", f"{decoder}.layers.{i}") for i in range(config.n_decoder_layers)]
    for ours, theirs in blocks:
        weights |= stacked(f"{ours}.attn.qkv", f"{theirs}.self_attn", "qkv")
        weights |= affine(f"{ours}.attn.out", f"{theirs}.self_attn.out_proj")
        weights |= affine(f"{ours}.attn_norm", f"{theirs}.self_attn_layer_norm")
        weights |= affine(f"{ours}.ffn_norm", f"{theirs}.final_layer_norm")
        weights |= affine(f"{ours}.up", f"{theirs}.fc1")
        weights |= affine(f"{ours}.down", f"{theirs}.fc2")
        if ours.startswith("text_layers"):
            cross = f"{theirs}.encoder_attn"
            weights |= affine(f"{ours}.cross_query", f"{cross}.q_proj")
            weights |= stacked(f"{ours}.cross_key_value", cross, "kv")
            weights |= affine(f"{ours}.cross_out", f"{cross}.out_proj")
            weights |= affine(f"{ours}.cross_norm", f"{theirs}.encoder_attn_layer_norm")
    return weights
