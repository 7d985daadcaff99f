"""Flow of MiniCPM-o 4.5's token2wav: speech tokens at 25 Hz -> mel frames at 50 Hz, in chunks.

Written from the description of the reference and the idea of conditional flow matching (Lipman et
al. 2022; CosyVoice 2 for the streaming form): an encoder turns tokens into a coarse mel, and a few
Euler steps of a diffusion transformer carry noise to the mel. One token is two frames.

A voice is what the caches hold after its prompt; every turn starts from there. All caches are
static tensors with a row dimension, lengths are tensors, and nothing waits for the device.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from worker.nn.conformer import (
    FRAMES_PER_TOKEN,
    TAIL_FRAMES,
    Conformer,
    ConformerCache,
    ConformerConfig,
    Rows,
    conformer_weights,
)
from worker.nn.dit import (
    GUIDED,
    Dit,
    DitCache,
    DitConfig,
    Window,
    dit_weights,
    rank_window,
    step_times,
)

NOISE_SEED = 20_260_101
"""The original draws its noise anew in every process; ours is the same everywhere."""


@dataclass(frozen=True, slots=True)
class FlowConfig:
    input_size: int = 512
    """Width of a token's embedding."""
    output_size: int = 80
    """Mel bands."""
    speaker_size: int = 192
    vocab_size: int = 6561
    encoder: ConformerConfig = field(default_factory=ConformerConfig)
    dit: DitConfig = field(default_factory=DitConfig)
    cfg_rate: float = 0.7
    """Guidance: how much the velocity moves away from the one without condition."""
    n_timesteps: int = 5
    """Euler steps. The package's default is 10, the demo runs 5."""
    noise_frames: int = 30_000
    """10 minutes; a longer utterance gets the same noise again."""


def default_noise(n_frames: int, n_bands: int = 80) -> Tensor:
    """Return the noise that every mel starts from, `[1, n_bands, n_frames]`, fp32."""
    generator = torch.Generator().manual_seed(NOISE_SEED)
    return torch.randn((1, n_bands, n_frames), generator=generator)


