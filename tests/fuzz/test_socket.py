"""Generated clients: whatever one sends, each message gets one answer and nobody else notices."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import struct
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed

from gateway.dialects.contract import Diagnostic
from gateway.dialects.g0_duplex import G0Duplex
from gateway.pool import Address
from shared.errors import BadMessage, NotJson
from tests.fakes.gateway import Running, Talker, run_gateway, wait_until
from tests.fakes.scripted_worker import ScriptedWorker
from tests.fakes.worker import FakeWorker

BOUND_S = 10.0
"""For everything that one example waits for."""

N_SLOTS = 3
BOUNDED = settings(
    derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck)
)


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def f32(*values: float) -> str:
    return b64(struct.pack(f"<{len(values)}f", *values))


# ---- what clients say

AUDIO = st.sampled_from(
    [
        f32(0.0),
        f32(*[0.9] * 200),
        f32(*[0.0] * 700),
        b64(bytes(3)),
        b64(bytes(4001)),
        "",
        "====",
        "é",
    ]
    + [f32(float("nan")), f32(float("inf")), f32(1e30), "AAAA\n", b64(bytes(2_000_000))]
)
PICTURE = st.sampled_from(
    ["", "AAAA", b64(b"\xff\xd8\xff\xe0 no picture"), b64(b"\x89PNG\r\n\x1a\n")]
)
TEXT = st.sampled_from(["", "be brief", "fail", "\0", "../../etc/passwd", "😀", "x" * 20_000])
VALID = st.one_of(
    st.fixed_dictionaries(
        {"type": st.just("audio_chunk"), "audio_base64": AUDIO},
        optional={
            "frame_base64_list": st.lists(PICTURE, max_size=3),
            "force_listen": st.booleans(),
            "max_slice_nums": st.integers(0, 10),
        },
    ),
    st.fixed_dictionaries(
        {"type": st.just("prepare")},
        optional={"system_prompt": TEXT, "ref_audio_base64": AUDIO, "ref_audio_path": TEXT},
    ),
    st.fixed_dictionaries(
        {"type": st.sampled_from(["pause", "resume", "interrupt", "client_diagnostic", "stopp"])}
    ),
)
JUNK = st.sampled_from(
    [None, True, [], {}, [[]], -1, 0, 1.5, 10**30, 10**400, "\0", "x" * 1000, {"type": "stop"}]
)
NAMES = st.sampled_from(["type", "audio_base64", "frame_base64_list", "config", "timeout", "\0"])


@st.composite
def mutated(draw: st.DrawFn) -> str:
    """A right message with a field replaced, a field gone, or its text damaged."""
    message = dict(draw(VALID))
    match draw(st.integers(0, 5)):
        case 0:
            message[draw(NAMES)] = draw(JUNK)
        case 1:
            message.pop(draw(st.sampled_from(sorted(message))))
        case 2:
            config = draw(st.dictionaries(st.sampled_from(["top_k", "temperature", "x"]), JUNK))
            message["config"] = config
        case 3:
            text = json.dumps(message)
            at = draw(st.integers(0, len(text)))
            return (
                text[:at] + draw(st.sampled_from(["", "\0", "}", '"', ",", "é"])) + text[at + 1 :]
            )
        case 4:
            return json.dumps(message)[:-1] + ', "type": "interrupt"}'
        case _:
            return json.dumps(message)[:-1] + draw(st.sampled_from(ENDS)) + "}"
    return json.dumps(message)


ENDS = [
    ', "timeout": 1e400',
    ', "timeout": -1e400',
    ', "timeout": NaN',
    ', "system_prompt": "\\ud800"',
    ', "x": ' + "[" * 10_000 + "]" * 10_000,
    ', "max_slice_nums": 1' + "0" * 400,
]
GARBAGE = st.one_of(
    st.sampled_from(["", "null", "[]", "7", "{", "\ufeff{}", "[" * 5000, '{"type": "stop"']),
    st.sampled_from([b"", b"\0", b'{"type": "stop"}']),
)
SAID = st.one_of(*[VALID.map(json.dumps)] * 5, *[mutated()] * 4)
MESSAGES = st.tuples(
    st.sampled_from([[], ['{"type": "prepare"}'], ['{"type": "prepare"}']]),
    st.lists(SAID, max_size=12),
    st.lists(GARBAGE, max_size=1) | st.just([]),
    st.lists(SAID, max_size=3),
).map(lambda parts: [message for part in parts for message in part])
ENDINGS = st.sampled_from(["stop", "close", "reset", "half a frame"])


def fate(message: str | bytes) -> str:
    """Whether a message is `answered`, has `no answer`, or is the `end` of its session."""
    if isinstance(message, bytes):
        return "end"
    try:
        command = G0Duplex().parse(message)
    except NotJson:
        return "end"
    except BadMessage:
        return "answered"
    return "no answer" if isinstance(command, Diagnostic) else "answered"


# ---- the stage


@dataclass
class Stage:
    """A gateway, its worker, and a healthy session beside the fuzzed ones."""

    running: Running
    worker: ScriptedWorker | FakeWorker
    neighbour: Talker
    n_tasks: int = 0
    n_files: int = 0

    @property
    def n_slots_used(self) -> int:
        if isinstance(self.worker, ScriptedWorker):
            return self.worker.n_live
        assert self.worker.lifecycle.host is not None
        return len(self.worker.lifecycle.host.sessions)

    async def neighbour_is_well(self) -> None:
        await self.neighbour.chunk(audio_base64=f32(*[0.0] * 160))
        said = await self.neighbour.hear(2)
        assert said["type"] == "result", said

    async def is_clean(self) -> None:
        """Wait until nothing is left of the sessions but the neighbour's."""
        gateway = self.running.gateway
        await wait_until(lambda: len(gateway.sessions) == 1 and self.n_slots_used == 1, BOUND_S)
        await wait_until(lambda: not len(gateway.background), BOUND_S)
        await wait_until(lambda: gateway.held.total == 0, BOUND_S)
        if not self.n_tasks:
            self.n_tasks, self.n_files = len(asyncio.all_tasks()), n_files()
        await wait_until(lambda: len(asyncio.all_tasks()) <= self.n_tasks, BOUND_S)
        await wait_until(lambda: n_files() <= self.n_files, BOUND_S)


