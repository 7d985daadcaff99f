"""What a unit's stages took."""

from __future__ import annotations

from collections.abc import Callable

from shared.protocol import Timings


class Costs:
    """Milliseconds of a unit's stages."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._began_at = self._last_at = clock()
        self._stages: dict[str, float] = {}

    def add(self, stage: str) -> None:
        """Book the time since the last call under a field of `Timings`."""
        now = self._clock()
        self._stages[stage] = self._stages.get(stage, 0.0) + 1000 * (now - self._last_at)
        self._last_at = now

    def timings(self) -> Timings:
        total_ms = 1000 * (self._clock() - self._began_at)
        return Timings(**self._stages, total_ms=total_ms)
