"""Is the service alive, is it ready, and what do its workers do."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from gateway.context import Gateway, gateway_of
from gateway.faults import fault_of
from gateway.pool import Lease, Worker
from gateway.routes.queue import running_tasks
from shared.errors import NoWorker, OmniError, Starting

router = APIRouter()


@router.head("/health", include_in_schema=False)
@router.get("/health")
async def health(request: Request) -> dict[str, Any]:
    """The gateway is alive; `ready` says whether a session would be served."""
    gateway = gateway_of(request)
    return {
        "status": "healthy",
        "timestamp": gateway.clock.date(),
        "live": True,
        **_readiness(gateway),
    }


@router.head("/ready", include_in_schema=False)
@router.get("/ready")
async def ready(request: Request) -> JSONResponse:
    """200 when at least one worker is ready, else 503 with the reason."""
    gateway = gateway_of(request)
    if gateway.pool.n_ready:
        return JSONResponse(_readiness(gateway))
    error: OmniError = NoWorker("No worker available")
    if gateway.pool.is_starting:
        error = Starting("Workers are loading")
    fault = fault_of(error)
    return JSONResponse(
        {**_readiness(gateway), **fault.body}, fault.http_status, dict(fault.headers)
    )


@router.get("/status")
async def status(request: Request) -> dict[str, Any]:
    gateway = gateway_of(request)
    words = [worker.status for worker in gateway.pool.workers]
    n_duplex = sum(word.startswith("duplex_") for word in words)
    n_other = sum(word.startswith("busy_") or word == "draining" for word in words)
    return {
        "gateway_healthy": True,
        "total_workers": len(words),
        "idle_workers": words.count("idle"),
        "busy_workers": n_duplex + n_other,
        "duplex_workers": n_duplex,
        "loading_workers": words.count("loading"),
        "error_workers": words.count("error"),
        "offline_workers": words.count("offline"),
        "queue_length": len(gateway.queue),
        "max_queue_size": gateway.queue.max_size,
        "running_tasks": running_tasks(gateway),
        "slots_total": sum(worker.slots_total for worker in gateway.pool.workers),
        "slots_free": sum(worker.slots_free for worker in gateway.pool.workers),
        "sessions": len(gateway.sessions),
        "errors": dict(gateway.desk.counts),
        "client_diagnostics": gateway.n_diagnostics,
    }


@router.get("/workers")
async def workers(request: Request) -> dict[str, Any]:
    gateway = gateway_of(request)
    rows = [_worker(gateway, worker) for worker in gateway.pool.workers]
    return {"total": len(rows), "workers": rows}


def _readiness(gateway: Gateway) -> dict[str, Any]:
    n_ready = gateway.pool.n_ready
    return {
        "ready": n_ready > 0,
        "workers_ready": n_ready,
        "workers_total": len(gateway.pool.workers),
    }


def _worker(gateway: Gateway, worker: Worker) -> dict[str, Any]:
    health = worker.health
    newest: Lease | None = worker.leases[-1] if worker.leases else None
    clock = gateway.clock
    return {
        "worker_id": worker.name,
        "host": worker.address.host,
        "port": worker.address.port,
        "gpu_id": worker.index,
        "status": worker.status,
        "current_session_id": newest.session_id if newest else None,
        "total_requests": health.total_requests if health else 0,
        "avg_inference_time_ms": health.avg_inference_time_ms if health else 0.0,
        "last_heartbeat": clock.date(worker.seen_at) if worker.seen_at is not None else None,
        "current_request_type": newest.request_type if newest else None,
        "task_started_at": clock.date(newest.started_at) if newest else None,
        "slots_total": worker.slots_total,
        "slots_free": worker.slots_free,
        "stage": health.stage if health else None,
        "stage_progress": health.stage_progress if health else 0.0,
        "stage_elapsed_s": health.stage_elapsed_s if health else 0.0,
        "eta_s": health.eta_s if health else None,
    }
