"""Which result of a session brings the first sound of a turn."""

from __future__ import annotations


class Turn:
    """Follows a session's results, in their order."""

    def __init__(self) -> None:
        self._began_at: float | None = None
        self._is_heard = False

    def take(
        self, arrived_at: float, *, is_listen: bool, has_audio: bool, end_of_turn: bool
    ) -> float | None:
        """Take the next result.

        Args:
            arrived_at: when the input arrived that the result answers, on any clock.

        Returns:
            None, or for a result with the first audio of its turn: when the input arrived whose
            answer began the turn. That input is the first one whose result does not listen.
        """
        if is_listen:
            self._end()
            return None
        if self._began_at is None:
            self._began_at = arrived_at
        first = None
        if has_audio and not self._is_heard:
            self._is_heard = True
            first = self._began_at
        if end_of_turn:
            self._end()
        return first

    def _end(self) -> None:
        self._began_at = None
        self._is_heard = False
