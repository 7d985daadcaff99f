"""Whatever a client sends: every chunk answered once, a clean slot, `closed` last."""

import asyncio

from hypothesis import given, settings
from hypothesis import strategies as st

from shared.protocol import (
    Closed,
    Failure,
    Input,
    Interrupt,
    Opened,
    Pause,
    Prepare,
    Result,
    Resume,
    Stop,
    Stopped,
)
from tests.fakes.model import UNIT_SAMPLES, FakeDuplexModel
from tests.fakes.session import Stage, eventually

AUDIO = st.one_of(
    st.sampled_from([b"", b"abc", b"\xff" * 8]),
    st.integers(1, 3 * UNIT_SAMPLES).map(lambda n: b"\x00\x00\x80\x3f" * n),
)
INPUT = st.builds(
    Input,
    seq=st.just(0),
    audio=AUDIO,
    frames=st.lists(st.just(b"junk"), max_size=1),
    force_listen=st.booleans(),
    max_slice_nums=st.sampled_from([None, 0, 2]),
)
COMMAND = st.one_of(
    INPUT,
    INPUT,
    st.builds(Prepare, system_prompt=st.sampled_from(["x", "fail"])),
    st.builds(Pause, timeout_s=st.sampled_from([None, 5.0, -1.0])),
    st.just(Resume()),
    st.just(Interrupt()),
)


async def play(commands, ending) -> None:
    stage = Stage(FakeDuplexModel(fail_units=frozenset({1})), n_slots=1)
    try:
        client = stage.client()
        n_chunks = 0
        for command in commands:
            if isinstance(command, Input):
                command = Input(
                    n_chunks,
                    command.audio,
                    command.frames,
                    command.force_listen,
                    command.max_slice_nums,
                )
                n_chunks += 1
            client.send(command)
        events = []

        def all_answered() -> bool:
            events.extend(client.rest())
            return len(answers(events)) == n_chunks

        client.send(Resume())
        await eventually(all_answered)
        if ending == "stop":
            client.send(Stop())
        else:
            client.disconnect()
        await client.code()
        events.extend(client.rest())

        assert sorted(answers(events)) == list(range(n_chunks))
        results = [event.seq for event in events if isinstance(event, Result)]
        assert results == sorted(results)
        assert isinstance(events[0], Opened)
        assert isinstance(events[-1], Closed)
        assert any(isinstance(event, Stopped) for event in events) == (ending == "stop")
        assert stage.host.slots.n_free == 1
        assert stage.host.engine.n_programs == 0
    finally:
        await stage.close()


def answers(events) -> list[int]:
    return [
        event.seq
        for event in events
        if isinstance(event, Result) or (isinstance(event, Failure) and event.seq is not None)
    ]


@settings(max_examples=60, deadline=None)
@given(st.lists(COMMAND, max_size=14), st.sampled_from(["stop", "vanish"]))
def test_every_chunk_is_answered_once_whatever_the_client_does(commands, ending):
    asyncio.run(play([Prepare("x"), *commands], ending))
