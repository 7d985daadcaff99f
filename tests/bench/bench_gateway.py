"""What the gateway adds: latency, CPU and memory of 64 live sessions on two cores.

    OMP_NUM_THREADS=1 .venv/bin/python -m tests.bench.bench_gateway

Every message is stamped at both ends (client and worker, one monotonic clock), so the way of a
chunk to the worker and of its result back is known exactly, without the worker's own time. The
same sessions run once through a real gateway process and once straight to the same workers; the
difference of the quantiles is what the gateway adds. Client, gateway and workers share two cores,
as in a small deployment; the client's own lateness is shown, since a busy client looks the same
as a busy gateway. Nothing is recorded: the folder would be that of the working tree.

What limits it: a chunk is 85 KB of base64 in JSON, a second of speech 128 KB. Sockets, masks and
copies of those bytes take most of the gateway's time, Python the rest: about 2 ms of one core
for a chunk and its spoken answer. All sessions at the same instant therefore queue up behind each
other, so that case is shown beside the others and has no target.

Cases: `listen` (short results), `speak` (one second of speech each), `camera` (a 60 KB picture
with each chunk), `together` (`speak`, all in the same instant), `deaf` (`speak`, and eight further
clients that never read; compared with `speak`, straight). Prints a table and, as the last line,
one JSON object.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, Self

from client.journal import percentiles
from tests.bench.provenance import ROOT, provenance
from tests.bench.stamped_load import Load
from tests.fakes.launch import free_port, wait_until

N_CORES = 2
N_WORKERS = 2
N_DEAF = 8
TARGET_P99_MS = 10.0
SAMPLE_S = 0.25
QUANTILES = ("p50", "p95", "p99", "max")
MIB = 2**20


@dataclass(frozen=True)
class Case:
    name: str
    load: dict[str, Any]
    baseline: str = ""
    """The case whose straight run is compared with; empty = its own."""


CASES = (
    Case("listen", {}),
    Case("speak", {"speaks": True}),
    Case("camera", {"has_camera": True}),
    Case("together", {"speaks": True, "is_together": True}),
    Case("deaf", {"speaks": True, "n_deaf": N_DEAF}, baseline="speak"),
)


@contextlib.contextmanager
def running(*arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """A Python process of this project, ended with the block."""
    process = subprocess.Popen(
        [sys.executable, *arguments], cwd=ROOT, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL
    )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False


def sees_workers(gateway_port: int, n_workers: int) -> bool:
    with contextlib.suppress(OSError):
        address = f"http://127.0.0.1:{gateway_port}/health"
        with urllib.request.urlopen(address, timeout=2) as answer:
            return bool(json.load(answer)["workers_ready"] == n_workers)
    return False


class ProcessWatch:
    """Samples CPU time and memory of a process while the block runs."""

    def __init__(self, pid: int) -> None:
        self._stat = Path(f"/proc/{pid}/stat")
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._samples: list[tuple[float, float, int]] = []

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(SAMPLE_S):
            # The name in parentheses may hold spaces; fields 14, 15 and 24 are what counts.
            fields = self._stat.read_text().rpartition(")")[2].split()
            cpu_s = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
            rss = int(fields[21]) * os.sysconf("SC_PAGE_SIZE")
            self._samples.append((time.monotonic(), cpu_s, rss))

    def cpu_share(self, began_at: float, ended_at: float) -> float:
        """Return the share of one core that was used in between."""
        inside = [(at, cpu_s) for at, cpu_s, _ in self._samples if began_at <= at <= ended_at]
        (first_at, first_s), (last_at, last_s) = inside[0], inside[-1]
        return (last_s - first_s) / (last_at - first_at)

    @property
    def max_rss_mib(self) -> float:
        return max(rss for _, _, rss in self._samples) / MIB


def run_load(load: Load) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.bench.stamped_load", json.dumps(asdict(load))],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        check=True,
    )
    outcome: dict[str, Any] = json.loads(done.stdout)
    return outcome


def transit(outcome: dict[str, Any]) -> dict[str, float]:
    """Return the quantiles of both ways together, in ms."""
    ways = zip(outcome["up_ms"], outcome["down_ms"], strict=True)
    return percentiles(up + down for up, down in ways)


class Bench:
    """Workers for all cases; a gateway of its own for each run, so that memory is that run's."""

    def __init__(self, workers: Sequence[int], n_sessions: int, seconds: int, config: Path) -> None:
        self._workers = workers
        self._config = config
        self._load = Load(None, workers, n_sessions, seconds)

    def straight(self, case: Case) -> dict[str, float]:
        return transit(run_load(replace(self._load, **{**case.load, "n_deaf": 0})))

    def through(self, case: Case, straight: dict[str, float]) -> dict[str, Any]:
        port = free_port()
        listed = ",".join(f"127.0.0.1:{worker}" for worker in self._workers)
        arguments = ["--port", str(port), "--workers", listed, "--config", str(self._config)]
        with running("-m", "gateway", *arguments) as gateway:
            n_workers = len(self._workers)
            wait_until(lambda: sees_workers(port, n_workers), "the gateway sees all workers")
            load = replace(self._load, url=f"ws://127.0.0.1:{port}", **case.load)
            libraries = Path(f"/proc/{gateway.pid}/maps").read_text(encoding="utf-8")
            loop = "uvloop" if "/uvloop/" in libraries else "asyncio"
            with ProcessWatch(gateway.pid) as watch:
                outcome = run_load(load)
        through = transit(outcome)
        return {
            "straight_ms": straight,
            "through_ms": through,
            "added_ms": {name: round(through[name] - straight[name], 2) for name in QUANTILES},
            "up_ms": percentiles(outcome["up_ms"]),
            "down_ms": percentiles(outcome["down_ms"]),
            "missing": outcome["missing"],
            "gateway_cpu": round(watch.cpu_share(outcome["began_at"], outcome["ended_at"]), 3),
            "gateway_rss_mib": round(watch.max_rss_mib, 1),
            "gateway_loop": loop,
            "client_cpu": round(outcome["cpu_share"], 3),
            "client_loop_late_ms": percentiles(outcome["loop_late_ms"]),
            "deaf_cut": outcome["deaf_cut"],
        }


