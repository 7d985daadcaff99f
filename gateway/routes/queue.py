"""The queue as operators see it."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from gateway.context import Gateway, gateway_of
from gateway.tickets import Ticket

router = APIRouter(prefix="/api/queue")


@router.get("")
async def show_queue(request: Request) -> dict[str, Any]:
    gateway = gateway_of(request)
    now = gateway.clock.monotonic()
    items = [
        {
            "ticket_id": ticket.ticket_id,
            "request_type": ticket.request_type,
            "session_id": ticket.session_id,
            "position": place.position,
            "estimated_wait_s": place.estimated_wait_s,
            "enqueued_at": gateway.clock.date(ticket.enqueued_at),
            "wait_elapsed_s": round(now - ticket.enqueued_at, 1),
        }
        for ticket in gateway.queue.waiting()
        for place in (gateway.queue.place(ticket),)
    ]
    return {
        "queue_length": len(items),
        "max_queue_size": gateway.queue.max_size,
        "items": items,
        "running_tasks": running_tasks(gateway),
    }


@router.get("/{ticket_id}")
async def show_ticket(request: Request, ticket_id: str) -> dict[str, Any]:
    gateway = gateway_of(request)
    ticket: Ticket | None = gateway.queue.find(ticket_id)
    if ticket is None:
        return {"found": False, "message": "No such ticket is waiting"}
    place = gateway.queue.place(ticket)
    return {
        "found": True,
        "ticket": {
            "ticket_id": ticket.ticket_id,
            "request_type": ticket.request_type,
            "session_id": ticket.session_id,
            "enqueued_at": gateway.clock.date(ticket.enqueued_at),
            "position": place.position,
            "estimated_wait_s": place.estimated_wait_s,
            "cancelled": False,
        },
    }


@router.delete("/{ticket_id}")
async def cancel_ticket(request: Request, ticket_id: str) -> dict[str, bool]:
    gateway = gateway_of(request)
    gateway.guard.check_admin(request)
    return {"success": gateway.queue.cancel(ticket_id)}


def running_tasks(gateway: Gateway) -> list[dict[str, Any]]:
    """Return what every lease is used for, in the wire's shape."""
    now = gateway.clock.monotonic()
    return [
        {
            "worker_id": lease.worker.name,
            "request_type": lease.request_type,
            "started_at": gateway.clock.date(lease.started_at),
            "elapsed_s": round(now - lease.started_at, 1),
            "estimated_remaining_s": round(
                gateway.durations.left_s(
                    lease.request_type, now - lease.started_at, is_ending=lease.is_ending
                ),
                1,
            ),
        }
        for lease in gateway.pool.leases()
    ]
