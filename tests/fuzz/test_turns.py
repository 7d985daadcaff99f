"""Generated clients of half duplex and chat: typed errors, right close codes, nobody else hurt."""

from __future__ import annotations

import asyncio
import io
import json
from contextlib import suppress
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from websockets.exceptions import ConnectionClosed

from gateway.dialects.g0_chat import read_request
from gateway.dialects.g0_half_duplex import G0HalfDuplex
from gateway.dialects.g0_values import json_object
from shared.errors import BadMessage, NotJson, OmniError, http_statuses
from shared.protocol import Interrupt, Stop
from tests.fakes.fuzzed import (
    AUDIO,
    BOUND_S,
    BOUNDED,
    ENDINGS,
    GARBAGE,
    PICTURE,
    TEXT,
    Stage,
    b64,
    damaged,
    end,
    f32,
    hear_all,
    odd,
)

pytestmark = pytest.mark.timeout(300)  # hundreds of sessions, beside busy processes too

LOUD_TURN = f32(*[0.9] * 16_000, *[0.0] * 16_000)
"""What the scripted worker and the fake model take for a turn."""

NUMBER = st.sampled_from([0, 1, 5, -1, 0.5, 1e9, 10**30, "5", None, True])


INTERNAL = {"internal", "engine_fault", "worker_lost"}
"""What no client may bring about."""


def gif() -> str:
    out = io.BytesIO()
    Image.new("RGB", (8, 8)).save(out, "GIF")
    return b64(out.getvalue())


# ---- messages with pictures and sound

ITEM = st.one_of(
    st.fixed_dictionaries({"type": st.just("text"), "text": TEXT}),
    st.fixed_dictionaries(
        {"type": st.just("image"), "data": PICTURE | st.sampled_from([gif(), "===="])}
    ),
    st.fixed_dictionaries({"type": st.just("audio"), "data": AUDIO}),
    st.fixed_dictionaries(
        {"type": st.just("video"), "data": PICTURE | AUDIO}, optional={"stack_frames": NUMBER}
    ),
)
CONTENT = TEXT | st.lists(ITEM, min_size=1, max_size=3)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant"]), "content": CONTENT}
)
GENERATION = st.dictionaries(
    st.sampled_from(["max_new_tokens", "min_new_tokens", "temperature", "top_k", "do_sample", "x"]),
    NUMBER,
    max_size=1,
)

# ---- half duplex

PREPARE = st.fixed_dictionaries(
    {"type": st.just("prepare")},
    optional={
        "system_content": CONTENT,
        "config": st.fixed_dictionaries(
            {},
            optional={
                "vad": st.dictionaries(
                    st.sampled_from(["threshold", "min_speech_duration_ms", "x"]), NUMBER
                ),
                "generation": GENERATION,
                "tts": st.fixed_dictionaries({"enabled": st.booleans()}),
                "session": st.fixed_dictionaries({"timeout_s": st.just(60)}),
            },
        ),
    },
)
CHUNK = st.fixed_dictionaries({"type": st.just("audio_chunk"), "audio_base64": AUDIO})
TURN = st.just({"type": "audio_chunk", "audio_base64": LOUD_TURN})
WORD = st.fixed_dictionaries({"type": st.sampled_from(["interrupt", "pause", "stopp"])})
VALID = st.one_of(CHUNK, TURN, PREPARE, WORD)
NAMES = st.sampled_from(["type", "audio_base64", "system_content", "config", "\0"])
SAID = st.one_of(VALID.map(json.dumps), odd(VALID).map(json.dumps), damaged(VALID, NAMES))
FIRST = st.sampled_from([[], ['{"type": "prepare"}']])
TALK = st.tuples(FIRST, st.lists(SAID, max_size=8), st.lists(GARBAGE, max_size=1)).map(
    lambda parts: [message for part in parts for message in part]
)


async def converse(stage: Stage, messages: list[str | bytes], ending: str) -> None:
    socket = await stage.running.dial_path("/ws/half_duplex/hdx_fuzz", ping_interval=None)
    heard: list[dict[str, Any]] = []
    hearing = asyncio.create_task(hear_all(socket, heard))
    dialect, refused, n_interrupts, over = G0HalfDuplex("hdx_fuzz"), list[str](), 0, None
    for message in messages:
        try:
            await socket.send(message)
        except ConnectionClosed:
            break
        try:
            if isinstance(message, bytes):
                over = "unexpected_binary", 1003
                break
            command = dialect.parse(message)
        except NotJson as error:
            over = error.slug, error.ws_close
            break
        except BadMessage as error:
            refused.append(error.slug)
            continue
        n_interrupts += isinstance(command, Interrupt)
        if isinstance(command, Stop):
            ending = "stopped already"
            break
    if over is None and ending != "stopped already":
        await end(socket, ending)
    await asyncio.wait_for(hearing, BOUND_S)
    kinds = [said["type"] for said in heard]
    slugs = [said["slug"] for said in heard if said["type"] == "error"]
    assert not INTERNAL & set(slugs), heard
    assert kinds.count("interrupted") <= n_interrupts
    assert kinds.count("turn_done") <= kinds.count("generating")
    if over is not None:
        assert (slugs[-1], socket.close_code) == over
        assert kinds[-1] == "error"
    elif ending.startswith("stop"):
        assert (kinds[-1], socket.close_code) == ("stopped", 1000)
        # What the gateway refuses is told in order; between may be what the worker refuses.
        told = iter(slugs)
        assert all(slug in told for slug in refused), (refused, slugs)
    await socket.close()


