"""Clients that end their session in every way a client can, and one that behaves.

Each ending is a coroutine over a `Target`; it opens its session (or sessions), ends in its way,
and checks only what its own end of the wire can see. What it leaves behind in the service is
for the test to look at.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import struct
import zlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Final, Self
from urllib.parse import urlsplit

import numpy as np
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed
from websockets.frames import Frame, Opcode

from shared.audio import Samples, encode_base64, samples_to_f32
from shared.limits import INPUT_SAMPLE_RATE_HZ as RATE
from shared.limits import MAX_FRAME_BYTES
from tests.faults.proxy import Proxy, reset

HEAR_TIMEOUT_S: Final = 30.0
UNREAD_CHUNKS: Final = 400
"""Enough spoken answers to fill every buffer between the model and a client that does not read."""


def _png(width: int, height: int) -> bytes:
    """A well-formed PNG file without pixels, of any size it likes to claim."""
    parts = [b"\x89PNG\r\n\x1a\n"]
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    for kind, data in ((b"IHDR", header), (b"IDAT", zlib.compress(b"")), (b"IEND", b"")):
        body = kind + data
        parts += [struct.pack(">I", len(data)), body, struct.pack(">I", zlib.crc32(body))]
    return b"".join(parts)


IMAGE_BOMB: Final = _png(30_000, 30_000)
"""A hundred bytes that would be 2.7 GB in memory."""

_numbers = itertools.count()


def chunk_of(samples: Samples) -> str:
    """The base64 text of one chunk's samples (float32 16 kHz)."""
    return encode_base64(samples_to_f32(samples))


def chunks_of(samples: Samples) -> list[str]:
    """Whole seconds of speech as chunks; the rest of the last second is silence."""
    padded = np.pad(samples, (0, -len(samples) % RATE))
    return [chunk_of(padded[i : i + RATE]) for i in range(0, len(padded), RATE)]


def turn_of(samples: Samples) -> list[str]:
    """A turn of a half-duplex session in chunks of half a second.

    The sound of its beginning is not heard, and silence ends it.
    """
    size = RATE // 2
    said = np.pad(samples, (size, 2 * size + -len(samples) % size))
    return [chunk_of(said[i : i + size]) for i in range(0, len(said), size)]


