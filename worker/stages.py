"""The stages that a worker's start goes through: which one runs, how far it is, what each took."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from shared.protocol import StageReport
from worker.models.contract import Progress

log = logging.getLogger(__name__)
R = TypeVar("R")

MIN_PROGRESS = 0.05
"""Below this, what is left of a stage cannot be told from the time it took so far."""


@dataclass(slots=True)
class Stage:
    """One stage; its progress is written by the thread that it runs on."""

    name: str
    started_at: float
    ended_at: float | None = None
    progress: float = 0.0
    note: str = ""

    def report(self, share: float, note: str) -> None:
        """Called from the stage's own thread."""
        self.progress = min(1.0, max(0.0, share))
        self.note = note

    def elapsed_s(self, now: float) -> float:
        return (self.ended_at if self.ended_at is not None else now) - self.started_at

    def eta_s(self, now: float) -> float | None:
        """Seconds to its end, from the share it has done; None while that says little."""
        if self.progress < MIN_PROGRESS:
            return None
        return round(self.elapsed_s(now) * (1.0 - self.progress) / self.progress, 1)


class Stages:
    """All stages so far, oldest first. May be read by any thread."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._stages: list[Stage] = []

    @property
    def last(self) -> Stage | None:
        return self._stages[-1] if self._stages else None

    async def run(self, name: str, work: Callable[[Progress], Awaitable[R]]) -> R:
        """Run the next stage and return its value."""
        stage = Stage(name, self._clock())
        self._stages.append(stage)
        log.info("stage started name=%s", name)
        value = await work(stage.report)
        stage.ended_at = self._clock()
        stage.progress = 1.0
        elapsed_s = stage.elapsed_s(stage.ended_at)
        log.info("stage done name=%s elapsed_s=%.2f note=%s", name, elapsed_s, stage.note)
        return value

    def reports(self) -> list[StageReport]:
        now = self._clock()
        return [
            StageReport(s.name, round(s.elapsed_s(now), 2), s.ended_at is not None, s.note)
            for s in list(self._stages)
        ]

    def seconds(self) -> dict[str, float]:
        """By name; the running one as far as it is."""
        return {report.name: report.elapsed_s for report in self.reports()}


def part_of(progress: Progress, begin: float, end: float) -> Progress:
    """Return the progress of a part of a stage."""
    return lambda share, note: progress(begin + share * (end - begin), note)
