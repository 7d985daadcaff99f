"""What the clients of all modes have in common: the connection, its stamps and its last words."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import socket
import ssl
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Self, TypeVar
from urllib.parse import urlsplit, urlunsplit

from websockets.asyncio.client import ClientConnection, connect
from websockets.asyncio.connection import Connection
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus, InvalidURI
from websockets.frames import DATA_OPCODES, Frame
from websockets.http11 import Request, Response

from client.events import (
    Closed,
    ErrorEvent,
    Queued,
    QueueDone,
    QueueUpdate,
    SessionError,
    TimedOut,
)
from shared.limits import MAX_FRAME_BYTES, WS_PING_INTERVAL_S, WS_PING_TIMEOUT_S

OPEN_TIMEOUT_S = 10.0
LOOPBACK_HOSTS = frozenset({"127.0.0.1", "localhost", "::1"})
BASE36 = "0123456789abcdefghijklmnopqrstuvwxyz"
READ_BYTES = 65_536

EventT = TypeVar("EventT")
"""The events of one mode; those of the queue, `ErrorEvent` and `Closed` are in each."""

WantedT = TypeVar("WantedT")

OnWait = Callable[[Queued | QueueUpdate], None]
"""Is told each report about the place in the queue."""


class Stamped(Connection):
    """Remembers when each message was complete at the socket, however busy its reader is."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.completed_at: deque[float] = deque()
        """One `time.monotonic()` per message that has not been read yet."""

    def process_event(self, event: Request | Response | Frame) -> None:
        if isinstance(event, Frame) and event.opcode in DATA_OPCODES and event.fin:
            self.completed_at.append(time.monotonic())
        super().process_event(event)


class StampedConnection(Stamped, ClientConnection):
    """The client's end of a socket; what the server said before it broke off is read."""

    def connection_lost(self, exc: Exception | None) -> None:
        if isinstance(exc, ConnectionError):
            # A write met the broken connection before a read did. asyncio reads no further, but
            # the system still has what had come until then: the reason, as a rule.
            for data in _left_over(self.transport):
                self.data_received(data)
        super().connection_lost(exc)


def _left_over(transport: asyncio.BaseTransport) -> list[bytes]:
    """Return the bytes that a broken connection's socket still holds; none of an encrypted one."""
    broken = transport.get_extra_info("socket")
    if broken is None or transport.get_extra_info("ssl_object") is not None:
        return []
    pieces: list[bytes] = []
    # The socket as asyncio hands it out cannot be read.
    with socket.socket(fileno=os.dup(broken.fileno())) as readable:
        readable.setblocking(False)
        with contextlib.suppress(OSError):
            while data := readable.recv(READ_BYTES):
                pieces.append(data)
    return pieces


