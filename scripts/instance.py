"""The one running launcher of a checkout: its lock, its pid, its notes, how it is asked for things.

The lock belongs to the launcher's process and goes with it, however it ends, so a pid in the
file counts only while the lock is held: a stale file never leads to a signal to a stranger.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from io import TextIOWrapper
from pathlib import Path

STOP_TIMEOUT_S = 30.0
KILL_TIMEOUT_S = 5.0
POLL_S = 0.1
LOOK_S = 0.5


class AlreadyRunning(Exception):
    """Another launcher of this checkout runs; the text names it."""


@dataclass(frozen=True, slots=True)
class Instance:
    """`health_urls`: process name -> URL, for `status`."""

    pid: int
    url: str
    health_urls: dict[str, str]


def acquire(run_dir: Path, instance: Instance) -> TextIOWrapper:
    """Take the lock and note who holds it; the lock lasts as long as the returned file is open.

    Raises:
        AlreadyRunning: another launcher holds it.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    file = _path(run_dir).open("a+", encoding="utf-8")
    deadline = time.monotonic() + LOOK_S
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError as error:
            # Somebody who only looks holds the lock for a moment; a launcher keeps it.
            if time.monotonic() > deadline:
                file.close()
                ensure_not_running(run_dir)
                raise AlreadyRunning("another launcher is just starting") from error
            time.sleep(POLL_S)
    file.truncate(0)
    file.write(json.dumps(asdict(instance)))
    file.flush()
    return file


def ensure_not_running(run_dir: Path) -> None:
    """Raises AlreadyRunning when a launcher holds the lock."""
    other = running(run_dir)
    if other is not None:
        raise AlreadyRunning(
            f"the service runs already at {other.url} (process {other.pid}); "
            "end it with: bash start_all.sh stop"
        )


def running(run_dir: Path) -> Instance | None:
    """Return the launcher that holds the lock; None if nobody does."""
    try:
        file = _path(run_dir).open("r", encoding="utf-8")
    except FileNotFoundError:
        return None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            try:
                return Instance(**json.load(file))
            except (json.JSONDecodeError, TypeError):
                # Between taking the lock and writing; the caller may look again.
                return None
    return None


def stop(run_dir: Path) -> bool:
    """End the running launcher and wait until it is gone; False when none ran."""
    instance = running(run_dir)
    if instance is None:
        return False
    # It may be gone by now, of itself.
    with contextlib.suppress(ProcessLookupError):
        os.kill(instance.pid, signal.SIGTERM)
        if not _wait_until_gone(run_dir, instance, STOP_TIMEOUT_S):
            # Its children die with it.
            os.kill(instance.pid, signal.SIGKILL)
            _wait_until_gone(run_dir, instance, KILL_TIMEOUT_S)
    return True


def restart(run_dir: Path) -> bool:
    """Ask the running launcher to restart its workers one by one; False when none runs."""
    instance = running(run_dir)
    if instance is None:
        return False
    try:
        os.kill(instance.pid, signal.SIGUSR1)
    except ProcessLookupError:
        return False
    return True


def write_notes(run_dir: Path, notes: Mapping[str, str]) -> None:
    """Leave what only the launcher knows for `status`: subject -> sentence.

    Raises:
        OSError: the disk is full, or the folder has gone.
    """
    half_written = run_dir / "notes.json.part"
    half_written.write_text(json.dumps(notes), encoding="utf-8")
    half_written.replace(run_dir / "notes.json")


def read_notes(run_dir: Path) -> dict[str, str]:
    """Return the notes of the running launcher; none if they cannot be read."""
    try:
        notes = json.loads((run_dir / "notes.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return notes if isinstance(notes, dict) else {}


def _wait_until_gone(run_dir: Path, instance: Instance, timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if running(run_dir) != instance:
            return True
        time.sleep(POLL_S)
    return False


def _path(run_dir: Path) -> Path:
    return run_dir / "launch.pid"
