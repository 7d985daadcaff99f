"""The worker's port, on loopback: health, metrics, what was compiled, one WebSocket per session."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections import deque
from collections.abc import AsyncIterator, Generator, Mapping

import msgspec
import uvicorn
from fastapi import FastAPI, Response, WebSocket, WebSocketDisconnect
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import Frame

from shared.errors import BadMessage, NoWorker, OmniError, SlowReader
from shared.limits import (
    LARGE_FRAME_BYTES,
    MAX_FRAME_BYTES,
    MAX_LARGE_FRAMES,
    MAX_OUTBOX_BYTES,
    MAX_SESSION_ID_CHARS,
    WS_PING_INTERVAL_S,
    WS_PING_TIMEOUT_S,
)
from shared.logs import session_id_in_context
from shared.protocol import (
    SESSION_PATH,
    SUBPROTOCOL,
    Command,
    Event,
    Failure,
    Mode,
    Open,
    decode_command,
    encode,
)
from worker.lifecycle import Lifecycle
from worker.sessions.chat import ChatSession
from worker.sessions.duplex import DuplexSession
from worker.sessions.failures import CLOSE_INTERNAL, failure_for
from worker.sessions.half_duplex import HalfDuplexSession

log = logging.getLogger(__name__)

OPEN_TIMEOUT_S = 10.0
"""A connection that says nothing for this long after its handshake is closed."""

FLUSH_TIMEOUT_S = 5.0
"""How long the last messages of a session may take to leave."""

CLOSE_PROTOCOL_ERROR = 1002

SESSIONS: Mapping[Mode, type[DuplexSession | HalfDuplexSession | ChatSession]] = {
    "duplex": DuplexSession,
    "half_duplex": HalfDuplexSession,
    "chat": ChatSession,
}

_encoder = msgspec.json.Encoder()


class Outbox:
    """Events on their way to one client, bounded in bytes."""

    def __init__(self, max_bytes: int = MAX_OUTBOX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._frames: deque[bytes] = deque()
        self._n_bytes = 0
        self._there = asyncio.Event()
        self._closed = False

    def put(self, event: Event) -> None:
        """Take an event; never waits.

        An event may be larger than the bound (a whole answer with its sound): what counts is what
        waits behind the one that is being sent.

        Raises:
            SlowReader: more is waiting than the client may leave unread.
        """
        frame = encode(event)
        n_waiting = self._n_bytes - len(self._frames[0]) + len(frame) if self._frames else 0
        if n_waiting > self._max_bytes:
            mib = self._max_bytes / 2**20
            raise SlowReader(f"more than {mib:g} MiB of output waits to be read")
        self._frames.append(frame)
        self._n_bytes += len(frame)
        self._there.set()

    def close(self) -> None:
        """Let `drain` return once everything has been sent."""
        self._closed = True
        self._there.set()

    async def drain(self, websocket: WebSocket) -> None:
        """Send what comes, as fast as the peer reads; returns when closed or disconnected."""
        while True:
            while self._frames:
                try:
                    await websocket.send_bytes(self._frames[0])
                except (WebSocketDisconnect, RuntimeError):
                    return  # the reader notices the same and ends the session
                # Still counted while it was being sent: it was not read yet.
                self._n_bytes -= len(self._frames.popleft())
            if self._closed:
                return
            self._there.clear()
            await self._there.wait()


class _Disconnected(Exception):
    """The gateway's end of a session socket is closed."""


class GatewayProtocol(WebSocketsSansIOProtocol):
    """uvicorn's WebSocket, without keeping each message until the next one has come."""

    def handle_text(self, event: Frame) -> None:
        super().handle_text(event)
        event.data = b""

    def handle_bytes(self, event: Frame) -> None:
        super().handle_bytes(event)
        event.data = b""

    def handle_cont(self, event: Frame) -> None:
        super().handle_cont(event)
        event.data = b""


