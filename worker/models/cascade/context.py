"""The token sequence of one conversation and how much of it the language model's cache holds.

Pure bookkeeping. The sequence may be cut and continued at any time; what the cache holds is the
longest prefix that is known to have been fed, so a program that was cancelled in the middle of
feeding leaves nothing to repair.
"""

from __future__ import annotations

from collections.abc import Sequence


class Context:
    """A sequence `system, turn, turn, …`; its first `n_fed` tokens are in the cache."""

    def __init__(self, system: Sequence[int] = ()) -> None:
        self._system = tuple(system)
        self._tokens = list(system)
        self._turn_starts: list[int] = []
        self.n_fed = 0

    def __len__(self) -> int:
        return len(self._tokens)

    @property
    def n_system(self) -> int:
        return len(self._system)

    @property
    def tokens(self) -> tuple[int, ...]:
        return tuple(self._tokens)

    def begin_turn(self, tokens: Sequence[int]) -> int:
        """Append a user turn; return the length before it, to go back to."""
        start = len(self._tokens)
        self._turn_starts.append(start)
        self._tokens.extend(tokens)
        return start

    def append(self, tokens: Sequence[int]) -> None:
        self._tokens.extend(tokens)

    def truncate(self, length: int) -> None:
        """Forget everything from position `length` on."""
        del self._tokens[length:]
        self._turn_starts = [start for start in self._turn_starts if start < length]
        self.n_fed = min(self.n_fed, length)

    def unfed(self, at_most: int) -> tuple[int, ...]:
        """The next tokens to feed, at position `n_fed`."""
        return tuple(self._tokens[self.n_fed : self.n_fed + at_most])

    def mark_fed(self, start: int, tokens: Sequence[int]) -> None:
        """Note that `tokens` were written at `start`.

        Nothing is noted if the sequence was changed there in the meantime.
        """
        end = start + len(tokens)
        if self.n_fed == start and self._tokens[start:end] == list(tokens):
            self.n_fed = end

    def drop_oldest(self, keep_tokens: int) -> int:
        """Keep the system prompt and the newest whole turns of at most `keep_tokens` tokens.

        The newest turn always stays. Everything has to be fed anew: positions have changed.

        Returns:
            By how much the positions of what was kept have moved (zero or negative).
        """
        if not self._turn_starts:
            return 0
        fits = (s for s in self._turn_starts if len(self._tokens) - s <= keep_tokens)
        first = next(fits, self._turn_starts[-1])
        shift = len(self._system) - first
        self._tokens = [*self._system, *self._tokens[first:]]
        self._turn_starts = [s + shift for s in self._turn_starts if s >= first]
        self.n_fed = 0 if shift else self.n_fed
        return shift
