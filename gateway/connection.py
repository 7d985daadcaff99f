"""One HTTP connection before and between its requests: bounded in time, size and number.

uvicorn times a connection only after its first request, and reads heads of any length. Here a
connection that asks for nothing, asks slowly or does not read its answer is cut, and a flood of
them costs its sender's own connections, nobody else's.
"""

from __future__ import annotations

import asyncio
import logging
from enum import Enum, auto
from http import HTTPStatus
from typing import Any, ClassVar

import orjson
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gateway.faults import fault_of
from gateway.security import network_of
from shared.errors import BadRequest, HeadTooLarge, OmniError
from shared.limits import (
    MAX_IDLE_CONNECTIONS,
    MAX_RECORDING_BODY_BYTES,
    MAX_REQUEST_HEAD_BYTES,
    MIN_BODY_BYTES_PER_S,
    REQUEST_BODY_TIMEOUT_S,
    REQUEST_HEAD_TIMEOUT_S,
)

log = logging.getLogger(__name__)

REST_TIMEOUT_S = 2.0
"""For the rest of a body that nobody wants any more. Closing at once would reset the connection,
and the client would lose the answer that it has not read yet."""

WRITE_TIMEOUT_S = 60.0
"""A client that has not read anything of its answer for this long is cut."""

CLOSE_GRACE_S = 5.0
"""For a closing handshake and for unsent bytes; then the connection is cut."""

LONG_HEAD = f"The request's head is longer than {MAX_REQUEST_HEAD_BYTES // 1024} KiB"


class IdleConnections:
    """The connections without a request, by client, oldest first."""

    def __init__(self) -> None:
        self._by_client: dict[str, dict[HttpConnection, None]] = {}
        self._n = 0

    def __len__(self) -> int:
        return self._n

    def enter(self, connection: HttpConnection) -> None:
        """Take a connection; beyond the bound the client with most of them loses its oldest."""
        own = self._by_client.setdefault(connection.client_network, {})
        self._n += connection not in own
        own[connection] = None
        if self._n > MAX_IDLE_CONNECTIONS:
            greediest = max(self._by_client.values(), key=len)
            oldest = next(iter(greediest))
            self.leave(oldest)
            oldest.cut("too many idle connections")

    def leave(self, connection: HttpConnection) -> None:
        own = self._by_client.get(connection.client_network, {})
        if connection in own:
            del own[connection]
            self._n -= 1
            if not own:
                del self._by_client[connection.client_network]


class Part(Enum):
    """Where in a request the bytes stand that have come in."""

    BETWEEN = auto()
    HEAD = auto()
    BODY = auto()


class Wait(Enum):
    """What the client owes us; each has its own limit."""

    NOTHING = auto()
    HEAD = auto()
    BODY = auto()
    REST = auto()
    """Of a body whose request has been answered already, or of bytes that are no request."""


