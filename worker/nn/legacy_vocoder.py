"""The legacy vocoder: overlapping windows of a net that looks to both sides, cross-faded.

Written from the MiniCPM-o 4.5 reference (Token2Wav up to 1.0.6). Each chunk decodes the last
eight mel frames again; where two windows overlap, the source signal of the older one is kept and
the samples are faded over.

Kept on purpose: the halves of the Hamming window add up to 1.08, so a fade can exceed 1. The
reference also draws initial phases for the overtones, but adds them to the first sample only,
which its resampling to frames never reads; they have no effect and are left out. Its Gaussian
noise is drawn anew in each call; here it is a fixed table that repeats.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from worker.nn.hift import Hift, HiftConfig
from worker.nn.vocoder import DELAY_FRAMES, Reach, Vocoder, noise_at

NOISE_SEED = 45
NOISE_S = 30
"""Length of the default noise table: long enough that nobody hears it repeat."""


def gaussian_table(config: HiftConfig, device: torch.device | str = "cpu") -> Tensor:
    """Return the default noise `[N, H]`: normal, from `NOISE_SEED`, the same on every machine."""
    generator = torch.Generator().manual_seed(NOISE_SEED)
    shape = (NOISE_S * config.sample_rate_hz, config.n_harmonics)
    return torch.randn(shape, generator=generator).to(device)


class LegacyVocoder(Vocoder):
    past_frames = DELAY_FRAMES

    def __init__(
        self,
        hift: Hift,
        n_rows: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        noise: Tensor | None = None,
    ) -> None:
        """
        Args:
            noise: table `[N, H]`, used periodically; None = `gaussian_table`.
        """
        assert not hift.config.is_causal
        super().__init__(hift, n_rows, dtype, device)
        self.noise = gaussian_table(hift.config, device) if noise is None else noise.to(device)
        n_overlap = DELAY_FRAMES * hift.config.hop
        self.source = torch.zeros(n_rows, 1, n_overlap, dtype=dtype, device=device)
        self.speech = torch.zeros(n_rows, n_overlap, device=device)
        """Source and samples of the last window's end, which the next one overlaps."""
        fade = torch.hamming_window(2 * n_overlap, periodic=False, dtype=torch.float64).float()
        self._rising, self._falling = fade.to(device).split(n_overlap)

    def whole(self, mel: Tensor) -> Tensor:
        return self.hift(mel, self.source_of(self.hift.f0(mel)))

    def _streams(self) -> dict[str, Tensor]:
        return {"source": self.source, "speech": self.speech}

    def _live(self, row: int) -> dict[str, int]:
        n_frames = min(self._n_received[row], self.past_frames)
        n_samples = n_frames * self.hift.config.hop
        return {"mel": n_frames, "source": n_samples, "speech": n_samples}

    def _decode(self, rows: Tensor, window: Tensor, reach: Reach, is_last: bool) -> Tensor:
        n_new, hop = window.shape[2] - self.past_frames, self.hift.config.hop
        n_overlap, skip = self.past_frames * hop, self._skip(reach)
        window, start = window[:, :, skip:], self._start(rows, reach, skip)
        received = self.received.index_select(0, rows)
        first = (received - (self.past_frames - skip)) * hop  # of the window, [B]
        source = self.source_of(self.hift.f0(window, start), start, first)
        is_old = (received > 0)[:, None]
        if skip == 0:
            old = self.source.index_select(0, rows)
            kept = torch.where(is_old[:, None], old, source[..., :n_overlap])
            source = torch.cat((kept, source[..., n_overlap:]), dim=2)
        samples = self._from_held_back(self.hift(window, source, start), skip)
        # In a turn's first window these are the zeros before its begin.
        head, rest = samples[:, :n_overlap], samples[:, n_overlap:]
        faded = head * self._rising + self.speech.index_select(0, rows) * self._falling
        samples = torch.cat((torch.where(is_old, faded, head), rest), dim=1)
        self.source.index_copy_(0, rows, self._last(source, n_overlap))
        self.speech.index_copy_(0, rows, samples[:, -n_overlap:])
        return samples if is_last else samples[:, : n_new * hop]

    def _last(self, source: Tensor, n: int) -> Tensor:
        """The last `n` samples; zeros before a window that has fewer."""
        return functional.pad(source, (max(0, n - source.shape[2]), 0))[..., -n:]

    def source_of(self, f0: Tensor, start: Tensor | None = None, first: Tensor | int = 0) -> Tensor:
        """Return the source `[B, 1, F * hop]` of F0 `[B, F]`.

        The phase begins anew in each window. Between the middles of two frames it is linear.

        Args:
            start: leading frames that do not belong to a row, `[B]`.
            first: place of the first sample in the turn, `[B]`, for the noise.
        """
        turns = self.hift.turns(f0).cumsum(1)  # [B, F, H]
        if start is not None:
            # The phase before a row's begin is that of its first frame, as at a window's edge.
            frame = torch.arange(f0.shape[1], device=f0.device)
            index = torch.maximum(frame, start[:, None])[..., None]
            turns = turns.gather(1, index.expand_as(turns))
        hop = self.hift.config.hop
        turns = functional.interpolate(
            turns.transpose(1, 2), scale_factor=hop, mode="linear", align_corners=False
        ).transpose(1, 2)
        sines = (2 * math.pi * turns.remainder(1.0)).float().sin()
        return self.hift.source(f0, sines, noise_at(self.noise, first, sines.shape[1]))
