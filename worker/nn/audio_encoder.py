"""MiniCPM-o 4.5's ears: a Whisper encoder with a cache, and the projector to the language model.

Written from Radford et al. 2022 (2.2) and the facts of MiniCPM-o 4.5's reference: pre-norm blocks,
learned positions, no bias on the key projections, GELU. A second of audio is 50 frames, which see
each other and everything before them; after the projector every 5 frames are averaged.

Two call sites share the layers: a stream (any number of rows, one second each, over caches with a
slot dimension) and a whole clip. Deliberate differences from the reference: frames are averaged
between the projector's two matrices, which is the same and leaves the second one a fifth of the
rows; the pieces of a clip over 30 s run one by one, and padding is not attended to.

A cache position that has not been written may hold anything, even NaN (`attention.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from worker.nn.attention import ExactRows, LiveRows, Reader, Rows, Span, has_kernels
from worker.nn.whisper import POSITIONS_PER_S, EncoderLayer

StreamCall = Callable[[Tensor, Tensor, Tensor, "StreamStep"], Tensor]
"""Signature of `AudioLayer.stream`."""


@dataclass(frozen=True, slots=True)
class AudioEncoderConfig:
    width: int
    n_layers: int
    n_heads: int
    ffn_size: int
    llm_dim: int
    n_mels: int = 80
    max_positions: int = 1500
    """Frames that have a position; a stream starts again before it runs out of them."""
    pool_step: int = 5
    """Frames per embedding."""
    chunk_s: float = 1.0
    """Length of a chunk where a clip is heard as a stream would be."""

    def n_frames(self, n_mel_frames: int) -> int:
        """Return how many frames the convolutions make of mel frames."""
        return (n_mel_frames - 1) // 2 + 1

    def stream_frames(self, n_mel_frames: int, is_first: bool) -> int:
        """Return how many frames of a streamed second's window are its own: 50 of 104 (102)."""
        return self.n_frames(n_mel_frames) - (1 if is_first else 2)

    def n_embeddings(self, n_mel_frames: int) -> int:
        """Return how many embeddings a clip (or piece) of this many mel frames becomes."""
        return self.n_frames(n_mel_frames) // self.pool_step

    def reset_due(self, past: int, n_mel_frames: int) -> bool:
        """Whether a stream has to start again at position 0 before its next second.

        Nothing is carried over. The frames that the convolutions make only to drop them count, as
        in the reference: with 1500 positions it happens after 29 seconds.
        """
        return past + self.n_frames(n_mel_frames) >= self.max_positions


