"""Decoder-only language model of the Llama / Qwen3 family over caches with a slot dimension.

Written from the architecture as published (Llama: RMSNorm, rotary position, SwiGLU, grouped
queries; Qwen3 adds a norm over each head's query and key). Two call sites share one layer
function: prefill (one row, any number of tokens) and decode (any number of rows, one token each).
With kernels one row's token has a third, `DecoderLayer.decode_row`.

A cache position that its row has not reached may hold anything, even NaN (`attention.py`).

Rows of different lengths go together by padding. A padding token has the position
`KvCache.spare`, one more than a slot can hold: every slot has room for it, nobody looks at it, and
so the padding's embedding may be anything, even NaN. `KvCache.positions` makes such positions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from worker.nn.attention import HAS_TRITON, Reader, Rows, choose_reader, has_kernels

if HAS_TRITON:
    from worker.nn.kernels.decode_attention import decode_attention
    from worker.nn.kernels.decode_linear import linear, linear_add, norm_gate_up, norm_linear
    from worker.nn.kernels.parts import can_overlap

__all__ = [
    "Decoder",
    "DecoderConfig",
    "DecoderLayer",
    "DecoderStack",
    "KvCache",
    "LiveStep",
    "Rows",
    "SavedKv",
    "Step",
    "decoder_weights",
    "rotary_table",
    "rotate",
    "row_linear",
    "stack_weights",
    "turn_keys",
]

LayerCall = Callable[[Tensor, Tensor, Tensor, "Step | LiveStep"], Tensor]
"""Signature of `DecoderLayer.forward`."""

SavedKv = tuple[tuple[Tensor, ...], tuple[Tensor, ...]]
"""Keys and values of one slot, `[K, n, d]` of every layer."""


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


class RmsNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * normed(x, self.eps)


def normed(x: Tensor, eps: float) -> Tensor:
    """Scale the last dimension to a root mean square of 1."""
    # Statistics in fp32 whatever the activations are, as the published models do.
    return functional.rms_norm(x.float(), x.shape[-1:], None, eps).to(x.dtype)


def rotary_table(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Return cosine and signed sine `[B, N, 1, d]` (fp32) of positions `[B, N]`.

    The first half of the sine is negated, so that rotating needs no negation of the input.
    """
    exponent = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32)
    # In this order, as published: at position 4000 another rounding shows in the angle.
    frequency = 1.0 / theta ** (exponent / head_dim)
    angles = positions[..., None].float() * frequency  # [B, N, d/2]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), -1)[:, :, None], torch.cat((-sin, sin), -1)[:, :, None]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate heads `[B, N, H, d]`; the two halves of a head form the pairs."""
    wide = x.float()
    return torch.addcmul(wide * cos, wide.roll(x.shape[-1] // 2, -1), sin).to(x.dtype)


def turn_keys(keys: Tensor, delta: int | Tensor, theta: float) -> Tensor:
    """Return cached keys `[..., d]` as they would be `delta` positions later.

    Rotations add up, so this is one rotation by the difference, in fp32. (MiniCPM-o 4.5 reference,
    `realign_rotary_suffix`, turns back and forth in the dtype of the cache, which loses digits.)

    Args:
        delta: a number, or int64 `[1]` on the device.
    """
    if isinstance(delta, int):
        delta = torch.full((1,), delta, device=keys.device)
    cos, sin = rotary_table(delta[None], keys.shape[-1], theta)  # [1, 1, 1, d]
    return rotate(keys, cos.flatten(), sin.flatten())


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

    def forward(self, x: Tensor, keys: Tensor, values: Tensor, step: Step | LiveStep) -> Tensor:
        """Return the block's output `[B, N, D]` of its input.

        Writes the new keys and values into this layer's caches `[slots, K, T, d]`.
        """
        x = x + self._attend(self.attn_norm(x), keys, values, step)
        gate, up = self.gate_up(self.ffn_norm(x)).chunk(2, dim=-1)
        return x + self.down(functional.silu(gate) * up)

    def decode_row(self, x: Tensor, keys: Tensor, values: Tensor, step: Step | LiveStep) -> Tensor:
        """Do what `forward` does, for one token of one row `[1, 1, D]` and with kernels only.

        They have the norms and sums in them and overlap, which compiled code cannot do. (The
        matrices of several rows are better off in `forward`, compiled.)
        """
        assert isinstance(step, LiveStep), "kernels do this"
        overlaps = can_overlap(x.device)
        row = x[0]  # [1, D]
        norm = self.attn_norm
        heads = norm_linear(row, norm.weight, norm.eps, self.qkv.weight, overlaps)
        mixed = self._mix(heads.view(1, -1, self.head_dim), keys, values, step, overlaps)
        row = linear_add(mixed.view(1, -1), self.out.weight, row, overlaps)
        norm = self.ffn_norm
        gated = norm_gate_up(row, norm.weight, norm.eps, self.gate_up.weight, overlaps)
        return linear_add(gated, self.down.weight, row, overlaps)[None]

    def _mix(
        self, heads: Tensor, keys: Tensor, values: Tensor, step: LiveStep, overlaps: bool = False
    ) -> Tensor:
        """Attention `[B, H, d]` of one token of each row, heads `[B, H + 2 K, d]`."""
        norms = None
        if self.q_norm is not None and self.k_norm is not None:
            norms = (self.q_norm.weight, self.k_norm.weight, self.q_norm.eps)
        return decode_attention(
            heads, norms, step.table, keys, values, step.slots, step.positions, overlaps
        )

    def _attend(self, x: Tensor, keys: Tensor, values: Tensor, step: Step | LiveStep) -> Tensor:
        b, n, _ = x.shape
        heads = self.qkv(x).view(b, n, -1, self.head_dim)  # [B, N, H + 2 K, d]
        if isinstance(step, LiveStep):
            return self.out(self._mix(heads[:, 0], keys, values, step).reshape(b, 1, -1))
        turning, v = heads.split((self.n_heads + self.n_kv_heads, self.n_kv_heads), dim=2)
        if self.q_norm is not None and self.k_norm is not None:
            # Every head by itself, so queries and keys need one pass; only the weights differ.
            weight = torch.cat(
                (
                    self.q_norm.weight.expand(self.n_heads, -1),
                    self.k_norm.weight.expand(self.n_kv_heads, -1),
                )
            )
            turning = weight * normed(turning, self.q_norm.eps)
        turning = rotate(turning, step.cos, step.sin)
        q, k = turning.split((self.n_heads, self.n_kv_heads), dim=2)
        # Index tensors on both sides of the head dimension move it behind them: [B, N, K, d].
        keys[step.slots[:, None], :, step.positions] = k
        values[step.slots[:, None], :, step.positions] = v
        return self.out(step.reader.read(q, keys, values).reshape(b, n, -1))


@dataclass(frozen=True, slots=True)
class Step:
    """What all layers of one call share."""

    cos: Tensor
    sin: Tensor
    """`[B, N, 1, d]`."""
    slots: Tensor
    """Cache row of each row, `[B]`."""
    positions: Tensor
    """Where a token is written, `[B, N]`."""
    reader: Reader


@dataclass(frozen=True, slots=True)
class LiveStep:
    """What all layers share in a decode step on a GPU: one kernel does all that needs positions."""

    table: Tensor
    """`KvCache.table`."""
    slots: Tensor
    """Cache row of each row, `[B]`."""
    positions: Tensor
    """`[B]`."""


@dataclass(frozen=True, slots=True)
class KvCache:
    """Keys and values of every slot: one pair of tensors `[slots, K, T, d]` per layer.

    T is one more than what a slot holds: the last position takes what padding writes. Separate
    tensors, since slices of one stacked tensor make the compiler copy the whole cache.
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    table: Tensor
    """Cosine and signed sine of every position, fp32 `[2, T, d]`."""

    @classmethod
    def allocate(
        cls,
        config: DecoderConfig,
        n_slots: int,
        n_tokens: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> KvCache:
        """Make empty caches that hold `n_tokens` per slot."""
        shape = (n_slots, config.n_kv_heads, n_tokens + 1, config.head_dim)  # + the spare one

        def side() -> tuple[Tensor, ...]:
            return tuple(
                torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.n_layers)
            )

        places = torch.arange(n_tokens + 1, device=device)[:, None]
        turns = rotary_table(places, config.head_dim, config.rope_theta)  # two of [T, 1, 1, d]
        return cls(side(), side(), torch.stack(turns)[:, :, 0, 0])

    @property
    def n_tokens(self) -> int:
        """How many tokens a slot can hold."""
        return self.keys[0].shape[2] - 1

    @property
    def spare(self) -> int:
        """The position of padding, behind all others."""
        return self.n_tokens

    def positions(self, starts: Tensor, counts: Tensor, n_new: int) -> Tensor:
        """Return positions `[B, N]` of rows with `counts` tokens from `starts` on, then padding.

        Args:
            starts, counts: int64 `[B]`. A row of count 0 is padding as a whole; its slot may be
                any, even one that another row uses.
        """
        index = torch.arange(n_new, device=starts.device)
        return torch.where(index < counts[:, None], starts[:, None] + index, self.spare)

    def poison(self, slot: int) -> None:
        """Make the slot unreadable: a token that still looked at it would give NaN."""
        for tensor in (*self.keys, *self.values):
            tensor[slot] = torch.nan

    def save(self, slot: int, length: int) -> SavedKv:
        """Return copies of the first `length` positions of a slot."""
        assert 0 <= length <= self.n_tokens, length
        return (
            tuple(keys[slot, :, :length].clone() for keys in self.keys),
            tuple(values[slot, :, :length].clone() for values in self.values),
        )

    def restore(self, slot: int, saved: SavedKv) -> None:
        """Put saved positions back, into any slot; what lies behind them stays."""
        for side, copies in zip((self.keys, self.values), saved, strict=True):
            for tensor, copy in zip(side, copies, strict=True):
                tensor[slot, :, : copy.shape[1]] = copy

    def move(self, slot: int, start: int, end: int, target: int, theta: float) -> None:
        """Move positions `start .. end - 1` of a slot to `target ..`; the two may overlap.

        Keys are turned by the difference (`turn_keys`), values are only copied. Several moves
        add up one rounding of the cache's dtype each.
        """
        self.check_block(start, end - start, target)
        stop = target + end - start
        for keys, values in zip(self.keys, self.values, strict=True):
            keys[slot, :, target:stop] = turn_keys(keys[slot, :, start:end], target - start, theta)
            values[slot, :, target:stop] = values[slot, :, start:end].clone()

    def check_block(self, start: int, length: int, target: int) -> None:
        """Assert that a block lies within a slot, here and there."""
        block = (start, length, target)
        assert 0 <= start <= start + length <= self.n_tokens, block
        assert 0 <= target <= self.n_tokens - length, block

    def move_block(self, block: Tensor, theta: float) -> None:
        """Do what `move` does, with nothing of it known to the host.

        Every position of the slot is read and written; what lies behind the block goes to the
        spare one.

        Args:
            block: slot, first position, length, target, int64 `[4]` on the cache's device; of
                length 0, nothing moves.
        """
        slot, start, length, target = block.split(1)
        index = torch.arange(self.n_tokens, device=block.device)
        source = (start + index).clamp(max=self.spare)
        goal = torch.where(index < length, target + index, self.spare)
        for keys, values in zip(self.keys, self.values, strict=True):
            # Index tensors on both sides of the head dimension move it behind them: [T, K, d].
            keys[slot, :, goal] = turn_keys(keys[slot, :, source], target - start, theta)
            values[slot, :, goal] = values[slot, :, source]


class DecoderStack(nn.Module):
    """The blocks and the closing norm: what turns embeddings into hidden states.

    It owns weights only; caches are handed in and written in place. `reach` says how far to look:
    exact `Rows`, or a span, any number of positions that covers every row's live length (few
    different ones save compilations).
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        layers = [DecoderLayer(config) for _ in range(config.n_layers)]
        self.layers = nn.ModuleList(layers)
        self.norm = RmsNorm(config.hidden_size, config.norm_eps)
        self.prefill_layers: list[LayerCall] = [layer.forward for layer in layers]
        self.decode_layers: list[LayerCall] = [layer.forward for layer in layers]
        """The two call sites of every layer; compiled regions take their places."""
        self.row_layers: list[LayerCall] = [layer.decode_row for layer in layers]
        """The call site of a decode step of one row where there are kernels; no region."""

    def feed(
        self, cache: KvCache, x: Tensor, slots: Tensor, positions: Tensor, reach: Rows | int
    ) -> Tensor:
        """Feed embeddings; return the hidden states after the closing norm, `[B, N, D]`.

        Args:
            cache: written at every row's positions.
            x: `[B, N, D]`; N = 1 is a decode step, anything else a prefill. Rows with fewer than
                N tokens end in padding, whose embeddings and hidden states mean nothing.
            slots: cache row of each row, int64 `[B]`; no slot twice among rows with tokens.
            positions: int64 `[B, N]`, ascending by one; `cache.spare` or more where x is padding
                (`KvCache.positions`).
            reach: exact rows, each with a token at least; or a span larger than every position
                of a token.
        """
        return self.norm(self.run(cache, x, slots, positions, reach))

    def run(
        self, cache: KvCache, x: Tensor, slots: Tensor, positions: Tensor, reach: Rows | int
    ) -> Tensor:
        """Feed embeddings like `feed`; return the states before the closing norm, `[B, N, D]`.

        For those who need few of them normed, or the norm as a part of what follows.
        """
        layers = self.decode_layers if x.shape[1] == 1 else self.prefill_layers
        return self._run(layers, cache, x, slots, positions, reach)

    def _run(
        self,
        layers: list[LayerCall],
        cache: KvCache,
        x: Tensor,
        slots: Tensor,
        positions: Tensor,
        reach: Rows | int,
    ) -> Tensor:
        step = self._begin(cache, slots, positions, reach)
        if isinstance(step, LiveStep) and x.shape[0] == 1:
            layers = self.row_layers
        for layer, keys, values in zip(layers, cache.keys, cache.values, strict=True):
            x = layer(x, keys, values, step)
        return x  # [B, N, D]

    def _begin(
        self, cache: KvCache, slots: Tensor, positions: Tensor, reach: Rows | int
    ) -> Step | LiveStep:
        """Return what the layers share: with kernels and a span, nothing of it is read here."""
        if positions.shape[1] == 1 and isinstance(reach, int) and has_kernels(positions):
            return LiveStep(cache.table, slots, positions[:, 0].contiguous())
        positions = positions.clamp(max=cache.spare)
        cos, sin = (table[positions][:, :, None] for table in cache.table)  # [B, N, 1, d]
        reader = choose_reader(slots, positions, cache.spare, reach)
        return Step(cos, sin, slots, positions, reader)


class Decoder(DecoderStack):
    """The whole model: token embedding, blocks and output head."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tied_head:
            self.head.weight = self.embed.weight

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the head's logits `[B, V]` of states `[B, D]`."""
        return row_linear(self.head, hidden)

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
            tokens, slots, positions: int64 `[B]`; no slot twice among rows with tokens. A row at
                the position `cache.spare` is padding.
            reach: exact rows, or a span larger than every position.
        """
        x = self.embed(tokens)[:, None]  # [B, 1, D]
        return self.feed(cache, x, slots, positions[:, None], reach)[:, 0]


def row_linear(layer: nn.Linear, x: Tensor) -> Tensor:
    """Return what a layer without bias makes of `[B, D]`; one row has a kernel on a GPU.

    For heads: it launches without overlap, which large matrices hardly gain by, and so may be a
    part of a compiled region (151748 x 4096 on an H200: 272 us instead of 386).
    """
    if x.shape[0] == 1 and has_kernels(x):
        return linear(x, layer.weight)
    made: Tensor = layer(x)
    return made


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