class SessionClient(Generic[EventT]):
    """One connection; open it with `async with`, at most once, and iterate over its events.

    Sending and iterating may run in two tasks. What needs an answer (`prepare`) reads the socket
    itself, so it is not to be called while another task iterates.

    `sent_at` and `received_at` are readings of `time.monotonic()`, taken at the socket: when the
    newest message was handed to it, and when the newest returned event was complete in it.

    Args:
        url: base address (`ws://`, `wss://`, `http://`, `https://`), with the path below which a
            proxy has the service, if any; one whose path contains `/ws/` is the complete endpoint.
        path: the endpoint below a base address.
        parse: makes an event of a message; None for one of a type that this client does not know.
        api_key: sent as a bearer token.
        ca_file: PEM certificate to trust, for a server with a self-made one.

    Raises:
        SessionError: `url` is no server address.
    """

    def __init__(
        self,
        url: str,
        path: str,
        parse: Callable[[str | bytes], EventT | None],
        api_key: str | None,
        ca_file: Path | None,
    ) -> None:
        self.url = endpoint(url, path)
        self._parse = parse
        self._api_key = api_key
        self._ca_file = ca_file
        self.sent_at = self.received_at = 0.0
        self._socket: StampedConnection | None = None
        self._reading = asyncio.Lock()
        self._pending: deque[tuple[float, EventT | Closed]] = deque()
        self._complaint: ErrorEvent | TimedOut | None = None
        """The newest event if it is one; as the last one it is why the server has closed."""
        self.closed: Closed | None = None
        """The end of the connection, once it has been read."""

    async def __aenter__(self) -> Self:
        """Connect.

        Raises:
            SessionError: the server cannot be reached or refuses the connection.
        """
        headers = {"Authorization": f"Bearer {self._api_key}"} if self._api_key else None
        host = urlsplit(self.url).hostname
        try:
            connection = await connect(
                self.url,
                create_connection=StampedConnection,
                additional_headers=headers,
                # A proxy of the environment is for far hosts; it cannot reach this one's loopback.
                proxy=None if host in LOOPBACK_HOSTS else True,
                ssl=self._tls(),
                open_timeout=OPEN_TIMEOUT_S,
                max_size=MAX_FRAME_BYTES,
                ping_interval=WS_PING_INTERVAL_S,
                ping_timeout=WS_PING_TIMEOUT_S,
                compression=None,
            )
        except InvalidStatus as error:
            raise SessionError(_refusal(self.url, error.response.status_code)) from error
        except ssl.SSLCertVerificationError as error:
            raise SessionError(
                f"the certificate of {self.url} is not trusted: {error.verify_message}; "
                "a self-made one is trusted when its file is given (ca_file, --ca)"
            ) from error
        except (OSError, InvalidHandshake, InvalidURI) as error:
            raise SessionError(f"cannot connect to {self.url}: {error or 'timed out'}") from error
        assert isinstance(connection, StampedConnection)
        self._socket = connection
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._socket is not None:
            await self._socket.close()

    def _tls(self) -> ssl.SSLContext | None:
        if not self.url.startswith("wss:"):
            return None
        return ssl.create_default_context(cafile=self._ca_file)

    async def _send(self, message: dict[str, Any]) -> None:
        """Send one message.

        Raises:
            SessionError: the connection is gone; with the server's reason, if it gave one.
        """
        frame = json.dumps(message)
        self.sent_at = time.monotonic()
        try:
            await self._open_socket().send(frame)
        except ConnectionClosed as error:
            raise await self._last_words() from error

    async def _last_words(self) -> SessionError:
        """Read to the end of a closed connection; all of it can still be iterated over.

        A task that iterates meanwhile may read them first.
        """
        async with self._reading:
            while self.closed is None:
                # A damaged message is no reason to miss what came behind it.
                with contextlib.suppress(SessionError):
                    self._pending.append(await self._receive())
        match self._complaint:
            case ErrorEvent(message, slug):
                return SessionError(message, slug)
            case TimedOut(reason):
                return SessionError(reason, "timeout")
        return SessionError("the connection to the server is closed")

    def __aiter__(self) -> AsyncIterator[EventT | Closed]:
        return self

    async def __anext__(self) -> EventT | Closed:
        if not self._pending and self.closed is not None:
            raise StopAsyncIteration
        return await self._next()

    async def _next(self) -> EventT | Closed:
        """Return the next event; after `Closed` there is none."""
        async with self._reading:
            # Whoever had to wait may find that its event has been read for it.
            self.received_at, event = (
                self._pending.popleft() if self._pending else await self._receive()
            )
        return event

    async def _until(self, wanted: type[WantedT], on_wait: OnWait | None) -> WantedT:
        """Return the first event of a type; the others, but those of the queue, come later.

        Raises:
            SessionError: the server answered with an error or closed the connection.
        """
        others: list[tuple[float, EventT | Closed]] = []
        try:
            while not isinstance(event := await self._next(), wanted):
                match event:
                    case Queued() | QueueUpdate():
                        if on_wait:
                            on_wait(event)
                    case ErrorEvent():
                        raise SessionError(event.message, event.slug)
                    case Closed():
                        reason = event.reason or f"code {event.code}"
                        raise SessionError(f"the server closed the session: {reason}")
                    case QueueDone():
                        pass
                    case _:
                        others.append((self.received_at, event))
        finally:
            self._pending.extendleft(reversed(others))
        return event

    async def _receive(self) -> tuple[float, EventT | Closed]:
        """Return the next event that this client knows; messages of other types are skipped."""
        connection = self._open_socket()
        while True:
            try:
                frame = await connection.recv(decode=True)
            except ConnectionClosed as error:
                received = error.rcvd
                self.closed = (
                    Closed(received.code, received.reason) if received else Closed(1006, "")
                )
                return time.monotonic(), self.closed
            at = connection.completed_at.popleft()
            event = self._parse(frame)
            if event is not None:
                self._complaint = event if isinstance(event, ErrorEvent | TimedOut) else None
                return at, event

    def _open_socket(self) -> StampedConnection:
        assert self._socket is not None, "use the client inside `async with`"
        return self._socket


def endpoint(url: str, path: str) -> str:
    """Return the WebSocket address of a path below a base address.

    An address whose own path leads through `/ws/` is a complete endpoint and keeps it.

    Raises:
        SessionError: the address has no host or another scheme.
    """
    problem = f"{url!r} is no server address, expected one like ws://127.0.0.1:8006"
    try:
        parts = urlsplit(url)
        # Reading the port checks its range.
        is_address = bool(parts.hostname) and parts.port != 0
    except ValueError as error:
        raise SessionError(problem) from error
    scheme = {"http": "ws", "https": "wss"}.get(parts.scheme, parts.scheme)
    if scheme not in {"ws", "wss"} or not is_address:
        raise SessionError(problem)
    base = parts.path.rstrip("/")
    whole = parts.path if "/ws/" in base else base + path
    return urlunsplit((scheme, parts.netloc, whole, parts.query, ""))


def new_session_id(prefix: str) -> str:
    """Return an id that no other session has; its prefix tells the kind."""
    # The time alone would name sessions of the same millisecond alike.
    tail = "".join(secrets.choice(BASE36) for _ in range(4))
    return f"{prefix}_{_base36(time.time_ns() // 1_000_000)}{tail}"


def _refusal(url: str, status: int) -> str:
    if status == 401:
        return f"{url} asks for an API key (or knows no such key)"
    if status == 403:
        return f"{url} refuses the session (HTTP 403): API key, origin or a disabled mode"
    if status == 404:
        return f"{url} is no session endpoint (HTTP 404)"
    return f"{url} refuses the session (HTTP {status})"


def _base36(number: int) -> str:
    digits = ""
    while number:
        number, digit = divmod(number, 36)
        digits = BASE36[digit] + digits
    return digits or "0"
