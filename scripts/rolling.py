"""A rolling restart: each worker ends once its sessions have, comes back, then the next one goes.

It only decides; the supervisor, which calls `step` again and again, starts what has ended.
"""

from __future__ import annotations

import logging
import signal
from collections import deque
from collections.abc import Callable, Sequence

from scripts.processes import Child

log = logging.getLogger(__name__)

RETIRE_GRACE_S = 15.0
"""Beyond the time its sessions have, for a worker to tell those that are left and to exit."""

SEEN_TIMEOUT_S = 10.0
"""For the gateway to notice that a worker is ready; without a gateway the workers go on."""


class RollingRestart:
    """One pass over the workers, in their order.

    Args:
        drain_timeout_s: how long a worker waits for its sessions by its own configuration.
        start_timeout_s: how long its start may take.
        is_ready: whether a worker says that it is ready.
        is_seen: whether the gateway sends sessions to all workers that are ready.
    """

    def __init__(
        self,
        workers: Sequence[Child],
        drain_timeout_s: float,
        start_timeout_s: float,
        is_ready: Callable[[Child], bool],
        is_seen: Callable[[], bool],
    ) -> None:
        self._n_workers = len(workers)
        self._waiting = deque(workers)
        self._drain_timeout_s = drain_timeout_s
        self._start_timeout_s = start_timeout_s
        self._is_ready = is_ready
        self._is_seen = is_seen
        self._worker: Child | None = None
        self._retired_at = 0.0
        self._ready_at: float | None = None
        self.note = ""
        """What is going on, for people."""
        self.outcome = ""
        """What is worth telling after the end; empty if all went well."""

    def step(self, now: float) -> bool:
        """Look at the worker whose turn it is; True once the restart is over."""
        worker = self._worker
        if worker is None:
            if not self._waiting:
                log.info("rolling restart done n_workers=%d", self._n_workers)
                return True
            self._begin(self._waiting.popleft(), now)
            return False
        if worker.n_failures:
            return self._give_up(worker, "died in its start")
        if worker.is_retiring:
            self._end_if_late(worker, now)
            return False
        return self._await_ready(worker, now)

    def _begin(self, worker: Child, now: float) -> None:
        self._worker = worker
        self._retired_at = now
        self._ready_at = None
        worker.n_failures = 0
        if worker.process is None:
            # Dead already and waiting for its next start, which may as well be now.
            worker.restart_at = now
        else:
            worker.retire()
        self._tell(worker, "lets its sessions end")

    def _end_if_late(self, worker: Child, now: float) -> None:
        if now - self._retired_at > self._drain_timeout_s + RETIRE_GRACE_S:
            log.error("worker did not retire name=%s pid=%s", worker.command.name, worker.pid)
            worker.signal_group(signal.SIGKILL)

    def _await_ready(self, worker: Child, now: float) -> bool:
        self._tell(worker, "starts")
        if self._ready_at is None:
            if self._is_ready(worker):
                self._ready_at = now
            elif now - worker.started_at > self._start_timeout_s:
                return self._give_up(worker, "is not ready in time")
            return False
        # Until the gateway has seen it, newcomers would find nobody when the next one retires.
        if self._is_seen() or now - self._ready_at > SEEN_TIMEOUT_S:
            self._worker = None
        return False

    def _give_up(self, worker: Child, what: str) -> bool:
        # What made this start fail would take down the others, too.
        name, n_left = worker.command.name, len(self._waiting)
        log.error("rolling restart given up name=%s %s n_not_restarted=%d", name, what, n_left)
        self.outcome = (
            f"given up: {name} {what}; {n_left} of {self._n_workers} workers not restarted"
        )
        return True

    def _tell(self, worker: Child, what: str) -> None:
        number = self._n_workers - len(self._waiting)
        note = f"{worker.command.name} {what} ({number} of {self._n_workers})"
        if note != self.note:
            self.note = note
            log.info("rolling restart: %s", note)
