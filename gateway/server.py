"""uvicorn as the gateway runs it: own keepalive, bounded closing, sessions told before exit."""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
import sys
from collections import deque
from pathlib import Path
from typing import Any, ClassVar

import uvicorn
from fastapi import FastAPI
from uvicorn._types import ASGIReceiveEvent, ASGISendEvent
from uvicorn.protocols.utils import ClientDisconnected
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.exceptions import PayloadTooBig
from websockets.frames import Close, Frame, Opcode

from gateway.connection import CLOSE_GRACE_S, HttpConnection
from gateway.context import Gateway
from gateway.relay import FRAME_TOO_LARGE
from shared.limits import (
    DEAD_CLIENT_TIMEOUT_S,
    KEEP_ALIVE_S,
    LARGE_FRAME_BYTES,
    MAX_FRAME_BYTES,
    MAX_LARGE_FRAMES,
    REQUEST_HEAD_TIMEOUT_S,
)

log = logging.getLogger(__name__)

PINGS_BEFORE_DEAD = 4
CLIENT_PING_INTERVAL_S = DEAD_CLIENT_TIMEOUT_S / PINGS_BEFORE_DEAD
"""A client is gone when it has sent nothing at all, no frame and no pong, while this many pings
went out. Counting pings instead of seconds forgives a gateway that was itself held up: after a
pause, what arrived meanwhile is read before the next ping is sent."""

QUIET_S = 0.5
"""A client that was told to stop has stopped when nothing has come for this long."""

LARGE_FRAME_TIMEOUT_S = 60.0
"""From the first bytes beyond the size of ordinary frames to the whole frame being read."""

MAX_FRAGMENTS = 16_384
"""Frames of one message; 8 KiB each make the largest one. Empty ones would add up for ever."""

MAX_FRAMES_PER_READ = 4096
"""A read brings 256 KiB at most; thousands of tiny frames in it are no speech, and parsing them
holds the event loop."""

GRACEFUL_SHUTDOWN_S = 10
STARTUP_FAILURE = 3
"""uvicorn's own exit code of a server that could not start."""

MAX_OPEN_FILES = 65_536


class LargeFrameGate:
    """Lets few connections at a time hold a large frame in memory; the others are not read."""

    def __init__(self, permits: int) -> None:
        self._free = permits
        self._waiting: deque[ClientProtocol] = deque()

    def enter(self, connection: ClientProtocol) -> bool:
        """Take a permit, or line up for one and return False."""
        if self._free > 0:
            self._free -= 1
            return True
        self._waiting.append(connection)
        return False

    def leave(self) -> None:
        """Give a permit back; it goes to the connection that has waited longest."""
        if self._waiting:
            self._waiting.popleft().admit_large_frame()
        else:
            self._free += 1

    def forget(self, connection: ClientProtocol) -> None:
        if connection in self._waiting:
            self._waiting.remove(connection)