def n_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@asynccontextmanager
async def stage_with(kind: str) -> AsyncIterator[Stage]:
    async with AsyncExitStack() as stack:
        worker: ScriptedWorker | FakeWorker
        if kind == "scripted":
            worker = await stack.enter_async_context(ScriptedWorker(slots=N_SLOTS))
            address = worker.address
        else:
            worker = await FakeWorker(n_slots=N_SLOTS).start()
            stack.push_async_callback(worker.close)
            address = Address("127.0.0.1", worker.port)
        running = await stack.enter_async_context(run_gateway([address]))
        socket = await stack.enter_async_context(running.dial("omni_neighbour"))
        neighbour = Talker(socket)
        await neighbour.prepare()
        yield Stage(running, worker, neighbour)


@pytest.fixture(scope="module", params=["scripted", "real"])
def stage(request, runner) -> Iterator[Stage]:
    opened = stage_with(request.param)
    stage = runner.run(opened.__aenter__())
    yield stage
    runner.run(opened.__aexit__(None, None, None))


# ---- one example


async def hear_all(socket: ClientConnection, heard: list[dict[str, Any]]) -> None:
    with suppress(ConnectionClosed):
        async for frame in socket:
            heard.append(json.loads(frame))


def answers(heard: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [said for said in heard if not said["type"].startswith("queue")]


async def play(stage: Stage, messages: list[str | bytes], ending: str) -> None:
    socket = await stage.running.dial("omni_fuzz", ping_interval=None)
    heard: list[dict[str, Any]] = []
    hearing = asyncio.create_task(hear_all(socket, heard))
    n_due, is_over = 0, False
    # At the end: what was held back by a pause is answered too.
    for message in [*messages, '{"type": "resume"}']:
        try:
            await socket.send(message)
        except ConnectionClosed:
            break
        match fate(message):
            case "answered":
                n_due += 1
            case "end":
                n_due, is_over = n_due + 1, True
                break
    if is_over:
        await asyncio.wait_for(hearing, BOUND_S)
        assert socket.close_code in (1003, 1007), (socket.close_code, heard)
        # What was asked before may be lost with the session; nothing is answered twice.
        assert 1 <= len(answers(heard)) <= n_due
        assert heard[-1]["slug"] in ("not_json", "unexpected_binary")
    else:
        await wait_until(lambda: len(answers(heard)) >= n_due or hearing.done(), BOUND_S)
        assert len(answers(heard)) == n_due, (answers(heard), socket.close_code)
        await end(socket, ending)
        await asyncio.wait_for(hearing, BOUND_S)
    assert "internal" not in [said.get("slug") for said in heard]
    assert socket.close_code != 1011
    await socket.close()


async def end(socket: ClientConnection, how: str) -> None:
    if how == "stop":
        await socket.send('{"type": "stop"}')
        return
    if how == "close":
        await socket.close()
        return
    if how == "half a frame":
        socket.transport.write(b"\x81\xfe\x40\x00abcd" + bytes(100))
        await asyncio.sleep(0)
    socket.transport.abort()


@settings(BOUNDED, max_examples=120)
@given(MESSAGES, ENDINGS)
def test_every_message_gets_one_answer_and_nobody_else_notices(runner, stage, messages, ending):
    async def example() -> None:
        await stage.neighbour_is_well()
        async with asyncio.TaskGroup() as group:
            group.create_task(play(stage, messages, ending))
            group.create_task(stage.neighbour_is_well())
        await stage.neighbour_is_well()
        await stage.is_clean()

    runner.run(asyncio.wait_for(example(), 3 * BOUND_S))
