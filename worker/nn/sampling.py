"""Choosing the next token of every row of a batch.

A row's choice depends on its own logits, settings and draw only, never on its neighbours, and the
draw is an argument: the same session picks the same tokens alone, in a batch, and after a restore.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from worker.nn.transfer import to_device

MIN_TEMPERATURE = 1e-6
"""Lower ones choose the same token and are near the end of what a float32 can hold."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a token is chosen; the defaults are greedy."""

    temperature: float = 0.0
    """0 = always the most likely token."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 = all."""
    top_p: float = 1.0
    """Keep the fewest tokens whose probabilities reach this sum; at least one."""
    repetition_penalty: float = 1.0
    """Above 1: tokens said before become less likely (CTRL, section 4.1)."""
    window: int = 64
    """How many of the latest tokens count as said before."""
    endings: tuple[int, ...] = ()
    """Tokens that end the text, for `length_penalty`."""
    length_penalty: float = 1.0
    """Above 1: endings become less likely, so the text becomes longer."""


def uniform(seed: int, position: int) -> float:
    """Return the draw in [0, 1) of one position of one session: a pure function of both."""
    return random.Random(f"{seed}:{position}").random()


def sample(
    logits: Tensor,
    settings: Sequence[Sampling],
    recent: Sequence[Sequence[int]],
    draws: Sequence[float],
) -> Tensor:
    """Return one token id per row, int64 `[B]`, on the device of `logits`.

    Args:
        logits: `[B, V]`, left as they are.
        settings: one per row.
        recent: token ids each row has said, latest last.
        draws: one number in [0, 1) per row; unused where the temperature is 0.
    """
    logits = penalise(logits.float(), settings, recent)
    chosen = logits.argmax(dim=-1)
    hot = [row for row, setting in enumerate(settings) if setting.temperature > 0]
    if hot:
        rows = to_device(np.array(hot, dtype=np.int64), logits.device)
        picked = draw_tokens(logits[rows], [settings[i] for i in hot], [draws[i] for i in hot])
        chosen = chosen.index_copy(0, rows, picked)
    return chosen


def penalise(
    logits: Tensor, settings: Sequence[Sampling], recent: Sequence[Sequence[int]]
) -> Tensor:
    """Return logits `[B, V]` in which each row's latest tokens and its endings are less likely."""
    windows = [
        sorted(set(said[-s.window :])) if s.window > 0 else []
        for s, said in zip(settings, recent, strict=True)
    ]
    out = made_rarer(logits, windows, [s.repetition_penalty for s in settings])
    return made_rarer(out, [s.endings for s in settings], [s.length_penalty for s in settings])


def made_rarer(logits: Tensor, ids: Sequence[Sequence[int]], penalties: Sequence[float]) -> Tensor:
    """Return `[B, V]` in which each row's ids are less likely by its penalty; all rows at once."""
    if not any(some and p != 1.0 for some, p in zip(ids, penalties, strict=True)):
        return logits
    vocab_size, device = logits.shape[-1], logits.device
    padded = np.full((len(ids), max(map(len, ids))), vocab_size, dtype=np.int64)
    for row, some in enumerate(ids):
        padded[row, : len(some)] = some
    index = to_device(padded, device)
    penalty = to_device(np.array(penalties, dtype=np.float32), device)[:, None]
    # One column more than there are ids takes what fills up the shorter rows.
    out = functional.pad(logits, (0, 1))
    values = out.gather(1, index)
    rarer = torch.where(values > 0, values / penalty, values * penalty)
    return out.scatter_(1, index, rarer)[:, :vocab_size]


def draw_tokens(logits: Tensor, settings: Sequence[Sampling], draws: Sequence[float]) -> Tensor:
    """Draw from each row's truncated distribution by inverting its cumulative sum; int64 `[B]`."""

    vocab = logits.shape[-1]
    table = [
        (s.top_k if s.top_k > 0 else vocab, max(s.temperature, MIN_TEMPERATURE), s.top_p, draw)
        for s, draw in zip(settings, draws, strict=True)
    ]
    numbers = to_device(np.array(table, dtype=np.float32).T[..., None].copy(), logits.device)
    kept, temperature, top_p, target_share = numbers  # each [B, 1]
    # Only the longest candidate list any row needs is sorted.
    n_candidates = min(vocab, int(max(s.top_k if s.top_k > 0 else vocab for s in settings)))
    # Relative to the best one: a tiny temperature makes the others impossible, not it infinite.
    best = logits.amax(dim=-1, keepdim=True)
    scaled = (logits - best) / temperature
    values, ids = scaled.topk(n_candidates, dim=-1)  # [B, C], descending
    rank = torch.arange(n_candidates, device=logits.device)
    values = values.masked_fill(rank >= kept, -torch.inf)
    probabilities = values.softmax(dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities
    probabilities = probabilities.masked_fill((before >= top_p) & (rank > 0), 0.0)
    cumulative = probabilities.cumsum(dim=-1)
    target = target_share * cumulative[:, -1:]
    index = torch.searchsorted(cumulative, target, right=True)
    # Rounding may put the target on the very end; the last token with a share is meant then.
    last = (probabilities > 0).sum(dim=-1, keepdim=True) - 1
    return ids.gather(1, torch.minimum(index, last)).squeeze(1)
