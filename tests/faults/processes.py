"""Real gateway and worker processes for fault tests, ended with their block, whatever happens.

with gateway(folder, [worker_port]) as front, fake_worker(folder, worker_port) as worker:
    wait_ready(front, worker)
    worker.kill()                     # SIGKILL
    worker.start()                    # again, on the same port
"""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.machine import fetch
from scripts.processes import Child, Command, stop_children
from shared.logs import TRACE_PREFIX
from tests.fakes.ports import free_port

LOOPBACK = "127.0.0.1"
START_TIMEOUT_S = 60.0
END_GRACE_S = 1.5
METRICS_TIMEOUT_S = 5.0
POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class Usage:
    """What a process holds at one moment."""

    rss_mb: float
    n_fds: int
    n_threads: int
    n_tasks: int
    """Tasks of its event loop."""


class Process:
    """One child on one port, with its output in `log` (or in another file, if one is named)."""

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        port: int,
        folder: Path,
        log_path: Path | None = None,
        **env: str,
    ) -> None:
        self.name = name
        self.port = port
        self.log_path = log_path or folder / f"{name}.log"
        environment = {**os.environ, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1", **env}
        command = Command(name, [sys.executable, *argv], environment, f"{self.url}/health")
        self._child = Child(command, self.log_path)

    @property
    def url(self) -> str:
        return f"http://{LOOPBACK}:{self.port}"

    @property
    def ws_url(self) -> str:
        return f"ws://{LOOPBACK}:{self.port}"

    @property
    def pid(self) -> int:
        assert self._child.pid is not None
        return self._child.pid

    @property
    def log(self) -> str:
        return self.log_path.read_text(encoding="utf-8", errors="replace")

    def trace_lines(self) -> list[str]:
        """The lines of its log that belong to a traceback, ours or the interpreter's."""
        lines = self.log.splitlines()
        return [line for line in lines if line.startswith((TRACE_PREFIX, "Traceback"))]

    def start(self) -> None:
        """Start it, or start it again; does not wait until it answers."""
        assert not self.is_alive(), f"{self.name} runs already"
        self._child.start(time.monotonic())

    def is_alive(self) -> bool:
        return self._child.process is not None and self._child.exit_status() is None

    def freeze(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL; returns when it is gone."""
        os.kill(self.pid, signal.SIGKILL)
        self.wait()

    def terminate(self) -> None:
        """SIGTERM; does not wait."""
        os.kill(self.pid, signal.SIGTERM)

    def fill_its_disk(self) -> None:
        """From now on it (and what it starts) can write no file: not one byte fits any more."""
        limit_file_size(self.pid, 0)

    def empty_its_disk(self) -> None:
        limit_file_size(self.pid, resource.RLIM_INFINITY)

    def wait(self, timeout_s: float = 20.0) -> int:
        """Return the exit code. Raises subprocess.TimeoutExpired."""
        assert self._child.process is not None
        return self._child.process.wait(timeout_s)

    def health(self, timeout_s: float = 2.0) -> dict[str, Any] | None:
        """What `/health` says; None for no answer."""
        return self.get("/health", timeout_s)

    def is_idle(self) -> bool:
        """Whether it is a worker that takes sessions."""
        return (self.health() or {}).get("worker_status") == "idle"

    def get(self, path: str, timeout_s: float = 2.0) -> dict[str, Any] | None:
        body = fetch(f"{self.url}{path}", timeout_s)
        if body is None:
            return None
        answer: dict[str, Any] = json.loads(body)
        return answer

    def usage(self) -> Usage:
        status = self._status()
        return Usage(
            rss_mb=_figure(status, "VmRSS:") / 1024,
            n_fds=len(os.listdir(f"/proc/{self.pid}/fd")),
            n_threads=int(_figure(status, "Threads:")),
            n_tasks=self._n_tasks(),
        )

    def rss_mb(self) -> float:
        return _figure(self._status(), "VmRSS:") / 1024

    def _status(self) -> str:
        return Path(f"/proc/{self.pid}/status").read_text()

    def _n_tasks(self) -> int:
        body = fetch(f"{self.url}/metrics", METRICS_TIMEOUT_S) or b""
        found = re.search(rb"^omni_(?:gateway|worker)_tasks ([\d.e+]+)$", body, re.M)
        assert found, f"{self.name} does not tell how many tasks it has: {body[:200]!r}"
        return int(float(found.group(1)))


def limit_file_size(pid: int, n_bytes: int) -> None:
    """Let writes of a process fail where a file would get longer than this.

    The error is EFBIG instead of ENOSPC; sockets and pipes are not concerned.
    """
    _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (n_bytes, hard))


def _figure(status: str, label: str) -> float:
    line = next(line for line in status.splitlines() if line.startswith(label))
    return float(line.split()[1])


def end(*processes: Process) -> None:
    """End processes, frozen ones too; nothing of them runs afterwards."""
    for process in processes:
        if process.is_alive():
            process.thaw()
    stop_children([process._child for process in processes], END_GRACE_S)


@contextmanager
def running(*processes: Process) -> Iterator[None]:
    """Start processes and end them with the block."""
    try:
        for process in processes:
            process.start()
        yield
    finally:
        end(*processes)


def fake_worker(
    folder: Path, name: str = "worker_0", log_path: Path | None = None, **options: Any
) -> Process:
    """A worker process around the fake model; options as `tests/fakes/worker_process.py` says."""
    port = free_port()
    argv = ["-m", "tests.fakes.worker_process", "--port", str(port), *_options(options)]
    return Process(name, argv, port, folder, log_path)


def cascade_worker(folder: Path, name: str = "worker_0", **service: Any) -> Process:
    """A real worker with the embedded back end; `service` is that section of its configuration."""
    port = free_port()
    config = folder / f"{name}.json"
    config.write_text(json.dumps({"service": service}), encoding="utf-8")
    argv = ["-m", "worker", "--port", str(port), "--config", str(config)]
    return Process(name, argv, port, folder, CUDA_VISIBLE_DEVICES="")


def gateway(
    folder: Path,
    worker_ports: Sequence[int],
    config: dict[str, Any] | None = None,
    log_path: Path | None = None,
    **options: Any,
) -> Process:
    """The real gateway; options as `tests/fakes/gateway_process.py` says, none = as it is.

    It records nothing unless the configuration says so: it would do so in the working directory.
    """
    config = {"recording": {"enabled": False}, **(config or {})}
    port = free_port()
    module = "tests.fakes.gateway_process" if options else "gateway"
    argv = ["-m", module, *_options(options), "--port", str(port)]
    argv += ["--workers", ",".join(f"{LOOPBACK}:{port}" for port in worker_ports)]
    path = folder / "gateway.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    argv += ["--config", str(path)]
    return Process("gateway", argv, port, folder, log_path)


def _options(options: dict[str, Any]) -> list[str]:
    return [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]


def wait_ready(front: Process, *workers: Process) -> None:
    """Wait until the gateway has seen all its workers ready."""
    for worker in workers:
        wait_until(worker.is_idle, f"{worker.name} is ready", worker)
    wait_until(
        lambda: (front.health() or {}).get("workers_ready", 0) >= len(workers),
        "the gateway sees its workers",
        front,
    )


def wait_until(
    condition: Callable[[], object],
    what: str,
    *needed: Process,
    timeout_s: float = START_TIMEOUT_S,
) -> float:
    """Look until it holds; returns how long that took (seconds).

    Raises:
        AssertionError: it did not in time, or a needed process has ended; with its last words.
    """
    begun = time.monotonic()
    while not condition():
        for process in needed:
            assert process.is_alive(), f"{process.name} has ended:\n{process.log[-2000:]}"
        waited = time.monotonic() - begun
        assert waited < timeout_s, f"not within {timeout_s:g} s: {what}"
        time.sleep(POLL_S)
    return time.monotonic() - begun