@dataclass(frozen=True)
class Target:
    """A service and the words to use with it. The defaults suit the fake model."""

    url: str
    """`ws://host:port`."""
    n_slots: int
    """Of all its workers together."""
    silence: str = chunk_of(np.zeros(160, np.float32))
    speech: Sequence[str] = (chunk_of(np.ones(160, np.float32)),)
    """Chunks that make the model speak, in this order."""
    chunk_s: float = 0.0
    """Pause after each chunk; 0 = as fast as the answers come."""
    prompt: str = "You are a helpful assistant."
    slow_prompt: str = "block 0.2"
    """A prompt whose prefill takes a while."""
    turn: Sequence[str] = field(default_factory=lambda: turn_of(np.ones(RATE // 2, np.float32)))
    """Chunks that are a whole turn of a half-duplex session."""
    turn_patience_s: float = HEAR_TIMEOUT_S
    """An answer to it that has not begun by then is none."""
    rng: random.Random = field(default_factory=lambda: random.Random(0))

    @property
    def port(self) -> int:
        port = urlsplit(self.url).port
        assert port is not None
        return port

    def through(self, proxy: Proxy) -> Target:
        return replace(self, url=f"ws://127.0.0.1:{proxy.port}")


class Caller:
    """A G0 client that says what the protocol allows, until it does not."""

    path: ClassVar[str] = "/ws/duplex/{session_id}"
    prefix: ClassVar[str] = "omni"

    def __init__(self, socket: ClientConnection, target: Target, session_id: str) -> None:
        self.socket = socket
        self.target = target
        self.session_id = session_id
        self.n_sent = 0

    @classmethod
    @asynccontextmanager
    async def open(
        cls, target: Target, session_id: str | None = None, **options: Any
    ) -> AsyncIterator[Self]:
        """A connection without any message yet; cut at the end of the block if still there."""
        session_id = session_id or f"{cls.prefix}_{os.getpid()}_{next(_numbers)}"
        options = {"ping_interval": None, "max_size": None} | options
        url = target.url + cls.path.format(session_id=session_id)
        socket = await connect(url, proxy=None, compression=None, **options)
        try:
            yield cls(socket, target, session_id)
        finally:
            socket.transport.abort()
            await socket.wait_closed()

    @classmethod
    @asynccontextmanager
    async def live(cls, target: Target, **options: Any) -> AsyncIterator[Self]:
        """A session that has been prepared."""
        async with cls.open(target, **options) as caller:
            await caller.prepare()
            yield caller

    async def say(self, kind: str, **fields: Any) -> None:
        await self.socket.send(json.dumps({"type": kind, **fields}))

    async def prepare(self, prompt: str | None = None) -> dict[str, Any]:
        await self.say("prepare", system_prompt=prompt or self.target.prompt)
        return await self.hear("prepared")

    async def chunk(self, audio: str | None = None, **fields: Any) -> None:
        self.n_sent += 1
        await self.say("audio_chunk", audio_base64=audio or self.target.silence, **fields)

    async def exchange(self, n_chunks: int) -> list[dict[str, Any]]:
        """Send silent chunks, each after the answer to the last."""
        answers = []
        for _ in range(n_chunks):
            await self.chunk()
            answers.append(await self.hear("result"))
            await asyncio.sleep(self.target.chunk_s)
        return answers

    async def ask(self) -> bool:
        """Send what makes the model speak; True once it does, False if it never did."""
        silences = [self.target.silence] * (8 if self.target.chunk_s else 0)
        for audio in [*self.target.speech, *silences]:
            await self.chunk(audio)
            answer = await self.hear("result")
            if answer["audio_data"]:
                return True
            await asyncio.sleep(self.target.chunk_s)
        return False

    async def hear(self, kind: str) -> dict[str, Any]:
        """The next message of a kind.

        Raises:
            AssertionError: an error came instead.
            ConnectionClosed: the socket's end came instead.
        """
        async with asyncio.timeout(HEAR_TIMEOUT_S):
            while True:
                message: dict[str, Any] = json.loads(await self.socket.recv())
                if message["type"] == kind:
                    return message
                assert message["type"] != "error", message

    async def rest(self) -> tuple[list[dict[str, Any]], int | None]:
        """Everything up to the end of the socket, and its close code."""
        messages = []
        async with asyncio.timeout(HEAR_TIMEOUT_S):
            try:
                while True:
                    messages.append(json.loads(await self.socket.recv()))
            except ConnectionClosed:
                return messages, self.socket.close_code

    async def last_word(self) -> tuple[str, int | None]:
        """The type of the last message before the socket's end, of an error its slug, "" without
        any; and the close code."""
        messages, code = await self.rest()
        last = messages[-1] if messages else {"type": ""}
        return last["slug" if last["type"] == "error" else "type"], code

    async def stop(self) -> int | None:
        """End in the protocol's own way; returns the close code."""
        await self.say("stop")
        word, code = await self.last_word()
        assert word == "stopped", word
        return code

    def vanish(self) -> None:
        """End as a killed process does: no close frame, whatever the kernel says for it."""
        self.socket.transport.abort()

    def reset(self) -> None:
        reset(self.socket.transport)

    def begin_frame(self) -> None:
        """Send the first half of a chunk's frame and nothing of the rest."""
        text = json.dumps({"type": "audio_chunk", "audio_base64": self.target.silence})
        frame = Frame(Opcode.TEXT, text.encode()).serialize(mask=True, extensions=[])
        self._write(frame[: len(frame) // 2])

    def announce_too_much(self) -> None:
        """Send the head of a frame that is longer than any may be."""
        self._write(b"\x81\xff" + (2 * MAX_FRAME_BYTES).to_bytes(8, "big") + bytes(4))

    def _write(self, data: bytes) -> None:
        try:
            self.socket.transport.write(data)
        except RuntimeError as error:
            # The server has ended the session, and this end has said goodbye already.
            raise ConnectionResetError("the session was over") from error


# ---- the endings; `endings.py` says which of them take little time and one slot


async def stopped(target: Target) -> None:
    async with Caller.live(target) as caller:
        await caller.exchange(2)
        assert await caller.stop() == 1000


async def stopped_with_chunks_unanswered(target: Target) -> None:
    async with Caller.live(target) as caller:
        for _ in range(4):
            await caller.chunk()
        assert await caller.stop() == 1000


async def closed(target: Target) -> None:
    async with Caller.live(target) as caller:
        await caller.exchange(2)
        await caller.socket.close()


async def killed(target: Target) -> None:
    async with Caller.live(target) as caller:
        await caller.exchange(2)
        caller.vanish()


async def reset_in_mid_frame(target: Target) -> None:
    async with Caller.live(target) as caller:
        await caller.exchange(2)
        caller.begin_frame()
        caller.reset()


async def ended_in_mid_frame(target: Target) -> None:
    async with Caller.live(target) as caller:
        await caller.exchange(1)
        caller.begin_frame()
        caller.vanish()


async def killed_while_the_gateway_connects(target: Target) -> None:
    async with Caller.open(target) as caller:
        await asyncio.sleep(target.rng.choice((0.0, 0.001, 0.004)))
        caller.vanish()


async def killed_between_queue_done_and_prepare(target: Target) -> None:
    async with Caller.open(target) as caller:
        await caller.hear("queue_done")
        caller.vanish()


async def killed_while_the_worker_prefills(target: Target) -> None:
    async with Caller.open(target) as caller:
        await caller.hear("queue_done")
        await caller.say("prepare", system_prompt=target.slow_prompt)
        await asyncio.sleep(0.02)
        caller.reset()


async def closed_while_the_model_speaks(target: Target) -> None:
    async with Caller.live(target) as caller:
        await caller.ask()
        await caller.chunk(target.speech[0])
        await caller.socket.close()


async def killed_while_the_model_speaks(target: Target) -> None:
    async with Caller.live(target) as caller:
        await caller.ask()
        await caller.chunk(target.speech[0])
        caller.vanish()


async def killed_while_paused(target: Target) -> None:
    async with Caller.live(target) as caller:
        await caller.say("pause")
        await caller.hear("paused")
        caller.vanish()


async def outstayed_its_pause(target: Target) -> None:
    async with Caller.live(target) as caller:
        await caller.say("pause", timeout=0.1)
        assert await caller.last_word() == ("timeout", 1000)


async def sent_garbage_text(target: Target) -> None:
    async with Caller.live(target) as caller:
        await caller.socket.send("{no json" + "x" * target.rng.randrange(1000))
        assert await caller.last_word() == ("not_json", 1007)


async def sent_garbage_bytes(target: Target) -> None:
    async with Caller.live(target) as caller:
        await caller.socket.send(target.rng.randbytes(1000))
        assert await caller.last_word() == ("unexpected_binary", 1003)


async def sent_broken_frames(target: Target) -> None:
    async with Caller.live(target) as caller:
        caller.socket.transport.write(b"\xff" + target.rng.randbytes(200))
        await caller.rest()


async def sent_bad_messages_then_stopped(target: Target) -> None:
    async with Caller.live(target) as caller:
        for fields in ({}, {"audio_base64": "?"}, {"audio_base64": "AAA="}):
            await caller.say("audio_chunk", **fields)
        await caller.say("no such type")
        for _ in range(4):
            answer = json.loads(await caller.socket.recv())
            assert answer["type"] == "error", answer
        assert await caller.stop() == 1000


async def sent_bad_images_then_stopped(target: Target) -> None:
    async with Caller.live(target) as caller:
        for image in (IMAGE_BOMB, IMAGE_BOMB[:40], b"no image", b""):
            await caller.chunk(frame_base64_list=[encode_base64(image)])
            answer = json.loads(await caller.socket.recv())
            assert answer["type"] == "error", answer
        await caller.exchange(1)
        assert await caller.stop() == 1000


async def announced_an_over_long_message(target: Target) -> None:
    async with Caller.live(target) as caller:
        caller.announce_too_much()
        assert await caller.last_word() == ("frame_too_large", 1009)


async def sent_no_http(target: Target) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", target.port)
    writer.write(target.rng.randbytes(300))
    await writer.drain()
    reset(writer.transport)


async def left_in_the_handshake(target: Target) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", target.port)
    writer.write(b"GET /ws/duplex/omni_half HTTP/1.1\r\nHost: 127.0.0.1\r\nUpgrade: webso")
    await writer.drain()
    writer.transport.abort()


async def was_refused(target: Target) -> None:
    async with Caller.open(target, session_id="no%20good") as caller:
        assert await caller.last_word() == ("bad_session_id", 1008)


async def stopped_reading(target: Target) -> None:
    """Asks on and on and reads nothing, until the service has had enough."""
    async with Caller.live(target, max_queue=1) as caller:
        try:
            async with asyncio.timeout(HEAR_TIMEOUT_S):
                for index in range(UNREAD_CHUNKS):
                    await caller.chunk(target.speech[index % len(target.speech)])
                    # Faster, and most of it would be dropped instead of answered.
                    await asyncio.sleep(max(target.chunk_s, 0.005))
        except (ConnectionClosed, TimeoutError):
            pass
        caller.vanish()


async def gone_silent(target: Target) -> None:
    """Its network swallows everything; ends when the service has given it up."""
    async with Proxy(target.port) as proxy, Caller.live(target.through(proxy)) as caller:
        await caller.exchange(1)
        proxy.up.black_hole = proxy.down.black_hole = True
        await caller.chunk()
        async with asyncio.timeout(HEAR_TIMEOUT_S):
            await proxy.server_hung_up.wait()


async def cut_on_the_way(target: Target) -> None:
    """The network ends in the middle of one of its frames."""
    async with Proxy(target.port) as proxy, Caller.live(target.through(proxy)) as caller:
        proxy.up.cut_after_bytes = 1
        await caller.chunk()
        await caller.rest()


async def killed_while_queued(target: Target) -> None:
    async with holding_slots(target, target.n_slots), Caller.open(target) as caller:
        await caller.say("prepare", system_prompt=target.prompt)
        await caller.hear("queued")
        caller.vanish()


async def closed_while_queued(target: Target) -> None:
    async with holding_slots(target, target.n_slots), Caller.open(target) as caller:
        await caller.hear("queued")
        await caller.socket.close()


@asynccontextmanager
async def holding_slots(target: Target, n_slots: int) -> AsyncIterator[None]:
    """That many live sessions, stopped at the end of the block."""
    release = asyncio.Event()
    ready = asyncio.Semaphore(0)

    async def hold() -> None:
        async with Caller.live(target) as caller:
            ready.release()
            await release.wait()
            await caller.stop()

    async with asyncio.TaskGroup() as group:
        for _ in range(n_slots):
            group.create_task(hold())
        try:
            for _ in range(n_slots):
                await ready.acquire()
            yield
        finally:
            release.set()
