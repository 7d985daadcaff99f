"""Diffusion transformer of the flow: the velocity of mel frames, given the encoder's output.

Written from the description of MiniCPM-o 4.5's token2wav and the DiT paper (Peebles and Xie 2023:
adaptive LayerNorm, gated residuals). Every solver step has caches of its own, and guidance doubles
the batch: row r of a call is rows 2 r (conditional) and 2 r + 1 (unconditional) here.

The step is all that the modulation depends on, so it is a table made with the weights.

The original puts new frames in *front* of a list, attends to the whole, and cuts the list to its
first P and its last 100 frames (P: the voice's prompt). Attention does not ask for order, so only
the set matters. A frame's rank is its distance from the end of that list if nothing were cut:
frames get rising ranks chunk by chunk, the last of a chunk the lowest. The set then is the ranks
below 100 and the P highest ones. The former stand still, the latter are a ring; with room for a
chunk beside P frames, a new one never meets a frame that is still to be read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.nn import functional

from worker.nn.streaming import RowConv, attend, resume

HELD_FRAMES = 100
"""Lowest ranks, which stay for ever."""
SLOT_MULTIPLE = 16
"""Masked attention on a GPU likes its keys in such numbers."""
GUIDED = 2
"""Rows of the batch per row of a call: with the condition, and without."""


@dataclass(frozen=True, slots=True)
class DitConfig:
    in_size: int = 320
    """A frame's noise, encoder output, speaker and given mel."""
    out_size: int = 80
    depth: int = 16
    n_heads: int = 8
    head_dim: int = 64
    width: int = 512
    mlp_ratio: float = 4.0
    time_size: int = 256
    """Sinusoids of the time embedding."""

    def __post_init__(self) -> None:
        if self.in_size != 4 * self.out_size:
            raise ValueError(f"in_size is {self.in_size}, expected {4 * self.out_size}")


@dataclass(frozen=True, slots=True)
class DitCache:
    """What rows keep between chunks, `[step][block]`; 2 rows of a tensor per row of a call."""

    keys: tuple[tuple[Tensor, ...], ...]
    values: tuple[tuple[Tensor, ...], ...]
    """`[2 rows, H, S, d]`: 100 held ranks, then the ring."""
    first: tuple[tuple[Tensor, ...], ...]
    second: tuple[tuple[Tensor, ...], ...]
    """Latest input of the block's two convolutions, `[2 rows, 2, D]`."""
    stacks: tuple[Tensor, Tensor, Tensor, Tensor]
    """The memory of the four above, `[step, block, 2 rows, ...]`: what a row holds is a slice of
    four tensors, not hundreds."""

    @classmethod
    def allocate(
        cls,
        config: DitConfig,
        n_steps: int,
        n_rows: int,
        max_prompt_frames: int,
        max_chunk_frames: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> DitCache:
        n_slots = HELD_FRAMES + max_prompt_frames + max_chunk_frames
        n_slots += -n_slots % SLOT_MULTIPLE

        def zeros(*shape: int) -> Tensor:
            full = (n_steps, config.depth, GUIDED * n_rows, *shape)
            return torch.zeros(full, dtype=dtype, device=device)

        kv = (config.n_heads, n_slots, config.head_dim)
        stacks = (zeros(*kv), zeros(*kv), zeros(2, config.width), zeros(2, config.width))
        # Sliced once, here: a compiled block would copy the stack to write into a slice of it.
        keys, values, first, second = (tuple(step.unbind() for step in stack) for stack in stacks)
        return cls(keys, values, first, second, stacks)


@dataclass(frozen=True, slots=True)
class Window:
    """What all blocks of all steps share in a call over caches. B counts both halves here."""

    rows: Tensor
    """int64 `[B]`."""
    slots: Tensor
    """Where the new frames go, int64 `[B, N]`."""
    visible: Tensor
    """Live slots, the new ones included, bool `[B, 1, 1, S]`."""


def rank_window(rows: Tensor, prompt: Tensor, seen: Tensor, n_new: int, n_slots: int) -> Window:
    """Say where `n_new` frames of each row go, and which slots they look at.

    Args:
        rows: rows of the call, int64 `[B]`.
        prompt: P of each row, `[B]`.
        seen: the prompt and everything generated so far, in frames, `[B]`.
    """
    prompt, seen = prompt[:, None], seen[:, None]
    ring = n_slots - HELD_FRAMES
    newest = seen + n_new - 1  # highest rank
    rank = newest - torch.arange(n_new, device=rows.device)
    slots = torch.where(rank < HELD_FRAMES, rank, HELD_FRAMES + (rank - HELD_FRAMES) % ring)

    slot = torch.arange(n_slots, device=rows.device)
    latest = newest - (newest - slot) % ring  # the highest rank that the ring has in a slot
    in_ring = (latest >= HELD_FRAMES) & (latest >= seen - prompt)
    visible = torch.where(slot < HELD_FRAMES, slot <= newest, in_ring)
    return Window(
        rows=(GUIDED * rows[:, None] + torch.arange(GUIDED, device=rows.device)).flatten(),
        slots=slots.repeat_interleave(GUIDED, dim=0),
        visible=visible.repeat_interleave(GUIDED, dim=0)[:, None, None],
    )


@dataclass(frozen=True, slots=True)
class BlockCache:
    """One block's tensors of one step, and where to look in them."""

    keys: Tensor
    values: Tensor
    first: Tensor
    second: Tensor
    window: Window


class DitAttention(nn.Module):
    """Self-attention without positions; query, key and value are stacked."""

    def __init__(self, config: DitConfig) -> None:
        super().__init__()
        self.n_heads, self.head_dim = config.n_heads, config.head_dim
        inner = config.n_heads * config.head_dim
        self.qkv = nn.Linear(config.width, 3 * inner)
        self.q_norm = nn.LayerNorm(config.head_dim)
        self.k_norm = nn.LayerNorm(config.head_dim)
        self.out = nn.Linear(inner, config.width)

    def forward(self, x: Tensor, cache: BlockCache | None) -> Tensor:
        b, n, _ = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.n_heads, self.head_dim).unbind(2)
        q, k = self.q_norm(q).transpose(1, 2), self.k_norm(k)
        if cache is None:
            mixed = functional.scaled_dot_product_attention(q, k.transpose(1, 2), v.transpose(1, 2))
        else:
            window = cache.window
            # Index tensors on both sides of the head dimension move it behind them: [B, N, H, d].
            cache.keys[window.rows[:, None], :, window.slots] = k.to(cache.keys.dtype)
            cache.values[window.rows[:, None], :, window.slots] = v.to(cache.values.dtype)
            keys = cache.keys.index_select(0, window.rows).to(q.dtype)
            values = cache.values.index_select(0, window.rows).to(q.dtype)
            mixed = attend(q, keys, values, window.visible)
        return self.out(mixed.transpose(1, 2).flatten(2))


