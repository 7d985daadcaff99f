"""The causal vocoder: windows with exactly as much past as the net looks back.

Written from the MiniCPM-o 4.5 reference (Token2Wav 1.0.7). The net looks eight frames ahead (three
for F0, four in the first convolution, one for the inverse transform) and 31 back, so a chunk's
samples do not depend on how the turn is cut. The reference decodes blocks of 16 frames, each with
its own past; here one pass serves the whole chunk, with the same result.

Kept on purpose: the sine waves hold their value for the length of a frame, and the noise is
uniform on [0, 1), so unvoiced frames carry an offset. The reference draws a table of 300 s (260 MB)
at each start; the default here is a shorter one from a fixed seed, used periodically.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from worker.nn.hift import Hift, HiftConfig
from worker.nn.legacy_vocoder import LegacyVocoder
from worker.nn.vocoder import DELAY_FRAMES, Reach, Vocoder, noise_at

HISTORY_FRAMES = 31
"""Frames before a frame that its samples depend on."""
NOISE_SEED = 46
NOISE_S = 30


def uniform_table(config: HiftConfig, device: torch.device | str = "cpu") -> Tensor:
    """Return the default noise `[N, H]`: uniform on [0, 1), from `NOISE_SEED`."""
    generator = torch.Generator().manual_seed(NOISE_SEED)
    shape = (NOISE_S * config.sample_rate_hz, config.n_harmonics)
    return torch.rand(shape, generator=generator).to(device)


class CausalVocoder(Vocoder):
    past_frames = HISTORY_FRAMES + DELAY_FRAMES

    def __init__(
        self,
        hift: Hift,
        n_rows: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        noise: Tensor | None = None,
        original: LegacyVocoder | None = None,
    ) -> None:
        """
        Args:
            noise: table `[N, H]`, used periodically; None = `uniform_table`.
            original: the legacy net of `hift_original.pt`, which the reference takes for whole
                utterances; None = they go through the causal net too.
        """
        config = hift.config
        assert config.is_causal
        assert config.f0_look_right + config.look_right + 1 == DELAY_FRAMES
        super().__init__(hift, n_rows, dtype, device)
        self.noise = uniform_table(config, device) if noise is None else noise.to(device)
        self.original = original
        self._source_frames = self.past_frames - config.f0_look_right
        n_samples = self._source_frames * config.hop
        self.source = torch.zeros(n_rows, 1, n_samples, dtype=dtype, device=device)
        self.phase = torch.zeros(n_rows, 1, config.n_harmonics, dtype=torch.float64, device=device)
        """Turns of each harmonic at the end of `source`, modulo 1."""

    def start_turn(self, row: int) -> None:
        super().start_turn(row)
        self.phase[row] = 0.0

    def whole(self, mel: Tensor) -> Tensor:
        if self.original is not None:
            return self.original.whole(mel)
        f0 = self.hift.f0(mel).float()
        source, _ = self._source(f0, 0.0, 0)
        return self.hift(mel, source)

    def _streams(self) -> dict[str, Tensor]:
        return {"source": self.source, "phase": self.phase}

    def _live(self, row: int) -> dict[str, int]:
        n, hop = self._n_received[row], self.hift.config.hop
        if self._has_ended[row]:  # nothing is held back any more
            n_frames = min(n, HISTORY_FRAMES)
            return {"mel": n_frames, "source": n_frames * hop}
        n_source = min(max(0, n - self.hift.config.f0_look_right), self._source_frames)
        return {"mel": min(n, self.past_frames), "source": n_source * hop}

    def _decode(self, rows: Tensor, window: Tensor, reach: Reach, is_last: bool) -> Tensor:
        config, hop = self.hift.config, self.hift.config.hop
        n_new, skip = window.shape[2] - self.past_frames, self._skip(reach)
        source, phase = self._new_source(rows, window, reach, is_last)
        source = torch.cat((self.source.index_select(0, rows), source), dim=2)
        self.source.index_copy_(0, rows, source[..., -self.source.shape[2] :])
        self.phase.index_copy_(0, rows, phase)

        mel = window[:, :, skip:] if is_last else window[:, :, skip : -config.f0_look_right]
        start = self._start(rows, reach, skip)
        samples = self.hift(mel, source[..., skip * hop :], start, is_final=is_last)
        samples = self._from_held_back(samples, skip)
        # The last frame misses what later frames add to the inverse transform.
        return samples if is_last else samples[:, : n_new * hop]

    def _new_source(
        self, rows: Tensor, window: Tensor, reach: Reach, is_last: bool
    ) -> tuple[Tensor, Tensor]:
        """Return the source of the frames that got their F0 now, and the phase behind them.

        Frames before a turn's begin have F0 0: they do not move the phase, and `Hift` does not
        look at their source.
        """
        f0_net = self.hift.f0
        offset = self._source_frames - f0_net.history
        start = self._start(rows, reach, offset)
        f0 = f0_net(window[:, :, offset:], start, is_final=is_last)[:, f0_net.history :].float()
        received = self.received.index_select(0, rows)
        first = (received - f0_net.look_right) * self.hift.config.hop
        return self._source(f0, self.phase.index_select(0, rows), first)

    def _source(
        self, f0: Tensor, phase: Tensor | float, first: Tensor | int
    ) -> tuple[Tensor, Tensor]:
        """Return the source `[B, 1, F * hop]` of F0 `[B, F]`, and the phase `[B, 1, H]` after.

        Args:
            f0: Hz.
            phase: before, `[B, 1, H]` in turns.
            first: place of the first sample in the turn, `[B]`.
        """
        turns = (phase + self.hift.turns(f0).cumsum(1)).remainder(1.0)
        sines = (2 * math.pi * turns).float().sin()  # the same for all samples of a frame
        sines = sines.repeat_interleave(self.hift.config.hop, dim=1)
        noise = noise_at(self.noise, first, sines.shape[1])
        return self.hift.source(f0, sines, noise), turns[:, -1:]
