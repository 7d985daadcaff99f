"""Choosing the next speech token of every row of a batch, on the device.

MiniCPM-o 4.5 reference, TTS generation. The order of the steps is fixed: temperature, repetition
penalty, nucleus, the k likeliest, the ban of the end code, softmax.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
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
    def allocate(
        cls, n_rows: int, n_steps: int, window: int, device: torch.device | str = "cpu"
    ) -> CodeRows:
        """Make room for `n_rows` rows, W = `window`; `fill_code_rows` gives it a meaning."""

        def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls(
            numbers=zeros(n_rows, 4, dtype=torch.float32),
            is_greedy=zeros(n_rows, dtype=torch.bool),
            is_free=zeros(n_rows, dtype=torch.bool),
            min_new=zeros(n_rows, dtype=torch.int64),
            counted=zeros(n_rows, window, dtype=torch.bool),
            draws=zeros(n_rows, n_steps, dtype=torch.float64),
            recent=zeros(n_rows, window, dtype=torch.int64),
            n_candidates=0,
        )

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
            settings, recent, draws, min_new, is_free, n_codes: as in `fill_code_rows`.
            n_steps: draws of the run.
        """
        host = cls.allocate(len(settings), n_steps, max(1, *(s.window for s in settings)))
        arrays = {name: tensor.numpy() for name, tensor in host.tensors().items()}
        fill_code_rows(arrays, settings, recent, draws, min_new, is_free, n_codes)
        made: dict[str, Any] = {name: to_device(array, device) for name, array in arrays.items()}
        return cls(**made, n_candidates=longest_list(settings, n_codes))

    def tensors(self) -> dict[str, Tensor]:
        """Everything besides the length of the lists, by name, in the order of the fields."""
        return {one.name: getattr(self, one.name) for one in fields(self)[:-1]}


def fill_code_rows(
    arrays: Mapping[str, NDArray[Any]],
    settings: Sequence[CodeSampling],
    recent: Sequence[Sequence[int]],
    draws: Sequence[Sequence[float]],
    min_new: Sequence[int],
    is_free: Sequence[bool],
    n_codes: int,
) -> None:
    """Write what rows are drawn with; what the arrays hold besides becomes harmless padding.

    Args:
        arrays: those of `CodeRows.tensors`, for as many rows or more.
        settings, recent, draws, min_new, is_free: one entry per row; draws may be shorter than the
            run where a row ends before it, and more than it are ignored.
        n_codes: columns of the logits, the end code included.
    """
    n, width = len(settings), arrays["recent"].shape[1]
    arrays["numbers"][n:] = 1.0
    arrays["recent"][:] = n_codes
    for name in ("is_greedy", "is_free", "min_new", "counted", "draws"):
        arrays[name][:] = 0
    arrays["is_greedy"][:n] = [s.is_greedy for s in settings]
    arrays["is_free"][:n] = is_free
    arrays["min_new"][:n] = min_new
    arrays["numbers"][:n] = [
        (
            max(s.temperature, MIN_TEMPERATURE),
            s.repetition_penalty,
            s.top_p if 0.0 < s.top_p < 1.0 else np.inf,
            _n_kept(s, n_codes),
        )
        for s in settings
    ]
    n_steps = arrays["draws"].shape[1]
    for row, (setting, said, row_draws) in enumerate(zip(settings, recent, draws, strict=True)):
        tail = said[-width:]
        arrays["recent"][row, width - len(tail) :] = tail
        arrays["counted"][row, max(0, width - setting.window) :] = True
        arrays["draws"][row, : len(row_draws)] = row_draws[:n_steps]


def longest_list(settings: Sequence[CodeSampling], n_codes: int) -> int:
    """Return how long the candidate lists of rows have to be; 0 if no row has filters."""
    kept = (_n_kept(s, n_codes) for s in settings if s.has_filters)
    return min(max(kept, default=0), n_codes)


def _n_kept(setting: CodeSampling, n_codes: int) -> int:
    return max(setting.top_k, MIN_KEPT) if setting.top_k > 0 else n_codes


def code_probabilities(
    logits: Tensor, rows: CodeRows, recent: Tensor, step: int | Tensor
) -> Tensor:
    """Return the distribution of draw number `step` of a run, fp32 `[B, V]`.

    Args:
        logits: `[B, V]`; the last column is the end code.
        recent: the latest codes, int64 `[B, W]`, as in `CodeRows.recent`.
        step: a number, or int64 `[1]` where the host does not count.
    """
    scaled = logits.float() / rows.numbers[:, 0, None]
    out = penalise_codes(scaled, recent, rows.counted, rows.numbers[:, 1, None])
    if rows.n_candidates:
        out = filter_codes(out, rows)
    out = torch.where((rows.is_free & (step == 0))[:, None], scaled, out)
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


def draw_codes(probabilities: Tensor, rows: CodeRows, step: int | Tensor) -> Tensor:
    """Take draw number `step` from `[B, V]`, or the likeliest code in greedy rows; int64 `[B]`."""
    if isinstance(step, Tensor):  # as an index it would be read back
        draws = rows.draws.index_select(1, step)[:, 0]
    else:
        draws = rows.draws[:, step]
    return torch.where(
        rows.is_greedy, probabilities.argmax(dim=-1), draw_index(probabilities, draws)
    )