class ClientProtocol(WebSocketsSansIOProtocol):
    """A client's WebSocket whose peer may vanish, stop reading, or send more than we can hold."""

    gate: ClassVar[LargeFrameGate] = LargeFrameGate(MAX_LARGE_FRAMES)
    """One for the process: its memory is what is bounded."""

    _n_unheard_pings = 0
    _n_frames = 0
    """Of the newest read."""
    _late_pongs = b""
    _has_permit = False
    _is_gated = False
    _is_over_long = False
    """A message above the frame limit has begun: nothing more is read, words may still be said."""
    _deadline: asyncio.TimerHandle | None = None

    def data_received(self, data: bytes) -> None:
        self._n_unheard_pings = self._n_frames = 0
        super().data_received(data)
        if len(self.frames) > MAX_FRAGMENTS or self._n_frames > MAX_FRAMES_PER_READ:
            log.warning("flood of tiny frames fragments=%d", len(self.frames))
            self.transport.abort()
            return
        if self._is_over_long:
            if self.close_sent:
                self._close_when_quiet()
            return
        if self.conn.handshake_exc is not None and not self.transport.is_closing():
            # The library has written its refusal of an over-long request; uvicorn sends none.
            self.transport.write(b"".join(self.conn.data_to_send()))
            self.transport.close()
            return
        if self._has_permit or self._is_gated or self._n_pending_bytes <= LARGE_FRAME_BYTES:
            return
        if self.gate.enter(self):
            self._begin_large_frame()
        else:
            self._is_gated = True
            self.transport.pause_reading()

    def admit_large_frame(self) -> None:
        """The gate's answer to a connection that had to wait."""
        self._is_gated = False
        self._n_unheard_pings = 0
        self._begin_large_frame()
        self.transport.resume_reading()

    async def receive(self) -> ASGIReceiveEvent:
        # Asking for the next message says that the one before has been dealt with.
        if self._n_pending_bytes <= LARGE_FRAME_BYTES and self.queue.empty():
            self._end_large_frame()
        return await super().receive()

    def connection_lost(self, exc: Exception | None) -> None:
        self.gate.forget(self)
        self._end_large_frame()
        super().connection_lost(exc)

    def send_receive_event_to_app(self) -> None:
        if self.curr_msg_data_type == "text" and not is_utf8(b"".join(self.frames)):
            # An empty text is no JSON either, and is refused with a reason instead of a trace.
            self.frames = [b""]
        super().send_receive_event_to_app()

    # The parser keeps each frame until the next one has come, with its 128 MiB if need be.

    def handle_text(self, event: Frame) -> None:
        self._n_frames += 1
        super().handle_text(event)
        event.data = b""

    def handle_bytes(self, event: Frame) -> None:
        self._n_frames += 1
        super().handle_bytes(event)
        event.data = b""

    def handle_cont(self, event: Frame) -> None:
        self._n_frames += 1
        super().handle_cont(event)
        event.data = b""

    def handle_ping(self) -> None:
        self._n_frames += 1
        if self.writable.is_set():
            super().handle_ping()
        else:
            # The client does not read, and answers to its pings would pile up. The newest read's
            # are kept: a pong answers all pings before its own.
            self._late_pongs = b"".join(self.conn.data_to_send()) or self._late_pongs

    def resume_writing(self) -> None:
        super().resume_writing()
        late, self._late_pongs = self._late_pongs, b""
        if late and not self.close_sent:
            self.transport.write(late)

    def handle_pong(self, event: Frame) -> None:
        self._n_frames += 1
        super().handle_pong(event)

    def handle_parser_exception(self) -> None:
        error = self.conn.parser_exc
        if self._is_over_long or not isinstance(error, PayloadTooBig):
            if not self._is_over_long:
                super().handle_parser_exception()
            return
        # The library has sealed itself and throws away what comes. Its bare close frame is not
        # sent yet: the application says first why, in the words of its dialect.
        self._is_over_long = True
        self.conn.data_to_send()
        self.stop_keepalive()
        self._end_large_frame()
        self.frames = []
        event: Any = {"type": "websocket.receive", FRAME_TOO_LARGE: True}
        self.queue.put_nowait(event)

    async def send(self, message: ASGISendEvent) -> None:
        if not self._is_over_long:
            if message["type"] == "websocket.send" and self.transport.is_closing():
                # Reset under us, and not told yet: asyncio would log every further write.
                raise ClientDisconnected
            await super().send(message)
            return
        await self.writable.wait()
        if self.disconnected or self.close_sent:
            raise ClientDisconnected
        if message["type"] == "websocket.send":
            text = message.get("text") or ""
            self.transport.write(Frame(Opcode.TEXT, text.encode()).serialize(mask=False))
        elif message["type"] == "websocket.close":
            code, reason = message.get("code", 1000), message.get("reason") or ""
            data = Close(code, reason).serialize()
            self.transport.write(Frame(Opcode.CLOSE, data).serialize(mask=False))
            self.close_sent = True
            self.queue.put_nowait({"type": "websocket.disconnect", "code": code})
            self._close_when_quiet()
            if self.read_paused:
                self.read_paused = False
                self.transport.resume_reading()

    def _close_when_quiet(self) -> None:
        """Read on while the client is still sending: closing at once would reset the connection,
        and what was said would be lost. `run_asgi` bounds it."""
        if self.close_timer is not None:
            self.close_timer.cancel()
        self.close_timer = self.loop.call_later(QUIET_S, self.transport.close)

    def schedule_ping(self) -> None:
        # uvicorn would take the last round trip off the interval, so that a client with a slow one
        # gets its pings in a burst, and is counted as dead before its first pong can be here.
        assert self.ping_interval is not None
        self.ping_timer = self.loop.call_later(self.ping_interval, self.send_keepalive_ping)

    def send_keepalive_ping(self) -> None:
        if self._n_unheard_pings >= PINGS_BEFORE_DEAD:
            self.transport.abort()
            return
        # A connection that we do not read cannot be heard.
        self._n_unheard_pings += not self._is_gated
        super().send_keepalive_ping()

    async def run_asgi(self) -> None:
        await super().run_asgi()
        # A peer that does not read would otherwise keep its unsent bytes here for ever.
        self.loop.call_later(CLOSE_GRACE_S, self.transport.abort)

    @property
    def _n_pending_bytes(self) -> int:
        """Received bytes of a message that is not complete yet."""
        return len(self.conn.reader.buffer) + sum(map(len, self.frames))

    def _begin_large_frame(self) -> None:
        self._has_permit = True
        self._deadline = self.loop.call_later(LARGE_FRAME_TIMEOUT_S, self._give_up_large_frame)

    def _end_large_frame(self) -> None:
        if self._has_permit:
            self._has_permit = False
            assert self._deadline is not None
            self._deadline.cancel()
            self.gate.leave()

    def _give_up_large_frame(self) -> None:
        log.warning("large frame took too long limit_s=%g", LARGE_FRAME_TIMEOUT_S)
        self.transport.abort()


