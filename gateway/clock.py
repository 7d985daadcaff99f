"""The two clocks of the gateway: monotonic seconds for durations, wall time for dates."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime


@dataclass(frozen=True, slots=True)
class Clock:
    monotonic: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = time.time
    """Unix seconds."""

    def date(self, at: float | None = None) -> str:
        """Return the local ISO date without a zone (the wire's form) of a monotonic reading.

        None = now.
        """
        age_s = 0.0 if at is None else self.monotonic() - at
        local = datetime.fromtimestamp(self.wall() - age_s, tz=UTC).astimezone()
        return local.replace(tzinfo=None).isoformat()
