"""Brings the processes up, keeps them up, and ends them.

One thread, one loop: every step looks at each process, restarts what is due and reports what
has changed. A death during the first start fails the start; later ones are restarted, and so is
a process that lives but has stopped answering.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import msgspec

from scripts.machine import StartError, fetch
from scripts.processes import Child, Command, bound_log, last_lines, rotate_log, stop_children
from shared.protocol import WorkerHealth

log = logging.getLogger(__name__)

STEP_S = 0.25
HEALTH_TIMEOUT_S = 1.0
ANSWER_TIMEOUT_S = 60.0
"""A process whose port has not answered once after this long will not answer any more."""

START_TIMEOUT_S = 1800.0
"""A first start that also compiles takes minutes; beyond this something hangs."""

LOOK_INTERVAL_S = 5.0
SILENT_LOOKS = 12
"""A running process that did not answer this many times in a row (a minute) is killed. Counted
and not timed: a launcher that was itself held up has not asked meanwhile."""

PROGRESS_INTERVAL_S = 5.0
GATEWAY_GRACE_S = 15.0
WORKER_GRACE_S = 10.0
N_SHOWN_LOG_LINES = 20


class StopRequest:
    """Set by SIGINT, SIGTERM or SIGHUP; a second signal asks for haste."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._n_signals = 0

    def install(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._n_signals += 1
        self.request()

    def request(self) -> None:
        self._event.set()

    def wait(self, seconds: float) -> bool:
        """Sleep; True as soon as the stop is asked for."""
        return self._event.wait(seconds)

    def is_urgent(self) -> bool:
        return self._n_signals > 1


@dataclass(frozen=True, slots=True)
class Progress:
    """What a worker says about its start."""

    stage: str
    text: str
    ready: bool


def read_progress(body: bytes) -> Progress | None:
    """Return the start's progress from the body of a worker's `/health`; None if it is none."""
    try:
        health = msgspec.json.decode(body, type=WorkerHealth)
    except msgspec.MsgspecError:
        return None
    ready = health.status == "healthy" and health.model_loaded
    stage = "ready" if ready else health.stage or health.worker_status
    if health.status == "error":
        return Progress("error", f"error: {health.reason or 'no reason given'}", ready=False)
    if ready:
        total_s = sum(report.elapsed_s for report in health.stages)
        return Progress(stage, f"ready after {total_s:.1f} s", ready=True)
    left = f", about {health.eta_s:.0f} s left" if health.eta_s is not None else ""
    text = f"{stage} {health.stage_progress:4.0%} ({health.stage_elapsed_s:.1f} s{left})"
    return Progress(stage, text, ready=False)


class GatewayHealth(msgspec.Struct):
    """What the launcher reads of the gateway's `/health`."""

    workers_ready: int


class Supervisor:
    """Owns the gateway (`commands[0]`) and the workers (the rest).

    Args:
        run_dir: where logs go, one per process, rotated at each start.
        say: prints one line to whoever started the service.
        stop: ends `start` and `watch` early.
    """

    def __init__(
        self,
        commands: Sequence[Command],
        run_dir: Path,
        say: Callable[[str], None],
        stop: StopRequest,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._children = [Child(c, run_dir / f"{c.name}.log") for c in commands]
        self._gateway, *self._workers = self._children
        self._say = say
        self._stop = stop
        self._clock = clock
        self._said: dict[str, tuple[str, float]] = {}

    def start(self) -> bool:
        """Start everything and wait until all is ready; False when asked to stop before.

        Raises:
            StartError: a process died, reports an error or does not answer; the text ends with
                the last lines of its log.
        """
        for child in self._children:
            rotate_log(child.log_path)
            child.start(self._clock())
        waiting = list(self._children)
        while waiting:
            if self._stop.wait(STEP_S):
                return False
            for child in self._children:
                self._check_alive(child)
            waiting = [child for child in waiting if not self._is_ready(child)]
        return True

    def watch(self) -> None:
        """Restart what dies or hangs, until asked to stop."""
        look_at = self._clock()
        while not self._stop.wait(STEP_S):
            for child in self._children:
                self._revive(child)
            if self._clock() >= look_at:
                look_at = self._clock() + LOOK_INTERVAL_S
                for child in self._children:
                    bound_log(child.log_path)
                    self._end_if_hung(child)

    def close(self) -> None:
        """End all processes: first the gateway, so that sessions are told, then the workers."""
        stop_children([self._gateway], GATEWAY_GRACE_S, self._stop.is_urgent)
        stop_children(self._workers, WORKER_GRACE_S, self._stop.is_urgent)

    def _check_alive(self, child: Child) -> None:
        status = child.exit_status()
        if status is not None:
            raise StartError(_obituary(child, f"ended during its start with {_how(status)}"))
        limit_s = START_TIMEOUT_S if child.command.name in self._said else ANSWER_TIMEOUT_S
        if self._clock() - child.started_at > limit_s:
            verb = "is not ready after" if child.command.name in self._said else "is silent for"
            raise StartError(_obituary(child, f"{verb} {limit_s:.0f} s"))

    def _is_ready(self, child: Child) -> bool:
        body = fetch(child.command.health_url, HEALTH_TIMEOUT_S)
        if body is None:
            return False
        read = self._gateway_progress if child is self._gateway else read_progress
        progress = read(body)
        if progress is None:
            return False
        if progress.stage == "error":
            raise StartError(_obituary(child, f"reports an {progress.text}"))
        self._report(child.command.name, progress)
        return progress.ready

    def _gateway_progress(self, body: bytes) -> Progress | None:
        """The gateway answers at once, but serves only when it has seen the workers ready."""
        try:
            n_ready = msgspec.json.decode(body, type=GatewayHealth).workers_ready
        except msgspec.MsgspecError:
            return None
        return Progress("up", "up, sessions wait for the workers", n_ready >= len(self._workers))

    def _report(self, name: str, progress: Progress) -> None:
        stage, said_at = self._said.get(name, ("", 0.0))
        now = self._clock()
        is_old = now - said_at >= PROGRESS_INTERVAL_S and progress.stage != "up"
        if progress.stage != stage or is_old:
            self._say(f"{name}: {progress.text}")
            self._said[name] = (progress.stage, now)

    def _revive(self, child: Child) -> None:
        now = self._clock()
        status = child.exit_status()
        if status is not None:
            # Whatever it had started goes with it, before ports are taken again.
            child.signal_group(signal.SIGKILL)
            delay_s = child.plan_restart(now)
            log.error(
                "process died name=%s exit=%s restart_in_s=%.0f log=%s",
                child.command.name, _how(status), delay_s, child.log_path,
            )  # fmt: skip
        elif child.restart_at is not None and now >= child.restart_at:
            child.start(now)
            log.warning("process restarted name=%s pid=%s", child.command.name, child.pid)

    def _end_if_hung(self, child: Child) -> None:
        if child.process is None:
            return
        answers = fetch(child.command.health_url, HEALTH_TIMEOUT_S) is not None
        child.n_silent_looks = 0 if answers else child.n_silent_looks + 1
        if child.n_silent_looks >= SILENT_LOOKS:
            log.error("process hangs name=%s pid=%s", child.command.name, child.pid)
            child.signal_group(signal.SIGKILL)


def _how(status: int) -> str:
    return f"signal {-status}" if status < 0 else f"status {status}"


def _obituary(child: Child, what: str) -> str:
    lines = [f"{child.command.name} {what}"]
    tail = last_lines(child.log_path, N_SHOWN_LOG_LINES)
    if tail:
        lines += [f"last lines of {child.log_path}:", *(f"  {line}" for line in tail)]
    return "\n".join(lines)
