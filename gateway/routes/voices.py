"""The default voice, and voices that clients bring to choose from."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from fastapi import APIRouter, HTTPException, Request
from fastapi.responses import Response

from gateway.context import gateway_of
from gateway.voices import Upload
from shared.errors import BadMessage
from shared.limits import INPUT_SAMPLE_RATE_HZ

router = APIRouter()

UPLOAD_BODY = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {
                "schema": {
                    "type": "object",
                    "required": ["name", "audio_base64"],
                    "properties": {
                        "name": {"type": "string"},
                        "audio_base64": {"type": "string", "format": "byte"},
                    },
                }
            }
        },
    }
}
"""For `/docs`: the body is parsed by the route, away from the event loop."""


class UploadBody(msgspec.Struct):
    """`audio_base64`: a whole sound file, not raw samples."""

    name: str
    audio_base64: bytes


@router.get("/api/default_ref_audio")
async def default_voice(request: Request) -> Response:
    """The voice of sessions that bring none, as base64 of float32 at 16 kHz."""
    try:
        clip = await gateway_of(request).default_voice.read()
    except FileNotFoundError as error:
        raise HTTPException(404, "This installation has no default voice") from error
    return await voice_response(
        {
            "name": clip.name,
            "duration": clip.duration_s,
            "sample_rate": INPUT_SAMPLE_RATE_HZ,
            "samples": clip.n_samples,
            "base64": clip.data,
        }
    )


@router.get("/api/assets/ref_audio")
async def voices(request: Request) -> dict[str, Any]:
    found = gateway_of(request).voices.all()
    return {"total": len(found), "ref_audios": [msgspec.to_builtins(voice) for voice in found]}


@router.post("/api/assets/ref_audio", openapi_extra=UPLOAD_BODY)
async def upload_voice(request: Request) -> dict[str, Any]:
    """Keep a voice of at most 60 s, out of a file in any usual format."""
    gateway = gateway_of(request)
    with gateway.voices.uploads.receiving():
        body = await request.body()
        upload = await gateway.large.run(len(body), _parse, body)
        voice = await gateway.voices.add(upload)
    return {
        "success": True,
        "id": voice.id,
        "name": voice.name,
        "message": f"Uploaded successfully, duration={voice.duration_ms}ms",
    }


@router.delete("/api/assets/ref_audio/{voice_id}")
async def delete_voice(request: Request, voice_id: str) -> dict[str, Any]:
    if not await gateway_of(request).voices.remove(voice_id):
        raise HTTPException(404, f"There is no voice {voice_id!r}")
    return {"success": True, "id": voice_id, "name": None, "message": "Deleted"}


@router.get("/api/assets/ref_audio/{voice_id}/audio")
async def voice_audio(request: Request, voice_id: str) -> Response:
    """An uploaded voice in the form that `prepare` takes: base64 of float32 at 16 kHz."""
    clip = await gateway_of(request).voices.read(voice_id)
    if clip is None:
        raise HTTPException(404, f"There is no voice {voice_id!r}")
    return await voice_response(clip.row)


async def voice_response(body: dict[str, Any]) -> Response:
    """Answer with voices in it; a minute of voice is 5 MB of text."""
    data = await asyncio.to_thread(msgspec.json.encode, body)
    return Response(data, media_type="application/json")


def _parse(body: bytes) -> Upload:
    try:
        read = msgspec.json.decode(body, type=UploadBody)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise BadMessage(f"body: {error}") from error
    return Upload(read.name, read.audio_base64)