def is_utf8(data: bytes) -> bool:
    if data.isascii():
        return True
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


class GatewayServer(uvicorn.Server):
    """Serves one gateway; `drain` happens while the clients' sockets are still open."""

    def __init__(self, config: uvicorn.Config, gateway: Gateway) -> None:
        super().__init__(config)
        self._gateway = gateway

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen. uvicorn's own would let a TLS handshake take a minute."""
        config = self.config
        await self.lifespan.startup()
        if self.lifespan.should_exit:
            sys.exit(STARTUP_FAILURE)
        options: dict[str, Any] = {}
        if config.is_ssl:
            options = {"ssl": config.ssl, "ssl_handshake_timeout": REQUEST_HEAD_TIMEOUT_S}
        try:
            listener = await asyncio.get_running_loop().create_server(
                self._connection, config.host, config.port, backlog=config.backlog, **options
            )
        except OSError as error:
            log.error("cannot listen host=%s port=%d: %s", config.host, config.port, error)
            await self.lifespan.shutdown()
            sys.exit(STARTUP_FAILURE)
        self.servers = [listener]
        self.started = True
        scheme = "https" if config.is_ssl else "http"
        log.info("listening url=%s://%s:%d", scheme, config.host, self.port)

    def _connection(self) -> HttpConnection:
        return HttpConnection(self.config, self.server_state, self.lifespan.state)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()
        await self._gateway.drain()
        await super().shutdown(sockets)

    @property
    def port(self) -> int:
        """The port that is listened on, once started."""
        port: int = self.servers[0].sockets[0].getsockname()[1]
        return port


def build_server(
    app: FastAPI,
    host: str,
    port: int,
    ssl_certfile: Path | None = None,
    ssl_keyfile: Path | None = None,
) -> GatewayServer:
    """Return a server that is ready to `serve()`; port 0 = any free one."""
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        http=HttpConnection,
        timeout_keep_alive=KEEP_ALIVE_S,
        ws=ClientProtocol,
        ws_max_size=MAX_FRAME_BYTES,
        ws_ping_interval=CLIENT_PING_INTERVAL_S,
        # `ClientProtocol` judges by silence, not by one late pong.
        ws_ping_timeout=None,
        # Base64 audio hardly shrinks, and compressing it would cost a core.
        ws_per_message_deflate=False,
        ssl_certfile=ssl_certfile,
        ssl_keyfile=ssl_keyfile,
        access_log=False,
        log_config=None,
        server_header=False,
        timeout_graceful_shutdown=GRACEFUL_SHUTDOWN_S,
    )
    return GatewayServer(config, app.state.gateway)


def allow_open_files() -> None:
    """Let the process hold as many connections as the machine allows: two for a session."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
