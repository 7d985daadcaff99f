"""What one client sends, through gateway and worker, and what its neighbours notice: nothing."""

from __future__ import annotations

import base64
import gc
import io
import json
import struct
import tracemalloc
import zlib
from contextlib import AsyncExitStack

import pytest
from PIL import Image

from gateway.pool import Address
from tests.fakes.gateway import Talker
from tests.fakes.model import UNIT_SAMPLES
from tests.fakes.scripted_worker import ScriptedWorker
from tests.fakes.worker import FakeWorker


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def f32(*values: float) -> str:
    return b64(struct.pack(f"<{len(values)}f", *values))


LOUD = f32(*[0.9] * UNIT_SAMPLES)
SILENT = f32(*[0.0] * UNIT_SAMPLES)


def picture(kind: str, size: tuple[int, int] = (64, 64)) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", size).save(out, kind)
    return out.getvalue()


def claims(width: int, height: int) -> bytes:
    """A PNG of one pixel whose header says something else."""
    png = bytearray(picture("PNG", (1, 1)))
    png[16:24] = struct.pack(">II", width, height)
    png[29:33] = struct.pack(">I", zlib.crc32(png[12:29]))
    return bytes(png)


AUDIO = {
    "no audio": ("", "bad_audio"),
    "no base64": ("%%%%", "bad_audio"),
    "one byte": (b64(b"\0"), "bad_audio"),
    "an odd number of bytes": (b64(bytes(4001)), "bad_audio"),
    "not a number": (f32(0.0, float("nan")), "bad_audio"),
    "infinity": (f32(float("-inf")), "bad_audio"),
    "another encoding": (f32(3.0e38), "bad_audio"),
    "half a minute and a sample": (b64(bytes(4 * (16_000 * 30 + 1))), "bad_audio"),
    "one sample": (f32(0.5), None),
    "the smallest number": (b64(b"\1\0\0\0" * UNIT_SAMPLES), None),
}
PICTURES = {
    "nothing": (b"", "bad_image"),
    "text": (b"no picture at all", "bad_image"),
    "a truncated jpeg": (picture("JPEG")[:300], "bad_image"),
    "a damaged jpeg": (picture("JPEG")[:20] + b"\xff" * 400, "bad_image"),
    "another format": (picture("GIF"), "bad_image"),
    "no pixels": (claims(0, 0), "bad_image"),
    "too many pixels": (claims(30_000, 30_000), "bad_image"),
    "a png": (picture("PNG"), None),
}
MESSAGES = {
    "an unknown type": ({"type": "x" * 1000}, "bad_message"),
    "no type": ({}, "bad_message"),
    "a type that is none": ({"type": ["stop"]}, "bad_message"),
    "resume without pause": ({"type": "resume"}, "bad_message"),
    "a pause without end": ({"type": "pause", "timeout": 1e300}, "bad_message"),
    "a path": ({"type": "prepare", "ref_audio_path": "../../config.json"}, "bad_message"),
    "a setting of the wrong type": ({"type": "prepare", "config": {"top_k": {}}}, "bad_message"),
    "a prompt that is too long": (
        {"type": "prepare", "system_prompt": "x" * 20_000},
        "bad_message",
    ),
    "a voice that is none": ({"type": "prepare", "ref_audio_base64": b64(b"abc")}, "bad_audio"),
    "a chunk without audio": ({"type": "audio_chunk"}, "bad_message"),
}
HOSTILE = [
    *(
        (name, {"type": "audio_chunk", "audio_base64": a}, slug)
        for name, (a, slug) in AUDIO.items()
    ),
    *(
        (name, {"type": "audio_chunk", "audio_base64": SILENT, "frame_base64_list": [b64(p)]}, slug)
        for name, (p, slug) in PICTURES.items()
    ),
    *((name, message, slug) for name, (message, slug) in MESSAGES.items()),
]


async def test_each_gets_its_error_and_the_neighbour_goes_on(serve):
    """B14: bad input of one session broke the step it shared with others."""
    worker = await FakeWorker(n_slots=2).start()
    try:
        async with (
            serve([Address("127.0.0.1", worker.port)]) as running,
            running.dial("omni_hostile") as one,
            running.dial("omni_neighbour") as other,
        ):
            hostile, neighbour = Talker(one), Talker(other)
            await hostile.prepare()
            await neighbour.prepare()
            told, heard = {}, []
            for name, message, _ in HOSTILE:
                await one.send(json.dumps(message))
                await neighbour.chunk(audio_base64=LOUD)
                told[name] = (await hostile.hear()).get("slug")
                heard.append((await neighbour.hear())["text"])
    finally:
        await worker.close()

    assert told == {name: slug for name, _, slug in HOSTILE}
    assert heard == [f"u{i} " for i in range(len(HOSTILE))]


async def test_settings_of_one_session_do_not_reach_the_next(serve):
    """W9: they were kept on an object that all sessions shared."""
    worker = await FakeWorker(n_slots=1).start()
    try:
        async with serve([Address("127.0.0.1", worker.port)]) as running:
            async with running.dial("omni_a") as socket:
                first = await Talker(socket).prepare(config={"top_k": 3}, system_prompt="be rude")
            async with running.dial("omni_b") as socket:
                second = await Talker(socket).prepare()
    finally:
        await worker.close()

    assert (first["ignored"], second["ignored"]) == (["top_k"], [])
    assert [state.prompts for state in worker.model.states[-2:]] == [
        ["be rude"],
        ["You are a helpful assistant."],
    ]


@pytest.mark.parametrize("kind", ["gateway", "worker"])
async def test_a_message_is_not_kept_once_it_has_been_answered(serve, kind):
    """B50: each live session kept its last message, up to 128 MiB, until the next one came."""
    n_bytes = 6_000_000
    async with AsyncExitStack() as stack:
        if kind == "gateway":
            worker = await stack.enter_async_context(ScriptedWorker(slots=2))
            port = worker.port
        else:
            real = await FakeWorker(n_slots=2).start()
            stack.push_async_callback(real.close)
            port = real.port
        running = await stack.enter_async_context(serve([Address("127.0.0.1", port)]))
        sockets = [
            await stack.enter_async_context(running.dial(f"omni_{i}", ping_interval=None))
            for i in range(2)
        ]
        clients = [Talker(socket) for socket in sockets]
        for client in clients:
            await client.prepare()
        frame = b64(bytes(n_bytes))
        tracemalloc.start()
        try:
            for client in clients:
                await client.chunk(audio_base64=SILENT, frame_base64_list=[frame])
                assert (await client.hear())["type"] in ("result", "error")
            if kind == "gateway":
                for session in worker.sessions:
                    session.commands.clear()
            gc.collect()
            kept, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        # The library of the scripted worker keeps the last frame of each session in its parser.
        assert kept < (2.5 if kind == "gateway" else 0.5) * n_bytes
