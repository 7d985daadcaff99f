"""`DuplexClient`: one full-duplex session over the G0 dialect (`/ws/duplex/{session_id}`).

    async with DuplexClient("ws://127.0.0.1:8006") as session:
        await session.prepare("You are a helpful assistant.")
        await session.send_audio(samples)            # one chunk, float32 16 kHz
        async for event in session:                  # one Result per chunk, among other events
            ...

Sending and iterating may run in two tasks; `prepare` reads from the socket itself, so it is not
to be called while another task iterates.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import ssl
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self
from urllib.parse import urlsplit, urlunsplit

import numpy as np
from numpy.typing import NDArray
from websockets.asyncio.client import ClientConnection, connect
from websockets.asyncio.connection import Connection
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus, InvalidURI
from websockets.frames import DATA_OPCODES, Frame
from websockets.http11 import Request, Response

from client.events import (
    Closed,
    DuplexError,
    ErrorEvent,
    Event,
    Interrupted,
    Paused,
    Prepared,
    Queued,
    QueueDone,
    QueueUpdate,
    Result,
    Resumed,
    Stopped,
    TimedOut,
    parse_event,
)
from shared.audio import Samples, encode_base64, samples_to_f32
from shared.limits import MAX_FRAME_BYTES, WS_PING_INTERVAL_S, WS_PING_TIMEOUT_S

# The library's one front door: a program needs no other module of it for a session.
__all__ = [
    "Closed",
    "DuplexClient",
    "DuplexError",
    "ErrorEvent",
    "Event",
    "Interrupted",
    "Paused",
    "Prepared",
    "QueueDone",
    "QueueUpdate",
    "Queued",
    "Result",
    "Resumed",
    "Stopped",
    "TimedOut",
]

DEFAULT_SYSTEM_PROMPT = "You are a helpful assistant."
OPEN_TIMEOUT_S = 10.0
LOOPBACK_HOSTS = frozenset({"127.0.0.1", "localhost", "::1"})
BASE36 = "0123456789abcdefghijklmnopqrstuvwxyz"


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
    """The client's end of a socket."""


