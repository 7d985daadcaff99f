"""Streaming conformer encoder of the flow: speech tokens at 25 Hz -> hidden states at 50 Hz.

Written from the description of MiniCPM-o 4.5's token2wav (the upsampling encoder of CosyVoice 2)
and of relative positions (Transformer-XL, as ESPnet has them). It looks three tokens ahead, runs a
stack of blocks at the rate of the tokens, doubles every row, and runs a second stack at the rate
of the mel frames. A chunk attends to its row's cache and to itself, nothing masked in between.

The cache of a block is a list of at most P + 100 frames (P: the voice's prompt), or half as many
tokens: the prompt and the latest 100 frames. Positions are those in the list, so the distance
between a new frame and the prompt stands still once the list is full. Lists end at the right edge
of their static tensors: the distance between a query and a cache position is then the same for
every row, however long its list is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from worker.nn.streaming import RowConv, attend, resume

FRAMES_PER_TOKEN = 2
TAIL_FRAMES = 100
"""How many of the latest frames a list holds beside the prompt."""
QUERY_BLOCK = 512
"""Whole utterances attend in blocks of queries: scores grow with block x length."""

Trim = Literal["intended", "packed"]
"""How the lists at the rate of the tokens are cut.

intended: to the prompt and the latest 50 tokens (minicpmo-utils 1.0.7).
packed: up to 1.0.6 both rates lay in one tensor of mel frames, with the shorter lists written
    twice, and that tensor was cut as a whole; so these lists keep their *first* P / 2 + 50 tokens.
