"""From asking for a worker to a session that is open on one: ticket, lease, link."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress

from gateway.context import Gateway
from gateway.link import WorkerLink
from gateway.pool import Lease
from gateway.race import first_to_end
from gateway.tickets import Place, Ticket
from shared.errors import NoFreeSlot, WorkerLost
from shared.protocol import Open

log = logging.getLogger(__name__)

QUEUE_UPDATE_S = 3.0
QUEUE_QUIET_S = 0.5
"""Between two updates of one client: each departure moves everybody who waits behind it."""

OPEN_ATTEMPTS = 4
"""Workers that are tried before the session is given up; each failed one leaves the rotation."""

Tell = Callable[[Ticket, Place], None]


async def admit(gateway: Gateway, opening: Open, tell: Tell) -> WorkerLink:
    """Wait for a slot, open the session on its worker and return the link to it.

    However this ends but with a link, neither a place in the queue nor a slot is left taken.

    Args:
        tell: told the ticket's place as soon as it has to wait, whenever the place changes, and
            every few seconds.

    Raises:
        QueueFull, NoWorker, TicketCancelled: there is no worker to be had.
        WorkerLost, NoFreeSlot, WorkerFailure: those that were to be had did not take the session.
    """
    ticket = gateway.queue.join(opening.session_id, opening.request_type)
    try:
        for attempt in range(1, OPEN_ATTEMPTS + 1):
            lease = await _wait(gateway, ticket, tell)
            link = WorkerLink(lease, gateway.background, gateway.large)
            try:
                # A worker that has frozen would use up the whole time-out of the opening.
                await first_to_end(link.open(opening), link.watch())
            except (WorkerLost, NoFreeSlot) as error:
                link.retire("refused")
                log.warning("worker refused attempt=%d error=%s", attempt, error)
                if attempt == OPEN_ATTEMPTS:
                    raise
                gateway.queue.rejoin(ticket)
            except BaseException:
                link.retire("client_gone")
                raise
            else:
                wait_s = gateway.clock.monotonic() - ticket.enqueued_at
                gateway.metrics.queue_wait_seconds.observe(wait_s)
                log.info("session assigned worker=%s wait_s=%.1f", link.worker_name, wait_s)
                return link
        raise AssertionError("the last attempt returns or raises")
    finally:
        gateway.queue.leave(ticket)


async def _wait(gateway: Gateway, ticket: Ticket, tell: Tell) -> Lease:
    while (lease := ticket.claim()) is None:
        ticket.changed.clear()
        tell(ticket, gateway.queue.place(ticket))
        with suppress(TimeoutError):
            async with asyncio.timeout(QUEUE_QUIET_S):
                await ticket.decided.wait()
                continue
        with suppress(TimeoutError):
            async with asyncio.timeout(QUEUE_UPDATE_S - QUEUE_QUIET_S):
                await ticket.changed.wait()
    return lease
