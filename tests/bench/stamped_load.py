"""A process of paced sessions against stamping workers, through a gateway or straight.

    python -m tests.bench.stamped_load '{"url": "ws://…" or null, "workers": [PORT, …], …}'

Takes a `Load` as JSON and prints an `Outcome` as JSON.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Self
from urllib.parse import urlsplit

import numpy as np
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed
from websockets.typing import Subprotocol

from client.connection import StampedConnection, endpoint
from client.duplex import DuplexClient
from client.events import Closed, Event, Result
from client.journal import Journal
from client.paced import Chunk, LoopProbe, stream
from shared import protocol
from shared.audio import Samples, encode_base64, samples_from_f32, samples_to_f32
from shared.limits import INPUT_SAMPLE_RATE_HZ, MAX_FRAME_BYTES

JPEG_BYTES = 60_000
DEAF_CHUNK_S = 0.05
DEAF_BUFFER_BYTES = 65_536
"""Its system would otherwise take in megabytes before the gateway notices."""

DEAF_PACE_S = 0.15
"""A client that does not read is owed a second of speech this often: fast enough for its 8 MiB to
be full within a run of 20 s, and no more traffic than the measured sessions have themselves."""

DEAF_CUT_S = 8.0
"""From the end of a run, for the last words to a client that does not read and its disconnect."""

LEAD_IN_S = 2.0
"""From the first session opened to the first chunk: handshakes are no part of the figures."""


@dataclass(frozen=True)
class Load:
    url: str | None
    """The gateway; None = straight to the workers, in their own protocol."""
    workers: Sequence[int]
    n_sessions: int = 64
    seconds: int = 20
    speaks: bool = False
    has_camera: bool = False
    is_together: bool = False
    n_deaf: int = 0
    """Further sessions, through the gateway, that never read."""


@dataclass
class Outcome:
    up_ms: list[float] = field(default_factory=list)
    """For each chunk, from our socket to the worker's."""
    down_ms: list[float] = field(default_factory=list)
    """For each result, from the worker to our socket."""
    missing: int = 0
    loop_late_ms: list[float] = field(default_factory=list)
    cpu_share: float = 0.0
    began_at: float = 0.0
    ended_at: float = 0.0
    deaf_cut: int = 0
    """Clients that did not read and were disconnected for it."""


class DirectSession:
    """The surface of `DuplexClient` over the internal protocol."""

    def __init__(self, port: int, name: str) -> None:
        self._url = f"ws://127.0.0.1:{port}{protocol.SESSION_PATH}"
        self._name = name
        self._seq = 0
        self.sent_at = self.received_at = 0.0

    async def __aenter__(self) -> Self:
        connection = await connect(
            self._url,
            create_connection=StampedConnection,
            subprotocols=[Subprotocol(protocol.SUBPROTOCOL)],
            max_size=MAX_FRAME_BYTES,
            compression=None,
            proxy=None,
        )
        assert isinstance(connection, StampedConnection)
        self._socket = connection
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._socket.close()

    async def prepare(self) -> None:
        await self._send(protocol.Open(self._name, "duplex", "omni_duplex"))
        assert isinstance(await self._receive(), protocol.Opened)
        await self._send(protocol.Prepare("be brief"))
        assert isinstance(await self._receive(), protocol.Prepared)

    async def send_audio(self, samples: Samples, *, frames: Sequence[bytes] = ()) -> None:
        chunk = protocol.Input(self._seq, samples_to_f32(samples), list(frames))
        self._seq += 1
        await self._send(chunk)

    async def stop(self) -> None:
        await self._send(protocol.Stop())

    async def _send(self, command: protocol.Command) -> None:
        frame = protocol.encode(command)
        self.sent_at = time.monotonic()
        await self._socket.send(frame)

    async def _receive(self) -> protocol.Event:
        frame = await self._socket.recv(decode=False)
        self.received_at = self._socket.completed_at.popleft()
        return protocol.decode_event(frame)

    def __aiter__(self) -> AsyncIterator[Event]:
        return self

    async def __anext__(self) -> Event:
        while True:
            try:
                event = await self._receive()
            except ConnectionClosed:
                return Closed(1000, "")
            if isinstance(event, protocol.Result):
                return Result(
                    is_listen=event.is_listen,
                    text=event.text,
                    audio=samples_from_f32(event.audio),
                    end_of_turn=event.end_of_turn,
                    heard="",
                    interrupted=False,
                    dropped=event.dropped,
                    unit_index=event.unit_index,
                    wall_clock_ms=None,
                    kv_cache_length=None,
                    n_tokens=None,
                    n_tts_tokens=None,
                )


