"""Decoder-only language model of the Llama / Qwen3 family over caches with a slot dimension.

Written from the architecture as published (Llama: RMSNorm, rotary position, SwiGLU, grouped
queries; Qwen3 adds a norm over each head's query and key). Two call sites share one layer
function: prefill (one row, any number of tokens) and decode (any number of rows, one token each).

A cache position that has not been written may hold anything, even NaN: it is masked out of the
scores and its values are replaced by zero before they are multiplied with a zero probability.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

LayerCall = Callable[[Tensor, Tensor, Tensor, "Step"], Tensor]
"""Signature of `DecoderLayer.forward`."""


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    vocab_size: int
    hidden_size: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    ffn_size: int
    rope_theta: float
    norm_eps: float
    qk_norm: bool = False
    """Qwen3: RMSNorm over every head's query and key before the rotation."""
    tied_head: bool = True
    """The output head is the embedding matrix."""


@dataclass(frozen=True, slots=True)
class Rows:
    """What the host knows of a batch: cache row and live length (this step included) of each row.

    With it attention reads exact slices of the caches: no copies, no masks, one small product a
    row. That is the right way for a CPU (B = 2 at 500 tokens: 105 ms -> 75 ms a step). Compiled
    regions take a span instead and find everything in tensors.
    """

    slots: tuple[int, ...]
    lengths: tuple[int, ...]


class RmsNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        # Statistics in fp32 whatever the activations are, as the published models do.
        normed = functional.rms_norm(x.float(), self.weight.shape, None, self.eps)
        return self.weight * normed.to(x.dtype)