def measure(cases: Sequence[Case], bench: Bench, repeats: int) -> dict[str, list[dict[str, Any]]]:
    """Return the figures of each repeat by case; repeats interleave, so drift hits all alike."""
    figures: dict[str, list[dict[str, Any]]] = {case.name: [] for case in cases}
    for _ in range(repeats):
        straight: dict[str, dict[str, float]] = {}
        for case in cases:
            if case.baseline not in straight:
                straight[case.name] = bench.straight(case)
            baseline = straight.get(case.baseline, straight.get(case.name, {}))
            figures[case.name].append(bench.through(case, baseline))
    return figures


def table(figures: dict[str, list[dict[str, Any]]]) -> str:
    """Return the median of the repeats, and in brackets their range."""
    lines = [
        f"{'':9} {'added p50':>18} {'p95':>18} {'p99':>20} {'p99 straight':>18}"
        f" {'CPU':>6} {'RSS MiB':>8} {'missing':>8} {'client late p99':>16}"
    ]
    for name, runs in figures.items():
        added = [_range([run["added_ms"][q] for run in runs]) for q in ("p50", "p95", "p99")]
        cpu = median(run["gateway_cpu"] for run in runs)
        late = median(run["client_loop_late_ms"]["p99"] for run in runs)
        lines.append(
            f"{name:9} {added[0]:>18} {added[1]:>18} {added[2]:>20}"
            f" {_range([run['straight_ms']['p99'] for run in runs]):>18} {cpu:>6.0%}"
            f" {max(run['gateway_rss_mib'] for run in runs):>8.0f}"
            f" {sum(run['missing'] for run in runs):>8} {late:>13.1f} ms"
        )
        if any(run["deaf_cut"] for run in runs):
            cut = ", ".join(str(run["deaf_cut"]) for run in runs)
            lines.append(f"{'':9} disconnected for not reading: {cut} of {N_DEAF}")
    return "\n".join(lines)


def _range(values: Sequence[float]) -> str:
    return f"{median(values):.2f} [{min(values):.1f}, {max(values):.1f}]"


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [case.name for case in CASES]
    parser.add_argument("--sessions", type=int, default=64)
    parser.add_argument("--seconds", type=int, default=20, help="length of each run")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--cases", nargs="+", choices=names, default=names)
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Entry point; returns what the JSON line says."""
    arguments = parse_arguments(argv)
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:N_CORES])
    cases = [case for case in CASES if case.name in arguments.cases]
    load_before = os.getloadavg()[0]
    with contextlib.ExitStack() as stack:
        workers = [free_port() for _ in range(N_WORKERS)]
        slots = str(arguments.sessions + N_DEAF)
        for port in workers:
            stack.enter_context(running("-m", "tests.bench.stamping_worker", str(port), slots))
            wait_until(functools.partial(listens, port), "the worker listens")
        config = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "config.json"
        config.write_text(json.dumps({"recording": {"enabled": False}}), encoding="utf-8")
        bench = Bench(workers, arguments.sessions, arguments.seconds, config)
        figures = measure(cases, bench, arguments.repeats)
    print(table(figures))
    report = {
        **provenance(),
        "settings": {
            "sessions": arguments.sessions,
            "seconds": arguments.seconds,
            "repeats": arguments.repeats,
            "workers": N_WORKERS,
        },
        "load_average_before": round(load_before, 2),
        "target_p99_ms": TARGET_P99_MS,
        "cases": figures,
    }
    line = json.dumps(report)
    if arguments.out:
        arguments.out.write_text(line + "\n", encoding="utf-8")
    print(line)
    return report


if __name__ == "__main__":
    main()