def chunks(load: Load) -> Iterator[Chunk]:
    noise = np.random.default_rng(7)
    samples = (0.1 * noise.standard_normal(INPUT_SAMPLE_RATE_HZ)).astype(np.float32)
    if not load.speaks:
        samples[0] = 0.0  # what the worker looks at
    frames = [noise.bytes(JPEG_BYTES)] if load.has_camera else []
    for _ in range(load.seconds):
        yield samples, frames


async def converse(load: Load, index: int, begin_at: float) -> Journal:
    """Run one session; all are open before the first chunk of any leaves."""
    phase_s = 0.0 if load.is_together else index / load.n_sessions
    # Not all handshakes at once: those of the gateway would queue up behind each other.
    await asyncio.sleep(index * LEAD_IN_S / 2 / load.n_sessions)
    if load.url is None:
        port = load.workers[index % len(load.workers)]
        session: DirectSession | DuplexClient = DirectSession(port, f"direct_{index}")
    else:
        session = DuplexClient(load.url)
    async with session:
        await session.prepare()
        journal = await stream(session, chunks(load), begin_at + phase_s, 1.0)
        await session.stop()
    return journal


async def be_deaf(url: str, index: int, until: float) -> bool:
    """Ask for speech and never read it; returns whether we were disconnected for that."""
    samples = samples_to_f32(np.full(int(DEAF_CHUNK_S * INPUT_SAMPLE_RATE_HZ), 0.1, np.float32))
    chunk = json.dumps({"type": "audio_chunk", "audio_base64": encode_base64(samples)})
    where = urlsplit(endpoint(url, f"/ws/duplex/omni_deaf_{index}"))
    line = socket.socket()
    line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, DEAF_BUFFER_BYTES)
    line.connect((where.hostname, where.port))
    session = await connect(
        where.geturl(), sock=line, max_queue=1, compression=None, proxy=None, ping_interval=None
    )
    try:
        await session.send(json.dumps({"type": "prepare"}))
        while time.monotonic() < until:
            await session.send(chunk)
            await asyncio.sleep(DEAF_PACE_S)
    except ConnectionClosed:
        return True
    finally:
        session.transport.abort()
    return False


async def run(load: Load) -> Outcome:
    begin_at = time.monotonic() + LEAD_IN_S
    end_at = begin_at + load.seconds
    async with LoopProbe() as probe, asyncio.TaskGroup() as group:
        assert load.url is not None or not load.n_deaf
        deaf = [
            group.create_task(be_deaf(load.url or "", index, end_at + DEAF_CUT_S))
            for index in range(load.n_deaf)
        ]
        sessions = [
            group.create_task(converse(load, index, begin_at)) for index in range(load.n_sessions)
        ]
        await asyncio.sleep(begin_at - time.monotonic())
        probe.late_s.clear()
        cpu_at = time.process_time()
        await asyncio.sleep(end_at - time.monotonic())
        cpu_share = (time.process_time() - cpu_at) / load.seconds
    outcome = Outcome(
        loop_late_ms=[round(1000 * s, 3) for s in probe.late_s],
        cpu_share=cpu_share,
        began_at=begin_at,
        ended_at=end_at,
        deaf_cut=sum(task.result() for task in deaf),
    )
    for task in sessions:
        note(task.result(), outcome)
    return outcome


def note(journal: Journal, outcome: Outcome) -> None:
    outcome.missing += journal.n_unanswered + len(journal.errors)
    # The first chunk of a session pays for what is made on first use.
    for reply in journal.replies[1:]:
        received_at, answered_at = map(float, reply.result.text.split())
        outcome.up_ms.append(round(1000 * (received_at - reply.chunk.sent_at), 3))
        outcome.down_ms.append(round(1000 * (reply.at - answered_at), 3))


def main(argv: Sequence[str]) -> None:
    wanted: dict[str, Any] = json.loads(argv[0])
    with contextlib.suppress(KeyboardInterrupt):
        print(json.dumps(asdict(asyncio.run(run(Load(**wanted))))))


if __name__ == "__main__":
    main(sys.argv[1:])
