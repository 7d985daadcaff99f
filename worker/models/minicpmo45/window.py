"""What of a duplex session stays in the language model's context.

Every unit is a run of positions behind the prompt. When there are too many, whole units go, oldest
first, and what follows moves up: keys are turned by the difference of positions, values stay, and
later units are not computed again (so they still carry traces of what is gone, as in the original).

Mode `basic` keeps the context between two sizes. Mode `context` keeps a number of units and carries
the dropped units' words along, between the prompt's prefix and its suffix. Mode `off` keeps all.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Literal

from shared.errors import ContextFull

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
        return -(-(kept + MAX_UNIT_TOKENS) // 64) * 64


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

    def is_due(self, n_tokens: int) -> bool:
        """Whether a context of this many tokens has to be cut before the next unit."""
        if len(self.units) < 2:
            return False
        match self.settings.mode:
            case "basic":
                return n_tokens > self.settings.high_tokens
            case "context":
                is_full = n_tokens > self.n_positions - MAX_UNIT_TOKENS
                return len(self.units) > self.settings.max_units or is_full
            case "off":
                return False

    def check_room(self, n_tokens: int) -> None:
        """Raises ContextFull: not even one more unit fits."""
        if n_tokens + MAX_UNIT_TOKENS > self.n_positions:
            raise ContextFull(
                f"the session has filled its context of {self.n_positions} tokens: "
                "start a new one, or use another duplex.sliding_window_mode"
            )

    def cut(self, n_tokens: int) -> Cut:
        """Drop what is too much of a context of this many tokens; to be called when it is due."""
        first = self.n_preserved
        n_dropped, had_words = 0, bool(self.previous)
        limit = self.settings.low_tokens
        words: list[int] = []
        if self.settings.mode == "basic":
            while len(self.units) > 1 and n_tokens - n_dropped > limit:
                n_dropped += self.units.popleft().n_tokens
            self.n_dropped_tokens += n_dropped
        else:
            room = self.n_positions - MAX_UNIT_TOKENS
            while len(self.units) > 1 and (
                len(self.units) > self.settings.max_units or n_tokens - n_dropped > room
            ):
                unit = self.units.popleft()
                n_dropped += unit.n_tokens
                words += unit.words
        rewritten: tuple[int, ...] = ()
        if words:
            content = self.previous[len(self.marker) :] if had_words else ()
            carried = content + tuple(words)
            n_over = max(0, len(carried) - self.settings.previous_max_tokens)
            self.previous = self.marker + carried[n_over:]
            rewritten = self.previous + self.suffix
        return Cut(first + n_dropped, self.n_preserved, rewritten, self.n_prefix)