@settings(BOUNDED, max_examples=200)
@given(TALK, ENDINGS)
def test_no_half_duplex_client_breaks_anything(runner, stage, messages, ending):
    runner.run(stage.beside_a_neighbour(converse(stage, messages, ending)))


# ---- chat

PLAIN = st.fixed_dictionaries({"messages": st.lists(MESSAGE, min_size=1, max_size=2)})
REQUEST = st.fixed_dictionaries(
    {"messages": st.lists(MESSAGE, min_size=1, max_size=2)},
    optional={
        "generation": GENERATION,
        "tts": st.fixed_dictionaries(
            {"enabled": st.booleans()}, optional={"ref_audio_data": AUDIO, "output_path": TEXT}
        ),
        "image": st.fixed_dictionaries({"max_slice_nums": NUMBER}),
        "streaming": st.booleans(),
        "omni_mode": st.booleans(),
        "return_prompt": st.booleans(),
    },
)
FIELDS = st.sampled_from(["messages", "generation", "tts", "image", "streaming", "\0"])
ASKED = st.one_of(
    PLAIN.map(json.dumps),
    odd(PLAIN).map(json.dumps),
    odd(REQUEST).map(json.dumps),
    damaged(REQUEST, FIELDS),
)


def refusal(body: str | bytes, *, is_streaming: bool) -> OmniError | None:
    """What is wrong with a request, as far as the gateway can see it."""
    try:
        read_request(json_object(body), is_streaming=is_streaming)
    except OmniError as error:
        return error
    return None


async def consult(stage: Stage, first: str | bytes, more: list[str]) -> None:
    socket = await stage.running.dial_path("/ws/chat", ping_interval=None)
    heard: list[dict[str, Any]] = []
    hearing = asyncio.create_task(hear_all(socket, heard))
    error = refusal(first, is_streaming=True) if isinstance(first, str) else None
    is_asked = isinstance(first, str) and error is None
    with suppress(ConnectionClosed):
        for frame in (first, *more) if is_asked else (first,):
            await socket.send(frame)
    await asyncio.wait_for(hearing, BOUND_S)
    kinds = [said["type"] for said in heard]
    if is_asked:
        # Whoever asks twice is told so, before the end of the answer or behind it.
        ends = [said for said in heard if said["type"] in ("done", "error")]
        (last,) = (said for said in ends if "One request" not in said.get("error", ""))
        assert last.get("slug") not in INTERNAL
        assert socket.close_code == 1000
    elif error is None:
        assert (kinds, socket.close_code) == (["error"], 1003)
    else:
        assert [said["slug"] for said in heard] == [error.slug]
        assert socket.close_code == (error.ws_close or 1000)
    await socket.close()


@settings(BOUNDED, max_examples=200)
@given(st.one_of(ASKED, GARBAGE), st.lists(PLAIN.map(json.dumps), max_size=1))
def test_no_chat_client_breaks_anything(runner, stage, first, more):
    runner.run(stage.beside_a_neighbour(consult(stage, first, more)))


async def post(stage: Stage, client: httpx.AsyncClient, body: str | bytes) -> None:
    answer = await client.post(f"{stage.running.http}/api/chat", content=body)
    said = answer.json()
    error = refusal(body, is_streaming=False)
    if error is not None:
        assert (answer.status_code, said["slug"]) == (error.http_status, error.slug)
    elif answer.status_code == 200:
        assert said["success"] is True
    else:
        assert said["slug"] not in INTERNAL
        assert answer.status_code == http_statuses()[said["slug"]]
    assert "None" not in said.get("detail", "")


@settings(BOUNDED, max_examples=200)
@given(st.one_of(ASKED, GARBAGE, st.binary(max_size=9)))
def test_no_chat_request_breaks_anything(runner, stage, body):
    async def example() -> None:
        async with httpx.AsyncClient(trust_env=False, verify=False, timeout=BOUND_S) as client:
            await post(stage, client, body)

    runner.run(stage.beside_a_neighbour(example()))
