"""Brings the processes up, keeps them up, and ends them.

One thread, one loop: every step looks at each process, restarts what is due and reports what
has changed. A death during the first start fails the start; later ones are restarted, and so is
a process that lives but has stopped answering.
"""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import FrameType

import msgspec

from scripts.instance import write_notes
from scripts.machine import StartError, fetch
from scripts.processes import (
    STABLE_AFTER_S,
    Child,
    Command,
    bound_log,
    last_lines,
    rotate_log,
    stop_children,
)
from scripts.rolling import RollingRestart
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
RESTARTING_NOTE = "rolling restart"
RESTARTED_NOTE = "last rolling restart"
"""Subjects of notes: how far a restart is, and what went wrong in the last one."""


PRECOMPILE_HINT = (
    "hint: no compile cache fits; python precompile.py fills it once for all workers and starts"
)


class Requests:
    """What signals ask of the launcher.

    SIGINT, SIGTERM and SIGHUP ask for the end, a second one for haste; SIGUSR1 asks for a rolling
    restart of the workers.
    """

    def __init__(self) -> None:
        # No event: to set one takes a lock, and the signal may have interrupted the very thread
        # that holds it. The launcher would then hear no signal any more.
        self._is_stopping = False
        self._n_stop_signals = 0
        self._wants_restart = False

    def install(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            # `nohup` has SIGHUP ignored, for whatever it starts.
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._note_stop)
        signal.signal(signal.SIGUSR1, self._note_restart)

    def _note_stop(self, number: int, frame: FrameType | None) -> None:
        self._n_stop_signals += 1
        self.stop()

    def _note_restart(self, number: int, frame: FrameType | None) -> None:
        self._wants_restart = True

    def stop(self) -> None:
        self._is_stopping = True

    def wait(self, seconds: float) -> bool:
        """Sleep; True if the stop has been asked for."""
        if not self._is_stopping:
            time.sleep(seconds)
        return self._is_stopping

    def is_urgent(self) -> bool:
        return self._n_stop_signals > 1

    def take_restart(self) -> bool:
        """Whether a restart has been asked for since the last call."""
        wanted, self._wants_restart = self._wants_restart, False
        return wanted


@dataclass(frozen=True, slots=True)
class Progress:
    """What a worker says about its start.

    `hint`: what would make the next start faster; "" if nothing would.
    """

    stage: str
    text: str
    ready: bool
    hint: str = ""


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
    if health.worker_status == "draining":
        return Progress("draining", "takes no new sessions, lets those it has end", ready=False)
    if ready:
        total_s = sum(report.elapsed_s for report in health.stages)
        return Progress(stage, f"ready after {total_s:.1f} s{_cache(health)}", ready=True)
    left = f", about {health.eta_s:.0f} s left" if health.eta_s is not None else ""
    text = f"{stage} {health.stage_progress:4.0%} ({health.stage_elapsed_s:.1f} s{left})"
    return Progress(stage, text + _cache(health), ready=False, hint=_hint(health))


def _cache(health: WorkerHealth) -> str:
    """How the worker found its compile cache, if it compiles."""
    found = health.compile
    if found is None or found.state in (None, "disabled"):
        return ""
    return f", compile cache {found.state}" + (" (degraded: runs slower)" * found.degraded)


def _hint(health: WorkerHealth) -> str:
    found = health.compile
    needs_filling = found is not None and found.state in ("cold", "stale", "damaged")
    # On a CPU compiling takes seconds.
    return PRECOMPILE_HINT if needs_filling and health.gpu_id is not None else ""


class GatewayHealth(msgspec.Struct):
    """What the launcher reads of the gateway's `/health`."""

    workers_ready: int


