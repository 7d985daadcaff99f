"""A conversation that nothing may disturb: a spoken question every twenty seconds."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from client.duplex import DuplexClient, SessionError
from client.journal import Journal, percentiles
from client.load.figures import DEADLINE_S
from client.paced import Chunk, stream
from shared.limits import INPUT_SAMPLE_RATE_HZ as RATE
from shared.playback import DEFAULT_BUFFER_S
from tests.bench.bench_conversation import Track

QUESTIONS: Final = (("capital_france.wav", "France"), ("days_in_week.wav", "week"))
"""Clips, and a word their caption has to hold."""

PERIOD_S = 20


@dataclass
class Healthy:
    """One conversation that nothing may disturb."""

    name: str
    first_at_s: int
    """When it asks for the first time, in its own seconds."""
    is_live: asyncio.Event = field(default_factory=asyncio.Event)
    journal: Journal = field(default_factory=Journal)
    problem: str = ""

    async def run(self, url: str, n_units: int) -> None:
        try:
            async with DuplexClient(url, mode="audio") as session:
                await session.prepare()
                self.is_live.set()
                begin_at = time.monotonic()
                self.journal = await stream(session, self._chunks(n_units), begin_at, 1.0)
                self.problem = self.journal.problem or ""
                await session.stop()
        except SessionError as error:
            self.problem = str(error)
        finally:
            self.is_live.set()

    def _chunks(self, n_units: int) -> Iterator[Chunk]:
        """Questions in turn, one in each period, each a bit later within its chunk."""
        track = Track.silence(PERIOD_S * len(QUESTIONS))
        for index, (clip, _) in enumerate(QUESTIONS):
            track.say(clip, index * PERIOD_S + 0.37 * index)
        silence = np.zeros(RATE, np.float32)
        n_seconds = len(track.samples) // RATE
        for unit in range(n_units):
            second = unit - self.first_at_s
            if second < 0 or second // PERIOD_S >= self._n_questions(n_units):
                yield silence, ()
            else:
                start = second % n_seconds * RATE
                yield track.samples[start : start + RATE], ()

    def _n_questions(self, n_units: int) -> int:
        """Those that have their whole period."""
        return max(0, (n_units - self.first_at_s) // PERIOD_S)

    def report(self, n_units: int) -> dict[str, Any]:
        journal, wrong = self.journal, []
        for number in range(self._n_questions(n_units)):
            begin = self.first_at_s + number * PERIOD_S
            replies = journal.replies[begin : begin + PERIOD_S]
            heard = " ".join(reply.result.heard for reply in replies)
            if QUESTIONS[number % len(QUESTIONS)][1] not in heard:
                wrong.append({"unit": begin, "heard": heard})
        return {
            "units": len(journal.replies),
            "expected": n_units,
            "latency_ms": percentiles(journal.latencies_s(), 1000),
            "missed": sum(s > DEADLINE_S for s in journal.latencies_s()) + journal.n_unanswered,
            "dropped": journal.n_dropped,
            "gaps_ms": percentiles(journal.gaps_s(DEFAULT_BUFFER_S), 1000),
            "interruptions": sum(reply.result.interrupted for reply in journal.replies),
            "questions": self._n_questions(n_units),
            "wrong_captions": wrong,
            "errors": [error.slug for error in journal.errors],
            "problem": self.problem,
        }

    def is_well(self, n_units: int) -> bool:
        figures = self.report(n_units)
        bad = ("missed", "dropped", "wrong_captions", "errors", "problem")
        return figures["units"] == n_units and not any(figures[name] for name in bad)