class ConvPair(nn.Module):
    """Two causal convolutions over three frames."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = RowConv(width, width, 3)
        self.norm = nn.LayerNorm(width)
        self.second = RowConv(width, width, 3)

    def forward(self, x: Tensor, cache: BlockCache | None) -> Tensor:
        before_first, before_second, rows = None, None, None
        if cache is not None:
            before_first, before_second = cache.first, cache.second
            rows = cache.window.rows
        x = self.first(resume(x, self.first.n_before, before_first, rows))
        x = functional.mish(self.norm(x))
        return self.second(resume(x, self.second.n_before, before_second, rows))


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """Norm of x without weights, then moved and stretched; shift and scale are `[D]`."""
    return functional.layer_norm(x, x.shape[-1:], eps=1e-6) * (1 + scale) + shift


class DitBlock(nn.Module):
    def __init__(self, config: DitConfig, n_steps: int) -> None:
        super().__init__()
        self.attn = DitAttention(config)
        self.conv = ConvPair(config.width)
        hidden = int(config.width * config.mlp_ratio)
        self.up = nn.Linear(config.width, hidden)
        self.down = nn.Linear(hidden, config.width)
        self.modulation: Tensor
        self.register_buffer("modulation", torch.zeros(n_steps, 9, config.width))

    def forward(self, x: Tensor, modulation: Tensor, cache: BlockCache | None) -> Tensor:
        """`[B, N, D]` -> `[B, N, D]`; the block's caches go on.

        Args:
            modulation: the step's row of the table, `[9, D]`: shift, scale and gate of attention,
                of the MLP, of the convolutions.
        """
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m, shift_c, scale_c, gate_c = modulation
        x = x + gate_a * self.attn(modulate(x, shift_a, scale_a), cache)
        x = x + gate_c * self.conv(modulate(x, shift_c, scale_c), cache)
        hidden = functional.gelu(self.up(modulate(x, shift_m, scale_m)), approximate="tanh")
        return x + gate_m * self.down(hidden)


class Dit(nn.Module):
    def __init__(self, config: DitConfig, n_steps: int) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Linear(config.in_size, config.width)
        self.blocks = nn.ModuleList(DitBlock(config, n_steps) for _ in range(config.depth))
        self.out = nn.Linear(config.width, config.out_size)
        self.modulation: Tensor
        self.register_buffer("modulation", torch.zeros(n_steps, 2, config.width))
        self.block_calls: list[Callable[[Tensor, Tensor, BlockCache | None], Tensor]] = [
            block.forward for block in self.blocks
        ]
        """All blocks in order, for prompts and whole utterances, whose lengths have no bounds."""
        self.stream_calls = list(self.block_calls)
        """The same for chunks; compiled regions take their places."""

    def condition(self, mu: Tensor, speaker: Tensor, given: Tensor | None) -> Tensor:
        """Return what the conditions add to a frame's embedding, the same in all steps.

        Args:
            mu: encoder output `[B, N, out_size]`.
            speaker: `[B, out_size]`.
            given: mel frames that are known, `[B, N, out_size]`; None = zeros.

        Returns:
            `[2 B, N, D]`; the odd rows know nothing.
        """
        _, by_mu, by_speaker, by_given = self.embed.weight.chunk(4, dim=1)
        known = functional.linear(mu, by_mu) + functional.linear(speaker, by_speaker)[:, None]
        if given is not None:
            known = known + functional.linear(given, by_given)
        pair = torch.stack((known, torch.zeros_like(known)), dim=1)
        return pair.flatten(0, 1) + self.embed.bias

    def forward(
        self,
        x: Tensor,
        condition: Tensor,
        step: int,
        cache: DitCache | None = None,
        window: Window | None = None,
        is_chunk: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Return velocities `[B, N, out_size]` with the condition, and without it.

        Args:
            x: frames on their way from noise to mel, `[B, N, out_size]`.
            condition: `[2 B, N, D]`.
            step: which of the solver's steps this is.
            cache, window: what came before, and is carried on. None: a whole utterance.
            is_chunk: of a turn; N is one of the few numbers of frames that chunks have.
        """
        by_x = self.embed.weight[:, : self.config.out_size]
        embedded = functional.linear(x.to(by_x.dtype), by_x)
        h = condition + embedded.repeat_interleave(GUIDED, dim=0)
        calls = self.stream_calls if is_chunk else self.block_calls
        for index, (block, call) in enumerate(zip(self.blocks, calls, strict=True)):
            assert isinstance(block, DitBlock)
            block_cache = None
            if cache is not None and window is not None:
                block_cache = BlockCache(
                    cache.keys[step][index],
                    cache.values[step][index],
                    cache.first[step][index],
                    cache.second[step][index],
                    window,
                )
            h = call(h, block.modulation[step], block_cache)
        shift, scale = self.modulation[step]
        velocity = self.out(modulate(h, shift, scale)).unflatten(0, (-1, GUIDED))
        return velocity[:, 0], velocity[:, 1]