@dataclass(frozen=True, slots=True)
class FlowCache:
    """Caches of all rows, and how far each row is."""

    encoder: ConformerCache
    dit: DitCache
    speaker: Tensor
    """`[rows, output_size]`."""
    prompt: Tensor
    """Frames of the row's prompt, int64 `[rows]`."""
    seen: Tensor
    """The prompt and everything generated since, in frames, int64 `[rows]`."""
    max_prompt_frames: int
    max_chunk_frames: int

    @classmethod
    def allocate(
        cls,
        config: FlowConfig,
        n_rows: int,
        max_prompt_frames: int,
        max_chunk_frames: int = 56,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        for_prompt: bool = False,
    ) -> FlowCache:
        """Allocate rows that `Flow.start_turn` has to fill before they are used.

        Args:
            max_chunk_frames: the longest call; 56 = 28 tokens, all of which come out at the end.
            for_prompt: the only call is a prompt. Nothing comes before it that is still to be
                read, so the transformer's slots need no room for a chunk besides.
        """
        sizes = (n_rows, max_prompt_frames, max_chunk_frames, dtype, device)
        dit_sizes = (n_rows, max_prompt_frames, 0 if for_prompt else max_chunk_frames)

        def count() -> Tensor:
            return torch.zeros(n_rows, dtype=torch.int64, device=device)

        return cls(
            encoder=ConformerCache.allocate(config.encoder, *sizes),
            dit=DitCache.allocate(config.dit, config.n_timesteps, *dit_sizes, dtype, device),
            speaker=torch.zeros(n_rows, config.output_size, dtype=dtype, device=device),
            prompt=count(),
            seen=count(),
            max_prompt_frames=max_prompt_frames,
            max_chunk_frames=max_chunk_frames,
        )

    def poison(self, row: int) -> None:
        """Make the row unreadable: a call that still looked at it would give NaN."""
        for part in self._parts(row):
            if part.is_floating_point():
                part.fill_(torch.nan)

    def save(self, row: int) -> tuple[Tensor, ...]:
        """Return copies of everything the row holds."""
        return tuple(part.clone() for part in self._parts(row))

    def restore(self, row: int, saved: tuple[Tensor, ...]) -> None:
        """Put back what `save` gave, into any row of a cache of the same sizes."""
        for part, copy in zip(self._parts(row), saved, strict=True):
            part.copy_(copy)

    def prompt_of(self, row: int, n_frames: int) -> tuple[Tensor, ...]:
        """Copy what a row that has seen its prompt of `n_frames` holds: a base for `start`."""
        return tuple(part.clone() for part in self._parts(row, n_frames))

    def start(self, row: int, n_frames: int, base: tuple[Tensor, ...]) -> None:
        """Begin a row with what `prompt_of` gave, in a cache of any size that it fits into.

        All the rest becomes zero. Masked positions are multiplied with a probability of zero all
        the same, so a NaN of an earlier session must not stay; clearing it once a turn spares
        every layer of every step a cleaned copy of its keys and values.
        """
        torch._foreach_zero_(list(self._rest(row, n_frames)))
        torch._foreach_copy_(list(self._parts(row, n_frames)), list(base))

    def _parts(self, row: int, n_frames: int | None = None) -> Iterator[Tensor]:
        """Yield views of all that belongs to a row, or of what a prompt of `n_frames` fills."""
        encoder, dit, pair = self.encoder, self.dit, slice(GUIDED * row, GUIDED * (row + 1))
        for stack, ratio in encoder.stacks:
            size = stack.shape[3]
            yield stack[:, row, :, size - (size if n_frames is None else n_frames // ratio) :]
        for tensor in (encoder.ahead, encoder.up, self.speaker):
            yield tensor[row]
        for stack in dit.stacks[:2]:
            yield stack[:, :, pair, :, :n_frames]
        for stack in dit.stacks[2:]:
            yield stack[:, :, pair]
        yield self.prompt[row]
        yield self.seen[row]

    def _rest(self, row: int, n_frames: int) -> Iterator[Tensor]:
        """Yield views of what a prompt of `n_frames` leaves in a row."""
        pair = slice(GUIDED * row, GUIDED * (row + 1))
        for stack, ratio in self.encoder.stacks:
            yield stack[:, row, :, : stack.shape[3] - n_frames // ratio]
        for stack in self.dit.stacks[:2]:
            yield stack[:, :, pair, :, n_frames:]


@dataclass(frozen=True, slots=True)
class FlowVoice:
    """What a voice's prompt leaves in the caches: where each of its turns begins."""

    n_frames: int
    """Of the prompt, P."""
    base: tuple[Tensor, ...]
    """`FlowCache.prompt_of`; on the module's device."""
    mel: Tensor
    """The prompt's mel as the flow restores it, `[output_size, P]`."""


class Flow(nn.Module):
    """Owns weights only; caches are handed in and written in place."""

    def __init__(self, config: FlowConfig) -> None:
        super().__init__()
        self.config = config
        self.codes = nn.Embedding(config.vocab_size, config.input_size)
        self.speaker = nn.Linear(config.speaker_size, config.output_size)
        self.encoder = Conformer(config.encoder)
        self.mu = nn.Linear(config.encoder.width, config.output_size)
        self.dit = Dit(config.dit, config.n_timesteps)
        self.noise: Tensor
        self.register_buffer("noise", torch.zeros(1, config.output_size, config.noise_frames))

    def set_voice(self, codes: Tensor, mel: Tensor, speaker: Tensor, ahead: Tensor) -> FlowVoice:
        """Run the prompt of a voice.

        Args:
            codes: speech tokens of the prompt, int64 `[n]`.
            mel: the prompt's mel, `[2 n, output_size]`.
            speaker: speaker vector, `[speaker_size]`.
            ahead: codes taken for those that follow, int64 `[3]`: three times 4218 up to
                minicpmo-utils 1.0.6, the prompt's first three from 1.0.7 on.

        Raises:
            ValueError: there are no codes, or the mel has not two frames per code.
        """
        n_frames = FRAMES_PER_TOKEN * len(codes)
        _check_prompt(codes, mel)
        weight = self.mu.weight
        cache = FlowCache.allocate(
            self.config, 1, n_frames, n_frames, weight.dtype, weight.device, for_prompt=True
        )
        cache.speaker[0] = self._speaker(speaker)
        cache.prompt.fill_(n_frames)
        row = torch.zeros(1, dtype=torch.int64, device=weight.device)
        given = mel.to(weight.dtype)[None]
        restored = self._advance(cache, row, torch.cat((codes, ahead))[None], False, given)
        return FlowVoice(n_frames, cache.prompt_of(0, n_frames), restored[0])

    def start_turn(self, cache: FlowCache, row: int, voice: FlowVoice) -> None:
        """Begin a turn in a row, whatever it held before.

        Raises:
            ValueError: the cache has no room for the voice's prompt.
        """
        if voice.n_frames > cache.max_prompt_frames:
            raise ValueError(
                f"the voice's prompt has {voice.n_frames} frames, "
                f"the cache takes {cache.max_prompt_frames}"
            )
        cache.start(row, voice.n_frames, voice.base)

    def chunk(self, cache: FlowCache, rows: Tensor, codes: Tensor, is_last: bool) -> Tensor:
        """Turn the next codes of some rows into mel frames `[B, output_size, 2 n]`, fp32.

        Args:
            cache: its rows go on by 2 n frames.
            rows: int64 `[B]`, none twice.
            codes: int64 `[B, n + 3]`, the last three only looked at: they come again with the
                next call. Of a turn's last call `[B, n]`, and all of them come out.
            is_last: the same for all rows.

        Raises:
            ValueError: n is zero, or larger than the cache's `max_chunk_frames` allow.
        """
        n = codes.shape[1] - (0 if is_last else self.config.encoder.n_lookahead)
        if not 0 < FRAMES_PER_TOKEN * n <= cache.max_chunk_frames:
            raise ValueError(
                f"{codes.shape[1]} codes make {FRAMES_PER_TOKEN * n} frames, "
                f"expected 1 to {cache.max_chunk_frames}"
            )
        return self._advance(cache, rows, codes, is_last, None)

    def whole(
        self, codes: Tensor, prompt_codes: Tensor, prompt_mel: Tensor, speaker: Tensor
    ) -> Tensor:
        """Turn all codes `[n]` of an utterance into mel frames `[output_size, 2 n]` at once, fp32.

        Args:
            prompt_codes, prompt_mel, speaker: the voice, as for `set_voice`.

        Raises:
            ValueError: as in `set_voice`.
        """
        _check_prompt(prompt_codes, prompt_mel)
        joined = torch.cat((prompt_codes, codes))[None]
        mu = self.mu(self.encoder(self.codes(joined), True))  # [1, T, 80]
        n_prompt = len(prompt_mel)
        given = functional.pad(prompt_mel.to(mu.dtype), (0, 0, 0, mu.shape[1] - n_prompt))
        condition = self.dit.condition(mu, self._speaker(speaker)[None], given[None])
        start = torch.zeros(1, dtype=torch.int64, device=mu.device)
        mel = self._solve(self._noise(start, mu.shape[1]), condition)
        return mel[0, n_prompt:].T

    def _advance(
        self, cache: FlowCache, rows: Tensor, codes: Tensor, is_last: bool, given: Tensor | None
    ) -> Tensor:
        prompt, seen = cache.prompt.index_select(0, rows), cache.seen.index_select(0, rows)
        known = Rows(rows, prompt, seen)
        is_chunk = given is None  # else a prompt
        mu = self.mu(self.encoder(self.codes(codes), is_last, cache.encoder, known, is_chunk))
        n_frames, n_slots = mu.shape[1], cache.dit.keys[0][0].shape[2]
        speaker = cache.speaker.index_select(0, rows).to(mu.dtype)
        condition = self.dit.condition(mu, speaker, given)
        # Once a cache is full this start stands still: every chunk begins with the same noise.
        noise = self._noise(torch.minimum(seen, prompt + TAIL_FRAMES), n_frames)
        window = rank_window(rows, prompt, seen, n_frames, n_slots)
        mel = self._solve(noise, condition, cache.dit, window, is_chunk)
        cache.seen.index_copy_(0, rows, seen + n_frames)
        return mel.transpose(1, 2)

    def _solve(
        self,
        x: Tensor,
        condition: Tensor,
        cache: DitCache | None = None,
        window: Window | None = None,
        is_chunk: bool = False,
    ) -> Tensor:
        """Carry noise `[B, N, output_size]` to the mel; the state stays in fp32."""
        times, rate = step_times(self.config.n_timesteps), self.config.cfg_rate
        for step, (now, then) in enumerate(pairwise(times)):
            guided, free = self.dit(x, condition, step, cache, window, is_chunk)
            x = x + (then - now) * ((1 + rate) * guided.float() - rate * free.float())
        return x

    def _noise(self, start: Tensor, n_frames: int) -> Tensor:
        """Return noise `[B, n_frames, output_size]` from `start` `[B]` on, repeated end to end."""
        index = start[:, None] + torch.arange(n_frames, device=start.device)
        return self.noise[0].T[index % self.noise.shape[2]].float()

    def _speaker(self, speaker: Tensor) -> Tensor:
        weight = self.speaker.weight
        return self.speaker(functional.normalize(speaker.float(), dim=-1).to(weight.dtype))


def _check_prompt(codes: Tensor, mel: Tensor) -> None:
    if not len(codes) or len(mel) != FRAMES_PER_TOKEN * len(codes):
        raise ValueError(f"a prompt of {len(codes)} codes and {len(mel)} mel frames, expected 1:2")


def flow_weights(
    source: Mapping[str, Tensor], config: FlowConfig, noise: Tensor | None = None
) -> dict[str, Tensor]:
    """Rename the tensors of `flow.pt`, stack what is stacked here, and add the constants.

    Args:
        source: fp32, so that the tables of the time steps are.
        noise: `[1, output_size, noise_frames]`; None = `default_noise`.

    Raises:
        KeyError: a tensor is missing.
    """
    affine = {
        f"{ours}.{part}": source[f"{theirs}.{part}"]
        for ours, theirs in (("speaker", "spk_embed_affine_layer"), ("mu", "encoder_proj"))
        for part in ("weight", "bias")
    }
    encoder = conformer_weights(source, config.encoder)
    dit = dit_weights(source, config.dit, config.n_timesteps)
    return {
        "codes.weight": source["input_embedding.weight"],
        **affine,
        **{f"encoder.{name}": tensor for name, tensor in encoder.items()},
        **{f"dit.{name}": tensor for name, tensor in dit.items()},
        "noise": default_noise(config.noise_frames, config.output_size) if noise is None else noise,
    }
