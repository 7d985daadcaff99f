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
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from client.duplex import DuplexClient
from client.journal import Journal, Reply, percentiles
from client.load.figures import DEADLINE_S
from client.media import audible_span, read_audio
from client.paced import stream
from shared.audio import Samples
from shared.limits import INPUT_SAMPLE_RATE_HZ as RATE
from shared.playback import DEFAULT_BUFFER_S
from tests.bench.provenance import provenance

ASSETS = Path(__file__).parents[1] / "assets"
QUESTIONS = ("capital_france.wav", "days_in_week.wav")
TURN_S = 15.0


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
        first, end = audible_span(samples)
        start = int(start_s * RATE)
        piece = samples[first:end][: len(self.samples) - start]
        self.samples[start : start + len(piece)] += piece
        self.spoken.append(Spoken(clip, start_s, start_s + len(piece) / RATE))
        return self

    def hiss(self, start_s: float, end_s: float, dbfs: float) -> Track:
        """Add white noise of an RMS level."""
        part = self.samples[int(start_s * RATE) : int(end_s * RATE)]
        noise = np.random.default_rng(7).standard_normal(len(part)).astype(np.float32)
        part += noise * np.float32(10 ** (dbfs / 20))
        return self


@dataclass(frozen=True)
class Heard:
    """What came back, one reply per chunk."""

    opened_at: float
    """When the microphone was opened, on the journal's clock."""
    journal: Journal

    @property
    def replies(self) -> Sequence[Reply]:
        return self.journal.replies

    def first_audio_after(self, moment_s: float) -> float | None:
        """Seconds from a moment of the track to the first speech that came later."""
        return self.journal.first_audio_after(self.opened_at + moment_s)


async def converse(url: str, track: Track) -> Heard:
    """Stream one track at the pace of a microphone."""
    n_chunks = len(track.samples) // RATE
    chunks = [(track.samples[i * RATE : (i + 1) * RATE], ()) for i in range(n_chunks)]
    async with DuplexClient(url, mode="audio") as session:
        await session.prepare()
        opened_at = time.monotonic()
        journal = await stream(session, chunks, opened_at, 1.0)
    if len(journal.replies) < n_chunks:
        raise RuntimeError(f"{len(journal.replies)} results for {n_chunks} chunks")
    return Heard(opened_at, journal)


def turns(duration_s: float, first_s: float, step: float = 0.13) -> Track:
    """Questions every `TURN_S` seconds, each a bit later within its chunk than the last."""
    track = Track.silence(duration_s)
    n_turns = int((duration_s - first_s) // TURN_S)
    for turn in range(n_turns):
        clip = QUESTIONS[turn % len(QUESTIONS)]
        track.say(clip, first_s + turn * TURN_S + (turn * step) % 1.0)
    return track


def summary(tracks: Sequence[Track], answers: Sequence[Heard]) -> dict[str, Any]:
    first = [
        heard.first_audio_after(spoken.end_s)
        for track, heard in zip(tracks, answers, strict=True)
        for spoken in track.spoken
    ]
    latencies = [s for heard in answers for s in heard.journal.latencies_s()]
    gaps = [s for heard in answers for s in heard.journal.gaps_s(DEFAULT_BUFFER_S)]
    return {
        "unit_ms": percentiles(latencies, 1000),
        "late_units": sum(s > DEADLINE_S for s in latencies),
        "first_audio_s": percentiles(s for s in first if s is not None),
        "unanswered": sum(s is None for s in first),
        "gaps_ms": percentiles(gaps, 1000),
        "heard": [r.result.heard for heard in answers for r in heard.replies if r.result.heard],
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
    replies = heard.replies
    flushed = [i for i, r in enumerate(replies) if r.result.interrupted]
    was_speaking = bool(replies[due - 1].n_samples)
    return {
        "offset_s": offset_s,
        "was_speaking": was_speaking,
        "due_chunk": due,
        "interrupted_chunks": flushed,
        "in_time": flushed == [due] and replies[due].result.is_listen,
        "answered": [r.result.heard for r in replies[due:] if r.result.heard],
        "says": "".join(r.result.text for r in replies[due:])[:120],
    }


async def noise(url: str) -> dict[str, Any]:
    """White noise at -20 dBFS during an answer must not stop it."""
    track = Track.silence(24.0).say("long_story.wav", 0.5).hiss(11.0, 20.0, -20.0)
    heard = await converse(url, track)
    during = heard.replies[11:20]
    return {
        "spoke_before": bool(heard.replies[10].n_samples),
        "interrupted": sum(r.result.interrupted for r in during),
        "speak_units": sum(bool(r.n_samples) for r in during),
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
    line = json.dumps({**provenance(), **figures})
    if arguments.out:
        arguments.out.write_text(line + "\n", encoding="utf-8")
    print(line)


if __name__ == "__main__":
    main()