class DuplexClient:
    """One session; open it with `async with`, at most once.

    `sent_at` and `received_at` are readings of `time.monotonic()`, taken at the socket: when the
    newest message was handed to it, and when the newest returned event was complete in it.

    Args:
        url: base address (`ws://`, `wss://`, `http://`, `https://`); a path other than `/` is
            taken as the complete endpoint.
        api_key: sent as a bearer token.
        mode: "omni" accepts frames beside the audio, "audio" does not.
        ca_file: PEM certificate to trust, for a server with a self-made one.
    """

    def __init__(
        self,
        url: str,
        api_key: str | None = None,
        *,
        mode: Literal["omni", "audio"] = "omni",
        ca_file: Path | None = None,
    ) -> None:
        prefix = "omni" if mode == "omni" else "adx"
        # The time alone would name sessions of the same millisecond alike.
        tail = "".join(secrets.choice(BASE36) for _ in range(4))
        self.session_id = f"{prefix}_{_base36(time.time_ns() // 1_000_000)}{tail}"
        self.url = endpoint(url, self.session_id)
        self._api_key = api_key
        self._ca_file = ca_file
        self.sent_at = self.received_at = 0.0
        self._socket: StampedConnection | None = None
        self._pending: deque[Event] = deque()
        self.closed: Closed | None = None
        """The end of the connection, once it has been read."""

    async def __aenter__(self) -> Self:
        """Connect.

        Raises:
            DuplexError: the server cannot be reached or refuses the connection.
        """
        headers = {"Authorization": f"Bearer {self._api_key}"} if self._api_key else None
        host = urlsplit(self.url).hostname
        try:
            socket = await connect(
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
            raise DuplexError(_refusal(self.url, error.response.status_code)) from error
        except ssl.SSLCertVerificationError as error:
            raise DuplexError(
                f"the certificate of {self.url} is not trusted: {error.verify_message}; "
                "a self-made one is trusted when its file is given (ca_file, --ca)"
            ) from error
        except (OSError, InvalidHandshake, InvalidURI) as error:
            raise DuplexError(f"cannot connect to {self.url}: {error or 'timed out'}") from error
        assert isinstance(socket, StampedConnection)
        self._socket = socket
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

    # ---- client -> server

    async def prepare(
        self,
        system_prompt: str = DEFAULT_SYSTEM_PROMPT,
        *,
        settings: dict[str, Any] | None = None,
        reference_voice: Samples | None = None,
        max_slice_nums: int | None = None,
        on_wait: Callable[[Queued | QueueUpdate], None] | None = None,
    ) -> Prepared:
        """Set prompt and voice and wait until the session is ready, however long the queue is.

        Args:
            settings: sampling settings by their wire names, such as `{"temperature": 0.7}`.
            reference_voice: float32 16 kHz.
            on_wait: called with each report about the place in the queue.

        Raises:
            DuplexError: the server answered with an error or closed the connection.
        """
        voice = None if reference_voice is None else samples_to_f32(reference_voice)
        optional = {
            "config": settings,
            "ref_audio_base64": encode_base64(voice) if voice else None,
            "max_slice_nums": max_slice_nums,
        }
        said = {name: value for name, value in optional.items() if value is not None}
        # A server that refuses has closed already; its reason is still there to be read.
        with contextlib.suppress(DuplexError):
            await self._send({"type": "prepare", "system_prompt": system_prompt, **said})
        while not isinstance(event := await self._read(), Prepared):
            match event:
                case Queued() | QueueUpdate():
                    if on_wait:
                        on_wait(event)
                case ErrorEvent():
                    raise DuplexError(event.message, event.slug)
                case Closed():
                    reason = event.reason or f"code {event.code}"
                    raise DuplexError(f"the server closed the session: {reason}")
                case QueueDone():
                    pass
                case _:
                    self._pending.append(event)
        return event

    async def send_audio(
        self,
        samples: NDArray[np.float32],
        *,
        frames: Sequence[bytes] = (),
        force_listen: bool = False,
        max_slice_nums: int | None = None,
    ) -> None:
        """Send one chunk; the server answers each with exactly one `Result`.

        Args:
            samples: float32 16 kHz `[n_samples]`, nominally one second.
            frames: JPEG files seen during the chunk.
            force_listen: make the model stop speaking for this unit.

        Raises:
            DuplexError: the connection is gone.
        """
        message: dict[str, Any] = {
            "type": "audio_chunk",
            "audio_base64": encode_base64(samples_to_f32(samples)),
        }
        if frames:
            message["frame_base64_list"] = [encode_base64(frame) for frame in frames]
        if force_listen:
            message["force_listen"] = True
        if max_slice_nums is not None:
            message["max_slice_nums"] = max_slice_nums
        await self._send(message)

    async def pause(self, timeout_s: float | None = None) -> None:
        """Hold the session; its place on the worker is kept for `timeout_s`."""
        await self._send({"type": "pause"} | ({} if timeout_s is None else {"timeout": timeout_s}))

    async def resume(self) -> None:
        await self._send({"type": "resume"})

    async def interrupt(self) -> None:
        await self._send({"type": "interrupt"})

    async def stop(self) -> None:
        """Ask for the end; `Stopped` and `Closed` follow as events."""
        await self._send({"type": "stop"})

    async def _send(self, message: dict[str, Any]) -> None:
        frame = json.dumps(message)
        self.sent_at = time.monotonic()
        try:
            await self._open_socket().send(frame)
        except ConnectionClosed as error:
            raise DuplexError("the connection to the server is closed") from error

    # ---- server -> client

    def __aiter__(self) -> AsyncIterator[Event]:
        return self

    async def __anext__(self) -> Event:
        if self._pending:
            return self._pending.popleft()
        if self.closed is not None:
            raise StopAsyncIteration
        return await self._read()

    async def _read(self) -> Event:
        """Return the next event that this client knows; messages of other types are skipped."""
        socket = self._open_socket()
        while True:
            try:
                frame = await socket.recv(decode=True)
                self.received_at = socket.completed_at.popleft()
            except ConnectionClosed as error:
                self.received_at = time.monotonic()
                received = error.rcvd
                self.closed = (
                    Closed(received.code, received.reason) if received else Closed(1006, "")
                )
                return self.closed
            event = parse_event(frame)
            if event is not None:
                return event

    def _open_socket(self) -> StampedConnection:
        assert self._socket is not None, "use the client inside `async with`"
        return self._socket


def endpoint(url: str, session_id: str) -> str:
    """Return the WebSocket address of a session below a base address.

    Raises:
        DuplexError: the address has no host or another scheme.
    """
    problem = f"{url!r} is no server address, expected one like ws://127.0.0.1:8006"
    try:
        parts = urlsplit(url)
        # Reading the port checks its range.
        is_address = bool(parts.hostname) and parts.port != 0
    except ValueError as error:
        raise DuplexError(problem) from error
    scheme = {"http": "ws", "https": "wss"}.get(parts.scheme, parts.scheme)
    if scheme not in {"ws", "wss"} or not is_address:
        raise DuplexError(problem)
    path = parts.path if parts.path.strip("/") else f"/ws/duplex/{session_id}"
    return urlunsplit((scheme, parts.netloc, path, parts.query, ""))


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
