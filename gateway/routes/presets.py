"""What a conversation may begin with."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, HTTPException, Request
from fastapi.responses import Response

from gateway.context import gateway_of
from gateway.routes.voices import voice_response

router = APIRouter(prefix="/api/presets")


@router.get("")
async def presets(request: Request) -> dict[str, list[dict[str, Any]]]:
    """All presets by mode, without their sound."""
    found = gateway_of(request).presets
    return {mode: [await one.row() for one in rows] for mode, rows in found.by_mode.items()}


@router.get("/{mode}/{preset_id}/audio")
async def preset_audio(request: Request, mode: str, preset_id: str) -> Response:
    """The sound of one preset, as base64 of float32 at 16 kHz."""
    preset = gateway_of(request).presets.find(mode, preset_id)
    if preset is None:
        raise HTTPException(404, f"Preset not found: {mode}/{preset_id}")
    return await voice_response(await preset.audio())
