"""A worker process without a model that tells when each chunk came and each answer left.

    python -m tests.bench.stamping_worker PORT SLOTS

A loud chunk is answered with one second of 24 kHz speech, a silent one is listened to. The text of
an answer is two readings of `time.monotonic()`, one clock for all processes of a machine: the
chunk complete at the socket, and the answer about to be encoded.
"""

from __future__ import annotations

import asyncio
import sys
import time

import numpy as np
from websockets.asyncio.server import ServerConnection

from client.connection import Stamped
from shared import protocol
from shared.audio import F32_BYTES, samples_to_f32
from shared.limits import OUTPUT_SAMPLE_RATE_HZ
from tests.fakes.scripted_worker import FakeSession, ScriptedWorker

SPEECH = samples_to_f32(
    (0.1 * np.random.default_rng(7).standard_normal(OUTPUT_SAMPLE_RATE_HZ)).astype(np.float32)
)
"""One second that does not compress, as speech does not."""


class StampedConnection(Stamped, ServerConnection):
    """The worker's end of a socket."""


class StampingWorker(ScriptedWorker):
    connection_type = StampedConnection

    async def _converse(self, session: FakeSession) -> None:
        """Unlike the scripted worker's, this keeps nothing of what it has received."""
        connection = session.connection
        assert isinstance(connection, StampedConnection)
        connection.completed_at.popleft()  # of `open`
        async for frame in connection:
            received_at = connection.completed_at.popleft()
            assert isinstance(frame, bytes)
            command = protocol.decode_command(frame)
            match command:
                case protocol.Stop():
                    await session.send(protocol.Stopped())
                    return
                case protocol.Input():
                    await session.send(answer(command, received_at))
                case _:
                    await self._reply(session, command)


def answer(chunk: protocol.Input, received_at: float) -> protocol.Result:
    is_loud = any(chunk.audio[:F32_BYTES])
    return protocol.Result(
        seq=chunk.seq,
        is_listen=not is_loud,
        unit_index=chunk.seq + 1,
        text=f"{received_at:.7f} {time.monotonic():.7f}",
        audio=SPEECH if is_loud else b"",
    )


async def main(port: int, slots: int) -> None:
    async with StampingWorker(slots=slots, port=port):
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), int(sys.argv[2])))
