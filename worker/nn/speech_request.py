"""What one run of the speech head is asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any

from numpy.typing import NDArray
from torch import Tensor

from worker.nn.code_sampling import CodeSampling


class InputKind(IntEnum):
    """What an input row of the speech head is made of."""

    TEXT = 0
    """The embedding of a text token."""
    CODE = 1
    """The embedding of a speech token."""
    STATE = 2
    """A condition: the embedding of a text token and its projected hidden state."""
    UNIT_STATE = 3
    """The same, the projected state brought to length 1."""


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

    @property
    def is_free(self) -> bool:
        """Whether the first draw knows neither penalty nor filters."""
        return self.sampling.first_is_free and self.last_code is None

    def piece(self, said: tuple[int, ...], n: int) -> SpeechRequest:
        """Return the run of the next `n` draws at most, after pieces that drew `said`.

        All pieces in turn say what the whole run says, and leave the same positions live.
        """
        n_done = len(said)
        if not said and self.max_new <= n:
            return self
        n_new = min(n, self.max_new - n_done)
        begin = replace(
            self,
            max_new=n_new,
            min_new=max(0, self.min_new - n_done),
            draws=self.draws[n_done : n_done + n_new],
            drops_last=self.drops_last and n_done + n_new == self.max_new,
        )
        if not said:
            return begin
        return replace(
            begin,
            start=self.start + self.n_inputs + n_done - 1,
            text_ids=(),
            hidden=None,
            is_closing=False,
            given_codes=(),
            last_code=said[-1],
            recent=(*self.recent, *said),
        )

    def input_rows(
        self, text_eos_id: int, audio_bos_id: int, normalize: bool
    ) -> tuple[list[int], list[InputKind]]:
        """Return the ids of the input rows, of text or codes, and their kinds.

        Args:
            normalize: what `SpeechRequest.normalize` of None means.
        """
        if self.last_code is not None:
            return [self.last_code], [InputKind.CODE]
        wanted = normalize if self.normalize is None else self.normalize
        closing = [text_eos_id] if self.is_closing else []
        state = InputKind.UNIT_STATE if wanted else InputKind.STATE
        return (
            [*self.text_ids, *closing, audio_bos_id, *self.given_codes],
            [state] * len(self.text_ids)
            + [InputKind.TEXT] * (len(closing) + 1)
            + [InputKind.CODE] * len(self.given_codes),
        )

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


def fill_inputs(
    arrays: Mapping[str, NDArray[Any]],
    requests: Sequence[SpeechRequest],
    offset: int,
    text_eos_id: int,
    audio_bos_id: int,
    normalize: bool,
) -> list[Tensor]:
    """Write what input rows are made of; padding becomes text of id 0.

    Args:
        arrays: "ids", "kinds" (`InputKind`) and "places" (of a row's hidden state among all
            states, 0 where there is none), int64 `[B, N]` each, with a row for every request.
        offset: the first N of a request's input rows behind as many are written.
        normalize: what `SpeechRequest.normalize` of None means.

    Returns:
        The hidden states of the conditions among them, `[n, D_llm]` each; places count through all
        of these.
    """
    states: list[Tensor] = []
    n_states, width = 0, arrays["ids"].shape[1]
    for array in (arrays["ids"], arrays["kinds"], arrays["places"]):
        array[:] = 0
    for row, request in enumerate(requests):
        ids, kinds = request.input_rows(text_eos_id, audio_bos_id, normalize)
        ids, kinds = ids[offset : offset + width], kinds[offset : offset + width]
        arrays["ids"][row, : len(ids)] = ids
        arrays["kinds"][row, : len(ids)] = kinds
        if request.hidden is None or offset >= request.hidden.shape[0]:
            continue
        states.append(request.hidden[offset : offset + width])  # text rows come first
        n_new = states[-1].shape[0]
        arrays["places"][row, :n_new] = range(n_states, n_states + n_new)
        n_states += n_new
    return states
