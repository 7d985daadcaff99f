"""Child processes: started with a log file each, ended together, never left behind."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

log = logging.getLogger(__name__)

KEPT_LOGS = 3
MAX_LOG_BYTES = 64 * 1024 * 1024
PR_SET_PDEATHSIG = 1
RESTART_DELAYS_S = (1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
STABLE_AFTER_S = 60.0
"""A process that ran this long before it died is restarted as if for the first time."""


@dataclass(frozen=True, slots=True)
class Command:
    """One process to run. `env` is complete; `health_url` answers once it is up."""

    name: str
    argv: Sequence[str]
    env: dict[str, str]
    health_url: str


@dataclass
class Child:
    """One supervised process and the count of its deaths."""

    command: Command
    log_path: Path
    started_at: float = 0.0
    n_failures: int = 0
    n_silent_looks: int = 0
    restart_at: float | None = None
    is_retiring: bool = False
    """It was asked to end once its sessions have; that end is no failure."""
    last_end: str = ""
    """How it ended the last time it did so by itself, for `status`."""
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    def start(self, now: float) -> None:
        """Start the process; its output is appended to the log.

        Raises:
            OSError: there is no room for its log, or no process to be had.
        """
        self.started_at = now
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                self.command.argv,
                env=self.command.env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # Its own group: Ctrl-C reaches the launcher alone, which ends all in order.
                start_new_session=True,
                preexec_fn=functools.partial(_die_with_parent, os.getpid()),
            )
        self.n_silent_looks = 0
        self.restart_at = None
        self.is_retiring = False

    @property
    def pid(self) -> int | None:
        return self.process.pid if self.process else None

    def exit_status(self) -> int | None:
        """The exit status; None while it runs (or waits for its restart)."""
        return self.process.poll() if self.process else None

    def plan_restart(self, now: float) -> float:
        """Note a death and return the delay until the restart: 1, 2, 4 .. 30 s."""
        if now - self.started_at >= STABLE_AFTER_S:
            self.n_failures = 0
        delay_s = RESTART_DELAYS_S[min(self.n_failures, len(RESTART_DELAYS_S) - 1)]
        self.n_failures += 1
        self.is_retiring = False
        self.process = None
        self.restart_at = now + delay_s
        return delay_s

    def retire(self) -> None:
        """Ask the process itself, not what it has started, to end once its sessions have."""
        if self.process is not None:
            self.is_retiring = True
            self.process.send_signal(signal.SIGUSR1)

    def signal_group(self, number: int) -> None:
        """Send a signal to the process and to whatever it has started."""
        if self.process is None:
            return
        # Gone already; macOS answers PermissionError where only a zombie is left of a group.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)


def stop_children(
    children: Sequence[Child],
    grace_s: float,
    in_a_hurry: Callable[[], bool] = lambda: False,
) -> None:
    """End processes: SIGTERM, a bounded wait, SIGKILL. Nothing of them runs afterwards."""
    for child in children:
        child.signal_group(signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    for child in children:
        while child.process and time.monotonic() < deadline and not in_a_hurry():
            try:
                child.process.wait(0.1)
                break
            except subprocess.TimeoutExpired:
                continue
    for child in children:
        # Also after a clean exit: a grandchild may have stayed behind in the group.
        child.signal_group(signal.SIGKILL)
        if child.process:
            child.process.wait()


def rotate_log(path: Path) -> None:
    """Move the log of the last start to `.1`, that one to `.2`, and so on."""
    if path.exists():
        path.replace(_make_room(path))


def bound_log(path: Path, max_bytes: int = MAX_LOG_BYTES) -> None:
    """Rotate a log that has grown too long while its process goes on appending to it."""
    if path.exists() and path.stat().st_size > max_bytes:
        # The process holds this very file, so the file stays and its content moves. A line that
        # is written between the copy and the cut is lost.
        kept = _make_room(path)
        try:
            shutil.copyfile(path, kept)
        except OSError as error:
            # A full disk: the old lines are given up, so that their room is free again.
            log.warning("log cannot be kept path=%s error=%s", path, error.strerror)
            kept.unlink(missing_ok=True)
        os.truncate(path, 0)


def _make_room(path: Path) -> Path:
    """Count the older logs up; returns the name that is free now."""
    for number in range(KEPT_LOGS, 1, -1):
        newer = path.with_name(f"{path.name}.{number - 1}")
        if newer.exists():
            newer.replace(path.with_name(f"{path.name}.{number}"))
    return path.with_name(f"{path.name}.1")


def last_lines(path: Path, n_lines: int) -> list[str]:
    try:
        with path.open(encoding="utf-8", errors="replace") as log:
            return [line.rstrip() for line in deque(log, n_lines)]
    except FileNotFoundError:
        return []


def _prctl() -> Callable[[int, int], int] | None:
    if not sys.platform.startswith("linux"):
        return None
    prctl: Callable[[int, int], int] = ctypes.CDLL(None).prctl
    return prctl


_PRCTL = _prctl()


def _die_with_parent(parent_pid: int) -> None:
    """Between fork and exec: have the kernel kill this process when the launcher dies.

    It is the launcher's thread whose end counts, so children are started by its main thread.
    """
    if _PRCTL is not None:
        _PRCTL(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent_pid:
            # It died before the kernel was asked.
            os._exit(1)
