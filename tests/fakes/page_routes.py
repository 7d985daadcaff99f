"""What the pages ask a gateway for besides sockets, with answers that a test can change."""

from __future__ import annotations

import base64
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from fastapi import APIRouter, HTTPException, Response
from fastapi.responses import FileResponse
from fastapi.staticfiles import StaticFiles

STATIC = Path(__file__).parents[2] / "gateway" / "static"
PAGES = {
    "/": "index.html",
    "/omni": "duplex.html",
    "/audio_duplex": "duplex.html",
    "/half_duplex": "half_duplex.html",
    "/turnbased": "chat.html",
}
APPS = {
    "turnbased": ("Turn-based Chat", "/turnbased"),
    "half_duplex_audio": ("Half-Duplex Audio", "/half_duplex"),
    "omni": ("Omni Full-Duplex", "/omni"),
    "audio_duplex": ("Audio Full-Duplex", "/audio_duplex"),
}
VOICE_S = 0.5
STATUS = {
    "total_workers": 2,
    "idle_workers": 1,
    "busy_workers": 1,
    "loading_workers": 0,
    "queue_length": 3,
    "running_tasks": [{"worker_id": "worker_0"}],
    "slots_total": 8,
    "slots_free": 7,
}


def voice(level: float) -> str:
    """Base64 of half a second at 16 kHz, told apart by its level."""
    samples = np.full(round(16_000 * VOICE_S), level, "<f4")
    return base64.b64encode(samples.tobytes()).decode()


PRESET_VOICE = voice(0.25)
UPLOADED_VOICE = voice(0.5)


def duplex_preset() -> dict[str, Any]:
    return {
        "id": "pirate",
        "order": 1,
        "name": "Pirate",
        "description": "Speaks like the sea",
        "system_prompt": "You are a pirate.",
        "ref_audio": {"data": None, "path": "x.wav", "name": "x", "duration": VOICE_S},
    }


def turn_preset() -> dict[str, Any]:
    audio = {"type": "audio", "data": None, "path": "x.wav", "name": "x", "duration": VOICE_S}
    return {
        "id": "pirate",
        "order": 1,
        "name": "Pirate",
        "description": "Speaks like the sea",
        "system_content": [
            {"type": "text", "text": "You are a pirate with this voice:"},
            audio,
            {"type": "text", "text": "Be brief."},
        ],
    }


@dataclass
class PageData:
    enabled: list[str] = field(default_factory=lambda: list(APPS))
    status: dict[str, Any] = field(default_factory=lambda: dict(STATUS))
    default_lang: str | None = None
    titles: dict[str, str] = field(default_factory=dict)
    """Of recordings, by id; the others are not there."""

    def defaults(self) -> dict[str, Any]:
        lang = {} if self.default_lang is None else {"default_lang": self.default_lang}
        return {"playback_delay_ms": 200, **lang}


def page_routes(data: PageData) -> APIRouter:
    router = APIRouter()
    router.include_router(_choices())

    for path, name in PAGES.items():
        router.add_api_route(path, _page(name))

    @router.get("/api/frontend_defaults")
    async def frontend_defaults() -> dict[str, Any]:
        return data.defaults()

    @router.get("/api/apps")
    async def apps() -> dict[str, Any]:
        rows = [(app_id, *APPS[app_id]) for app_id in data.enabled]
        return {"apps": [{"app_id": a, "name": n, "route": r} for a, n, r in rows]}

    @router.get("/status")
    async def status() -> dict[str, Any]:
        return data.status

    @router.get("/api/sessions/{recording_id}")
    async def recording(recording_id: str) -> dict[str, Any]:
        if recording_id not in data.titles:
            raise HTTPException(404, f"Session not found: {recording_id}")
        return {"session_id": recording_id, "title": data.titles[recording_id]}

    @router.get("/favicon.ico")
    async def favicon() -> Response:
        return Response(status_code=204)

    router.mount("/static", StaticFiles(directory=STATIC))
    return router


def _choices() -> APIRouter:
    """Presets and voices."""
    router = APIRouter()

    @router.get("/api/presets")
    async def presets() -> dict[str, Any]:
        return {
            "omni": [duplex_preset()],
            "audio_duplex": [],
            "half_duplex_audio": [turn_preset()],
            "turnbased": [turn_preset()],
        }

    @router.get("/api/presets/{mode}/{preset_id}/audio")
    async def preset_audio(mode: str, preset_id: str) -> dict[str, Any]:
        sound = {"data": PRESET_VOICE, "name": "x", "duration": VOICE_S}
        return {"ref_audio": sound} if mode == "omni" else {"system_content_audio": [sound]}

    @router.get("/api/assets/ref_audio")
    async def voices() -> dict[str, Any]:
        return {"total": 1, "ref_audios": [{"id": "v1", "name": "Ada"}]}

    @router.get("/api/assets/ref_audio/{voice_id}/audio")
    async def uploaded(voice_id: str) -> dict[str, Any]:
        if voice_id != "v1":
            raise HTTPException(404, "There is no such voice")
        return {"data": UPLOADED_VOICE, "name": "Ada", "duration": VOICE_S}

    return router


def _page(name: str) -> Any:
    async def page() -> FileResponse:
        return FileResponse(STATIC / name)

    return page
