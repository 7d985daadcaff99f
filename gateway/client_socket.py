"""A client's WebSocket: bounded in what it holds, in what it costs, and in the time of its end."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import Any, ClassVar

from uvicorn._types import ASGIReceiveEvent, ASGISendEvent
from uvicorn.protocols.utils import ClientDisconnected
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.exceptions import PayloadTooBig
from websockets.frames import Close, Frame, Opcode

from gateway.connection import CLOSE_GRACE_S
from gateway.relay import FRAME_TOO_LARGE, FRAMING_BROKEN, LAST_WORDS
from shared.limits import DEAD_CLIENT_TIMEOUT_S, LARGE_FRAME_BYTES, MAX_LARGE_FRAMES

log = logging.getLogger(__name__)

PINGS_BEFORE_DEAD = 4
CLIENT_PING_INTERVAL_S = DEAD_CLIENT_TIMEOUT_S / PINGS_BEFORE_DEAD
"""A client is gone when it has sent nothing at all, no frame and no pong, while this many pings
went out. Counting pings instead of seconds forgives a gateway that was itself held up: after a
pause, what arrived meanwhile is read before the next ping is sent."""

QUIET_S = 0.5
"""A client that was told to stop has stopped when nothing has come for this long."""

READ_PAUSE_S = 0.002
"""After each read of what is thrown away, 256 KiB at most: not more than 128 MiB in a second."""

SHUTDOWN_GRACE_S = 1.0
"""For closing handshakes that are under way when the process ends."""

LARGE_FRAME_TIMEOUT_S = 60.0
"""From the first bytes beyond the size of ordinary frames to the whole frame being read."""

MAX_FRAGMENTS = 16_384
"""Frames of one message; 8 KiB each make the largest one. Empty ones would add up for ever."""

MAX_FRAMES_PER_READ = 4096
"""A read brings 256 KiB at most; thousands of tiny frames in it are no speech, and parsing them
holds the event loop."""


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
    """Of the newest read; after our close frame, of all reads since."""
    _late_pongs = b""
    _has_permit = False
    _is_gated = False
    _is_deaf = False
    """What comes in is thrown away, words may still be said: the parser has given up, or the
    session is over and its client goes on sending."""
    _deadline: asyncio.TimerHandle | None = None

    def data_received(self, data: bytes) -> None:
        self._n_unheard_pings = 0
        if self._is_deaf or self.close_sent:
            self._receive_in_vain(data)
            return
        self._n_frames = 0
        super().data_received(data)
        if self._is_flooded:
            log.warning("flood of tiny frames fragments=%d", len(self.frames))
            self.transport.abort()
            return
        if self.conn.parser_exc is not None:
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
        if self.close_sent:
            self.conn.data_to_send()
        elif self.writable.is_set():
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
        # The library has sealed itself. Its bare close frame is not sent: the application says
        # first why, in the words of its dialect.
        self.conn.data_to_send()
        self._grow_deaf()
        if self.close_sent:
            return
        log.debug("framing is broken: %s", error)
        self.stop_keepalive()
        key = FRAME_TOO_LARGE if isinstance(error, PayloadTooBig) else FRAMING_BROKEN
        event: Any = {"type": "websocket.receive", key: True}
        self.queue.put_nowait(event)

    async def send(self, message: ASGISendEvent) -> None:
        event: Any = message
        if event["type"] == "websocket.close" and self.handshake_complete:
            self._say_close(event)
            return
        if self._is_deaf:
            await self.writable.wait()
        if event["type"] == "websocket.send" and self.transport.is_closing():
            # Reset under us, and not told yet: asyncio would log every further write.
            raise ClientDisconnected
        if self._is_deaf:
            self._write_text(event["text"])
        else:
            await super().send(message)

    def _write_text(self, text: str) -> None:
        """Past the library, which takes nothing more, and past the limit on unread bytes."""
        self.transport.write(Frame(Opcode.TEXT, text.encode()).serialize(mask=False))

    def _say_close(self, event: dict[str, Any]) -> None:
        """Never waits: whoever does not read may do so later, and finds out why."""
        if self.disconnected or self.close_sent or self.transport.is_closing():
            raise ClientDisconnected
        if event.get(LAST_WORDS) is not None:
            self._write_text(event[LAST_WORDS])
        close = Close(event.get("code", 1000), event.get("reason") or "")
        self.transport.write(Frame(Opcode.CLOSE, close.serialize()).serialize(mask=False))
        self.close_sent = True
        self.stop_keepalive()
        self.queue.put_nowait({"type": "websocket.disconnect", "code": close.code})
        self.close_timer = self.loop.call_later(self.close_timeout, self.transport.close)
        self._read_to_the_end()

    # A connection that is closed while its client sends is reset, and what the client has not read
    # yet, the reason for example, is lost to it. So it is read on, at a pace that costs little,
    # until the client closes or falls silent. `run_asgi` bounds it.

    def _receive_in_vain(self, data: bytes) -> None:
        self._pause_reading()
        if self._is_deaf:
            if self.close_sent:
                self._close_when_quiet()
            return
        super().data_received(data)
        if self._is_flooded or self._n_pending_bytes > LARGE_FRAME_BYTES:
            self._grow_deaf()

    def _read_to_the_end(self) -> None:
        if self._is_deaf or self._is_gated or self._n_pending_bytes > LARGE_FRAME_BYTES:
            self._grow_deaf()
        if self.read_paused:
            self.read_paused = False
            self.transport.resume_reading()

    def _grow_deaf(self) -> None:
        """Throw away what comes from now on, and hold nothing of what has come."""
        self._is_deaf = True
        self.frames = []
        self.conn.reader.buffer.clear()
        self._end_large_frame()
        if self._is_gated:
            self.gate.forget(self)
            self._is_gated = False
            self.transport.resume_reading()
        if self.close_sent:
            self._close_when_quiet()

    def _pause_reading(self) -> None:
        if not self.transport.is_closing():
            self.transport.pause_reading()
            self.loop.call_later(READ_PAUSE_S, self._read_on)

    def _read_on(self) -> None:
        if not self.transport.is_closing():
            self.transport.resume_reading()

    def _close_when_quiet(self) -> None:
        if self.close_timer is not None:
            self.close_timer.cancel()
        self.close_timer = self.loop.call_later(QUIET_S, self.transport.close)

    def shutdown(self) -> None:
        if self.close_sent and not self.transport.is_closing():
            self.loop.call_later(SHUTDOWN_GRACE_S, self.transport.close)
        else:
            super().shutdown()

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
    def _is_flooded(self) -> bool:
        return len(self.frames) > MAX_FRAGMENTS or self._n_frames > MAX_FRAMES_PER_READ

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
