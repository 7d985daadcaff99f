"""A client that sends without reading, and reads everything afterwards."""

from __future__ import annotations

import asyncio
import json
import socket
from dataclasses import dataclass
from typing import Any, Self

from websockets.client import ClientProtocol
from websockets.frames import Frame, Opcode
from websockets.protocol import State
from websockets.uri import parse_uri

READ_BYTES = 1 << 20
TIMEOUT_S = 10.0


@dataclass
class Heard:
    """Everything that one connection had to say after its upgrade."""

    messages: list[dict[str, Any]]
    close_code: int | None
    """None = there was no close frame."""


def frame(text: str) -> bytes:
    """One text message as a client puts it on the wire."""
    return Frame(Opcode.TEXT, text.encode()).serialize(mask=True)


class DeafClient:
    """`async with DeafClient(port, path) as client:` is a WebSocket on a bare socket.

    Args:
        buffer_bytes: of its socket for what comes in; None = what the system gives.
    """

    def __init__(self, port: int, path: str, buffer_bytes: int | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self._socket = socket.socket()
        self._socket.setblocking(False)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if buffer_bytes is not None:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
        self._address = ("127.0.0.1", port)
        self._protocol = ClientProtocol(parse_uri(f"ws://127.0.0.1:{port}{path}"), max_size=None)

    async def __aenter__(self) -> Self:
        await self._loop.sock_connect(self._socket, self._address)
        self._protocol.send_request(self._protocol.connect())
        await self.send(b"".join(self._protocol.data_to_send()))
        while self._protocol.state is State.CONNECTING:
            # Byte by byte: what follows the upgrade stays in the socket.
            self._protocol.receive_data(await self._loop.sock_recv(self._socket, 1))
        return self

    async def __aexit__(self, *_: object) -> None:
        self._socket.close()

    async def send(self, data: bytes) -> None:
        """Raises ConnectionError when the other side has reset the connection."""
        async with asyncio.timeout(TIMEOUT_S):
            await self._loop.sock_sendall(self._socket, data)

    async def say(self, kind: str, **fields: Any) -> None:
        await self.send(frame(json.dumps({"type": kind, **fields})))

    async def hear(self) -> Heard:
        """Read to the end.

        Raises:
            ConnectionError: the connection was reset, which throws away what is on its way.
        """
        async with asyncio.timeout(TIMEOUT_S):
            while data := await self._loop.sock_recv(self._socket, READ_BYTES):
                self._protocol.receive_data(data)
                if reply := b"".join(self._protocol.data_to_send()):
                    await self.send(reply)
        frames = [one for one in self._protocol.events_received() if isinstance(one, Frame)]
        texts = [json.loads(bytes(one.data)) for one in frames if one.opcode is Opcode.TEXT]
        close = self._protocol.close_rcvd
        return Heard(texts, close.code if close else None)
