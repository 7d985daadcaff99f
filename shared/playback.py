"""When a listener would hear a gap: a player with a jitter buffer, without any sound."""

from __future__ import annotations

DEFAULT_BUFFER_S = 0.2


class Player:
    """Plays what arrives, in order, and starts each turn `buffer_s` after its first audio.

    Args:
        buffer_s: how much later than its arrival the first audio of a turn is played.
    """

    def __init__(self, buffer_s: float = DEFAULT_BUFFER_S) -> None:
        self._buffer_s = buffer_s
        self._free_at: float | None = None

    def receive(self, at_s: float, duration_s: float) -> float:
        """Take audio that arrived at `at_s` (any clock); returns the gap before it, in seconds.

        The first audio of a turn has no gap before it. After a gap the player goes on at once.
        """
        if self._free_at is None:
            self._free_at = at_s + self._buffer_s
        gap_s = max(0.0, at_s - self._free_at)
        self._free_at = max(self._free_at, at_s) + duration_s
        return gap_s

    def end_turn(self) -> None:
        """What comes next belongs to another turn; also after a flush."""
        self._free_at = None

    def lead_s(self, at_s: float) -> float:
        """Seconds of audio that have arrived and not been played at `at_s`."""
        return 0.0 if self._free_at is None else max(0.0, self._free_at - at_s)
