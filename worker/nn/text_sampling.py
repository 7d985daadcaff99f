"""The decision of a duplex unit: the next token, the end of the unit's text, or silence.

MiniCPM-o 4.5 reference, stream decoder. A decision has three stages: a draw from the raw
distribution that can only end the unit's text (A), penalties and filters (B), and a draw from what
they leave (C). All rows of a batch go through all stages; nothing is read back in between, so the
whole decision is a function of tensors. A row depends on its own logits, settings, history and
draws only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from worker.nn.sampling import MIN_TEMPERATURE
from worker.nn.shapes import rounded_up
from worker.nn.transfer import to_device

CANDIDATE_STEP = 32
"""Candidate lists and histories have multiples of this length, so that few shapes occur."""
TIE_ROOM = 8
"""Candidates beyond the k-th: those as likely as the k-th stay in, and bf16 logits do tie. No
more than this many, so that a row keeps the same number in a list of any length."""

FIXED_CANDIDATES = 128
FIXED_HISTORY = 1024
"""Sizes of a decision in fixed shapes (`fill_decisions`): what clients ordinarily ask for, top_k of
100 or so and twice the default window, needs no more."""


@dataclass(frozen=True, slots=True)
class DuplexSampling:
    """How a duplex session decides; the defaults are those of the reference's served mode."""

    is_greedy: bool = False
    """Both draws take the likeliest token."""
    temperature: float = 0.7
    top_k: int = 20
    """Keep the k likeliest tokens; 0 = all."""
    top_p: float = 0.8
    """Then keep the likeliest ones up to the first that passes this sum; 0 or 1 = all."""
    repetition_penalty: float = 1.05
    window: int = 512
    """How many of the latest tokens the penalty looks at; 0 = none."""
    length_penalty: float = 1.1
    """Above 1: the end of the turn becomes less likely."""
    listen_prob_scale: float = 1.0
    """Factor of the listen token's logit."""
    listen_top_k: int | None = None
    """Listen for certain if fewer than this many tokens are likelier; None = off."""

    def counted(self, said: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the part of a history, latest last, that the penalty looks at."""
        return said[-self.window :] if self.window > 0 else said[:0]


@dataclass(frozen=True, slots=True)
class DuplexVocabulary:
    """The ids that a decision treats specially."""

    forbidden: Tensor
    """Ids that stages B and C never choose, bool `[V]`."""
    chunk_eos: int
    turn_eos: int
    listen: int
    im_end: int

    @classmethod
    def build(
        cls,
        vocab_size: int,
        bad_ids: Sequence[int],
        *,
        tts_pad: int,
        chunk_eos: int,
        turn_eos: int,
        listen: int,
        im_end: int,
        device: torch.device | str = "cpu",
    ) -> DuplexVocabulary:
        """Forbid the tokenizer's bad ids, the padding of speech and the end of a unit's text.

        Args:
            vocab_size: columns of the logits, V.
        """
        forbidden = torch.zeros(vocab_size, dtype=torch.bool)
        forbidden[[tts_pad, chunk_eos, *bad_ids]] = True
        return cls(forbidden.to(device), chunk_eos, turn_eos, listen, im_end)


@dataclass(frozen=True, slots=True)
class DecisionInputs:
    """Settings, histories and draws of a batch as small tensors, made before the decision."""

    numbers: Tensor
    """One column per setting in the order of `DuplexSampling`, float64 `[B, 8]`: is_greedy,
    temperature, top_k, top_p, repetition_penalty, length_penalty, listen_prob_scale,
    listen_top_k."""
    draws: Tensor
    """Numbers in [0, 1) for stages A and C, float64 `[B, 2]`."""
    recent: Tensor
    """Ids that the penalty looks at, int64 or int32 `[B, W]`, filled up with V."""
    n_candidates: int
    """Length of the candidate lists, C: covers every row's top_k, but for greedy rows."""

    def column(self, index: int) -> Tensor:
        return self.numbers[:, index, None]  # [B, 1]


@dataclass(frozen=True, slots=True)
class Decision:
    """A decision and what led to it."""

    chosen: Tensor
    """int64 `[B]`."""
    p_chunk_eos: Tensor
    """Probability that stage A ends the unit's text, `[B]`."""
    is_direct: Tensor
    """Whether `listen_top_k` settled it without a second draw, bool `[B]`."""
    ids: Tensor
    """Candidates of stage C in ascending order, int64 `[B, C]`."""
    probabilities: Tensor
    """Their probabilities, 0 for those filtered out, `[B, C]`."""


def decide(
    logits: Tensor,
    settings: Sequence[DuplexSampling],
    recent: Sequence[NDArray[np.int64]],
    draws: Tensor | Sequence[Sequence[float]],
    vocabulary: DuplexVocabulary,
    listen_is_im_end: bool = False,
    divide_negative: bool = True,
) -> Tensor:
    """Return one token id per row, int64 `[B]`, on the device of `logits`.

    Args:
        logits: `[B, V]`, left as they are.
        settings: one per row.
        recent: ids each row has said, latest last; cut to the row's window here.
        draws: `[B, 2]` numbers in [0, 1): for the raw draw and the filtered one; greedy rows
            use none of them.
        listen_is_im_end: the listen settings act on `<|im_end|>` (a quirk of the reference).
        divide_negative: the repetition penalty divides negative logits too, which raises them (a
            quirk of the reference).
    """
    inputs = decision_inputs(settings, recent, draws, logits.shape[-1], logits.device)
    return decide_stages(logits, inputs, vocabulary, listen_is_im_end, divide_negative).chosen


def decision_inputs(
    settings: Sequence[DuplexSampling],
    recent: Sequence[NDArray[np.int64]],
    draws: Tensor | Sequence[Sequence[float]],
    vocab_size: int,
    device: torch.device | str,
) -> DecisionInputs:
    """Put what the host knows of a batch into tensors on the device; arguments as in `decide`."""
    numbers = np.array([_numbers(s, vocab_size) for s in settings], dtype=np.float64)
    windows = [s.counted(said) for s, said in zip(settings, recent, strict=True)]
    width = rounded_up(max(1, *(len(window) for window in windows)), CANDIDATE_STEP)
    padded = np.full((len(windows), width), vocab_size, dtype=np.int64)
    for row, window in enumerate(windows):
        padded[row, : len(window)] = window
    if not isinstance(draws, Tensor):
        draws = to_device(np.asarray(draws, dtype=np.float64).reshape(len(settings), -1), device)
    longest = max(s.top_k if s.top_k > 0 else vocab_size for s in settings)
    return DecisionInputs(
        numbers=to_device(numbers, device),
        draws=draws.double(),
        recent=to_device(padded, device),
        n_candidates=min(vocab_size, rounded_up(longest + TIE_ROOM, CANDIDATE_STEP)),
    )


def _numbers(setting: DuplexSampling, vocab_size: int) -> tuple[float, ...]:
    """Return a row of `DecisionInputs.numbers`."""
    return (
        setting.is_greedy,
        max(setting.temperature, MIN_TEMPERATURE),
        setting.top_k if setting.top_k > 0 else vocab_size,
        setting.top_p if 0.0 < setting.top_p < 1.0 else np.inf,
        setting.repetition_penalty,
        setting.length_penalty,
        setting.listen_prob_scale,
        0 if setting.listen_top_k is None else setting.listen_top_k,
    )


def has_fixed_sizes(setting: DuplexSampling, recent: NDArray[np.int64]) -> bool:
    """Whether a row of this setting and history may be decided in fixed shapes."""
    # A greedy row takes the likeliest token of all.
    has_room = setting.is_greedy or 0 < setting.top_k <= FIXED_CANDIDATES - TIE_ROOM
    return has_room and min(setting.window, len(recent)) <= FIXED_HISTORY


def fill_decisions(
    arrays: Mapping[str, NDArray[Any]],
    rows: Sequence[int],
    settings: Sequence[DuplexSampling],
    recent: Sequence[NDArray[np.int64]],
    draws: Sequence[Sequence[float]],
    vocab_size: int,
) -> None:
    """Write what `decision_inputs` would return into rows of arrays that were there before.

    Args:
        arrays: `numbers`, `draws` and `recent` as in `DecisionInputs`, the last one as wide as
            `FIXED_HISTORY`; rows that are not named stay as they are.
        rows: one per setting.
        settings, recent, draws: as in `decide`, all of them of fixed sizes (`has_fixed_sizes`).
    """
    arrays["numbers"][rows] = [_numbers(s, vocab_size) for s in settings]
    arrays["draws"][rows] = draws
    histories = arrays["recent"]
    for row, setting, said in zip(rows, settings, recent, strict=True):
        window = setting.counted(said)
        histories[row, : len(window)] = window
        histories[row, len(window) :] = vocab_size


def fixed_inputs(inputs: Mapping[str, Tensor], vocab_size: int) -> DecisionInputs:
    """Return the tensors of `fill_decisions` as inputs of `decide_stages`; zeros are valid too."""
    n_candidates = min(vocab_size, FIXED_CANDIDATES)
    return DecisionInputs(inputs["numbers"], inputs["draws"], inputs["recent"], n_candidates)


def decide_stages(
    logits: Tensor,
    inputs: DecisionInputs,
    vocabulary: DuplexVocabulary,
    listen_is_im_end: bool,
    divide_negative: bool,
) -> Decision:
    """Decide `[B, V]` logits on the device; only tensors in, only tensors out."""
    logits = logits.float()
    is_greedy = inputs.numbers[:, 0] > 0
    raw = logits.softmax(dim=-1)  # [B, V]
    ends = torch.where(
        is_greedy,
        logits.argmax(dim=-1) == vocabulary.chunk_eos,
        draw_hits(raw, inputs.draws[:, 0], vocabulary.chunk_eos),
    )

    listen = vocabulary.im_end if listen_is_im_end else vocabulary.listen
    weighed = weigh(logits, inputs, vocabulary, listen, divide_negative)
    n_likelier = (weighed > weighed[:, listen, None]).sum(dim=-1)
    is_direct = n_likelier < inputs.numbers[:, 7]

    ids, probabilities = candidates(weighed, inputs)
    drawn = ids.gather(1, draw_index(probabilities, inputs.draws[:, 1])[:, None])[:, 0]
    chosen = torch.where(is_greedy, weighed.argmax(dim=-1), drawn)
    chosen = chosen.masked_fill(is_direct, listen).masked_fill(ends, vocabulary.chunk_eos)
    return Decision(chosen, raw[:, vocabulary.chunk_eos], is_direct, ids, probabilities)


def weigh(
    logits: Tensor,
    inputs: DecisionInputs,
    vocabulary: DuplexVocabulary,
    listen: int,
    divide_negative: bool,
) -> Tensor:
    """Stage B without the filters: forbidden ids and penalties; fp32 `[B, V]`.

    Args:
        listen: the id that `listen_prob_scale` acts on.
    """
    vocab_size = logits.shape[-1]
    out = logits.masked_fill(vocabulary.forbidden, -torch.inf)
    # One column more than there are ids takes what fills up the histories.
    said = torch.zeros((len(out), vocab_size + 1), dtype=torch.bool, device=out.device).scatter_(
        1, inputs.recent.long(), True
    )[:, :vocab_size]
    penalty = inputs.column(4).float()
    lowered = out / penalty if divide_negative else _made_rarer(out, penalty)
    out = torch.where(said, lowered, out)

    turn_end = out[:, vocabulary.turn_eos, None]
    out[:, vocabulary.turn_eos, None] = _made_rarer(turn_end, inputs.column(5).float())
    out[:, listen, None] *= inputs.column(6).float()
    return out


def _made_rarer(logits: Tensor, penalty: Tensor) -> Tensor:
    """Lower logits of either sign by a factor above 1."""
    return torch.where(logits > 0, logits / penalty, logits * penalty)


def candidates(logits: Tensor, inputs: DecisionInputs) -> tuple[Tensor, Tensor]:
    """Temperature, the k likeliest, then the nucleus among them.

    Returns:
        Ids in ascending order, int64 `[B, C]`, and their probabilities, fp32 `[B, C]`.
    """
    best = logits.amax(dim=-1, keepdim=True)
    # Relative to the best one: a tiny temperature makes the others impossible, not it infinite.
    scaled = (logits - best) / inputs.column(1).float()
    values, ids = scaled.topk(inputs.n_candidates, dim=-1)  # [B, C], descending
    # A row that keeps everything has its vocabulary's size here, and C is that size then, unless
    # the row is greedy; a row of padding may have 0.
    last = inputs.column(2).long().clamp(1, inputs.n_candidates) - 1
    rank = torch.arange(inputs.n_candidates, device=logits.device)
    is_out = (values < values.gather(1, last)) | (rank > last + TIE_ROOM)
    values = values.masked_fill(is_out, -torch.inf)
    probabilities = values.softmax(dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities
    values = values.masked_fill(before > inputs.column(3), -torch.inf)
    ids, order = ids.sort(dim=-1)
    return ids, values.softmax(dim=-1).gather(1, order)


def draw_index(probabilities: Tensor, draws: Tensor) -> Tensor:
    """Invert each row's cumulative sum: the first index whose sum passes `draw * total`.

    Args:
        probabilities: `[B, C]`; need not add up to 1.
        draws: numbers in [0, 1), float64 `[B]`.

    Returns:
        int64 `[B]`; never an index of probability zero, and an index even if a row is not a number.
    """
    cumulative = probabilities.double().cumsum(dim=-1)
    total = cumulative[:, -1:]
    # A float64 below 1 times the total is below the total, also after rounding.
    index = torch.searchsorted(cumulative, draws[:, None] * total, right=True)[:, 0]
    return index.clamp(max=probabilities.shape[-1] - 1)


def draw_hits(probabilities: Tensor, draws: Tensor, index: int) -> Tensor:
    """Whether `draw_index` would return `index`, bool `[B]`: two sums instead of V partial ones."""
    wide = probabilities.double()
    before = wide[:, :index].sum(dim=-1)
    target = draws * wide.sum(dim=-1)
    return (before <= target) & (target < before + wide[:, index])
