"""Recordings for those who know their id, and the list of them for administrators."""

from __future__ import annotations

import asyncio
import mimetypes
import re
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, HTTPException, Query, Request
from fastapi.responses import FileResponse, Response, StreamingResponse
from pydantic import BaseModel

from gateway.context import Gateway, gateway_of
from gateway.recording import archive, upload
from gateway.recording.store import (
    COMMENT,
    META,
    RECORDING,
    is_own_file,
    is_private,
    is_unfinished,
    write_atomically,
)
from shared.errors import BadMessage, NoStorage, OmniError, RecordingUnfinished

router = APIRouter()

MAX_COMMENT_CHARS = 2000
CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")
"""Characters that a terminal obeys; tabs and ends of lines are none of them."""

MAX_LISTED = 1000
LISTED = 200
VIEWERS = ("session.html", "session-viewer.html")
"""The viewer's page, in our tree or in another."""

MEDIA_TYPES = {
    ".wav": "audio/wav",
    ".jpg": "image/jpeg",
    ".jpeg": "image/jpeg",
    ".png": "image/png",
    ".webm": "video/webm",
    ".mp4": "video/mp4",
    ".mp3": "audio/mpeg",
}
HEADERS = {"Cache-Control": "private, no-cache", "X-Content-Type-Options": "nosniff"}


class Comment(BaseModel):
    comment: str | None = None


@router.get("/api/sessions/{recording_id}")
async def meta(request: Request, recording_id: str) -> Response:
    folder = _folder(request, recording_id)
    return _json_file(folder / META, f"Session not found: {recording_id}")


@router.get("/api/sessions/{recording_id}/recording")
async def recording(request: Request, recording_id: str) -> Response:
    folder = _folder(request, recording_id)
    return _json_file(folder / RECORDING, "The recording is not finished yet")


@router.head("/api/sessions/{recording_id}/assets/{path:path}", include_in_schema=False)
@router.get("/api/sessions/{recording_id}/assets/{path:path}")
async def asset(request: Request, recording_id: str, path: str) -> Response:
    folder = _folder(request, recording_id)
    file = _inside(folder, path)
    if file is None or not file.is_file():
        raise HTTPException(404, "Asset not found")
    known = MEDIA_TYPES.get(file.suffix.lower()) or mimetypes.guess_type(file.name)[0]
    return FileResponse(file, media_type=known or "application/octet-stream", headers=HEADERS)


@router.get("/api/sessions/{recording_id}/download")
async def download(request: Request, recording_id: str) -> StreamingResponse:
    folder = _folder(request, recording_id)
    if is_unfinished(folder):
        raise RecordingUnfinished("The recording is not finished yet")
    headers = {"Content-Disposition": f"attachment; filename={folder.name}.zip"}
    return StreamingResponse(
        archive.pieces(folder), media_type="application/zip", headers=HEADERS | headers
    )


@router.post("/api/sessions/{recording_id}/upload-recording")
async def upload_recording(request: Request, recording_id: str) -> dict[str, Any]:
    folder = _folder(request, recording_id)
    content_type = request.headers.get("content-type", "")
    uploads = gateway_of(request).recordings.uploads
    path, n_bytes = await upload.receive(folder, content_type, request.stream(), uploads)
    return {"status": "ok", "path": path.name, "size_bytes": n_bytes}


@router.post("/api/sessions/{recording_id}/comment")
async def put_comment(request: Request, recording_id: str, body: Comment) -> dict[str, Any]:
    path = _folder(request, recording_id) / COMMENT
    written = body.comment or ""
    if control := CONTROL.search(written):
        raise BadMessage(f"comment: U+{ord(control.group()):04X} is a control character")
    text = written.strip()
    if len(text) > MAX_COMMENT_CHARS:
        raise CommentTooLong(f"A comment may have {MAX_COMMENT_CHARS} characters at most")
    try:
        content = text.encode()
    except UnicodeEncodeError as error:
        # JSON can escape one half of a surrogate pair; as text it means nothing.
        raise BadMessage("comment: half of a surrogate pair is no character") from error
    try:
        if text:
            await asyncio.to_thread(write_atomically, path, content)
        else:
            path.unlink(missing_ok=True)
    except OSError as error:
        raise NoStorage("The comment cannot be stored") from error
    return {"status": "ok", "len": len(text)}


@router.get("/api/sessions/{recording_id}/comment")
async def get_comment(request: Request, recording_id: str) -> dict[str, str]:
    path = _folder(request, recording_id) / COMMENT
    if not is_own_file(path):
        return {"comment": ""}
    try:
        return {"comment": path.read_bytes().decode(errors="replace")}
    except FileNotFoundError:
        return {"comment": ""}


@router.get("/s/{recording_id}")
async def viewer(request: Request, recording_id: str) -> FileResponse:
    _folder(request, recording_id)
    static_dir = gateway_of(request).static_dir
    for page in (static_dir / name for name in VIEWERS):
        if page.is_file():
            return FileResponse(page, media_type="text/html", headers={"Cache-Control": "no-cache"})
    raise HTTPException(404, "This installation has no page for recordings")


@router.get("/api/recordings")
async def recordings(
    request: Request, limit: Annotated[int, Query(ge=1, le=MAX_LISTED)] = LISTED
) -> list[dict[str, Any]]:
    """The newest recordings first."""
    gateway = gateway_of(request)
    gateway.guard.check_admin(request)
    summaries = await asyncio.to_thread(gateway.recordings.store.summaries)
    return [
        {
            "session_id": summary.recording_id,
            "title": summary.title,
            "app_type": summary.app_type,
            "created_at": summary.created_at.isoformat(),
            "duration_s": summary.duration_s,
            "n_bytes": summary.n_bytes,
            "is_live": summary.recording_id in gateway.recordings.live,
        }
        for summary in summaries[:limit]
    ]


@router.delete("/api/recordings/{recording_id}")
async def delete(request: Request, recording_id: str) -> dict[str, bool]:
    gateway = gateway_of(request)
    gateway.guard.check_admin(request)
    try:
        was_there = await asyncio.to_thread(gateway.recordings.store.delete, recording_id)
    except OSError as error:
        raise NoStorage("The recording cannot be removed") from error
    if not was_there:
        raise HTTPException(404, f"Session not found: {recording_id}")
    return {"success": True}


class CommentTooLong(OmniError):
    """A comment of more than `MAX_COMMENT_CHARS`."""

    slug = "payload_too_large"
    http_status = 413


def _folder(request: Request, recording_id: str) -> Path:
    gateway: Gateway = gateway_of(request)
    folder = gateway.recordings.store.find(recording_id)
    if folder is None:
        raise HTTPException(404, f"Session not found: {recording_id}")
    return folder


def _inside(folder: Path, path: str) -> Path | None:
    """Return the file of that path; None: one that is not to be shown.

    Raises:
        HTTPException: 400, the path leads out of the recording.
    """
    if "\0" in path:
        return None
    if path.startswith("/") or ".." in path.split("/"):
        raise HTTPException(400, "Invalid path")
    file = (folder / path).resolve()
    if not file.is_relative_to(folder.resolve()):
        raise HTTPException(400, "Invalid path")
    return None if any(map(is_private, path.split("/"))) else file


def _json_file(path: Path, missing: str) -> Response:
    if not is_own_file(path):
        raise HTTPException(404, missing)
    return FileResponse(path, media_type="application/json", headers=HEADERS)
