"""Choosing the next speech token of every row of a batch, on the device.

MiniCPM-o 4.5 reference, TTS generation. The order of the steps is fixed: temperature, repetition
penalty, nucleus, the k likeliest, the ban of the end code, softmax.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from worker.nn.sampling import MIN_TEMPERATURE
from worker.nn.text_sampling import draw_index
from worker.nn.transfer import to_device

MIN_KEPT = 3
"""The filters leave at least this many codes."""


@dataclass(frozen=True, slots=True)
class CodeSampling:
    """How speech tokens are chosen; the defaults are those of a duplex unit, which filters not."""

    temperature: float = 0.8
    repetition_penalty: float = 1.05
    """Once per occurrence in the window: three times the same code is penalised to the third."""
    window: int = 16
    """How many of the latest codes the penalty looks at; 0 = none."""
    top_p: float = 1.0
    """Keep the likeliest codes that reach this sum; 0 or 1 = all."""
    top_k: int = 0
    """Then keep the k likeliest; 0 = all."""
    is_greedy: bool = False
    """Take the likeliest code; draws are not used."""
    first_is_free: bool = True
    """The first draw after a condition knows neither penalty nor filters."""

    @property
    def has_filters(self) -> bool:
        return 0.0 < self.top_p < 1.0 or self.top_k > 0


@dataclass(frozen=True, slots=True)
class CodeRows:
    """What the rows of a run are drawn with, as small tensors made before the run."""

    numbers: Tensor
    """Float32 `[B, 4]`: temperature, repetition penalty, top_p (infinite = all), top_k."""
    is_greedy: Tensor
    """bool `[B]`."""
    is_free: Tensor
    """Rows whose first draw knows neither penalty nor filters, bool `[B]`."""
    min_new: Tensor
    """Draws for which the end code is banned, int64 `[B]`."""
    counted: Tensor
    """Which of the W latest codes lie in the row's window, bool `[B, W]`."""
    draws: Tensor
    """Numbers in [0, 1), float64 `[B, steps]`."""
    recent: Tensor
    """The latest codes before the run, int64 `[B, W]`; `n_codes` where there are none."""
    n_candidates: int
    """Length of the candidate lists, C; 0 if no row has filters."""

    @classmethod
    def build(
        cls,
        settings: Sequence[CodeSampling],
        recent: Sequence[Sequence[int]],
        draws: Sequence[Sequence[float]],
        min_new: Sequence[int],
        is_free: Sequence[bool],
        n_codes: int,
        n_steps: int,
        device: torch.device | str,
    ) -> CodeRows:
        """Put what the host knows into tensors on the device.

        Args:
            settings, recent, draws, min_new, is_free: one entry per row; draws may be shorter
                than the run where a row ends before it.
            n_codes: columns of the logits, the end code included.
            n_steps: draws of the run.
        """
        width = max(1, *(s.window for s in settings))
        latest = np.full((len(settings), width), n_codes, dtype=np.int64)
        counted = np.zeros((len(settings), width), dtype=bool)
        uniforms = np.zeros((len(settings), n_steps), dtype=np.float64)
        for row, (setting, said, row_draws) in enumerate(zip(settings, recent, draws, strict=True)):
            tail = list(said)[-width:]
            latest[row, width - len(tail) :] = tail
            counted[row, width - setting.window :] = True
            uniforms[row, : len(row_draws)] = row_draws[:n_steps]
        kept = [max(s.top_k, MIN_KEPT) if s.top_k > 0 else n_codes for s in settings]
        numbers = np.array(
            [
                (
                    max(s.temperature, MIN_TEMPERATURE),
                    s.repetition_penalty,
                    s.top_p if 0.0 < s.top_p < 1.0 else np.inf,
                    k,
                )
                for s, k in zip(settings, kept, strict=True)
            ],
            dtype=np.float32,
        )
        longest = max((k for s, k in zip(settings, kept, strict=True) if s.has_filters), default=0)
        return cls(
            numbers=to_device(numbers, device),
            is_greedy=to_device(np.array([s.is_greedy for s in settings]), device),
            is_free=to_device(np.array(is_free, dtype=bool), device),
            min_new=to_device(np.array(min_new, dtype=np.int64), device),
            counted=to_device(counted, device),
            draws=to_device(uniforms, device),
            recent=to_device(latest, device),
            n_candidates=min(longest, n_codes),
        )


def code_probabilities(logits: Tensor, rows: CodeRows, recent: Tensor, step: int) -> Tensor:
    """Return the distribution of draw number `step` of a run, fp32 `[B, V]`.

    Args:
        logits: `[B, V]`; the last column is the end code.
        recent: the latest codes, int64 `[B, W]`, as in `CodeRows.recent`.
    """
    scaled = logits.float() / rows.numbers[:, 0, None]
    out = penalise_codes(scaled, recent, rows.counted, rows.numbers[:, 1, None])
    if rows.n_candidates:
        out = filter_codes(out, rows)
    if step == 0:
        out = torch.where(rows.is_free[:, None], scaled, out)
    banned = (rows.min_new > step)[:, None]
    out = torch.cat((out[:, :-1], out[:, -1:].masked_fill(banned, -torch.inf)), dim=-1)
    return out.softmax(dim=-1)


def penalise_codes(logits: Tensor, recent: Tensor, counted: Tensor, penalty: Tensor) -> Tensor:
    """Make each row's latest codes less likely, the more often they occurred; `[B, V]`.

    Args:
        recent: codes `[B, W]`; V stands for none.
        counted: which of them count, bool `[B, W]`.
        penalty: `[B, 1]`.
    """
    n_codes = logits.shape[-1]
    # One column more than there are codes takes what stands for none.
    times = torch.zeros((len(logits), n_codes + 1), dtype=torch.float32, device=logits.device)
    times = times.scatter_add(1, recent, counted.float())[:, :n_codes]
    factor = penalty**times
    return torch.where(logits < 0, logits * factor, logits / factor)


def filter_codes(logits: Tensor, rows: CodeRows) -> Tensor:
    """Nucleus, then the k likeliest, at least `MIN_KEPT`; the others become -inf; `[B, V]`."""
    values, ids = logits.topk(rows.n_candidates, dim=-1)  # [B, C], descending
    # Of the whole distribution: the nucleus comes before the cut to k.
    probabilities = (values - logits.logsumexp(dim=-1, keepdim=True)).exp()
    before = probabilities.cumsum(dim=-1) - probabilities
    rank = torch.arange(rows.n_candidates, device=logits.device)
    keep = (before < rows.numbers[:, 2, None]) | (rank < MIN_KEPT)
    keep &= rank < rows.numbers[:, 3, None]
    kept = torch.zeros_like(logits, dtype=torch.bool).scatter(1, ids, keep)
    # A row without filters keeps what lies beyond the other rows' candidates, too.
    is_open = (rows.numbers[:, 2].isinf() & (rows.numbers[:, 3] >= logits.shape[-1]))[:, None]
    return logits.masked_fill(~(kept | is_open), -torch.inf)


def draw_codes(probabilities: Tensor, rows: CodeRows, step: int) -> Tensor:
    """Take draw number `step` from `[B, V]`, or the likeliest code in greedy rows; int64 `[B]`."""
    drawn = draw_index(probabilities, rows.draws[:, step])
    return torch.where(rows.is_greedy, probabilities.argmax(dim=-1), drawn)
