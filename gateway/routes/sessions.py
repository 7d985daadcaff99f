"""Which sessions are live, and on which worker."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from gateway.context import gateway_of

router = APIRouter()


@router.get("/sessions")
@router.get("/api/sessions")
async def sessions(request: Request) -> dict[str, Any]:
    """Every session that has a worker; `last_active` is when it got it."""
    gateway = gateway_of(request)
    rows = [
        {
            "session_id": lease.session_id,
            "worker_id": lease.worker.name,
            # There is no cache that several sessions could share.
            "messages_hash": "",
            "last_active": gateway.clock.date(lease.started_at),
        }
        for lease in gateway.pool.leases()
    ]
    return {"total": len(rows), "sessions": rows}


@router.get("/cache")
async def cache(request: Request) -> dict[str, Any]:
    workers = gateway_of(request).pool.workers
    return {"workers": [{"worker_id": worker.name, "status": worker.status} for worker in workers]}
