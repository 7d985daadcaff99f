"""Generated clients: whatever one sends, each message gets one answer and nobody else notices."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from websockets.exceptions import ConnectionClosed

from gateway.dialects.contract import Diagnostic
from gateway.dialects.g0_duplex import G0Duplex
from shared.errors import BadMessage, NotJson
from tests.fakes.fuzzed import (
    AUDIO,
    BOUND_S,
    BOUNDED,
    ENDINGS,
    GARBAGE,
    PICTURE,
    TEXT,
    Stage,
    damaged,
    end,
    hear_all,
)
from tests.fakes.gateway import wait_until

pytestmark = pytest.mark.timeout(300)  # hundreds of sessions, beside busy processes too

# ---- what clients say

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
NAMES = st.sampled_from(["type", "audio_base64", "frame_base64_list", "config", "timeout", "\0"])
SAID = st.one_of(VALID.map(json.dumps), damaged(VALID, NAMES))
MESSAGES = st.tuples(
    st.sampled_from([[], ['{"type": "prepare"}'], ['{"type": "prepare"}']]),
    st.lists(SAID, max_size=12),
    st.lists(GARBAGE, max_size=1) | st.just([]),
    st.lists(SAID, max_size=3),
).map(lambda parts: [message for part in parts for message in part])


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


# ---- one example


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


@settings(BOUNDED, max_examples=120)
@given(MESSAGES, ENDINGS)
def test_every_message_gets_one_answer_and_nobody_else_notices(runner, stage, messages, ending):
    runner.run(stage.beside_a_neighbour(play(stage, messages, ending)))
