"""`python -m client.load`: many sessions at the pace of microphones, and what they got.

Each session sends a chunk a second (`--chunk-s`), at an instant of its own within the chunk
unless `--together`, whatever the server does. Times are taken at the socket. Prints a table and,
as the last line, one JSON object.

Exit status: 0 when every session was served to its end and every chunk was used and answered;
1 when something was lost (a session refused or ended early, a result missing, input dropped, an
error); 2 for a wrong command line or a file that cannot be read. Late results and audible gaps
are figures, not losses.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from client.duplex import Closed, DuplexClient, DuplexError, ErrorEvent, Queued, QueueDone
from client.journal import NO_SAMPLES, Journal, percentiles
from client.media import audible_span, read_audio
from client.paced import Chunk, LoopProbe, stream
from shared.clips import Clip, MediaError, read_clip
from shared.limits import INPUT_SAMPLE_RATE_HZ, MAX_CHUNK_S
from shared.playback import DEFAULT_BUFFER_S

DEADLINE_S = 1.0
"""A result that comes later than this after its chunk is too late to keep up."""

GOODBYE_S = 10.0
"""For the server to close the session after `stop`."""

LATE_CLIENT_MS = 20.0
"""A generator later than this (p99) spoils the figures."""


@dataclass(frozen=True)
class Plan:
    """What one run does."""

    url: str
    n_sessions: int
    duration_s: float
    chunk_s: float = 1.0
    is_together: bool = False
    max_wait_s: float = 60.0
    pause_s: float = 10.0
    buffer_s: float = DEFAULT_BUFFER_S
    api_key: str | None = None
    ca_file: Path | None = None

    @property
    def n_chunks(self) -> int:
        return max(1, round(self.duration_s / self.chunk_s))


class Track:
    """What every session sends: a clip again and again with a pause after each, or silence."""

    def __init__(self, clip: Clip, pause_s: float) -> None:
        pause = np.zeros(round(pause_s * INPUT_SAMPLE_RATE_HZ), np.float32)
        self._loop = np.concatenate([clip.audio, pause]) if clip.audio.size else None
        self._frames = clip.frames
        self._speech_end_s = audible_span(clip.audio)[1] / INPUT_SAMPLE_RATE_HZ

    @property
    def period_s(self) -> float:
        """From one repetition to the next; 0 without a clip."""
        return self._loop.size / INPUT_SAMPLE_RATE_HZ if self._loop is not None else 0.0

    @property
    def has_frames(self) -> bool:
        return bool(self._frames)

    def chunks(self, n_chunks: int, chunk_s: float) -> Iterator[Chunk]:
        size = round(chunk_s * INPUT_SAMPLE_RATE_HZ)
        silence = np.zeros(size, np.float32)
        for index in range(n_chunks):
            start = index * size
            samples = silence
            if self._loop is not None:
                samples = self._loop.take(range(start, start + size), mode="wrap")
            yield samples, self._frames_of(start, start + size)

    def _frames_of(self, start: int, end: int) -> Sequence[bytes]:
        """One frame a second; the clip's pictures go round too."""
        if not self._frames:
            return ()
        seconds = range(start // INPUT_SAMPLE_RATE_HZ, end // INPUT_SAMPLE_RATE_HZ)
        return [self._frames[second % len(self._frames)] for second in seconds]

    def speech_ends_s(self, duration_s: float) -> list[float]:
        """Where the last audible sample of each repetition is that fits with its pause."""
        if self._loop is None or not self._speech_end_s:
            return []
        n_whole = int(duration_s / self.period_s)
        return [self._speech_end_s + i * self.period_s for i in range(n_whole)]


@dataclass
class Visit:
    """One session's fate. `lost` is the slug of what kept it from being served to its end."""

    lost: str = ""
    queue_wait_s: float | None = None
    """From the first word of the queue to a free slot; None = it never waited."""
    prepare_s: float | None = None
    """From a free slot to the session being ready; None = it never was."""
    begin_at: float = 0.0
    journal: Journal | None = None
    close_code: int | None = None
    """None = the server did not close after `stop`, or could not be reached."""


async def visit(plan: Plan, track: Track, start_at: float, phase_s: float) -> Visit:
    """Open a session, stream to it, stop it; never raises for what a server does."""
    what = Visit()
    await asyncio.sleep(start_at + phase_s - time.monotonic())
    client = DuplexClient(
        plan.url,
        plan.api_key,
        mode="omni" if track.has_frames else "audio",
        ca_file=plan.ca_file,
    )
    try:
        async with client as session:
            try:
                await _serve(session, what, plan, track, start_at + phase_s)
            except DuplexError:
                await _stop(session)
                raise
            await _stop(session)
    except TimeoutError:
        what.lost = "gave_up_waiting"
    except DuplexError as error:
        what.lost = error.slug or ("connection_lost" if client.closed else "no_connection")
    what.close_code = client.closed.code if client.closed else None
    if not what.lost and what.close_code != 1000:
        what.lost = f"closed_{what.close_code}" if what.close_code else "not_closed"
    return what


async def _serve(
    session: DuplexClient, what: Visit, plan: Plan, track: Track, grid_at: float
) -> None:
    """Stream one session.

    Raises:
        DuplexError: it cannot start, or ended before its time.
        TimeoutError: it was not ready within `max_wait_s`.
    """
    async with asyncio.timeout(plan.max_wait_s):
        await _admit(session, what)
        ready_at = time.monotonic()
        await session.prepare()
    what.prepare_s = session.received_at - ready_at
    # On the grid that all sessions share, however long each had to wait.
    n_past = (time.monotonic() - grid_at) // plan.chunk_s + 1
    what.begin_at = grid_at + n_past * plan.chunk_s
    chunks = track.chunks(plan.n_chunks, plan.chunk_s)
    journal = what.journal = await stream(session, chunks, what.begin_at, plan.chunk_s)
    if journal.problem:
        raise DuplexError(journal.problem, journal.slug)
    if session.closed is not None:
        last = journal.errors[-1].slug if journal.errors else ""
        raise DuplexError("the session ended early", last or f"closed_{session.closed.code}")


async def _admit(session: DuplexClient, what: Visit) -> None:
    """Wait for a slot. Raises DuplexError when there will be none."""
    queued_at: float | None = None
    async for event in session:
        match event:
            case Queued():
                queued_at = session.received_at
            case QueueDone():
                if queued_at is not None:
                    what.queue_wait_s = session.received_at - queued_at
                return
            case ErrorEvent():
                raise DuplexError(event.message, event.slug)
            case Closed():
                raise DuplexError(event.reason, f"closed_{event.code}")
            case _:
                pass


async def _stop(session: DuplexClient) -> None:
    """End the session in order, if it has not ended yet, and wait until the server has closed."""
    with contextlib.suppress(TimeoutError, DuplexError):
        async with asyncio.timeout(GOODBYE_S):
            with contextlib.suppress(DuplexError):
                await session.stop()
            async for _ in session:
                pass


async def load(plan: Plan, clip: Clip) -> dict[str, Any]:
    """Run all sessions to their end; returns the report."""
    track = Track(clip, plan.pause_s)
    start_at, cpu_at = time.monotonic(), time.process_time()
    phases = [
        0.0 if plan.is_together else plan.chunk_s * index / plan.n_sessions
        for index in range(plan.n_sessions)
    ]
    async with LoopProbe() as probe:
        visits = await asyncio.gather(
            *(visit(plan, track, start_at, phase_s) for phase_s in phases)
        )
    wall_s = time.monotonic() - start_at
    cpu_share = (time.process_time() - cpu_at) / wall_s
    settings = {
        "url": plan.url,
        "sessions": plan.n_sessions,
        "seconds": plan.duration_s,
        "chunk_s": plan.chunk_s,
        "together": plan.is_together,
        "buffer_ms": 1000 * plan.buffer_s,
    }
    figures = report(plan, track, visits)
    return {
        "settings": settings,
        **figures,
        "client": client_figures(visits, probe, cpu_share),
    }


def report(plan: Plan, track: Track, visits: Sequence[Visit]) -> dict[str, Any]:
    """Return the figures of all sessions together."""
    journals = [what.journal for what in visits if what.journal is not None]
    latencies = [s for journal in journals for s in journal.latencies_s()]
    pieces = [piece for journal in journals for piece in journal.pieces(plan.buffer_s)]
    leads = [piece.lead_s for piece in pieces]
    answers = [s for what in visits for s in answers_s(what, track, plan)]
    errors = Counter(error.slug or "unnamed" for j in journals for error in j.errors)
    lost = Counter(what.lost for what in visits if what.lost)
    figures = {
        "sessions": {
            "asked": len(visits),
            "served": sum(not what.lost for what in visits),
            "refused": sum(bool(what.lost) and what.journal is None for what in visits),
            "queued": sum(what.queue_wait_s is not None for what in visits),
            "lost": dict(lost),
        },
        "queue_wait_s": percentiles(s for w in visits if (s := w.queue_wait_s) is not None),
        "prepare_ms": percentiles((s for w in visits if (s := w.prepare_s) is not None), 1000),
        "chunks": sum(len(journal.sent) for journal in journals),
        "latency_ms": percentiles(latencies, 1000),
        "late_results": sum(s > DEADLINE_S for s in latencies),
        "dropped": sum(journal.n_dropped for journal in journals),
        "missing": sum(journal.n_unanswered for journal in journals),
        "first_audio_ms": percentiles((s for j in journals for s in j.first_audio_s()), 1000),
        "answer_s": percentiles(s for s in answers if s is not None),
        "unanswered_turns": sum(s is None for s in answers),
        "gaps_ms": percentiles((piece.gap_s for piece in pieces if piece.gap_s > 0), 1000),
        "lead_s": {"min": round(min(leads), 3), "max": round(max(leads), 3)} if leads else {},
        "errors": dict(errors),
        "close_codes": dict(Counter(str(w.close_code or "none") for w in visits)),
    }
    return {**figures, "lost": bool(lost or errors or figures["dropped"] or figures["missing"])}


def answers_s(what: Visit, track: Track, plan: Plan) -> list[float | None]:
    """For each time the clip was spoken, from its end to the first audio; None = no answer."""
    if what.journal is None:
        return []
    ends = track.speech_ends_s(len(what.journal.sent) * plan.chunk_s)
    answers: list[float | None] = []
    for end_s in ends:
        answer_s = what.journal.first_audio_after(what.begin_at + end_s)
        # Later audio answers the next repetition.
        is_own = answer_s is not None and answer_s < track.period_s
        answers.append(answer_s if is_own else None)
    return answers


def client_figures(visits: Sequence[Visit], probe: LoopProbe, cpu_share: float) -> dict[str, Any]:
    """How late the generator was itself; a late one measures itself, not the server."""
    sent = [chunk for w in visits if w.journal is not None for chunk in w.journal.sent]
    loop_late_ms = percentiles(probe.late_s, 1000)
    return {
        "send_late_ms": percentiles((chunk.late_s for chunk in sent), 1000),
        "loop_late_ms": loop_late_ms,
        "send_blocked_ms": percentiles((chunk.blocked_s for chunk in sent), 1000),
        "cpu_share": round(cpu_share, 3),
        "is_late": loop_late_ms.get("p99", 0.0) > LATE_CLIENT_MS,
    }


def table(figures: dict[str, Any]) -> str:
    """Return the report for people."""
    sessions, client = figures["sessions"], figures["client"]
    rows = [
        ("sessions", _counts(sessions, "asked", "served", "refused", "queued")),
        ("lost sessions", _slugs(sessions["lost"])),
        ("close codes", _slugs(figures["close_codes"])),
        ("errors", _slugs(figures["errors"])),
        ("wait for a slot, s", _spread(figures["queue_wait_s"])),
        ("prepare, ms", _spread(figures["prepare_ms"])),
        ("chunk to result, ms", _spread(figures["latency_ms"])),
        ("results", _counts(figures, "chunks", "late_results", "dropped", "missing")),
        ("first audio, ms", _spread(figures["first_audio_ms"])),
        ("end of speech to audio, s", _spread(figures["answer_s"])),
        ("turns without answer", str(figures["unanswered_turns"])),
        ("audible gaps, ms", _spread(figures["gaps_ms"])),
        ("audio ahead of playback, s", _spread(figures["lead_s"])),
        ("own lateness sending, ms", _spread(client["send_late_ms"])),
        ("own event loop late, ms", _spread(client["loop_late_ms"])),
        ("connection blocked, ms", _spread(client["send_blocked_ms"])),
        ("own CPU", f"{client['cpu_share']:.0%} of one core"),
    ]
    lines = [f"{name:27} {value}" for name, value in rows]
    if client["is_late"]:
        lines.append("this client was too busy: it measured itself, use fewer sessions or machines")
    return "\n".join(lines)


def _spread(figures: dict[str, float]) -> str:
    shown = [f"{name} {value:g}" for name, value in figures.items()]
    return "  ".join(shown) if shown and figures.get("n") != 0 else "-"


def _counts(figures: dict[str, Any], *names: str) -> str:
    return ", ".join(f"{figures[name]} {name.replace('_results', '')}" for name in names)


def _slugs(counts: dict[str, int]) -> str:
    return ", ".join(f"{slug} {count}" for slug, count in sorted(counts.items())) or "-"


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m client.load",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--url", default="ws://127.0.0.1:8006", help="server (default: %(default)s)"
    )
    parser.add_argument("--sessions", type=int, default=1, help="sessions at the same time")
    parser.add_argument("--seconds", type=float, default=30.0, help="length of each session")
    parser.add_argument("--audio", type=Path, help="what each says, again and again; else silence")
    parser.add_argument("--video", type=Path, help="file whose picture is sent, a frame a second")
    parser.add_argument("--pause-s", type=float, default=10.0, help="silence after each --audio")
    parser.add_argument("--chunk-s", type=float, default=1.0, help="seconds per chunk")
    parser.add_argument("--together", action="store_true", help="all send at the same instant")
    parser.add_argument(
        "--buffer-ms", type=float, default=1000 * DEFAULT_BUFFER_S, help="the player's buffer"
    )
    parser.add_argument(
        "--max-wait-s", type=float, default=60.0, help="a session that waits longer gives up"
    )
    parser.add_argument("--api-key")
    parser.add_argument("--ca", type=Path, help="certificate to trust, such as certs/cert.pem")
    parser.add_argument("--json", type=Path, help="also write the JSON line to this file")
    arguments = parser.parse_args(argv)
    if arguments.sessions < 1:
        parser.error(f"--sessions is {arguments.sessions}, must be at least 1")
    if not 0.05 <= arguments.chunk_s <= MAX_CHUNK_S:
        parser.error(f"--chunk-s is {arguments.chunk_s}, must be in 0.05..{MAX_CHUNK_S:g}")
    for name in ("seconds", "pause_s", "buffer_ms", "max_wait_s"):
        if getattr(arguments, name) < 0:
            parser.error(f"--{name.replace('_', '-')} must not be negative")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; the exit status is told at the top."""
    arguments = parse_arguments(argv)
    plan = Plan(
        url=arguments.url,
        n_sessions=arguments.sessions,
        duration_s=arguments.seconds,
        chunk_s=arguments.chunk_s,
        is_together=arguments.together,
        max_wait_s=arguments.max_wait_s,
        pause_s=arguments.pause_s,
        buffer_s=arguments.buffer_ms / 1000,
        api_key=arguments.api_key,
        ca_file=arguments.ca,
    )
    try:
        audio = read_audio(arguments.audio) if arguments.audio else NO_SAMPLES
        frames = read_clip(arguments.video).frames if arguments.video else ()
        figures = asyncio.run(load(plan, Clip(audio, frames)))
    except (MediaError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 1
    print(table(figures))
    line = json.dumps(figures)
    if arguments.json:
        arguments.json.write_text(line + "\n", encoding="utf-8")
    print(line)
    return 1 if figures["lost"] else 0


if __name__ == "__main__":
    sys.exit(main())
