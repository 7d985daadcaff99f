"""States as enums, their edges as one table, their change as one method."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Generic, TypeVar

log = logging.getLogger(__name__)
S = TypeVar("S", bound=StrEnum)


class WorkerState(StrEnum):
    """What a worker process is doing; `shared/protocol.py` maps it to the wire's words."""

    LOADING = "loading"
    READY = "ready"
    RETIRING = "retiring"
    DRAINING = "draining"
    FAILED = "failed"


class SessionState(StrEnum):
    """One client's stay on one worker."""

    OPENED = "opened"
    PREPARING = "preparing"
    LIVE = "live"
    PAUSED = "paused"
    CLOSING = "closing"
    CLOSED = "closed"


WORKER_EDGES: Mapping[WorkerState, frozenset[WorkerState]] = {
    WorkerState.LOADING: frozenset({WorkerState.READY, WorkerState.FAILED, WorkerState.DRAINING}),
    WorkerState.READY: frozenset({WorkerState.RETIRING, WorkerState.DRAINING, WorkerState.FAILED}),
    WorkerState.RETIRING: frozenset({WorkerState.DRAINING, WorkerState.FAILED}),
    WorkerState.DRAINING: frozenset({WorkerState.FAILED}),
    WorkerState.FAILED: frozenset(),
}

SESSION_EDGES: Mapping[SessionState, frozenset[SessionState]] = {
    SessionState.OPENED: frozenset({SessionState.PREPARING, SessionState.CLOSING}),
    SessionState.PREPARING: frozenset(
        {SessionState.LIVE, SessionState.OPENED, SessionState.CLOSING}
    ),
    SessionState.LIVE: frozenset(
        {SessionState.PREPARING, SessionState.PAUSED, SessionState.CLOSING}
    ),
    SessionState.PAUSED: frozenset({SessionState.LIVE, SessionState.CLOSING}),
    SessionState.CLOSING: frozenset({SessionState.CLOSED}),
    SessionState.CLOSED: frozenset(),
}


class IllegalTransition(RuntimeError):
    """A state change that the table does not list: always a mistake of ours."""


class StateMachine(Generic[S]):
    """Holds one state, changes it only along the edges of its table, logs each change."""

    def __init__(
        self,
        name: str,
        initial: S,
        edges: Mapping[S, frozenset[S]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name = name
        self._edges = edges
        self._clock = clock
        self._state = initial
        self.since = clock()

    @property
    def state(self) -> S:
        return self._state

    def can(self, new: S) -> bool:
        return new in self._edges[self._state]

    def to(self, new: S, reason: str) -> None:
        """Change to `new`.

        Raises:
            IllegalTransition: the table has no such edge; the state stays as it was.
        """
        old = self._state
        if new not in self._edges[old]:
            allowed = ", ".join(sorted(self._edges[old])) or "none (final state)"
            raise IllegalTransition(
                f"{self._name}: {old} -> {new} is no edge; from {old}: {allowed}"
            )
        self._state = new
        self.since = self._clock()
        log.info("state changed machine=%s old=%s new=%s reason=%s", self._name, old, new, reason)
