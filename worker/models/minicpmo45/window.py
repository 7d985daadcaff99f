"""What of a duplex session stays in the language model's context.

Every unit is a run of positions behind the prompt. When there are too many, whole units go, oldest
first, and what follows moves up: keys are turned by the difference of positions, values stay, and
later units are not computed again (so they still carry traces of what is gone, as in the original).

Mode `basic` keeps the context between two sizes. Mode `context` keeps a number of units and carries
the dropped units' words along, between the prompt's prefix and its suffix. Mode `off` keeps all.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from typing import Literal

from shared.errors import ContextFull
from worker.nn.shapes import rounded_up

MAX_UNIT_TOKENS = 1024
"""Positions that one unit may take, what it says included; the largest prefill bucket."""

Mode = Literal["off", "basic", "context"]


@dataclass(frozen=True, slots=True)
class WindowSettings:
    """Names and defaults as in the original's configuration, but `basic` instead of `off`."""

    mode: Mode = "basic"
    high_tokens: int = 4000
    low_tokens: int = 3500
    max_units: int = 24
    previous_max_tokens: int = 500
    max_tokens: int = 8192
    """Mode `off`: a session ends when its context has grown to this. Mode `context`: units go
    before it does."""

    @property
    def n_positions(self) -> int:
        """Size of a slot's cache: everything that is kept, and one largest unit."""
        kept = self.high_tokens if self.mode == "basic" else self.max_tokens
        return rounded_up(kept + MAX_UNIT_TOKENS, 64)


@dataclass(frozen=True, slots=True)
class KeptUnit:
    index: int
    n_tokens: int
    words: tuple[int, ...] = ()
    """What was said in it, without special tokens."""


@dataclass(frozen=True, slots=True)
class Cut:
    """What has to happen to the cache."""

    start: int
    """First position that stays of the units."""
    target: int
    """Where it moves."""
    rewritten: tuple[int, ...]
    """Tokens to be fed at `rewritten_at`: carried words and the prompt's suffix; often empty."""
    rewritten_at: int


@dataclass(slots=True)
class Window:
    """Units in the context of one session, and the words carried along."""

    settings: WindowSettings
    n_positions: int
    """Size of the slot's cache."""
    marker: tuple[int, ...] = ()
    """Tokens that introduce the carried words."""
    n_prefix: int = 0
    """Prompt positions in front of the carried words."""
    suffix: tuple[int, ...] = ()
    previous: tuple[int, ...] = ()
    """Marker and carried words."""
    units: deque[KeptUnit] = field(default_factory=deque)
    n_dropped_tokens: int = 0
    """Positions that units have given up since the session began (mode `basic`)."""

    @property
    def n_preserved(self) -> int:
        return self.n_prefix + len(self.previous) + len(self.suffix)

    def add(self, unit: KeptUnit) -> None:
        self.units.append(unit)

    @property
    def _room(self) -> int:
        """The longest context that has room for one more unit."""
        return self.n_positions - MAX_UNIT_TOKENS

    def is_due(self, n_tokens: int) -> bool:
        """Whether a context of this many tokens has to be cut before the next unit."""
        return self._is_too_long(n_tokens, self.settings.high_tokens)

    def check_room(self, n_tokens: int) -> None:
        """Raises ContextFull: not even one more unit fits."""
        if n_tokens > self._room:
            raise ContextFull(
                f"the session has filled its context of {self._room} tokens: "
                "start a new one, or use another duplex.sliding_window_mode"
            )

    def cut(self, n_tokens: int) -> tuple[Window, Cut]:
        """Drop what is too much of a context of this many tokens.

        Returns:
            The window once the cache has been cut, and how to cut it; this one stays as it is.
        """
        kept = replace(self, units=deque(self.units))
        n_after, n_dropped = n_tokens, 0
        while kept._is_too_long(n_after, self.settings.low_tokens):
            unit = kept.units.popleft()
            n_dropped += unit.n_tokens
            kept._let_go(unit)
            n_after = n_tokens - n_dropped + len(kept.previous) - len(self.previous)
        rewritten = kept.previous + kept.suffix if kept.previous is not self.previous else ()
        return kept, Cut(self.n_preserved + n_dropped, kept.n_preserved, rewritten, self.n_prefix)

    def emptied(self) -> Window:
        """Return the window of a context that holds nothing but the prompt."""
        return replace(self, units=deque(), previous=())

    def _is_too_long(self, n_tokens: int, limit: int) -> bool:
        """Whether the oldest unit has to go; the newest one stays if there is room for another."""
        if not self.units or self.settings.mode == "off":
            return False
        if self.settings.mode == "basic":
            is_over = n_tokens > limit and len(self.units) > 1
        else:
            is_over = len(self.units) > self.settings.max_units
        return is_over or n_tokens > self._room

    def _let_go(self, unit: KeptUnit) -> None:
        if self.settings.mode == "basic":
            self.n_dropped_tokens += unit.n_tokens
        elif unit.words:
            carried = self.previous[len(self.marker) :] + unit.words
            # With the prompt, which takes half of it at most, room for units is left.
            most = min(self.settings.previous_max_tokens, self._room // 4)
            self.previous = self.marker + carried[max(0, len(carried) - most) :]