class HttpConnection(HttpToolsProtocol):
    idle: ClassVar[IdleConnections] = IdleConnections()
    """One for the process: its descriptors are what is bounded."""

    client_network = ""

    _part = Part.BETWEEN
    _wait = Wait.NOTHING
    _n_head_bytes = 0
    """Of the request's head, and of what frames its body: chunk lengths, a trailer."""
    _n_body_bytes = 0
    """Of the newest read."""
    _is_upgraded = False
    _is_refused = False
    """What it sends cannot be read as requests any more, and is thrown away."""
    _deadline: asyncio.TimerHandle | None = None
    _write_deadline: asyncio.TimerHandle | None = None

    # ---- the connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.client_network = network_of(self.client[0]) if self.client else ""
        self._settle()

    def connection_lost(self, exc: Exception | None) -> None:
        self.idle.leave(self)
        self._limit(Wait.NOTHING)
        self._stop_write_deadline()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        part = self._part
        self._n_body_bytes = 0
        super().data_received(data)
        if self._is_upgraded or self._is_refused or self.transport.is_closing():
            return
        # The read that began the head may have brought the end of the request before it.
        if part is self._part and part is not Part.BETWEEN:
            self._n_head_bytes += len(data) - self._n_body_bytes
            if self._n_head_bytes > MAX_REQUEST_HEAD_BYTES:
                if part is Part.HEAD:
                    self._refuse(HeadTooLarge(LONG_HEAD))
                else:
                    # It may have its answer already. The parser would keep the whole trailer.
                    self.cut("too long a trailer")
                return
        self._settle()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write_deadline = self.loop.call_later(WRITE_TIMEOUT_S, self.transport.abort)

    def resume_writing(self) -> None:
        self._stop_write_deadline()
        super().resume_writing()

    def handle_websocket_upgrade(self) -> None:
        # From here on the connection is the WebSocket's.
        self._is_upgraded = True
        self.idle.leave(self)
        self._limit(Wait.NOTHING)
        super().handle_websocket_upgrade()

    def send_400_response(self, msg: str) -> None:
        is_too_long = self._part is Part.HEAD and self._has_long_head()
        self._refuse(HeadTooLarge(LONG_HEAD) if is_too_long else BadRequest(msg))

    def timeout_keep_alive_handler(self) -> None:
        self.cut("kept alive for nothing")

    def cut(self, why: str) -> None:
        """Close the connection; what has been written already may still leave."""
        log.debug("connection cut reason=%r", why)
        if not self.transport.is_closing():
            self.transport.close()
            self.loop.call_later(CLOSE_GRACE_S, self.transport.abort)

    # ---- the request

    def on_message_begin(self) -> None:
        self._part = Part.HEAD
        self._n_head_bytes = 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        if self._has_long_head():
            # What the parser's callbacks raise ends in `send_400_response`.
            raise HeadTooLarge(LONG_HEAD)
        self._part = Part.BODY
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._n_body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._part = Part.BETWEEN
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.transport.is_closing():
            self._settle()

    # ---- limits

    def _has_long_head(self) -> bool:
        """Whether what has been parsed of a head is beyond the bound: one read may bring more."""
        n_bytes = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        return n_bytes > MAX_REQUEST_HEAD_BYTES

    def _settle(self) -> None:
        """Set the limit of what the client owes now."""
        is_answering = self.cycle is not None and not self.cycle.response_complete
        if is_answering:
            self.idle.leave(self)
            self._limit(Wait.BODY if self._part is Part.BODY else Wait.NOTHING)
        elif self._part is Part.BODY:
            self._unset_keepalive_if_required()
            self._limit(Wait.REST)
        else:
            self.idle.enter(self)
            is_kept_alive = self.timeout_keep_alive_task is not None
            self._limit(Wait.NOTHING if is_kept_alive else Wait.HEAD)

    def _limit(self, wait: Wait) -> None:
        if wait is self._wait:
            return
        self._wait = wait
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        limit_s = {
            Wait.HEAD: REQUEST_HEAD_TIMEOUT_S,
            Wait.BODY: REQUEST_BODY_TIMEOUT_S + self._announced_bytes() / MIN_BODY_BYTES_PER_S,
            Wait.REST: REST_TIMEOUT_S,
        }.get(wait)
        if limit_s is not None:
            self._deadline = self.loop.call_later(limit_s, self.cut, f"late with {wait.name}")

    def _announced_bytes(self) -> int:
        """What the head says of its body; one that may not be so large is refused at once."""
        headers = self.headers or ()  # None before the first request
        length = next((value for name, value in headers if name == b"content-length"), b"0")
        return min(int(length), MAX_RECORDING_BODY_BYTES)

    def _stop_write_deadline(self) -> None:
        if self._write_deadline is not None:
            self._write_deadline.cancel()
            self._write_deadline = None

    def _refuse(self, error: OmniError) -> None:
        """Answer a request that no route can be asked about."""
        self.transport.write(refusal(error))
        if self.cycle is not None and not self.cycle.response_complete:
            # It still answers the request before this one.
            self.cut(error.slug)
            return
        self._is_refused = True
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._limit(Wait.REST)


def refusal(error: OmniError) -> bytes:
    """Return a whole HTTP response in the one error shape; it closes its connection."""
    fault = fault_of(error)
    body = orjson.dumps(fault.body)
    fields: dict[str, Any] = {
        "content-type": "application/json",
        "content-length": len(body),
        "connection": "close",
        **fault.headers,
    }
    lines = [f"HTTP/1.1 {fault.http_status} {HTTPStatus(fault.http_status).phrase}"]
    lines += [f"{name}: {value}" for name, value in fields.items()]
    return "\r\n".join([*lines, "", ""]).encode() + body
