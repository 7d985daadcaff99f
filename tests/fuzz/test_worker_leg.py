"""Generated frames on the worker's own socket: it trusts its gateway no more than anybody."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from websockets.exceptions import ConnectionClosed

from shared.protocol import (
    Ask,
    AudioPart,
    ChatMessage,
    Closed,
    DuplexSettings,
    Event,
    Failure,
    GenerationSettings,
    ImagePart,
    Input,
    Interrupt,
    Open,
    Pause,
    Prepare,
    PrepareTurns,
    Result,
    Resume,
    Stop,
    TextPart,
    VadSettings,
    VideoPart,
    encode,
)
from tests.fakes.gateway import wait_until
from tests.fakes.model import UNIT_SAMPLES
from tests.fakes.worker import FakeWorker, Peer

pytestmark = pytest.mark.timeout(300)  # hundreds of sessions, beside busy processes too

BOUND_S = 10.0
NUMBERS = st.floats() | st.integers(-(2**63), 2**64 - 1)
AUDIO = st.one_of(
    st.sampled_from([b"", b"abc", b"\xff" * 8, bytes(4 * 16_000 * 31)]),
    st.integers(1, 3 * UNIT_SAMPLES).map(lambda n: struct.pack("<f", 1.0) * n),
)
PARTS = st.lists(
    st.one_of(
        st.builds(TextPart, st.sampled_from(["", "hello", "fail", "too long", "y" * 20_000])),
        st.builds(ImagePart, st.binary(max_size=8)),
        st.builds(AudioPart, AUDIO),
        st.builds(VideoPart, st.binary(max_size=8), st.integers(-1, 2**40)),
    ),
    max_size=3,
)
GENERATION = st.builds(
    GenerationSettings,
    max_new_tokens=st.none() | st.integers(-5, 2**60),
    temperature=st.none() | st.floats(),
)
HELLO = [ChatMessage("user", [TextPart("hello")])]
SPOKEN = [ChatMessage("user", [AudioPart(struct.pack("<f", 1.0) * UNIT_SAMPLES)])]
MESSAGES = st.lists(st.builds(ChatMessage, st.sampled_from(["user", "system"]), PARTS), max_size=2)
ASK = st.one_of(
    st.builds(Ask, MESSAGES),
    st.builds(Ask, st.just(HELLO), GENERATION, voice=AUDIO, speaks=st.booleans()),
    st.builds(Ask, st.just(HELLO), max_slice_nums=st.integers(-5, 5)),
)
PREPARE_TURNS = st.one_of(
    st.builds(PrepareTurns, PARTS, generation=GENERATION),
    st.builds(PrepareTurns, st.just([]), st.builds(VadSettings, st.floats(), st.floats())),
    st.builds(PrepareTurns, st.just([]), timeout_s=st.floats()),
)
COMMANDS = st.one_of(
    PREPARE_TURNS,
    ASK,
    st.builds(Open, st.text(max_size=200), st.just("duplex"), st.just("audio_duplex")),
    st.builds(
        Prepare,
        st.sampled_from(["x", "fail", "\0", "y" * 20_000]),
        st.builds(DuplexSettings, temperature=st.none() | st.floats()),
        AUDIO,
    ),
    st.builds(
        Input,
        st.integers(-1, 3),
        AUDIO,
        st.lists(st.binary(max_size=8), max_size=18),
        st.booleans(),
        st.none() | st.integers(-5, 5),
    ),
    st.builds(Pause, st.none() | st.floats()),
    st.just(Resume()),
    st.just(Interrupt()),
).map(encode)
PACKED = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.binary(max_size=9) | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
).map(msgspec.msgpack.encode)


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    frame = draw(COMMANDS)
    at = draw(st.integers(0, min(len(frame), 60) - 1))
    return frame[:at] + draw(st.binary(max_size=3)) + frame[at + 1 :]


FRAMES = st.one_of(*[COMMANDS] * 3, damaged(), PACKED, st.binary(max_size=20), st.text(max_size=9))


OPENINGS = st.one_of(
    st.just([]),
    st.just([Open("fuzz", "duplex", "omni_duplex"), Prepare("x")]),
    PREPARE_TURNS.map(lambda prepare: [Open("f", "half_duplex", "half_duplex_audio"), prepare]),
    ASK.map(lambda ask: [Open("fuzz", "chat", "chat"), ask]),
)
SESSIONS = st.tuples(OPENINGS, st.lists(FRAMES, max_size=10)).map(
    lambda parts: [*map(encode, parts[0]), *parts[1]]
)


@dataclass
class Stage:
    worker: FakeWorker
    neighbour: Peer
    n_said: int = 0
    n_tasks: int = 0

    async def neighbour_is_well(self) -> None:
        await self.neighbour.send(Input(self.n_said, bytes(4 * UNIT_SAMPLES)))
        assert (await self.neighbour.until(Result)).seq == self.n_said
        self.n_said += 1

    async def is_clean(self) -> None:
        host = self.worker.lifecycle.host
        assert host is not None
        await wait_until(lambda: host.slots.n_free == len(host.slots) - 1, BOUND_S)
        # The fake remembers what it was asked, with its sound.
        self.worker.model.states.clear()
        await wait_until(lambda: host.media.budget.total == 0, BOUND_S)
        self.n_tasks = self.n_tasks or len(asyncio.all_tasks())
        await wait_until(lambda: len(asyncio.all_tasks()) <= self.n_tasks, BOUND_S)


async def start() -> Stage:
    worker = await FakeWorker(n_slots=2).start()
    return Stage(worker, await worker.session("neighbour"))


async def stop(stage: Stage) -> None:
    await stage.neighbour.socket.close()
    await stage.worker.close()


@pytest.fixture(scope="module")
def stage(runner) -> Iterator[Stage]:
    stage = runner.run(start())
    yield stage
    runner.run(stop(stage))


async def play(stage: Stage, frames: list[bytes | str], ending: str) -> None:
    peer = await stage.worker.connect()
    hearing = asyncio.create_task(peer.rest())
    try:
        for frame in frames:
            await peer.socket.send(frame)
        if ending == "stop":
            await peer.send(Stop())
            await asyncio.wait_for(hearing, BOUND_S)
        elif ending == "answered":
            await asyncio.wait_for(hearing, BOUND_S)
        elif ending == "reset":
            peer.socket.transport.abort()
        await peer.socket.close()
    except ConnectionClosed:
        pass
    check(list(await asyncio.wait_for(hearing, BOUND_S)), ending)


def check(heard: list[Event], ending: str) -> None:
    slugs = [event.slug for event in heard if isinstance(event, Failure)]
    assert not {"internal", "engine_fault"} & set(slugs), heard
    closed = [event for event in heard if isinstance(event, Closed)]
    assert closed == heard[len(heard) - len(closed) :]
    if ending == "stop":
        assert closed or slugs


@settings(
    max_examples=240,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(
    SESSIONS,
    st.sampled_from(["stop", "close", "reset"]),
)
@example([encode(Open("fuzz", "chat", "chat")), encode(Ask(SPOKEN))], "answered")
def test_no_frame_hurts_the_worker_or_a_neighbour(runner, stage, frames, ending):

    async def example() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(play(stage, frames, ending))
            group.create_task(stage.neighbour_is_well())
        await stage.is_clean()
        assert (await stage.worker.health()).worker_status == "idle"

    runner.run(asyncio.wait_for(example(), 3 * BOUND_S))
