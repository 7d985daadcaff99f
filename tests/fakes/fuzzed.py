"""What fuzzed clients send, and the service that has to bear it beside a healthy session."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import struct
from collections.abc import AsyncIterator, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed

from gateway.pool import Address
from tests.fakes.gateway import Running, Talker, run_gateway, wait_until
from tests.fakes.scripted_worker import ScriptedWorker
from tests.fakes.worker import FakeWorker

BOUND_S = 10.0
"""For everything that one example waits for."""

N_POLL_FILES = 4
"""Both ends of the connections that the gateway's polls may keep, or may just have lost."""

N_SLOTS = 3
BOUNDED = settings(
    derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck)
)

# ---- what clients say


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def f32(*values: float) -> str:
    return b64(struct.pack(f"<{len(values)}f", *values))


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
JUNK = st.sampled_from(
    [None, True, [], {}, [[]], -1, 0, 1.5, 10**30, 10**400, "\0", "x" * 1000, {"type": "stop"}]
)
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
ENDINGS = st.sampled_from(["stop", "close", "reset", "half a frame"])


@st.composite
def damaged(
    draw: st.DrawFn, valid: st.SearchStrategy[dict[str, Any]], names: st.SearchStrategy[str]
) -> str:
    """A right message with a field replaced, a field gone, or its text damaged.

    Args:
        names: fields that may be replaced.
    """
    message = dict(draw(valid))
    match draw(st.integers(0, 5)):
        case 0:
            message[draw(names)] = draw(JUNK)
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


@st.composite
def odd(draw: st.DrawFn, valid: st.SearchStrategy[Any]) -> Any:
    """A right value in which one thing, however deep, is something else or gone."""
    value = draw(valid)
    if not value or not isinstance(value, dict | list) or not draw(st.integers(0, 5)):
        return draw(JUNK)
    changed = value.copy()
    at = draw(st.sampled_from(sorted(value) if isinstance(value, dict) else range(len(value))))
    if draw(st.integers(0, 7)):
        changed[at] = draw(odd(st.just(value[at])))
    else:
        del changed[at]
    return changed


async def hear_all(socket: ClientConnection, heard: list[dict[str, Any]]) -> None:
    with suppress(ConnectionClosed):
        async for frame in socket:
            heard.append(json.loads(frame))


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


# ---- the service


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

    async def beside_a_neighbour(self, play: Coroutine[Any, Any, None]) -> None:
        """Run one example: the neighbour is well before, meanwhile and after, and nothing is left.

        Raises:
            TimeoutError: it takes too long.
        """
        async with asyncio.timeout(3 * BOUND_S):
            async with asyncio.TaskGroup() as group:
                group.create_task(play)
                group.create_task(self.neighbour_is_well())
            await self.neighbour_is_well()
            await self.is_clean()

    async def neighbour_is_well(self) -> None:
        await self.neighbour.chunk(audio_base64=f32(*[0.0] * 160))
        said = await self.neighbour.hear(BOUND_S / 2)
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
        await wait_until(lambda: n_files() <= self.n_files + N_POLL_FILES, BOUND_S)


def n_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@asynccontextmanager
async def stage_with(kind: str) -> AsyncIterator[Stage]:
    """A stage whose worker is `scripted`, or a `real` one around the fake model."""
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
