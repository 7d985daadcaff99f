"""Pages, their files, and the little data they ask for.

Our own tree has one page per kind of app. Another tree (`--static-dir`) may have a folder per app;
what it has none of is served by its index.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fastapi import APIRouter, HTTPException, Request
from fastapi.responses import FileResponse, RedirectResponse, Response
from fastapi.staticfiles import StaticFiles

from gateway import relative
from gateway.context import gateway_of

router = APIRouter()

NO_CACHE = "no-cache"
NO_STORE = {"Cache-Control": "no-store"}
INDEX = "index.html"
APP_PAGES = {
    "turnbased": ("turnbased.html", "chat.html"),
    "half_duplex_audio": ("half-duplex/half_duplex.html", "half_duplex.html"),
    "omni": ("omni/omni.html", "duplex.html"),
    "audio_duplex": ("audio-duplex/audio_duplex.html", "duplex.html"),
}
"""app id -> files that may be its page; the first one that is there is."""

MOBILE = "mobile"
MOBILE_OMNI_PAGES = ("mobile-omni/index.html", *APP_PAGES["omni"])


@router.get("/")
async def index(request: Request) -> Response:
    return _page(request, INDEX)


@router.get("/turnbased")
async def turnbased(request: Request) -> Response:
    return _app_page(request, "turnbased")


@router.get("/half_duplex")
async def half_duplex(request: Request) -> Response:
    return _app_page(request, "half_duplex_audio")


@router.get("/omni")
async def omni(request: Request) -> Response:
    return _app_page(request, "omni")


@router.get("/audio_duplex")
async def audio_duplex(request: Request) -> Response:
    return _app_page(request, "audio_duplex")


@router.get("/admin")
async def admin(request: Request) -> Response:
    return _page(request, "admin.html")


@router.get("/mobile-omni")
async def mobile_omni(request: Request) -> Response:
    is_enabled = gateway_of(request).apps.is_enabled("omni")
    return _redirect(request, "/mobile-omni/" if is_enabled else "/")


@router.get("/mobile-omni/", include_in_schema=False)
async def mobile_omni_page(request: Request) -> Response:
    if not gateway_of(request).apps.is_enabled("omni"):
        return _redirect(request, "/")
    return _page(request, *MOBILE_OMNI_PAGES, INDEX)


@router.get("/mobile")
async def mobile(request: Request) -> Response:
    return _redirect(request, "/mobile/")


@router.get("/mobile/", include_in_schema=False)
async def mobile_page(request: Request) -> Response:
    """The pages for phones; a tree without them has pages that fit a phone."""
    if not (gateway_of(request).static_dir / MOBILE / INDEX).is_file():
        return _redirect(request, "/")
    return _page(request, f"{MOBILE}/{INDEX}")


@router.head("/mobile/{path:path}", include_in_schema=False)
@router.get("/mobile/{path:path}")
async def mobile_file(request: Request, path: str) -> Response:
    if ".." in path.split("/"):
        raise HTTPException(400, "The path leads out of the page tree")
    return await static_file(request, f"{MOBILE}/{path}")


@router.head("/static/{path:path}", include_in_schema=False)
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


@router.get("/api/frontend_defaults")
async def frontend_defaults(request: Request) -> dict[str, Any]:
    """What pages start with; `default_lang` only where the gateway was told one."""
    gateway = gateway_of(request)
    language = {"default_lang": gateway.default_lang} if gateway.default_lang else {}
    return {"playback_delay_ms": gateway.config.audio.playback_delay_ms, **language}


def _app_page(request: Request, app_id: str) -> Response:
    if not gateway_of(request).apps.is_enabled(app_id):
        return _redirect(request, "/")
    return _page(request, *APP_PAGES[app_id], INDEX)


def _page(request: Request, *names: str) -> Response:
    """Answer with the first of these files that the tree has."""
    path = _first(gateway_of(request).static_dir, names)
    if path is None:
        raise HTTPException(404, "This installation has no page")
    return FileResponse(path, media_type="text/html", headers={"Cache-Control": NO_CACHE})


def _first(static_dir: Path, names: tuple[str, ...]) -> Path | None:
    return next((path for name in names if (path := static_dir / name).is_file()), None)


def _redirect(request: Request, path: str) -> Response:
    # A key in the address has to arrive; without no-store a page that is enabled again stays lost.
    way = relative.way_up(request.scope) + path.removeprefix("/") or "./"
    return RedirectResponse(way + relative.query(request.scope), 302, NO_STORE)
