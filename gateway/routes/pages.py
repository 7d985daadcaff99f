"""Pages, their files, and the little data they ask for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fastapi import APIRouter, HTTPException, Request
from fastapi.responses import FileResponse, Response
from fastapi.staticfiles import StaticFiles

from gateway.context import gateway_of

router = APIRouter()

NO_CACHE = "no-cache"
APPS = {
    "omni": ("Omni Full-Duplex", "omni"),
    "audio_duplex": ("Audio Full-Duplex", "audio-duplex"),
}
"""app id -> name, folder of its page in a tree that has one page per app."""


@router.get("/")
async def index(request: Request) -> FileResponse:
    return _page(gateway_of(request).static_dir / "index.html")


@router.get("/omni")
async def omni(request: Request) -> FileResponse:
    return _page(app_page(gateway_of(request).static_dir, "omni"))


@router.get("/audio_duplex")
async def audio_duplex(request: Request) -> FileResponse:
    return _page(app_page(gateway_of(request).static_dir, "audio_duplex"))


@router.get("/static/{path:path}")
async def static_file(request: Request, path: str) -> Response:
    gateway = gateway_of(request)
    if "\0" in path or not gateway.static_dir.is_dir():
        raise HTTPException(404, "Not Found")
    files = StaticFiles(directory=gateway.static_dir)
    response = await files.get_response(
        files.get_path({**request.scope, "path": path}), request.scope
    )
    # Asked again each time (and answered 304): an old script in a new page would break it.
    response.headers["Cache-Control"] = NO_CACHE
    return response


@router.get("/favicon.ico", include_in_schema=False)
async def favicon(request: Request) -> Response:
    for name, media_type in (("favicon.ico", "image/x-icon"), ("favicon.svg", "image/svg+xml")):
        path = gateway_of(request).static_dir / name
        if path.is_file():
            return FileResponse(path, media_type=media_type)
    return Response(status_code=204)


@router.get("/api/apps")
async def apps(request: Request) -> dict[str, Any]:
    """The apps of the page tree; a tree with a single page serves all of them at `/`."""
    static_dir = gateway_of(request).static_dir
    return {
        "apps": [
            {
                "app_id": app_id,
                "name": name,
                "route": f"/{app_id}" if app_page(static_dir, app_id).parent != static_dir else "/",
            }
            for app_id, (name, _) in APPS.items()
        ]
    }


@router.get("/api/frontend_defaults")
async def frontend_defaults(request: Request) -> dict[str, Any]:
    return {"playback_delay_ms": gateway_of(request).config.audio.playback_delay_ms}


def app_page(static_dir: Path, app_id: str) -> Path:
    """Return the page of an app: its own, or else the tree's index."""
    own = static_dir / APPS[app_id][1] / f"{app_id}.html"
    return own if own.is_file() else static_dir / "index.html"


def _page(path: Path) -> FileResponse:
    if not path.is_file():
        raise HTTPException(404, "This installation has no page")
    return FileResponse(path, media_type="text/html", headers={"Cache-Control": NO_CACHE})
