"""Bounds on HTTP requests as the application sees them: their number and their bodies."""

from __future__ import annotations

from pydantic import BaseModel
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.faults import FaultDesk
from gateway.security import OPEN_PATHS
from shared.errors import OmniError, PayloadTooLarge, TooManyConnections
from shared.limits import MAX_BODY_BYTES, MAX_REQUESTS


class Problem(BaseModel):
    """The body of every answer that is an error."""

    detail: str
    slug: str


class RequestLimits:
    """Refuses requests beyond `MAX_REQUESTS` at a time, and bodies beyond `MAX_BODY_BYTES`.

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
        exchange = _Exchange(scope, receive, send, self._desk)
        if self._n_running >= MAX_REQUESTS and scope["path"] not in OPEN_PATHS:
            await exchange.refuse(TooManyConnections("The service answers too many requests"))
            return
        if _declared_bytes(scope) > MAX_BODY_BYTES:
            await exchange.refuse(_too_large())
            return
        self._n_running += 1
        try:
            await self._app(scope, exchange.receive, exchange.send)
        finally:
            self._n_running -= 1


class _Exchange:
    """One request and its response."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, desk: FaultDesk) -> None:
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
        if self._n_bytes > MAX_BODY_BYTES:
            if not self._is_answered:
                await self.refuse(_too_large())
            raise _too_large()
        return message

    async def send(self, message: Message) -> None:
        if self._is_refused:
            return
        self._is_answered = True
        await self._send(message)

    async def refuse(self, error: OmniError) -> None:
        self._is_refused = True
        fault = self._desk.translate(error, self._scope["path"])
        response = JSONResponse(fault.body, fault.http_status, dict(fault.headers))
        await response(self._scope, self._receive, self._send)


def _too_large() -> PayloadTooLarge:
    return PayloadTooLarge(f"The body is larger than {MAX_BODY_BYTES} bytes")


def _declared_bytes(scope: Scope) -> int:
    for name, value in scope["headers"]:
        if name == b"content-length":
            # The parser has refused everything but digits.
            return int(value)
    return 0
