"""Sessions of all modes that end in every way against one worker, and what they leave behind.

    .venv/bin/python -m tests.faults.leaks --sessions 200 --backend cascade

Starts a gateway and a worker of its own. Prints what each process holds at the start, after the
first tenth of the sessions and at the end, and, as the last line, one JSON object. Exit status 1
when something leaked. The cascade needs about two seconds a session on two cores.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from client.media import read_audio
from tests.faults.clients import Target, chunks_of, gone_silent, turn_of
from tests.faults.endings import (
    ENDINGS,
    NEEDS_ALL_SLOTS,
    SLOW_ENDINGS,
    WARM_UP,
    Ending,
    by_mode,
)
from tests.faults.processes import Usage, cascade_worker, fake_worker, gateway, running, wait_ready
from tests.faults.service import Service, mixed, run_all

QUESTION = Path(__file__).parents[1] / "assets" / "capital_france.wav"
N_SLOTS = 4
AT_A_TIME = 6
CASCADE_CHUNK_S = 0.25
"""Faster than speech, so that a session with a question stays short."""


def measure(folder: Path, backend: str, n_sessions: int, seed: int) -> dict[str, Any]:
    rng = random.Random(seed)
    if backend == "cascade":
        worker = cascade_worker(folder, sessions_per_worker=N_SLOTS)
        # It never has more to say than a client leaves unread, so that ending is not for it.
        slow: tuple[Ending, ...] = (gone_silent,)
    else:
        worker = fake_worker(folder, slots=N_SLOTS, unit_ms=2, speech_s=1.0)
        slow = SLOW_ENDINGS
    front = gateway(folder, [worker.port])
    target = Target(front.ws_url, N_SLOTS, rng=rng)
    if backend == "cascade":
        spoken = read_audio(QUESTION)
        target = replace(
            target,
            silence=chunks_of(spoken * 0)[0],
            speech=chunks_of(spoken),
            turn=turn_of(spoken),
            chunk_s=CASCADE_CHUNK_S,
        )
    early_endings = [*slow, *WARM_UP]
    early_endings += mixed(ENDINGS, n_sessions // 10 - len(early_endings), rng)
    late_endings = mixed(ENDINGS, n_sessions - len(early_endings) - len(NEEDS_ALL_SLOTS), rng)
    with running(front, worker):
        wait_ready(front, worker)
        service = Service(front, [worker], target)
        ended: Counter[str] = Counter()
        before, began_at = service.settle(), time.monotonic()
        asyncio.run(_run(target, early_endings, ended))
        early = service.settle()
        asyncio.run(_run(target, [*late_endings, *NEEDS_ALL_SLOTS], ended))
        late = service.settle()
        took_s = time.monotonic() - began_at
        leaks = service.leaks(before, early)
        status = front.get("/status") or {}
        n_trace_lines = sum(len(process.trace_lines()) for process in service.processes)
    return {
        "backend": backend,
        "sessions": sum(ended.values()),
        "took_s": round(took_s, 1),
        "modes": by_mode(ended),
        "ended": dict(ended),
        "errors": status.get("errors", {}),
        "trace_lines": n_trace_lines,
        "usage": {
            name: {
                moment: asdict(usage[name])
                for moment, usage in (("start", before), ("early", early), ("end", late))
            }
            for name in before
        },
        "leaks": leaks,
    }


async def _run(target: Target, endings: list[Ending], ended: Counter[str]) -> None:
    await run_all(target, endings, AT_A_TIME, lambda ending: ended.update([ending.__name__]))


def show_usage(usage: dict[str, dict[str, Any]]) -> None:
    print(f"{'process':12} {'when':6} {'RSS MB':>8} {'fds':>5} {'threads':>8} {'tasks':>6}")
    for name, moments in usage.items():
        for moment, held in moments.items():
            row = Usage(**held)
            print(
                f"{name:12} {moment:6} {row.rss_mb:8.1f} {row.n_fds:5} {row.n_threads:8} "
                f"{row.n_tasks:6}"
            )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sessions", type=int, default=200)
    parser.add_argument("--backend", choices=["fake", "cascade"], default="fake")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--logs", type=Path, help="an empty folder to keep the processes' logs in")
    arguments = parser.parse_args()
    if arguments.sessions < 40:
        parser.error("at least 40 sessions, so that the first tenth warms everything up")
    with tempfile.TemporaryDirectory() as folder:
        logs = arguments.logs or Path(folder)
        report = measure(logs, arguments.backend, arguments.sessions, arguments.seed)
    show_usage(report["usage"])
    print(f"{report['sessions']} sessions in {report['took_s']} s, {report['modes']}")
    print(f"errors by slug: {report['errors']}")
    for leak in report["leaks"]:
        print(f"leak: {leak}")
    print(json.dumps(report))
    return 1 if report["leaks"] or report["trace_lines"] else 0


if __name__ == "__main__":
    sys.exit(main())
