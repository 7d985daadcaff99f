"""The queue: one line for all sessions, first in first out, with a bound.

Everything here is synchronous, so no cancellation can fall between two of its steps: whoever
holds a `Ticket` calls `leave` once, whatever happened, and neither a place nor a slot is lost.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import deque
from dataclasses import dataclass

from gateway import eta
from gateway.clock import Clock
from gateway.pool import Lease, Pool, Worker
from shared.errors import NoWorker, OmniError, QueueFull, TicketCancelled
from shared.protocol import RequestType

log = logging.getLogger(__name__)

ESTIMATES_VALID_S = 1.0


@dataclass(frozen=True, slots=True)
class Place:
    """What a waiting client is told."""

    position: int
    """1-based; 0 = not waiting."""
    estimated_wait_s: float
    queue_length: int
    is_starting: bool
    """Nobody can be served yet: workers are loading."""


class Ticket:
    """A place in the queue, then the lease it led to."""

    def __init__(self, session_id: str, request_type: RequestType, now: float) -> None:
        self.ticket_id = f"q_{secrets.token_hex(6)}"
        self.session_id = session_id
        self.request_type = request_type
        self.enqueued_at = now
        self.changed = asyncio.Event()
        """Set when the place, the estimate or the outcome may be another one."""
        self.decided = asyncio.Event()
        """Set with the outcome: `claim` has something to say."""
        self.lease: Lease | None = None
        self.error: OmniError | None = None

    def decide(self) -> None:
        self.decided.set()
        self.changed.set()

    def claim(self) -> Lease | None:
        """Return the lease, which is the caller's from now on; None while still waiting.

        Raises:
            TicketCancelled: the place was taken back.
            NoWorker: the last worker that could have served is gone.
        """
        if self.error is not None:
            raise self.error
        lease, self.lease = self.lease, None
        return lease


class TicketQueue:
    def __init__(
        self,
        pool: Pool,
        max_size: int,
        durations: eta.Durations,
        clock: Clock,
    ) -> None:
        self._pool = pool
        self._durations = durations
        self._clock = clock
        self._waiting: deque[Ticket] = deque()
        self._places: dict[str, Place] = {}
        self._places_at = -ESTIMATES_VALID_S
        self.max_size = max_size
        pool.on_change = self.dispatch
        pool.on_sample = durations.learn

    def __len__(self) -> int:
        return len(self._waiting)

    def waiting(self) -> list[Ticket]:
        return list(self._waiting)

    def find(self, ticket_id: str) -> Ticket | None:
        return next((t for t in self._waiting if t.ticket_id == ticket_id), None)

    def join(self, session_id: str, request_type: RequestType) -> Ticket:
        """Return a ticket that has its lease already, or waits at the end of the line.

        Raises:
            NoWorker: no worker is ready, loading or restarting.
            QueueFull: nothing is free and `max_size` others wait.
        """
        if not self._pool.n_ready and not self._pool.is_starting:
            raise NoWorker("No worker available")
        ticket = Ticket(session_id, request_type, self._clock.monotonic())
        self._waiting.append(ticket)
        self.dispatch()
        if ticket.lease is None and len(self._waiting) > self.max_size:
            self._waiting.remove(ticket)
            self._tell()
            raise QueueFull(f"Queue full ({self.max_size} requests)")
        return ticket

    def rejoin(self, ticket: Ticket) -> None:
        """Put a ticket whose worker could not be reached back to the head of the line."""
        ticket.decided.clear()
        self._waiting.appendleft(ticket)
        self.dispatch()

    def leave(self, ticket: Ticket) -> None:
        """Forget a ticket: its place, or the lease that nobody claimed."""
        if ticket in self._waiting:
            self._waiting.remove(ticket)
            self._tell()
        lease, ticket.lease = ticket.lease, None
        if lease is not None:
            lease.release()

    def cancel(self, ticket_id: str) -> bool:
        """Take a waiting ticket back; its holder is told. False: no such ticket waits."""
        ticket = self.find(ticket_id)
        if ticket is None:
            return False
        self._refuse(ticket, TicketCancelled("Request cancelled"))
        self._tell()
        return True

    def dispatch(self) -> None:
        """Give every free slot to the one who has waited longest."""
        while self._waiting:
            head = self._waiting[0]
            lease = self._pool.take(head.session_id, head.request_type)
            if lease is None:
                break
            self._waiting.popleft()
            head.lease = lease
            head.decide()
        if self._waiting and not self._pool.n_ready and not self._pool.is_starting:
            for ticket in list(self._waiting):
                self._refuse(ticket, NoWorker("No worker available"))
        self._tell()

    def place(self, ticket: Ticket) -> Place:
        """Return position and estimate of a ticket, at most a second old."""
        if self._clock.monotonic() - self._places_at >= ESTIMATES_VALID_S:
            self._estimate()
        return self._places.get(ticket.ticket_id, Place(0, 0.0, len(self._waiting), False))

    def estimate_anew(self) -> None:
        """The expected lengths have been changed."""
        self._places_at = -ESTIMATES_VALID_S

    def _refuse(self, ticket: Ticket, error: OmniError) -> None:
        self._waiting.remove(ticket)
        ticket.error = error
        ticket.decide()

    def _tell(self) -> None:
        self._places_at = -ESTIMATES_VALID_S
        old = self._places
        if not self._waiting and not old:
            return
        self._estimate()
        for ticket in self._waiting:
            before = old.get(ticket.ticket_id)
            now = self._places[ticket.ticket_id]
            if before is None or (before.position, before.is_starting) != (
                now.position,
                now.is_starting,
            ):
                ticket.changed.set()

    def _estimate(self) -> None:
        waits = eta.simulate(
            self._slots_free_in_s(),
            [self._durations.expected_s(ticket.request_type) for ticket in self._waiting],
        )
        is_starting = self._pool.n_ready == 0
        self._places = {
            ticket.ticket_id: Place(i + 1, wait_s, len(self._waiting), is_starting)
            for i, (ticket, wait_s) in enumerate(zip(self._waiting, waits, strict=True))
        }
        self._places_at = self._clock.monotonic()

    def _slots_free_in_s(self) -> list[float]:
        now = self._clock.monotonic()
        slots: list[float] = []
        for worker in self._pool.workers:
            if worker.in_rotation:
                slots += [0.0] * worker.slots_free
                slots += self._leases_left_s(worker, now)
                slots += [eta.OVERDUE_S] * worker.n_foreign
            elif worker.is_starting(now):
                is_loading = worker.status == "loading"
                wait_s = eta.start_left(
                    worker.health if is_loading else None, self._pool.stage_lengths_s
                )
                if worker.status == "draining":
                    wait_s += max(self._leases_left_s(worker, now), default=0.0)
                slots += [wait_s] * max(1, worker.slots_total)
        return slots

    def _leases_left_s(self, worker: Worker, now: float) -> list[float]:
        return [
            self._durations.left_s(
                lease.request_type, now - lease.started_at, is_ending=lease.is_ending
            )
            for lease in worker.leases
        ]