"""


@dataclass(frozen=True, slots=True)
class ConformerConfig:
    input_size: int = 512
    width: int = 512
    n_heads: int = 8
    ffn_size: int = 2048
    n_blocks: int = 6
    """At the rate of the tokens."""
    n_up_blocks: int = 4
    """At the rate of the mel frames."""
    up_stride: int = 2
    n_lookahead: int = 3
    key_bias: bool = True
    trim: Trim = "intended"

    def __post_init__(self) -> None:
        if self.up_stride != FRAMES_PER_TOKEN:
            raise ValueError(f"up_stride is {self.up_stride}, expected {FRAMES_PER_TOKEN}")
        if self.width % self.n_heads:
            raise ValueError(f"width {self.width} does not divide into {self.n_heads} heads")


@dataclass(frozen=True, slots=True)
class ConformerCache:
    """What rows keep between chunks; blocks in order, those at the rate of the tokens first."""

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    """Per block `[rows, H, C, d]`; a list of length L lies at C - L .. C - 1."""
    ahead: Tensor
    """Latest input of the look-ahead's second convolution, `[rows, 2, D]`."""
    up: Tensor
    """Latest input of the upsampling convolution, `[rows, 4, D]`."""
    ratios: tuple[int, ...]
    """Mel frames an entry of the block's list stands for."""
    stacks: tuple[tuple[Tensor, int], ...]
    """The memory of all keys and values, `[block, rows, H, C, d]`, and its ratio: what a row holds
    is a slice of few tensors."""
    max_chunk_frames: int
    distances: list[Tensor] = field(default_factory=list)
    """`Conformer.distance_keys` for these sizes; made by `Conformer.prepare`."""

    @classmethod
    def allocate(
        cls,
        config: ConformerConfig,
        n_rows: int,
        max_prompt_frames: int,
        max_chunk_frames: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> ConformerCache:
        head_dim, frames = config.width // config.n_heads, max_prompt_frames + TAIL_FRAMES
        blocks = {FRAMES_PER_TOKEN: config.n_blocks, 1: config.n_up_blocks}

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        def lists() -> dict[int, Tensor]:
            return {
                ratio: zeros(n, n_rows, config.n_heads, frames // ratio, head_dim)
                for ratio, n in blocks.items()
            }

        keys, values = lists(), lists()
        return cls(
            # Sliced once, here: a compiled block would copy the stack to write into a slice of it.
            keys=tuple(one for stack in keys.values() for one in stack.unbind()),
            values=tuple(one for stack in values.values() for one in stack.unbind()),
            ahead=zeros(n_rows, 2, config.width),
            up=zeros(n_rows, 2 * config.up_stride, config.width),
            ratios=tuple(ratio for ratio, n in blocks.items() for _ in range(n)),
            stacks=tuple((made[ratio], ratio) for made in (keys, values) for ratio in blocks),
            max_chunk_frames=max_chunk_frames,
        )

    @property
    def sizes(self) -> dict[int, int]:
        """Positions of the lists, C, by their ratio."""
        return {ratio: keys.shape[2] for ratio, keys in zip(self.ratios, self.keys, strict=True)}


@dataclass(frozen=True, slots=True)
class Rows:
    """Which cache rows a call is about; int64 `[B]` each, lengths in mel frames."""

    rows: Tensor
    prompt: Tensor
    seen: Tensor
    """The prompt and everything generated so far."""


@dataclass(frozen=True, slots=True)
class Span:
    """What the blocks of one rate share in a call over cached lists."""

    rows: Tensor
    visible: Tensor
    """Live ones among C cached and N new positions, bool `[B, 1, 1, C + N]`."""
    keep: Tensor
    """Which of the C + N positions the cache holds afterwards, `[B, 1, C, 1]`."""


def list_span(rows: Rows, ratio: int, size: int, n_new: int, is_packed: bool) -> Span:
    """Describe a call that adds `n_new` entries to lists of `ratio` frames an entry.

    Args:
        size: positions of the cache, C.
        is_packed: the trim rule `packed` (only where `ratio` is 2).
    """
    device = rows.rows.device
    head, tail = rows.prompt[:, None] // ratio, TAIL_FRAMES // ratio
    length = torch.minimum(rows.seen[:, None] // ratio, head + tail)
    total = length + n_new
    kept = torch.minimum(total, head + tail)
    position = torch.arange(size, device=device) - (size - kept)  # in the list afterwards
    if is_packed:
        # The list written twice is cut to its first 2 head and last 2 tail entries, and the first
        # half of what remains is read back: with a short prompt that reaches into the tail.
        late = (2 * (total - tail - head) + position) % total
        source = torch.where((total > kept) & (position >= 2 * head), late, position)
    else:
        source = position + torch.where(position >= head, total - kept, 0)
    visible = torch.arange(size + n_new, device=device) >= size - length
    keep = (source + size - length).clamp(min=0)
    return Span(rows.rows, visible[:, None, None], keep[:, None, :, None])


def distance_table(first: int, last: int, width: int, device: torch.device) -> Tensor:
    """Return sinusoids `[first - last + 1, width]`, fp32, of distances `first` down to `last`.

    A distance is the query's position less the key's; sine and cosine alternate.
    """
    distance = torch.arange(first, last - 1, -1, device=device, dtype=torch.float32)
    step = torch.arange(0, width, 2, device=device, dtype=torch.float32)
    angles = distance[:, None] * torch.exp(step * -(math.log(10_000.0) / width))
    return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(1)


class RelativeAttention(nn.Module):
    """Attention with scores by content and by distance; query, key and value are stacked."""

    def __init__(self, width: int, n_heads: int) -> None:
        super().__init__()
        self.n_heads, self.head_dim = n_heads, width // n_heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.distance = nn.Linear(width, width, bias=False)
        self.content_bias = nn.Parameter(torch.zeros(n_heads, self.head_dim))
        self.distance_bias = nn.Parameter(torch.zeros(n_heads, self.head_dim))

    def distance_keys(self, table: Tensor) -> Tensor:
        """Keys `[H, W, d]` of a table of distances `[W, D]`."""
        projected = self.distance(table.to(self.distance.weight.dtype))
        return projected.view(len(table), self.n_heads, self.head_dim).transpose(0, 1)

    def forward(self, x: Tensor, memory: Memory) -> Tensor:
        b, n, _ = x.shape
        stacked = self.qkv(x).view(b, n, 3, self.n_heads, self.head_dim)
        q, k, v = stacked.permute(2, 0, 3, 1, 4)  # each [B, H, N, d]
        visible = None
        if memory.cached is not None:
            keys, values, span = memory.cached
            k, v, visible = append(keys, k, span), append(values, v, span), span.visible
        n_past = k.shape[2] - n

        def mix(block: Tensor, start: int) -> Tensor:
            bias = self._distance_scores(block, memory.distances, n_past + n, n_past, start)
            if visible is not None:
                bias = bias.masked_fill(~visible, -math.inf)
            return attend(block + self.content_bias[:, None], k, v, bias)

        if n <= QUERY_BLOCK:  # a loop would be compiled anew for each n
            mixed = mix(q, 0)
        else:
            starts = range(0, n, QUERY_BLOCK)
            mixed = torch.cat(
                [mix(q[:, :, start : start + QUERY_BLOCK], start) for start in starts], dim=2
            )
        return self.out(mixed.transpose(1, 2).flatten(2))

    def _distance_scores(
        self, q: Tensor, distances: Tensor, n_keys: int, n_past: int, start: int
    ) -> Tensor:
        """Return scores `[B, H, M, n_keys]` of queries `[B, H, M, d]` by distance.

        Args:
            distances: `Memory.distances`.
            n_keys, n_past: all keys, and those before the chunk.
            start: where in the chunk the first query stands.
        """
        b, n_heads, m, d = q.shape
        n_max = (distances.shape[1] - n_past) // 2
        width = n_keys + m
        table = distances[:, n_max - start - m :][:, :width]
        scores = (q + self.distance_bias[:, None]) @ table.transpose(1, 2)  # [B, H, M, width]
        # Query i wants the columns from m - 1 - i on: rows one shorter in the same memory.
        shifted = scores.flatten(2)[:, :, m - 1 : -1].view(b, n_heads, m, width - 1)
        return shifted[..., :n_keys] * d**-0.5


def append(cached: Tensor, new: Tensor, span: Span) -> Tensor:
    """Return the rows' lists with new entries `[B, H, N, d]` behind; cut the cache to `keep`."""
    joined = torch.cat((cached.index_select(0, span.rows).to(new.dtype), new), dim=2)
    b, n_heads, _, d = joined.shape
    kept = joined.gather(2, span.keep.expand(b, n_heads, -1, d))
    cached.index_copy_(0, span.rows, kept.to(cached.dtype))
    return joined  # [B, H, C + N, d]


@dataclass(frozen=True, slots=True)
class Memory:
    """What a block looks at besides its input."""

    distances: Tensor
    """Keys `[H, C + 2 n_max, d]` of the distances C + n_max - 1 down to -n_max, for C cached
    positions and at most n_max new ones."""
    cached: tuple[Tensor, Tensor, Span] | None
    """Keys and values of the block's cache. None: attention is among the input alone."""


class ConformerBlock(nn.Module):
    def __init__(self, config: ConformerConfig) -> None:
        super().__init__()
        self.attn_norm = nn.LayerNorm(config.width, eps=1e-12)
        self.attn = RelativeAttention(config.width, config.n_heads)
        self.ffn_norm = nn.LayerNorm(config.width, eps=1e-12)
        self.up = nn.Linear(config.width, config.ffn_size)
        self.down = nn.Linear(config.ffn_size, config.width)

    def forward(self, x: Tensor, memory: Memory) -> Tensor:
        """`[B, N, D]` -> `[B, N, D]`; the block's cache goes on."""
        x = x + self.attn(self.attn_norm(x), memory)
        return x + self.down(functional.silu(self.up(self.ffn_norm(x))))


class Embed(nn.Module):
    """Projection into a stack of blocks, scaled up as relative positions expect it."""

    def __init__(self, n_in: int, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(n_in, width)
        self.norm = nn.LayerNorm(width)
        self.scale = math.sqrt(width)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x)) * self.scale


class Conformer(nn.Module):
    def __init__(self, config: ConformerConfig) -> None:
        super().__init__()
        width = config.width
        self.config = config
        self.embed = Embed(config.input_size, width)
        self.ahead1 = RowConv(width, width, config.n_lookahead + 1)
        self.ahead2 = RowConv(width, width, 3)
        self.blocks = nn.ModuleList(ConformerBlock(config) for _ in range(config.n_blocks))
        self.up_conv = RowConv(width, width, 2 * config.up_stride + 1)
        self.up_embed = Embed(width, width)
        self.up_blocks = nn.ModuleList(ConformerBlock(config) for _ in range(config.n_up_blocks))
        self.norm = nn.LayerNorm(width)
        self.block_calls: list[Callable[[Tensor, Memory], Tensor]] = [
            block.forward for block in (*self.blocks, *self.up_blocks)
        ]
        """All blocks in order, for prompts and whole utterances, whose lengths have no bounds."""
        self.stream_calls = list(self.block_calls)
        """The same for chunks; compiled regions take their places."""

    def forward(
        self,
        x: Tensor,
        is_last: bool,
        cache: ConformerCache | None = None,
        rows: Rows | None = None,
        is_chunk: bool = False,
    ) -> Tensor:
        """Encode embedded tokens; return `[B, 2 N, D]`.

        Args:
            x: `[B, N + n_lookahead, input_size]`, or `[B, N, input_size]` of a last chunk.
            cache, rows: what came before, and is carried on. None: a whole utterance.
            is_chunk: of a turn; N is one of the few numbers of tokens that chunks have.
        """
        x = self.embed(x)
        if is_last:
            x = functional.pad(x, (0, 0, 0, self.config.n_lookahead))
        n = x.shape[1] - self.config.n_lookahead
        seen = functional.leaky_relu(self.ahead1(x), 0.01)  # [B, N, D]
        if cache is None or rows is None:
            memories = self._no_memories(n)
            before, before_up, index = None, None, None
        else:
            memories = self._memories(n, cache, rows)
            before, before_up, index = cache.ahead, cache.up, rows.rows

        x = x[:, :n] + self.ahead2(resume(seen, self.ahead2.n_before, before, index))
        n_blocks = self.config.n_blocks
        calls = self.stream_calls if is_chunk else self.block_calls
        for call, memory in zip(calls[:n_blocks], memories[:n_blocks], strict=True):
            x = call(x, memory)
        x = x.repeat_interleave(FRAMES_PER_TOKEN, dim=1)
        x = self.up_embed(self.up_conv(resume(x, self.up_conv.n_before, before_up, index)))
        for call, memory in zip(calls[n_blocks:], memories[n_blocks:], strict=True):
            x = call(x, memory)
        return self.norm(x)

    def _no_memories(self, n: int) -> list[Memory]:
        return [Memory(distances, None) for distances in self.distance_keys(0, 0, n)]

    def prepare(self, cache: ConformerCache) -> None:
        """Make the cache's distances, unless they are there; else its first call does."""
        if not cache.distances:
            sizes, n_max = cache.sizes, cache.max_chunk_frames // FRAMES_PER_TOKEN
            cache.distances.extend(self.distance_keys(sizes[FRAMES_PER_TOKEN], sizes[1], n_max))

    def _memories(self, n: int, cache: ConformerCache, rows: Rows) -> list[Memory]:
        self.prepare(cache)
        spans = {
            ratio: list_span(
                rows,
                ratio,
                size,
                FRAMES_PER_TOKEN * n // ratio,
                is_packed=ratio == FRAMES_PER_TOKEN and self.config.trim == "packed",
            )
            for ratio, size in cache.sizes.items()
        }
        return [
            Memory(distances, (keys, values, spans[ratio]))
            for distances, keys, values, ratio in zip(
                cache.distances, cache.keys, cache.values, cache.ratios, strict=True
            )
        ]

    def distance_keys(self, n_tokens: int, n_frames: int, n_max: int) -> list[Tensor]:
        """`Memory.distances` of every block, for caches of these sizes and `n_max` new tokens."""
        width, device = self.config.width, self.norm.weight.device

        def of(blocks: nn.ModuleList, n_past: int, n_new: int) -> list[Tensor]:
            table = distance_table(n_past + n_new - 1, -n_new, width, device)
            attentions = [block.get_submodule("attn") for block in blocks]
            return [a.distance_keys(table) for a in attentions if isinstance(a, RelativeAttention)]

        token_rate = of(self.blocks, n_tokens, n_max)
        return token_rate + of(self.up_blocks, n_frames, FRAMES_PER_TOKEN * n_max)


def conformer_weights(
    source: Mapping[str, Tensor], config: ConformerConfig, prefix: str = "encoder"
) -> dict[str, Tensor]:
    """Rename the encoder's tensors of `flow.pt` and stack what is stacked here.

    Raises:
        KeyError: a tensor is missing.
    """

    def affine(ours: str, theirs: str) -> dict[str, Tensor]:
        return {
            f"{ours}.{part}": source[f"{prefix}.{theirs}.{part}"] for part in ("weight", "bias")
        }

    weights = {
        **affine("embed.linear", "embed.out.0"),
        **affine("embed.norm", "embed.out.1"),
        **affine("ahead1", "pre_lookahead_layer.conv1"),
        **affine("ahead2", "pre_lookahead_layer.conv2"),
        **affine("up_conv", "up_layer.conv"),
        **affine("up_embed.linear", "up_embed.out.0"),
        **affine("up_embed.norm", "up_embed.out.1"),
        **affine("norm", "after_norm"),
    }
    blocks = [(f"blocks.{i}", f"encoders.{i}") for i in range(config.n_blocks)]
    blocks += [(f"up_blocks.{i}", f"up_encoders.{i}") for i in range(config.n_up_blocks)]
    for ours, theirs in blocks:
        attention = f"{prefix}.{theirs}.self_attn"
        biases = [source[f"{attention}.linear_q.bias"], source[f"{attention}.linear_v.bias"]]
        key_bias = (
            source[f"{attention}.linear_k.bias"] if config.key_bias else torch.zeros_like(biases[0])
        )
        weights |= {
            f"{ours}.attn.qkv.weight": torch.cat(
                [source[f"{attention}.linear_{name}.weight"] for name in "qkv"]
            ),
            f"{ours}.attn.qkv.bias": torch.cat([biases[0], key_bias, biases[1]]),
            f"{ours}.attn.distance.weight": source[f"{attention}.linear_pos.weight"],
            f"{ours}.attn.content_bias": source[f"{attention}.pos_bias_u"],
            f"{ours}.attn.distance_bias": source[f"{attention}.pos_bias_v"],
            **affine(f"{ours}.attn.out", f"{theirs}.self_attn.linear_out"),
            **affine(f"{ours}.attn_norm", f"{theirs}.norm_mha"),
            **affine(f"{ours}.ffn_norm", f"{theirs}.norm_ff"),
            **affine(f"{ours}.up", f"{theirs}.feed_forward.w_1"),
            **affine(f"{ours}.down", f"{theirs}.feed_forward.w_2"),
        }
    return weights
