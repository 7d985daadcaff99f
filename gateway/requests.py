"""Bounds on HTTP requests as the application sees them: their number and their bodies."""

from __future__ import annotations

import re

from pydantic import BaseModel
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.faults import FaultDesk
from gateway.security import OPEN_PATHS
from shared.errors import OmniError, PayloadTooLarge, TooManyConnections
from shared.limits import (
    MAX_BODY_BYTES,
    MAX_CHAT_BODY_BYTES,
    MAX_RECORDING_BODY_BYTES,
    MAX_REQUESTS,
    MAX_VOICE_BODY_BYTES,
)

MEDIA_BODIES = (
    (re.compile(r"/api/chat"), MAX_CHAT_BODY_BYTES),
    (re.compile(r"/api/assets/ref_audio"), MAX_VOICE_BODY_BYTES),
    (re.compile(r"/api/sessions/[^/]+/upload-recording"), MAX_RECORDING_BODY_BYTES),
)
"""Paths whose bodies may be larger than `MAX_BODY_BYTES`."""


class Problem(BaseModel):
    """The body of every answer that is an error."""

    detail: str
    slug: str


class RequestLimits:
    """Refuses requests beyond `MAX_REQUESTS` at a time, and bodies beyond what their path may have.

    A body is refused by what its head says, or else once it has grown too long; what is beyond
    the bound is never held. A health probe is answered however many requests there are.
    """

    def __init__(self, app: ASGIApp, desk: FaultDesk) -> None:
        self._app = app
        self._desk = desk
        self._n_running = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        most = most_bytes(scope["path"])
        exchange = _Exchange(scope, receive, send, self._desk, most)
        if self._n_running >= MAX_REQUESTS and scope["path"] not in OPEN_PATHS:
            await exchange.refuse(TooManyConnections("The service answers too many requests"))
            return
        if _declared_bytes(scope) > most:
            await exchange.refuse(exchange.too_large())
            return
        self._n_running += 1
        try:
            await self._app(scope, exchange.receive, exchange.send)
        finally:
            self._n_running -= 1


class _Exchange:
    """One request and its response."""

    def __init__(
        self, scope: Scope, receive: Receive, send: Send, desk: FaultDesk, most_bytes: int
    ) -> None:
        self._most_bytes = most_bytes
        self._scope = scope
        self._receive = receive
        self._send = send
        self._desk = desk
        self._n_bytes = 0
        self._is_refused = False
        self._is_answered = False

    async def receive(self) -> Message:
        """Raises PayloadTooLarge; whatever the route makes of it, the client is told that."""
        message = await self._receive()
        self._n_bytes += len(message.get("body", b""))
        if self._n_bytes > self._most_bytes:
            if not self._is_answered:
                await self.refuse(self.too_large())
            raise self.too_large()
        return message

    def too_large(self) -> PayloadTooLarge:
        return PayloadTooLarge(f"The body is larger than {self._most_bytes} bytes")

    async def send(self, message: Message) -> None:
        if self._is_refused:
            return
        self._is_answered = True
        await self._send(message)

    async def refuse(self, error: OmniError) -> None:
        self._is_refused = True
        answer = self._desk.answer(error, HTTPConnection(self._scope))
        await answer(self._scope, self._receive, self._send)


def most_bytes(path: str) -> int:
    """Return how large the body of a request to this path may be."""
    return next((most for known, most in MEDIA_BODIES if known.fullmatch(path)), MAX_BODY_BYTES)


def _declared_bytes(scope: Scope) -> int:
    for name, value in scope["headers"]:
        if name == b"content-length":
            # The parser has refused everything but digits.
            return int(value)
    return 0