def rotary_table(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Return cosine and signed sine `[B, N, 1, d]` (fp32) of positions `[B, N]`.

    The first half of the sine is negated, so that rotating needs no negation of the input.
    """
    exponent = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32)
    angles = positions[..., None].float() * theta ** (-exponent / head_dim)  # [B, N, d/2]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), -1)[:, :, None], torch.cat((-sin, sin), -1)[:, :, None]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate heads `[B, N, H, d]`; the two halves of a head form the pairs."""
    wide = x.float()
    return torch.addcmul(wide * cos, wide.roll(x.shape[-1] // 2, -1), sin).to(x.dtype)


class DecoderLayer(nn.Module):
    """One block. Query, key and value matrices are stacked, and so are gate and up."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        width, d = config.hidden_size, config.head_dim
        self.n_heads, self.n_kv_heads, self.head_dim = config.n_heads, config.n_kv_heads, d
        self.attn_norm = RmsNorm(width, config.norm_eps)
        self.qkv = nn.Linear(width, (config.n_heads + 2 * config.n_kv_heads) * d, bias=False)
        self.q_norm = RmsNorm(d, config.norm_eps) if config.qk_norm else None
        self.k_norm = RmsNorm(d, config.norm_eps) if config.qk_norm else None
        self.out = nn.Linear(config.n_heads * d, width, bias=False)
        self.ffn_norm = RmsNorm(width, config.norm_eps)
        self.gate_up = nn.Linear(width, 2 * config.ffn_size, bias=False)
        self.down = nn.Linear(config.ffn_size, width, bias=False)

    def forward(self, x: Tensor, keys: Tensor, values: Tensor, step: Step) -> Tensor:
        """Return the block's output `[B, N, D]` of its input.

        Writes the new keys and values into this layer's caches `[slots, K, T, d]`.
        """
        x = x + self._attend(self.attn_norm(x), keys, values, step)
        gate, up = self.gate_up(self.ffn_norm(x)).chunk(2, dim=-1)
        return x + self.down(functional.silu(gate) * up)

    def _attend(self, x: Tensor, keys: Tensor, values: Tensor, step: Step) -> Tensor:
        b, n, _ = x.shape
        heads = self.qkv(x).view(b, n, -1, self.head_dim)  # [B, N, H + 2 K, d]
        turning, v = heads.split((self.n_heads + self.n_kv_heads, self.n_kv_heads), dim=2)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = turning.split((self.n_heads, self.n_kv_heads), dim=2)
            turning = torch.cat((self.q_norm(q), self.k_norm(k)), dim=2)
        turning = rotate(turning, step.cos, step.sin)
        q, k = turning.split((self.n_heads, self.n_kv_heads), dim=2)
        # Index tensors on both sides of the head dimension move it behind them: [B, N, K, d].
        keys[step.slots[:, None], :, step.positions] = k
        values[step.slots[:, None], :, step.positions] = v
        mixed = read_cache(q.transpose(1, 2), keys, values, step)  # [B, H, N, d]
        return self.out(mixed.transpose(1, 2).reshape(b, n, -1))


@dataclass(frozen=True, slots=True)
class Step:
    """What all layers of one call share."""

    cos: Tensor
    sin: Tensor
    """`[B, N, 1, d]`."""
    slots: Tensor
    """Cache row of each row, `[B]`."""
    positions: Tensor
    """`[B, N]`."""
    visible: Tensor
    """Which positions a token may look at, bool `[B, 1, N, S]`."""
    dead: Tensor
    """Positions that the row has not reached, bool `[B, 1, S, 1]`."""
    rows: Rows | None


def read_cache(q: Tensor, keys: Tensor, values: Tensor, step: Step) -> Tensor:
    """Attention of queries `[B, H, N, d]` over what their slots hold; `[B, H, N, d]`."""
    if step.rows is None:
        span = step.visible.shape[-1]
        # A probability of zero times NaN is NaN, so unwritten positions become zeros first.
        k = keys[:, :, :span].index_select(0, step.slots).masked_fill(step.dead, 0.0)
        v = values[:, :, :span].index_select(0, step.slots).masked_fill(step.dead, 0.0)
        return grouped_attention(q, k, v, step.visible)
    parts = [
        grouped_attention(
            q[row : row + 1],
            keys[slot : slot + 1, :, :length],
            values[slot : slot + 1, :, :length],
            step.visible[row : row + 1, ..., :length] if q.shape[2] > 1 else None,
        )
        for row, (slot, length) in enumerate(zip(step.rows.slots, step.rows.lengths, strict=True))
    ]
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def grouped_attention(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None) -> Tensor:
    """Attention of H query heads over K shared key/value heads: `[B, H, N, d]`.

    The query heads of one key head stand together, so the products need no repeated keys.
    """
    b, n_heads, n, d = q.shape
    per_group = n_heads // k.shape[1]
    if visible is not None and n > 1:
        visible = visible.repeat(1, 1, per_group, 1)
    mixed = functional.scaled_dot_product_attention(
        q.reshape(b, -1, per_group * n, d), k, v, attn_mask=visible
    )  # [B, K, H/K * N, d]
    return mixed.reshape(b, n_heads, n, d)


@dataclass(frozen=True, slots=True)
class KvCache:
    """Keys and values of every slot: one pair of tensors `[slots, K, T, d]` per layer.

    Separate tensors, since slices of one stacked tensor make the compiler copy the whole cache.
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]

    @classmethod
    def allocate(
        cls,
        config: DecoderConfig,
        n_slots: int,
        n_tokens: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> KvCache:
        shape = (n_slots, config.n_kv_heads, n_tokens, config.head_dim)

        def side() -> tuple[Tensor, ...]:
            return tuple(
                torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.n_layers)
            )

        return cls(side(), side())

    @property
    def n_tokens(self) -> int:
        return self.keys[0].shape[2]

    def poison(self, slot: int) -> None:
        """Make the slot unreadable: a token that still looked at it would give NaN."""
        for tensor in (*self.keys, *self.values):
            tensor[slot] = torch.nan


class DecoderStack(nn.Module):
    """The blocks and the closing norm: what turns embeddings into hidden states.

    It owns weights only; caches are handed in and written in place. `reach` says how far to look:
    exact `Rows`, or a span, any number of positions that covers every row's live length (few
    different ones save compilations).
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.n_layers))
        self.norm = RmsNorm(config.hidden_size, config.norm_eps)
        self.prefill_layers: list[LayerCall] = [layer.forward for layer in self.layers]
        self.decode_layers: list[LayerCall] = [layer.forward for layer in self.layers]
        """The two call sites of every layer; compiled regions take their places."""

    def feed(
        self, cache: KvCache, x: Tensor, slots: Tensor, positions: Tensor, reach: Rows | int
    ) -> Tensor:
        """Feed embeddings; return the hidden states after the closing norm, `[B, N, D]`.

        A row with fewer than N tokens is padded at its end: what it writes behind its live length
        is overwritten by the row's next feed, and nobody looks at it before.

        Args:
            cache: written at every row's positions.
            x: `[B, N, D]`; N = 1 is a decode step, anything else a prefill.
            slots: cache row of each row, int64 `[B]`; no slot twice.
            positions: int64 `[B, N]`, ascending by one.
            reach: exact rows, or a span larger than every position.
        """
        layers = self.decode_layers if x.shape[1] == 1 else self.prefill_layers
        return self.norm(self._run(layers, cache, x, slots, positions, reach))

    def _run(
        self,
        layers: list[LayerCall],
        cache: KvCache,
        x: Tensor,
        slots: Tensor,
        positions: Tensor,
        reach: Rows | int,
    ) -> Tensor:
        span = reach if isinstance(reach, int) else max(reach.lengths)
        index = torch.arange(span, device=x.device)
        cos, sin = rotary_table(positions, self.config.head_dim, self.config.rope_theta)
        step = Step(
            cos=cos,
            sin=sin,
            slots=slots,
            positions=positions,
            visible=(index <= positions[..., None])[:, None],
            dead=(index > positions[:, -1:])[:, None, :, None],
            rows=None if isinstance(reach, int) else reach,
        )
        for layer, keys, values in zip(layers, cache.keys, cache.values, strict=True):
            x = layer(x, keys, values, step)
        return x  # [B, N, D]


class Decoder(DecoderStack):
    """The whole model: token embedding, blocks and output head."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tied_head:
            self.head.weight = self.embed.weight

    def prefill(
        self, cache: KvCache, tokens: Tensor, slot: Tensor, start: Tensor, reach: Rows | int
    ) -> Tensor:
        """Feed known tokens of one slot; return the last one's hidden state `[1, D]`.

        Args:
            cache: written at `start .. start + N - 1` of the slot.
            tokens: int64 `[1, N]`.
            slot: cache row, int64 `[1]`.
            start: position of the first token, int64 `[1]`.
            reach: exact rows, or a span of at least start + N.
        """
        positions = (start + torch.arange(tokens.shape[1], device=tokens.device))[None]  # [1, N]
        x = self._run(self.prefill_layers, cache, self.embed(tokens), slot, positions, reach)
        return self.norm(x[:, -1])  # [1, D]

    def decode(
        self, cache: KvCache, tokens: Tensor, slots: Tensor, positions: Tensor, reach: Rows | int
    ) -> Tensor:
        """Feed one token of each row; return their hidden states `[B, D]`.

        Args:
            cache: written at every row's position.
            tokens, slots, positions: int64 `[B]`; no slot twice.
            reach: exact rows, or a span larger than every position.
        """
        x = self.embed(tokens)[:, None]  # [B, 1, D]
        return self.feed(cache, x, slots, positions[:, None], reach)[:, 0]


def decoder_weights(source: Mapping[str, Tensor], config: DecoderConfig) -> dict[str, Tensor]:
    """Rename Hugging Face tensors of a Llama or Qwen3 model and stack what is stacked here.

    Args:
        source: names as in `LlamaForCausalLM`, such as "model.layers.0.self_attn.q_proj.weight".

    Raises:
        KeyError: a tensor is missing.
    """
    weights = stack_weights(source, config)
    weights["embed.weight"] = source["model.embed_tokens.weight"]
    weights["head.weight"] = weights["embed.weight"]
    if not config.tied_head:
        weights["head.weight"] = source["lm_head.weight"]
    return weights


def stack_weights(source: Mapping[str, Tensor], config: DecoderConfig) -> dict[str, Tensor]:
    """The part of `decoder_weights` that belongs to a `DecoderStack`."""
    weights = {"norm.weight": source["model.norm.weight"]}
    for index in range(config.n_layers):
        theirs, ours = f"model.layers.{index}", f"layers.{index}"
        attention, mlp = f"{theirs}.self_attn", f"{theirs}.mlp"
        weights |= {
            f"{ours}.attn_norm.weight": source[f"{theirs}.input_layernorm.weight"],
            f"{ours}.qkv.weight": torch.cat(
                [source[f"{attention}.{name}_proj.weight"] for name in "qkv"]
            ),
            f"{ours}.out.weight": source[f"{attention}.o_proj.weight"],
            f"{ours}.ffn_norm.weight": source[f"{theirs}.post_attention_layernorm.weight"],
            f"{ours}.gate_up.weight": torch.cat(
                [source[f"{mlp}.{name}_proj.weight"] for name in ("gate", "up")]
            ),
            f"{ours}.down.weight": source[f"{mlp}.down_proj.weight"],
        }
        if config.qk_norm:
            for name in ("q_norm", "k_norm"):
                weights[f"{ours}.{name}.weight"] = source[f"{attention}.{name}.weight"]
    return weights
