"""Where pages report what went wrong in them."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import APIRouter, Request

from gateway.context import gateway_of
from shared.errors import BadMessage

router = APIRouter()

OBJECT_BODY = {
    "requestBody": {
        "required": True,
        "content": {"application/json": {"schema": {"type": "object"}}},
    }
}


@router.post("/api/_debug/record_trace", openapi_extra=OBJECT_BODY)
async def record_trace(request: Request) -> dict[str, bool]:
    """Keep a JSON object, with the time, for whoever runs the service."""
    body = await request.body()
    try:
        record = msgspec.json.decode(body, type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise BadMessage(f"body: {error}") from error
    await gateway_of(request).traces.append(record)
    return {"ok": True}
