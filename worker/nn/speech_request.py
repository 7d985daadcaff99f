"""What one run of the speech head is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from worker.nn.code_sampling import CodeSampling


@dataclass(frozen=True, slots=True)
class SpeechRequest:
    """One run of the speech head for one slot.

    The inputs are `n_inputs` rows at the positions `start ...`: either a condition (the text rows,
    the text-EOS row if `is_closing`, the audio-BOS row) with `given_codes` behind it, or
    `last_code` alone, which goes on where an earlier run stopped. Then up to `max_new` codes are
    drawn, until the end code.

    How many positions are live afterwards, with m codes returned:

    - the end code was drawn: n_inputs + m from `start` on;
    - it was not, with `drops_last`: n_inputs + m, since the last draw is neither returned nor fed;
    - it was not, without: n_inputs + m - 1. The last code is returned but not fed yet: go on with
      `last_code` and `start` at this position.

    That is the next run's `start`. Nothing is written behind the live positions.

    Attention types of half duplex. "full_attention": `start` goes on over the chunks of a turn.
    "sliding_recompute": a chunk begins at 0 again, by one request with the previous chunk's
    condition and `given_codes`, `max_new` 0, and one with its own condition at `n_inputs`.
    "sliding_window" and "reindex": the caller moves what is kept to lower positions (keys turned)
    and goes on at their end; only differences of positions matter to the rotation.
    """

    slot: int
    start: int
    """Position of the first input; 0 at the start of a turn. Everything before it is live."""
    text_ids: tuple[int, ...] = ()
    hidden: Tensor | None = None
    """Last hidden states (after the closing norm) of the text tokens, `[n, D_llm]`; None if there
    are none."""
    is_closing: bool = False
    """The text ends here: its EOS row comes before the BOS row."""
    given_codes: tuple[int, ...] = ()
    """Codes that are fed behind the condition without being drawn."""
    last_code: int | None = None
    """Continue from this code, which was returned but not fed, instead of a condition."""
    max_new: int = 26
    min_new: int = 0
    """As many draws cannot be the end code."""
    draws: Sequence[float] = ()
    """`max_new` numbers in [0, 1); greedy runs need none."""
    sampling: CodeSampling = field(default_factory=CodeSampling)
    recent: tuple[int, ...] = ()
    """Codes before this run that the penalty counts, latest last: none in duplex, which counts
    within a unit, the whole turn's in half duplex."""
    drops_last: bool = False
    """Draw `max_new` codes but return one less (duplex: 26 draws, at most 25 codes)."""
    normalize: bool | None = None
    """Whether projected states get length 1; None = as configured. Duplex always does."""

    @property
    def n_inputs(self) -> int:
        if self.last_code is not None:
            return 1
        return len(self.text_ids) + int(self.is_closing) + 1 + len(self.given_codes)

    @property
    def end(self) -> int:
        """Positions that the slot's cache must have: the last draw is never fed."""
        return self.start + self.n_inputs + max(self.max_new - 1, 0)

    @property
    def n_draws(self) -> int:
        """Draws that matter: one that is dropped anyway and cannot be the end code does not."""
        is_idle = self.drops_last and self.min_new >= self.max_new
        return max(self.max_new - int(is_idle), 0)

    def input_ids(self, text_eos_id: int, audio_bos_id: int) -> tuple[list[int], list[int]]:
        """Return the input rows: ids of the text embedding, then of the code embedding."""
        if self.last_code is not None:
            return [], [self.last_code]
        closing = [text_eos_id] if self.is_closing else []
        return [*self.text_ids, *closing, audio_bos_id], list(self.given_codes)

    def outcome(self, drawn: list[int], end_code: int) -> tuple[tuple[int, ...], bool]:
        """Return the codes of the run and whether the end code was among its draws."""
        if end_code in drawn:
            return tuple(drawn[: drawn.index(end_code)]), True
        return tuple(drawn[: self.max_new - int(self.drops_last)]), False

    def check(self, n_tokens: int) -> None:
        """Raise ValueError if the run does not fit into `n_tokens` positions or lacks something."""
        name = f"speech request of slot {self.slot}"
        if self.end > n_tokens:
            raise ValueError(f"{name} needs {self.end} positions, its cache has {n_tokens}")
        if not self.sampling.is_greedy and len(self.draws) < self.max_new:
            raise ValueError(f"{name} has {len(self.draws)} draws for {self.max_new} codes")
        n_states = 0 if self.hidden is None else len(self.hidden)
        if n_states != len(self.text_ids):
            raise ValueError(
                f"{name} has {n_states} hidden states for {len(self.text_ids)} text tokens"
            )
        if self.last_code is not None and (self.text_ids or self.given_codes or self.is_closing):
            raise ValueError(f"{name} has a condition besides the code it continues from")