class Connection:
    """One WebSocket from its handshake to its close."""

    def __init__(
        self, websocket: WebSocket, lifecycle: Lifecycle, large: asyncio.Semaphore
    ) -> None:
        self._websocket = websocket
        self._lifecycle = lifecycle
        self._large = large
        self._outbox = Outbox()
        self._session_id = "?"

    async def serve(self) -> None:
        websocket = self._websocket
        if SUBPROTOCOL not in websocket.scope["subprotocols"]:
            # Before the handshake a close is an HTTP 403: nobody else's client gets in.
            await websocket.close(CLOSE_PROTOCOL_ERROR, f"expected {SUBPROTOCOL}")
            return
        await websocket.accept(SUBPROTOCOL)
        sender = asyncio.create_task(self._outbox.drain(websocket))
        close_code = CLOSE_INTERNAL
        try:
            close_code = await self._session()
        except OmniError as error:
            close_code = self._refuse(error)
        finally:
            await self._finish(sender, close_code)

    async def _session(self) -> int:
        opening = await self._receive_open()
        self._session_id = opening.session_id
        session_id_in_context.set(opening.session_id)
        host = self._lifecycle.host
        if host is None or not self._lifecycle.accepts_sessions:
            raise NoWorker(f"this worker is {self._lifecycle.state}")
        make = SESSIONS[opening.mode]
        session = make(host, opening.session_id, opening.request_type, self._outbox.put)
        return await session.run(self._commands())

    async def _receive_open(self) -> Open:
        """Raises BadMessage: something else came, or nothing."""
        try:
            async with asyncio.timeout(OPEN_TIMEOUT_S):
                frame = await self._receive()
        except TimeoutError as error:
            raise BadMessage(f"no open within {OPEN_TIMEOUT_S:g} s") from error
        if frame is None:
            raise BadMessage("disconnected before open")
        command = await self._decode(frame)
        if not isinstance(command, Open):
            raise BadMessage("the first message has to be open")
        if len(command.session_id) > MAX_SESSION_ID_CHARS:
            raise BadMessage(f"session_id is longer than {MAX_SESSION_ID_CHARS} characters")
        if not command.session_id.isprintable():
            raise BadMessage("session_id holds characters that cannot be printed in a log")
        return command

    async def _commands(self) -> AsyncIterator[Command]:
        with contextlib.suppress(_Disconnected):
            while True:
                try:
                    # Not by a name: it would keep the last command, which may have 128 MiB, while
                    # the session waits for the next one.
                    yield await self._next()
                except BadMessage as error:
                    self._outbox.put(self._failure(error))

    async def _next(self) -> Command:
        """Raises BadMessage: it is no command. Raises _Disconnected."""
        frame = await self._receive()
        if frame is None:
            raise _Disconnected
        return await self._decode(frame)

    async def _receive(self) -> bytes | str | None:
        """The next frame; None after the disconnect."""
        message = await self._websocket.receive()
        if message["type"] == "websocket.disconnect":
            return None
        data = message.get("bytes")
        return data if data is not None else message.get("text", "")

    async def _decode(self, frame: bytes | str) -> Command:
        if isinstance(frame, str):
            raise BadMessage("text frame, expected a binary one")
        if len(frame) <= LARGE_FRAME_BYTES:
            return decode_command(frame)
        async with self._large:
            return await asyncio.to_thread(decode_command, frame)

    def _refuse(self, error: OmniError) -> int:
        failure = self._failure(error)
        close_code = failure.close_code or CLOSE_PROTOCOL_ERROR
        with contextlib.suppress(SlowReader):
            self._outbox.put(msgspec.structs.replace(failure, close_code=close_code))
        return close_code

    def _failure(self, error: OmniError) -> Failure:
        self._lifecycle.metrics.failed(error.slug)
        return failure_for(error, self._session_id)

    async def _finish(self, sender: asyncio.Task[None], close_code: int) -> None:
        """Send what is left, then close; a peer that does not read cannot hold this up."""
        self._outbox.close()
        try:
            async with asyncio.timeout(FLUSH_TIMEOUT_S):
                await asyncio.shield(sender)
                await self._websocket.close(close_code)
        except TimeoutError:
            log.warning("last messages not read")
        except (WebSocketDisconnect, RuntimeError):
            log.debug("peer was gone before the close")
        finally:
            sender.cancel()
            await asyncio.gather(sender, return_exceptions=True)


def create_app(lifecycle: Lifecycle) -> FastAPI:
    """The worker's HTTP surface; everything it knows, it asks of `lifecycle`."""
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
    large = asyncio.Semaphore(MAX_LARGE_FRAMES)
    registry = lifecycle.metrics.registry
    lifecycle.metrics.watch(lifecycle)

    @app.get("/health")
    async def health() -> Response:
        report = lifecycle.health()
        # Anything that looks at the status alone has to see that this worker is of no use.
        status = 503 if report.status == "error" else 200
        return Response(_encoder.encode(report), status, media_type="application/json")

    @app.get("/api/compile")
    async def compile_status() -> Response:
        body = _encoder.encode(lifecycle.compile_status())
        return Response(body, media_type="application/json")

    @app.get("/metrics")
    async def metrics() -> Response:
        headers = {"content-type": CONTENT_TYPE_PLAIN_0_0_4}
        return Response(generate_latest(registry), headers=headers)

    @app.websocket(SESSION_PATH)
    async def session(websocket: WebSocket) -> None:
        await Connection(websocket, lifecycle, large).serve()

    return app


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: the lifecycle drains sessions before the port goes."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


def make_server(app: FastAPI) -> uvicorn.Server:
    """A server for sockets that are bound already: `await server.serve(sockets=[...])`."""
    return _Server(
        uvicorn.Config(
            app,
            ws=GatewayProtocol,
            ws_max_size=MAX_FRAME_BYTES,
            ws_ping_interval=WS_PING_INTERVAL_S,
            ws_ping_timeout=WS_PING_TIMEOUT_S,
            ws_per_message_deflate=False,
            lifespan="off",
            log_config=None,
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=int(FLUSH_TIMEOUT_S),
        )
    )


def bind(port: int) -> socket.socket:
    """Take a port on loopback, 0 = any free one. Raises OSError: it is taken."""
    # The protocol is named because asyncio sets TCP_NODELAY only then; without it two short
    # messages in a row cost 40 ms (Nagle's algorithm against the peer's delayed ACK).
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen(128)
    except OSError:
        listener.close()
        raise
    return listener