@dataclass(frozen=True, slots=True)
class AudioCache:
    """Keys and values of every slot: one pair of tensors `[slots, H, max_positions, d]` a layer."""

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]

    @classmethod
    def allocate(
        cls,
        config: AudioEncoderConfig,
        n_slots: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> AudioCache:
        shape = (n_slots, config.n_heads, config.max_positions, config.width // config.n_heads)

        def side() -> tuple[Tensor, ...]:
            return tuple(
                torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.n_layers)
            )

        return cls(side(), side())

    def poison(self, slot: int) -> None:
        """Make the slot unreadable: a frame that still looked at it would give NaN."""
        for tensor in (*self.keys, *self.values):
            tensor[slot] = torch.nan

    def save(self, slot: int, n_frames: int) -> tuple[Tensor, ...]:
        """Return copies `[H, n_frames, d]` of what the slot's stream has written so far."""
        return tuple(tensor[slot, :, :n_frames].clone() for tensor in (*self.keys, *self.values))

    def restore(self, slot: int, saved: Sequence[Tensor]) -> None:
        """Write what `save` returned into a slot, which need not be the same one."""
        for tensor, part in zip((*self.keys, *self.values), saved, strict=True):
            tensor[slot, :, : part.shape[1]] = part


@dataclass(frozen=True, slots=True)
class StreamStep:
    """What all layers of one streamed second share."""

    slots: Tensor
    """Cache row of each row, `[B]`."""
    positions: Tensor
    """Where the new frames go, `[B, N]`."""
    reader: Reader


class AudioLayer(EncoderLayer):
    """A Whisper block that can also go on where its cache ends."""

    def stream(self, x: Tensor, keys: Tensor, values: Tensor, step: StreamStep) -> Tensor:
        """New frames of each row, `[B, N, D]` -> `[B, N, D]`; writes their keys and values."""
        q, k, v = (heads.transpose(1, 2) for heads in self.attn.project(self.attn_norm(x)))
        # Index tensors on both sides of the head dimension move it behind them: [B, N, H, d].
        keys[step.slots[:, None], :, step.positions] = k
        values[step.slots[:, None], :, step.positions] = v
        return self.close(x, step.reader.read(q, keys, values).transpose(1, 2))


def choose_reader(slots: Tensor, positions: Tensor, reach: Rows | int) -> Reader:
    """Return how a second's frames, all of which see up to the newest one, read the caches.

    Args:
        slots: `[B]`.
        positions: `[B, N]`. The last position of a cache is not among them, which the kernel
            would take for padding: a stream starts again before (`reset_due`).
        reach: exact rows, or a span larger than every position.
    """
    if isinstance(reach, Rows):
        return ExactRows(reach, None)
    newest = positions[:, -1:]
    if has_kernels(positions):
        return LiveRows(slots, newest.expand_as(positions).contiguous())
    visible = torch.arange(reach, device=positions.device) <= newest  # [B, S]
    return Span(slots, visible[:, None, None], ~visible[:, None, :, None])


def chunk_mask(n_frames: int, chunk_frames: int, device: torch.device) -> Tensor:
    """Which frames a frame sees that sees its own chunk and all before it, bool `[N, N]`."""
    chunk = torch.arange(n_frames, device=device) // chunk_frames
    return chunk <= chunk[:, None]


class AudioEncoder(nn.Module):
    """Convolutions, layers, closing norm and projector. Owns weights only."""

    def __init__(self, config: AudioEncoderConfig) -> None:
        super().__init__()
        self.config = config
        width = config.width
        self.conv1 = nn.Conv1d(config.n_mels, width, 3, padding=1)
        self.conv2 = nn.Conv1d(width, width, 3, stride=2, padding=1)
        self.positions = nn.Parameter(torch.zeros(config.max_positions, width))
        layers = [
            AudioLayer(width, config.n_heads, config.ffn_size) for _ in range(config.n_layers)
        ]
        self.layers = nn.ModuleList(layers)
        self.norm = nn.LayerNorm(width)
        self.linear1 = nn.Linear(width, config.llm_dim)
        self.linear2 = nn.Linear(config.llm_dim, config.llm_dim)
        self.stream_calls: list[StreamCall] = [layer.stream for layer in layers]
        """The call site of every layer in a stream; compiled regions take their places."""

    def stream(
        self,
        cache: AudioCache,
        mel: Tensor,
        slots: Tensor,
        past: Tensor,
        is_first: bool,
        reach: Rows | int | None = None,
    ) -> Tensor:
        """Hear one second of each row; return its embeddings `[B, N / pool_step, D of the LLM]`.

        The second's mel window reaches two frames into its neighbours, so that the convolutions
        equal those of the whole recording; what they make of those frames alone is dropped. 102 or
        104 mel frames leave N = 50 frames.

        Args:
            cache: written at `past .. past + N - 1` of every row's slot.
            mel: `[B, n_mels, F]`.
            slots: cache row of each row, int64 `[B]`; no slot twice.
            past: frames that the slot already holds, int64 `[B]`; 0 after a reset.
            is_first: whether `mel` is the very start of the streams, without frames from before
                (false after a reset).
            reach: exact slots and live lengths (`past + N`) for a CPU; or a span, a number of
                positions that covers every row's length; None = all positions. Where there are
                kernels, a span of any size reads what is live.
        """
        x = self._convolve(mel)[:, 0 if is_first else 1 : -1]
        positions = past[:, None] + torch.arange(x.shape[1], device=x.device)  # [B, N]
        x = x + self.positions[positions]
        reader = choose_reader(
            slots, positions, self.config.max_positions if reach is None else reach
        )
        step = StreamStep(slots, positions, reader)
        for layer, keys, values in zip(self.stream_calls, cache.keys, cache.values, strict=True):
            x = layer(x, keys, values, step)
        return self._project(x)

    def encode_clip(
        self, mel: Tensor, lens: Sequence[int], is_chunked: bool, hears_padding: bool = False
    ) -> Tensor:
        """Return a whole clip's embeddings `[n, D of the LLM]`, its pieces one after the other.

        Args:
            mel: `[B, n_mels, F]`, the pieces of the clip (`clip_mel`).
            lens: live mel frames of each piece.
            is_chunked: whether a frame sees its own chunk (`chunk_s`) and what came before only.
            hears_padding: do as the reference does with a piece that is shorter than the clip's
                first one, where it takes mel frames for encoder frames: as many frames of padding
                as of sound are seen. No effect on clips up to 30 s.

        Raises:
            ValueError: a piece has more frames than there are positions.
        """
        pieces = []
        for row, length in enumerate(lens):
            n_heard = mel.shape[2] if hears_padding else length
            x = self._convolve(mel[row : row + 1, :, :n_heard])[:, :length]
            pieces.append(self._encode_piece(x, is_chunked)[: self.config.n_embeddings(length)])
        return torch.cat(pieces)

    def _encode_piece(self, x: Tensor, is_chunked: bool) -> Tensor:
        """Convolved frames `[1, N, D]` -> embeddings `[n, D of the LLM]`."""
        n = x.shape[1]
        if n > self.config.max_positions:
            raise ValueError(
                f"a piece of audio has {n} frames, the encoder has {self.config.max_positions} "
                "positions"
            )
        x = x + self.positions[:n]
        chunk_frames = int(self.config.chunk_s * POSITIONS_PER_S)
        visible = chunk_mask(n, chunk_frames, x.device) if is_chunked else None
        for layer in self.layers:
            x = layer(x, visible)
        return self._project(x)[0]

    def _convolve(self, mel: Tensor) -> Tensor:
        """`[B, n_mels, F]` -> `[B, (F + 1) / 2, D]`."""
        x = functional.gelu(self.conv1(mel.to(self.conv1.weight.dtype)))
        return functional.gelu(self.conv2(x)).transpose(1, 2)

    def _project(self, x: Tensor) -> Tensor:
        """Frames `[B, N, D]` -> embeddings `[B, N / pool_step, D of the LLM]`; a rest is left."""
        x = functional.relu(self.linear1(self.norm(x)))
        n = x.shape[1] // self.config.pool_step
        groups = x[:, : n * self.config.pool_step].unflatten(1, (n, self.config.pool_step))
        return self.linear2(groups.mean(2))


def audio_encoder_weights(
    source: Mapping[str, Tensor], config: AudioEncoderConfig
) -> dict[str, Tensor]:
    """Rename the checkpoint's tensors `apm.*` and `audio_projection_layer.*`, stack qkv.

    Raises:
        KeyError: a tensor is missing.
    """

    def affine(ours: str, theirs: str) -> dict[str, Tensor]:
        return {f"{ours}.{part}": source[f"{theirs}.{part}"] for part in ("weight", "bias")}

    weights = {
        "positions": source["apm.embed_positions.weight"],
        **affine("conv1", "apm.conv1"),
        **affine("conv2", "apm.conv2"),
        **affine("norm", "apm.layer_norm"),
        **affine("linear1", "audio_projection_layer.linear1"),
        **affine("linear2", "audio_projection_layer.linear2"),
    }
    for index in range(config.n_layers):
        ours, theirs = f"layers.{index}", f"apm.layers.{index}"
        attention = f"{theirs}.self_attn"
        q_bias, v_bias = (source[f"{attention}.{name}_proj.bias"] for name in "qv")
        weights |= {
            f"{ours}.attn.qkv.weight": torch.cat(
                [source[f"{attention}.{name}_proj.weight"] for name in "qkv"]
            ),
            # The key projection has no bias; a stacked product needs one, so it becomes zero.
            f"{ours}.attn.qkv.bias": torch.cat((q_bias, torch.zeros_like(q_bias), v_bias)),
            **affine(f"{ours}.attn.out", f"{attention}.out_proj"),
            **affine(f"{ours}.attn_norm", f"{theirs}.self_attn_layer_norm"),
            **affine(f"{ours}.ffn_norm", f"{theirs}.final_layer_norm"),
            **affine(f"{ours}.up", f"{theirs}.fc1"),
            **affine(f"{ours}.down", f"{theirs}.fc2"),
        }
    return weights