class Supervisor:
    """Owns the gateway (`commands[0]`) and the workers (the rest).

    Args:
        run_dir: where logs go, one per process, rotated at each start.
        say: prints one line to whoever started the service.
        requests: end `start` and `watch` early, or ask for a rolling restart.
        drain_timeout_s: how long a worker that retires waits for its sessions.
    """

    def __init__(
        self,
        commands: Sequence[Command],
        run_dir: Path,
        say: Callable[[str], None],
        requests: Requests,
        drain_timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._children = [Child(c, run_dir / f"{c.name}.log") for c in commands]
        self._gateway, *self._workers = self._children
        self._say = say
        self._run_dir = run_dir
        self._requests = requests
        self._drain_timeout_s = drain_timeout_s
        self._clock = clock
        self._hints: set[str] = set()
        self._rolling: RollingRestart | None = None
        self._outcome = ""
        self._notes: dict[str, str] | None = None
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
            if self._requests.wait(STEP_S):
                return False
            for child in self._children:
                self._check_alive(child)
            waiting = [child for child in waiting if not self._is_ready(child)]
        # The last look may have taken seconds, and somebody may have lost patience meanwhile.
        return not self._requests.wait(0.0)

    def watch(self) -> None:
        """Restart what dies or hangs, and the workers in turn if asked to, until asked to stop."""
        look_at = self._clock()
        while not self._requests.wait(STEP_S):
            for child in self._children:
                self._revive(child)
            self._roll()
            self._leave_notes()
            if self._clock() >= look_at:
                look_at = self._clock() + LOOK_INTERVAL_S
                for child in self._children:
                    self._bound_log(child)
                    self._end_if_hung(child)

    def close(self) -> None:
        """End all processes: first the gateway, so that sessions are told, then the workers."""
        stop_children([self._gateway], GATEWAY_GRACE_S, self._requests.is_urgent)
        stop_children(self._workers, WORKER_GRACE_S, self._requests.is_urgent)

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
        n_ready = n_workers_ready(body)
        if n_ready is None:
            return None
        return Progress("up", "up, sessions wait for the workers", n_ready >= len(self._workers))

    def _report(self, name: str, progress: Progress) -> None:
        stage, said_at = self._said.get(name, ("", 0.0))
        now = self._clock()
        is_old = now - said_at >= PROGRESS_INTERVAL_S and progress.stage != "up"
        if progress.stage != stage or is_old:
            self._say(f"{name}: {progress.text}")
            self._said[name] = (progress.stage, now)
        if progress.hint and progress.hint not in self._hints:
            self._hints.add(progress.hint)
            self._say(progress.hint)

    def _revive(self, child: Child) -> None:
        now = self._clock()
        status = child.exit_status()
        if status is not None:
            # Whatever it had started goes with it, before ports are taken again.
            child.signal_group(signal.SIGKILL)
            if child.is_retiring:
                log.info("worker retired name=%s exit=%s", child.command.name, _how(status))
                self._start_again(child, now)
                return
            child.last_end = _how(status)
            delay_s = child.plan_restart(now)
            log.error(
                "process died name=%s exit=%s restart_in_s=%.0f log=%s",
                child.command.name, child.last_end, delay_s, child.log_path,
            )  # fmt: skip
        elif child.restart_at is not None and now >= child.restart_at:
            self._start_again(child, now)

    def _start_again(self, child: Child, now: float) -> None:
        try:
            child.start(now)
        except OSError as error:
            # No room for its log, no process to be had: the others go on, and this one is tried
            # again like one that has died.
            child.last_end = f"no start: {error.strerror}"
            delay_s = child.plan_restart(now)
            log.error("no restart name=%s try_in_s=%.0f: %s", child.command.name, delay_s, error)
        else:
            log.warning("process restarted name=%s pid=%s", child.command.name, child.pid)

    def _bound_log(self, child: Child) -> None:
        try:
            bound_log(child.log_path)
        except OSError as error:
            log.warning("log cannot be rotated path=%s: %s", child.log_path, error)

    def _roll(self) -> None:
        if self._requests.take_restart():
            if self._rolling is not None:
                log.warning("a rolling restart is under way already")
            else:
                self._outcome = ""
                self._rolling = RollingRestart(
                    self._workers,
                    self._drain_timeout_s,
                    START_TIMEOUT_S,
                    _says_ready,
                    self._is_seen_by_gateway,
                )
        if self._rolling is not None and self._rolling.step(self._clock()):
            self._outcome = self._rolling.outcome
            self._rolling = None

    def _is_seen_by_gateway(self) -> bool:
        body = fetch(self._gateway.command.health_url, HEALTH_TIMEOUT_S)
        n_seen = n_workers_ready(body) if body is not None else None
        return n_seen is not None and n_seen >= sum(map(_says_ready, self._workers))

    def _leave_notes(self) -> None:
        """Tell `status` what health reports cannot: deaths, and how far a restart is."""
        now = self._clock()
        notes = {child.command.name: _deaths(child, now) for child in self._children}
        notes[RESTARTING_NOTE] = self._rolling.note if self._rolling else ""
        notes[RESTARTED_NOTE] = self._outcome
        notes = {subject: note for subject, note in notes.items() if note}
        if notes != self._notes:
            self._notes = notes
            try:
                write_notes(self._run_dir, notes)
            except OSError as error:
                log.warning("notes for status cannot be written: %s", error)

    def _end_if_hung(self, child: Child) -> None:
        if child.process is None:
            return
        answers = fetch(child.command.health_url, HEALTH_TIMEOUT_S) is not None
        child.n_silent_looks = 0 if answers else child.n_silent_looks + 1
        if child.n_silent_looks >= SILENT_LOOKS:
            log.error("process hangs name=%s pid=%s", child.command.name, child.pid)
            child.signal_group(signal.SIGKILL)


def n_workers_ready(body: bytes) -> int | None:
    """Read the gateway's `/health`; None if it is none."""
    try:
        return msgspec.json.decode(body, type=GatewayHealth).workers_ready
    except msgspec.MsgspecError:
        return None


def _says_ready(worker: Child) -> bool:
    body = fetch(worker.command.health_url, HEALTH_TIMEOUT_S)
    progress = read_progress(body) if body is not None else None
    return progress is not None and progress.ready


def _deaths(child: Child, now: float) -> str:
    is_stable = child.process is not None and now - child.started_at >= STABLE_AFTER_S
    if not child.n_failures or is_stable:
        return ""
    text = f"ended by itself {child.n_failures} x in a row, last with {child.last_end}"
    if child.restart_at is None:
        return text
    at = datetime.now(tz=UTC).astimezone() + timedelta(seconds=child.restart_at - now)
    return f"{text}, starts again at {at:%H:%M:%S}"


def _how(status: int) -> str:
    return f"signal {-status}" if status < 0 else f"status {status}"


def _obituary(child: Child, what: str) -> str:
    lines = [f"{child.command.name} {what}"]
    tail = last_lines(child.log_path, N_SHOWN_LOG_LINES)
    if tail:
        lines += [f"last lines of {child.log_path}:", *(f"  {line}" for line in tail)]
    return "\n".join(lines)
