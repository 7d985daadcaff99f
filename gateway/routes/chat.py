"""`POST /api/chat`: one question, one answer."""

from __future__ import annotations

import asyncio
import logging

from fastapi import APIRouter, Request, Response
from starlette.requests import ClientDisconnect

from gateway.context import Gateway, gateway_of
from gateway.dialects.g0_chat import ChatRequest, read_request, response
from gateway.dialects.g0_values import json_object
from gateway.question import Answer, Question
from gateway.race import first_to_end
from gateway.routes.sockets import chat_opening
from shared.errors import ServerShutdown
from shared.logs import session_id_in_context
from shared.protocol import Open

log = logging.getLogger(__name__)
router = APIRouter()

CLIENT_GONE = 499
"""For the log alone: whoever asked is not there any more."""

BODY = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {
                "schema": {
                    "type": "object",
                    "required": ["messages"],
                    "properties": {"messages": {"type": "array", "minItems": 1, "items": {}}},
                }
            }
        },
        "description": "See docs/chat.md.",
    }
}


@router.post("/api/chat", openapi_extra=BODY)
async def chat(request: Request) -> Response:
    """Answers with text, and sound if asked for; docs/chat.md has the fields."""
    gateway = gateway_of(request)
    gateway.apps.require("turnbased")
    if gateway.closing.is_set():
        raise ServerShutdown("The service is going down")
    opening = chat_opening()
    session_id_in_context.set(opening.session_id)
    try:
        with gateway.guard.count_session(request), gateway.session():
            return await _answer(request, gateway, opening)
    except ClientDisconnect:
        log.info("client left before its answer")
        return Response(status_code=CLIENT_GONE)


async def _answer(request: Request, gateway: Gateway, opening: Open) -> Response:
    held = _Held(gateway)
    answers: list[Answer] = []
    try:
        asked = await _read(request, gateway, held)
        ignored, returns_prompt = asked.ignored, asked.returns_prompt
        question = Question(gateway, opening, asked.ask, on_sent=held.release)
        del asked

        async def ask() -> None:
            answers.append(await question.answer())

        await first_to_end(ask(), _until_gone(request))
    finally:
        held.release()
    (answer,) = answers
    body = await gateway.large.run(
        len(answer.answered.audio),
        response,
        answer.answered,
        answer.course,
        ignored,
        returns_prompt=returns_prompt,
    )
    return Response(body, media_type="application/json")


class _Held:
    """What one request adds to the input that the process holds."""

    def __init__(self, gateway: Gateway) -> None:
        self._held = gateway.held
        self._n_bytes = 0

    def add(self, n_bytes: int) -> None:
        """Raises MediaFull when all together hold too much."""
        self._held.check(self._n_bytes, n_bytes)
        self._held.total += n_bytes
        self._n_bytes += n_bytes

    def release(self) -> None:
        self._held.total -= self._n_bytes
        self._n_bytes = 0


async def _read(request: Request, gateway: Gateway, held: _Held) -> ChatRequest:
    body = bytearray()
    async for piece in request.stream():
        held.add(len(piece))
        body += piece
    return await gateway.large.run(len(body), _parse, body)


def _parse(body: bytearray) -> ChatRequest:
    return read_request(json_object(body), is_streaming=False)


async def _until_gone(request: Request) -> None:
    """Raises ClientDisconnect once the client has closed its connection."""
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        await asyncio.sleep(0)