@lru_cache(maxsize=8)
def step_times(n_steps: int) -> tuple[float, ...]:
    """Return the solver's `n_steps + 1` times from 0 to 1: small steps first.

    Rounded to fp32 on the way as the original does: the vocoder integrates what it hears from the
    mel, and exact times, 1e-7 away, are heard as a different phase after some seconds.
    """
    even = torch.linspace(0, 1, n_steps + 1, dtype=torch.float32, device="cpu")
    return tuple((1 - torch.cos(even * 0.5 * math.pi)).tolist())


def time_table(n_steps: int, size: int) -> Tensor:
    """Return sinusoids `[n_steps, size]` of the times at which the steps begin; cosines first."""
    half = size // 2
    rates = torch.exp(torch.arange(half, dtype=torch.float32) * -(math.log(10_000.0) / half))
    angles = 1000 * torch.tensor(step_times(n_steps)[:-1])[:, None] * rates
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


def dit_weights(
    source: Mapping[str, Tensor],
    config: DitConfig,
    n_steps: int,
    prefix: str = "decoder.estimator",
) -> dict[str, Tensor]:
    """Rename the estimator's tensors of `flow.pt`, stack what is stacked, make the tables.

    Raises:
        KeyError: a tensor is missing.
    """

    def affine(ours: str, theirs: str) -> dict[str, Tensor]:
        return {
            f"{ours}.{part}": source[f"{prefix}.{theirs}.{part}"] for part in ("weight", "bias")
        }

    def applied(theirs: str, x: Tensor) -> Tensor:
        return functional.linear(x, *(source[f"{prefix}.{theirs}.{p}"] for p in ("weight", "bias")))

    first = source[f"{prefix}.t_embedder.mlp.0.weight"]
    times = time_table(n_steps, config.time_size).to(first)
    hidden = functional.silu(applied("t_embedder.mlp.0", times))
    active = functional.silu(applied("t_embedder.mlp.2", hidden))  # [n_steps, D]

    def table(theirs: str, n_vectors: int) -> Tensor:
        return applied(f"{theirs}.adaLN_modulation.1", active).view(n_steps, n_vectors, -1)

    weights = {
        **affine("embed", "in_proj"),
        **affine("out", "final_layer.linear"),
        "modulation": table("final_layer", 2),
    }
    for index in range(config.depth):
        ours = theirs = f"blocks.{index}"
        weights |= {
            **{
                f"{ours}.attn.qkv.{part}": torch.cat(
                    [source[f"{prefix}.{theirs}.attn.to_{name}.{part}"] for name in "qkv"]
                )
                for part in ("weight", "bias")
            },
            **affine(f"{ours}.attn.q_norm", f"{theirs}.attn.q_norm"),
            **affine(f"{ours}.attn.k_norm", f"{theirs}.attn.k_norm"),
            **affine(f"{ours}.attn.out", f"{theirs}.attn.proj"),
            **affine(f"{ours}.conv.first", f"{theirs}.conv.block.1"),
            **affine(f"{ours}.conv.norm", f"{theirs}.conv.block.3"),
            **affine(f"{ours}.conv.second", f"{theirs}.conv.block.6"),
            **affine(f"{ours}.up", f"{theirs}.mlp.fc1"),
            **affine(f"{ours}.down", f"{theirs}.mlp.fc2"),
            f"{ours}.modulation": table(theirs, 9),
        }
    return weights
