"""`GET /metrics` for Prometheus."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, generate_latest

from gateway.context import gateway_of

router = APIRouter()


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """All metrics in the text format of Prometheus."""
    # A coroutine, because what is read belongs to the event loop.
    registry = gateway_of(request).metrics.registry
    return Response(generate_latest(registry), headers={"content-type": CONTENT_TYPE_PLAIN_0_0_4})
