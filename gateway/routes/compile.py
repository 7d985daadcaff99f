"""What each worker has compiled, captured and found in its cache."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from fastapi import APIRouter, Request

from gateway.context import gateway_of
from gateway.pool import Pool, Worker
from shared.errors import WorkerLost

router = APIRouter()


@router.get("/api/compile")
async def compile_status(request: Request) -> dict[str, Any]:
    """One row per worker, asked now and all at once; one that does not answer says why."""
    pool = gateway_of(request).pool
    rows = await asyncio.gather(*(_row(pool, worker) for worker in pool.workers))
    return {"workers": rows}


async def _row(pool: Pool, worker: Worker) -> dict[str, Any]:
    try:
        status = await pool.compile_status(worker)
    except WorkerLost as error:
        return {"worker_id": worker.name, "error": str(error)}
    return {"worker_id": worker.name, **msgspec.to_builtins(status)}
