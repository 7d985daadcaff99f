"""Live conversations with a running service: latency of units, first audio, barge-in.

    bash start_all.sh --http --detach
    .venv/bin/python -m tests.bench.bench_conversation --url ws://127.0.0.1:8006 --minutes 2

What limits it on a CPU: a decode step of the cascade's language model reads 540 MB of weights
(44 ms at this machine class's memory bandwidth); the answer's first phrase takes about eight
steps, one transcription and one synthesis. The chunk of one second adds half a second on
average before the end of speech is seen at all.

Cases: one session with several turns, two sessions with staggered turns, two that speak at the
same time, barge-in at different places in the chunk, noise during an answer. Prints a table and,
as the last line, one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from client.duplex import DuplexClient, Result
from client.media import read_audio
from shared.audio import Samples
from shared.limits import INPUT_SAMPLE_RATE_HZ as RATE

ASSETS = Path(__file__).parents[1] / "assets"
QUESTIONS = ("capital_france.wav", "days_in_week.wav")
TURN_S = 15.0
AUDIBLE = 0.01


@dataclass(frozen=True)
class Spoken:
    """One clip on the input timeline."""

    clip: str
    start_s: float
    end_s: float
    """Its last audible sample."""


@dataclass
class Track:
    """The whole input of one session."""

    samples: Samples
    spoken: list[Spoken] = field(default_factory=list)

    @classmethod
    def silence(cls, duration_s: float) -> Track:
        return cls(np.zeros(int(duration_s * RATE), np.float32))

    def say(self, clip: str, start_s: float) -> Track:
        return self.say_samples(read_audio(ASSETS / clip), start_s, clip)

    def say_samples(self, samples: Samples, start_s: float, clip: str = "") -> Track:
        """Add speech whose first audible sample is at `start_s`."""
        audible = np.flatnonzero(np.abs(samples) > AUDIBLE)
        start = int(start_s * RATE)
        piece = samples[audible[0] : audible[-1] + 1][: len(self.samples) - start]
        self.samples[start : start + len(piece)] += piece
        self.spoken.append(Spoken(clip, start_s, start_s + len(piece) / RATE))
        return self

    def hiss(self, start_s: float, end_s: float, dbfs: float) -> Track:
        """Add white noise of an RMS level."""
        part = self.samples[int(start_s * RATE) : int(end_s * RATE)]
        noise = np.random.default_rng(7).standard_normal(len(part)).astype(np.float32)
        part += noise * np.float32(10 ** (dbfs / 20))
        return self


@dataclass
class Heard:
    """What came back: one entry per chunk, times in seconds since the microphone was opened."""

    results: list[Result] = field(default_factory=list)
    at_s: list[float] = field(default_factory=list)
    sent_s: list[float] = field(default_factory=list)

    @property
    def latency_ms(self) -> list[float]:
        return [1000 * (a - s) for a, s in zip(self.at_s, self.sent_s, strict=False)]

    def first_audio_after(self, moment_s: float) -> float | None:
        """Seconds from a moment to the first result with speech sent after it."""
        pairs = zip(self.at_s, self.results, strict=True)
        return next((at - moment_s for at, r in pairs if at > moment_s and r.audio.size), None)

    def gaps_ms(self, buffer_ms: float = 200.0) -> list[float]:
        """Silences inside turns as a player with a jitter buffer would make them."""
        gaps, free_at = [], None
        for at, result in zip(self.at_s, self.results, strict=True):
            if result.interrupted:
                free_at = None
            if result.audio.size:
                if free_at is None:
                    free_at = at + buffer_ms / 1000
                elif at > free_at:
                    gaps.append(1000 * (at - free_at))
                    free_at = at
                free_at += result.audio.size / 24_000
            if result.end_of_turn:
                free_at = None
        return gaps


async def converse(url: str, track: Track) -> Heard:
    """Stream one track at the pace of a microphone."""
    heard = Heard()
    async with DuplexClient(url, mode="audio") as session:
        await session.prepare()
        opened = time.monotonic()
        n_chunks = len(track.samples) // RATE

        async def listen() -> None:
            async for event in session:
                if isinstance(event, Result):
                    heard.results.append(event)
                    heard.at_s.append(time.monotonic() - opened)
                    if len(heard.results) == n_chunks:
                        return

        reader = asyncio.create_task(listen())
        for index in range(n_chunks):
            await asyncio.sleep(max(0.0, opened + index + 1 - time.monotonic()))
            heard.sent_s.append(time.monotonic() - opened)
            await session.send_audio(track.samples[index * RATE : (index + 1) * RATE])
        await asyncio.wait_for(reader, 10)
    return heard


def turns(duration_s: float, first_s: float, step: float = 0.13) -> Track:
    """Questions every `TURN_S` seconds, each a bit later within its chunk than the last."""
    track = Track.silence(duration_s)
    n_turns = int((duration_s - first_s) // TURN_S)
    for turn in range(n_turns):
        clip = QUESTIONS[turn % len(QUESTIONS)]
        track.say(clip, first_s + turn * TURN_S + (turn * step) % 1.0)
    return track


def percentiles(values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {"n": 0}
    q = np.percentile(values, [50, 95, 100])
    p50, p95, largest = (round(float(value), 2) for value in q)
    return {"n": len(values), "p50": p50, "p95": p95, "max": largest}


def summary(tracks: Sequence[Track], answers: Sequence[Heard]) -> dict[str, Any]:
    first = [
        heard.first_audio_after(spoken.end_s)
        for track, heard in zip(tracks, answers, strict=True)
        for spoken in track.spoken
    ]
    latency = [ms for heard in answers for ms in heard.latency_ms]
    return {
        "unit_ms": percentiles(latency),
        "late_units": sum(ms > 1000 for ms in latency),
        "first_audio_s": percentiles([s for s in first if s is not None]),
        "unanswered": sum(s is None for s in first),
        "gaps_ms": percentiles([gap for heard in answers for gap in heard.gaps_ms()]),
        "heard": [r.heard for heard in answers for r in heard.results if r.heard],
    }


async def several(url: str, tracks: Sequence[Track]) -> dict[str, Any]:
    answers = await asyncio.gather(*(converse(url, track) for track in tracks))
    return summary(tracks, answers)


async def barge_in(url: str, offset_s: float) -> dict[str, Any]:
    """Interrupt a story; `offset_s` is where in its chunk the interruption begins."""
    begun_s = 12.0 + offset_s
    track = Track.silence(30.0).say("long_story.wav", 0.5).say("stop_talking.wav", begun_s)
    heard = await converse(url, track)
    # The first chunk that holds at least 300 ms of the interruption.
    due = int(begun_s) if begun_s % 1.0 <= 0.7 else int(begun_s) + 1
    flushed = [i for i, r in enumerate(heard.results) if r.interrupted]
    was_speaking = bool(heard.results[due - 1].audio.size)
    return {
        "offset_s": offset_s,
        "was_speaking": was_speaking,
        "due_chunk": due,
        "interrupted_chunks": flushed,
        "in_time": flushed == [due] and heard.results[due].is_listen,
        "answered": [r.heard for r in heard.results[due:] if r.heard],
        "says": "".join(r.text for r in heard.results[due:])[:120],
    }


async def noise(url: str) -> dict[str, Any]:
    """White noise at -20 dBFS during an answer must not stop it."""
    track = Track.silence(24.0).say("long_story.wav", 0.5).hiss(11.0, 20.0, -20.0)
    heard = await converse(url, track)
    during = heard.results[11:20]
    return {
        "spoke_before": bool(heard.results[10].audio.size),
        "interrupted": sum(r.interrupted for r in during),
        "speak_units": sum(bool(r.audio.size) for r in during),
    }


async def measure(url: str, minutes: float) -> dict[str, Any]:
    duration_s = 60.0 * minutes
    return {
        "single": await several(url, [turns(duration_s, 1.0)]),
        "staggered": await several(url, [turns(60.0, 1.0), turns(60.0, 1.0 + TURN_S / 2)]),
        "simultaneous": await several(url, [turns(45.0, 1.0), turns(45.0, 1.0)]),
        "barge_in": [await barge_in(url, offset_s) for offset_s in (0.0, 0.35, 0.65, 0.85)],
        "noise": await noise(url),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="ws://127.0.0.1:8006")
    parser.add_argument("--minutes", type=float, default=2.0, help="length of the single session")
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    arguments = parser.parse_args()
    figures = asyncio.run(measure(arguments.url, arguments.minutes))
    for case in ("single", "staggered", "simultaneous"):
        row = figures[case]
        print(f"{case:13} unit ms {row['unit_ms']}  first audio s {row['first_audio_s']}")
        print(f"{'':13} late units {row['late_units']}  gaps ms {row['gaps_ms']}")
    for row in figures["barge_in"]:
        print(f"barge-in at +{row['offset_s']:.2f} s: in time {row['in_time']}  {row['answered']}")
    print(f"noise: {figures['noise']}")
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    report = {"commit": commit, "machine": platform.processor() or platform.machine(), **figures}
    line = json.dumps(report)
    if arguments.out:
        arguments.out.write_text(line + "\n", encoding="utf-8")
    print(line)


if __name__ == "__main__":
    main()
