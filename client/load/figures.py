"""The figures of a load run, mode by mode, and how they are shown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from client.journal import percentiles
from client.load.answers import Answers
from client.load.plan import Mode, Plan, Track
from client.load.visits import Visit
from client.paced import LoopProbe

DEADLINE_S = 1.0
"""A result that comes later than this after its chunk is too late to keep up."""

LATE_CLIENT_MS = 20.0
"""A generator later than this (p99) spoils the figures."""


def report(plan: Plan, mode: Mode, track: Track, visits: Sequence[Visit]) -> dict[str, Any]:
    """Return the figures of all sessions of one mode together."""
    lost = Counter(what.lost for what in visits if what.lost)
    errors = Counter(error.slug or "unnamed" for what in visits for error in what.errors)
    codes = Counter(str(code or "none") for what in visits for code in what.close_codes)
    if mode in {"half_duplex", "chat"}:
        figures = _answered(visits)
    else:
        figures = _streamed(plan, mode, track, visits)
    return {
        "sessions": {
            "asked": len(visits),
            "served": sum(not what.lost for what in visits),
            "refused": sum(
                bool(what.lost) and what.journal is None and what.answers is None for what in visits
            ),
            "queued": sum(bool(what.queue_waits_s) for what in visits),
            "lost": dict(lost),
        },
        "queue_wait_s": percentiles(s for what in visits for s in what.queue_waits_s),
        "prepare_ms": percentiles(
            (what.prepare_s for what in visits if what.prepare_s is not None), 1000
        ),
        **figures,
        "errors": dict(errors),
        "close_codes": dict(codes),
        "lost": bool(lost or errors or figures["dropped"] or figures["missing"]),
    }


def _streamed(plan: Plan, mode: Mode, track: Track, visits: Sequence[Visit]) -> dict[str, Any]:
    """Full duplex: each chunk has a result."""
    journals = [what.journal for what in visits if what.journal is not None]
    latencies = [s for journal in journals for s in journal.latencies_s()]
    pieces = [piece for journal in journals for piece in journal.pieces(plan.buffer_s)]
    leads = [piece.lead_s for piece in pieces]
    answers = [s for what in visits for s in _waits_s(what, track, plan.chunk_of(mode))]
    return {
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
    }


def _waits_s(what: Visit, track: Track, chunk_s: float) -> list[float | None]:
    """For each time the clip was spoken, from its end to the first audio; None = no answer."""
    if what.journal is None:
        return []
    ends = track.speech_ends_s(len(what.journal.sent) * chunk_s)
    answers: list[float | None] = []
    for end_s in ends:
        answer_s = what.journal.first_audio_after(what.begin_at + end_s)
        # Later audio answers the next repetition.
        is_own = answer_s is not None and answer_s < track.period_s
        answers.append(answer_s if is_own else None)
    return answers


def _answered(visits: Sequence[Visit]) -> dict[str, Any]:
    """Half duplex and chat: each question has an answer."""
    records: list[Answers] = [what.answers for what in visits if what.answers is not None]
    answers = [answer for record in records for answer in record.answers]
    gaps = [gap_s for answer in answers for gap_s in answer.gaps_s]

    def spread(name: str) -> dict[str, float]:
        times = (getattr(answer, name) for answer in answers)
        return percentiles((s for s in times if s is not None), 1000)

    return {
        "questions": len(answers),
        "missing": sum(record.n_missing for record in records),
        "cut_short": sum(record.n_cut_short for record in records),
        "dropped": sum(record.n_dropped for record in records),
        "first_text_ms": spread("first_text_s"),
        "first_audio_ms": spread("first_audio_s"),
        "done_ms": spread("done_s"),
        "gaps_ms": percentiles(gaps, 1000),
    }


def client_figures(visits: Sequence[Visit], probe: LoopProbe, cpu_share: float) -> dict[str, Any]:
    """How late the generator was itself; a late one measures itself, not the server."""
    sent = [chunk for what in visits for chunk in what.sent]
    loop_late_ms = percentiles(probe.late_s, 1000)
    return {
        "send_late_ms": percentiles((chunk.late_s for chunk in sent), 1000),
        "loop_late_ms": loop_late_ms,
        "send_blocked_ms": percentiles((chunk.blocked_s for chunk in sent), 1000),
        "cpu_share": round(cpu_share, 3),
        "is_late": loop_late_ms.get("p99", 0.0) > LATE_CLIENT_MS,
    }


def table(figures: dict[str, Any]) -> str:
    """Return the report for people, a block for each mode."""
    lines: list[str] = []
    for mode, one in figures["modes"].items():
        rows = [("mode", mode), *_common_rows(one)]
        rows += _answer_rows(one) if "questions" in one else _stream_rows(one)
        lines += [*_lines(rows), ""]
    client = figures["client"]
    rows = [
        ("own lateness sending, ms", _spread(client["send_late_ms"])),
        ("own event loop late, ms", _spread(client["loop_late_ms"])),
        ("connection blocked, ms", _spread(client["send_blocked_ms"])),
        ("own CPU", f"{client['cpu_share']:.0%} of one core"),
    ]
    lines += _lines(rows)
    if client["is_late"]:
        lines.append("this client was too busy: it measured itself, use fewer sessions or machines")
    return "\n".join(lines)


def _common_rows(one: dict[str, Any]) -> list[tuple[str, str]]:
    sessions = one["sessions"]
    return [
        ("sessions", _counts(sessions, "asked", "served", "refused", "queued")),
        ("lost sessions", _slugs(sessions["lost"])),
        ("close codes", _slugs(one["close_codes"])),
        ("errors", _slugs(one["errors"])),
        ("wait for a slot, s", _spread(one["queue_wait_s"])),
        ("prepare, ms", _spread(one["prepare_ms"])),
    ]


def _stream_rows(one: dict[str, Any]) -> list[tuple[str, str]]:
    return [
        ("chunk to result, ms", _spread(one["latency_ms"])),
        ("results", _counts(one, "chunks", "late_results", "dropped", "missing")),
        ("first audio, ms", _spread(one["first_audio_ms"])),
        ("end of speech to audio, s", _spread(one["answer_s"])),
        ("turns without answer", str(one["unanswered_turns"])),
        ("audible gaps, ms", _spread(one["gaps_ms"])),
        ("audio ahead of playback, s", _spread(one["lead_s"])),
    ]


def _answer_rows(one: dict[str, Any]) -> list[tuple[str, str]]:
    return [
        ("answers", _counts(one, "questions", "missing", "cut_short", "dropped")),
        ("question to first text, ms", _spread(one["first_text_ms"])),
        ("question to sound, ms", _spread(one["first_audio_ms"])),
        ("question to the end, ms", _spread(one["done_ms"])),
        ("audible gaps, ms", _spread(one["gaps_ms"])),
    ]


def _lines(rows: Sequence[tuple[str, str]]) -> list[str]:
    return [f"{name:27} {value}" for name, value in rows]


def _spread(figures: dict[str, float]) -> str:
    shown = [f"{name} {value:g}" for name, value in figures.items()]
    return "  ".join(shown) if shown and figures.get("n") != 0 else "-"


def _counts(figures: dict[str, Any], *names: str) -> str:
    words = {"late_results": "late", "cut_short": "cut short"}
    return ", ".join(f"{figures[name]} {words.get(name, name)}" for name in names)


def _slugs(counts: dict[str, int]) -> str:
    return ", ".join(f"{slug} {count}" for slug, count in sorted(counts.items())) or "-"
