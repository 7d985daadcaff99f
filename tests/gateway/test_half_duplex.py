"""`/ws/half_duplex` on real sockets: client <-> gateway <-> scripted worker."""

from __future__ import annotations

import asyncio
import base64
import json
import struct
from contextlib import asynccontextmanager

import pytest

from gateway.routes import sockets
from shared.limits import MAX_INBOX_UNITS
from shared.protocol import Failure, Interrupt, Notice, PrepareTurns, Stop
from tests.fakes.scripted_worker import WORDS, Script, ScriptedWorker

LOUD = base64.b64encode(struct.pack("<4f", *[0.5] * 4) * 2000).decode()
QUIET = base64.b64encode(bytes(32_000)).decode()
PATH = "/ws/half_duplex/hdx_1"


@asynccontextmanager
async def connected(serve, talker):
    """A worker, and a client of its gateway."""
    async with (
        ScriptedWorker() as worker,
        serve([worker]) as running,
        running.dial_path(PATH) as socket,
    ):
        yield worker, talker(socket)


@asynccontextmanager
async def live(serve, talker):
    """The same, and its session is prepared."""
    async with connected(serve, talker) as (worker, client):
        await client.prepare()
        yield worker, client


async def test_a_conversation_of_two_turns_goes_to_a_normal_close(serve, talker):
    async with connected(serve, talker) as (worker, client):
        heard = []

        await client.say("prepare", config={"session": {"timeout_s": 60}})
        await client.chunk(audio_base64=QUIET)
        for _ in range(2):
            await client.chunk(audio_base64=LOUD)
            while not heard or heard[-1]["type"] != "turn_done":
                heard.append(await client.hear())
            turn = heard.pop()
        await client.say("stop")
        last = await client.hear()

        assert [message["type"] for message in heard] == [
            "queue_done",
            "prepared",
            *["vad_state", "vad_state", "generating", "chunk", "chunk", "chunk"] * 2,
        ]
        assert heard[1] == {
            "type": "prepared",
            "session_id": "hdx_1",
            "timeout_s": 60.0,
            "ignored": ["length_penalty"],
            "languages": ["en"],
        }
        assert (turn["turn_index"], turn["text"]) == (2, "".join(WORDS))
        assert last == {"type": "stopped"}
        assert await client.closed() == 1000
        session = worker.sessions[0]
        assert (session.opened.mode, session.opened.request_type) == (
            "half_duplex",
            "half_duplex_audio",
        )
        assert isinstance(session.commands[0], PrepareTurns)
        assert isinstance(session.commands[-1], Stop)


async def test_chunks_get_no_answers_and_are_not_waited_for(serve, talker, until, monkeypatch):
    """Counted as unanswered, they would have been refused after some half an hour."""
    monkeypatch.setattr("gateway.inbox.MAX_UNANSWERED", 3)
    async with live(serve, talker) as (worker, client):
        for _ in range(10):
            await client.chunk(audio_base64=QUIET)
        await client.chunk(audio_base64=LOUD)

        assert (await client.hear())["type"] == "vad_state"
        assert [chunk.seq for chunk in worker.sessions[0].chunks] == list(range(11))


async def test_prepare_and_sound_that_come_in_the_queue_are_replayed(serve, talker):
    """The reference's page prepares as soon as the socket is open."""
    async with (
        ScriptedWorker() as worker,
        serve([worker]) as running,
        running.dial_path("/ws/half_duplex/hdx_a") as a,
        running.dial_path("/ws/half_duplex/hdx_b") as b,
    ):
        first, second = talker(a), talker(b)
        await first.prepare()

        await second.say("prepare")
        await second.chunk(audio_base64=LOUD)
        queued = await second.hear()
        await first.say("stop")
        kinds = [(await second.hear())["type"] for _ in range(3)]

        assert (queued["type"], queued["position"]) == ("queued", 1)
        assert kinds == ["queue_done", "prepared", "vad_state"]


async def test_sound_beyond_the_bound_in_the_queue_is_said_to_be_dropped(serve, talker):
    async with (
        ScriptedWorker() as worker,
        serve([worker]) as running,
        running.dial_path("/ws/half_duplex/hdx_a") as a,
        running.dial_path("/ws/half_duplex/hdx_b") as b,
    ):
        await talker(a).prepare()
        client = talker(b)
        await client.hear_kind("queued")
        await client.say("prepare")

        for _ in range(2 * MAX_INBOX_UNITS + 1):
            await client.chunk(audio_base64=QUIET)
        notice = await client.hear_kind("notice")

        assert (notice["slug"], notice["count"]) == ("input_dropped", 1)


REFUSED = {
    "sound before prepare": ({"type": "audio_chunk", "audio_base64": QUIET}, "not_prepared"),
    "an unknown type": ({"type": "resume"}, "bad_message"),
    "a setting": ({"type": "prepare", "config": {"vad": {"threshold": 7}}}, "bad_message"),
}


@pytest.mark.parametrize(("message", "slug"), REFUSED.values(), ids=REFUSED)
async def test_what_cannot_be_used_gets_a_typed_error_and_the_session_goes_on(
    serve, talker, message, slug
):
    async with connected(serve, talker) as (worker, client):
        await client.hear_kind("queue_done")

        await client.socket.send(json.dumps(message))

        assert (await client.hear())["slug"] == slug
        assert (await client.prepare())["type"] == "prepared"


async def test_bad_sound_after_prepare_costs_nothing_but_itself(serve, talker):
    async with live(serve, talker) as (worker, client):
        await client.chunk(audio_base64="AAA")
        await client.chunk(audio_base64=LOUD)

        assert (await client.hear())["slug"] == "bad_audio"
        assert (await client.hear())["type"] == "vad_state"


async def test_an_interrupt_reaches_the_worker_and_is_confirmed(serve, talker):
    async with live(serve, talker) as (worker, client):
        await client.say("interrupt")

        assert await client.hear() == {"type": "interrupted"}
        assert isinstance(worker.sessions[0].commands[-1], Interrupt)


async def test_the_end_of_the_time_is_told_before_the_close(serve, talker):
    async with live(serve, talker) as (worker, client):
        await worker.sessions[0].send(Failure("session_timeout", "Session timeout (1.0s)", 1000))
        message = await client.hear()

        assert (message["type"], message["reason"]) == ("timeout", "Session timeout (1.0s)")
        assert message["elapsed_s"] >= 0
        assert await client.closed() == 1000


async def test_a_place_that_was_never_prepared_says_how_long_it_was_kept(serve, talker):
    async with connected(serve, talker) as (worker, client):
        await client.hear_kind("queue_done")
        await asyncio.sleep(0.15)
        await worker.sessions[0].send(Failure("session_timeout", "Idle timeout (30.0s)", 1000))

        assert 0.1 <= (await client.hear_kind("timeout"))["elapsed_s"] < 10


async def test_a_turn_that_fails_is_told_and_the_session_goes_on(serve, talker):
    async with live(serve, talker) as (worker, client):
        await worker.sessions[0].send(Failure("model_fault", "This turn failed"))
        await worker.sessions[0].send(Notice("dropped", "some sound", 2))
        await client.chunk(audio_base64=LOUD)

        assert (await client.hear())["slug"] == "model_fault"
        assert (await client.hear())["count"] == 2
        assert (await client.hear())["type"] == "vad_state"


async def test_a_client_that_leaves_stops_its_session(serve, talker, until):
    async with ScriptedWorker() as worker, serve([worker]) as running:
        async with running.dial_path(PATH) as socket:
            await talker(socket).prepare()

        await until(lambda: worker.n_live == 0)
        assert isinstance(worker.sessions[0].commands[-1], Stop)


async def test_a_worker_that_dies_is_told(serve, talker):
    async with live(serve, talker) as (worker, client):
        await worker.die()

        assert (await client.hear_kind("error"))["slug"] == "worker_lost"
        assert await client.closed() == 1011


@pytest.mark.parametrize(
    ("path", "app_id", "name"),
    [
        ("/ws/half_duplex/hdx_1", "half_duplex_audio", "Half-Duplex Audio"),
        ("/ws/duplex/omni_1", "omni", "Omni Full-Duplex"),
        ("/ws/duplex/adx_1", "audio_duplex", "Audio Full-Duplex"),
        ("/ws/chat", "turnbased", "Turn-based Chat"),
    ],
)
async def test_an_app_that_is_switched_off_takes_no_sessions(serve, talker, path, app_id, name):
    async with ScriptedWorker() as worker, serve([worker]) as running:
        apps = running.gateway.apps
        apps.switch(apps.find(app_id), enabled=False)

        async with running.dial_path(path) as socket:
            client = talker(socket)

            assert await client.hear() == {
                "type": "error",
                "error": f"{name} is currently disabled",
                "slug": "app_disabled",
            }
            assert await client.closed() == 1008
        assert worker.n_opens == 0


async def test_the_other_apps_go_on_while_one_is_switched_off(serve, talker):
    async with ScriptedWorker() as worker, serve([worker]) as running:
        apps = running.gateway.apps
        apps.switch(apps.find("omni"), enabled=False)

        async with running.dial("adx_1") as socket:
            assert (await talker(socket).hear())["type"] == "queue_done"


@pytest.mark.parametrize("session_id", ["a%2fb", "x" * 200, "a%0A"])
async def test_an_unsafe_session_id_gets_a_typed_error(serve, talker, session_id):
    async with (
        ScriptedWorker() as worker,
        serve([worker]) as running,
        running.dial_path(f"/ws/half_duplex/{session_id}") as socket,
    ):
        assert (await talker(socket).hear())["slug"] == "bad_session_id"


async def test_answers_are_counted_and_timed_by_mode(serve, talker):
    async with (
        ScriptedWorker(script=Script()) as worker,
        serve([worker]) as running,
        running.dial_path(PATH) as socket,
    ):
        client = talker(socket)
        await client.prepare()
        await client.chunk(audio_base64=LOUD)
        await client.hear_kind("turn_done")
        registry = running.gateway.metrics.registry
        mode = {"mode": "half_duplex"}

        name = "omni_gateway_answer_first_piece_seconds_count"
        assert registry.get_sample_value(name, mode) == 1
        assert registry.get_sample_value("omni_gateway_answers_total", mode) == 1
        assert registry.get_sample_value("omni_gateway_playback_lead_seconds_count") == 1


def test_ids_of_chat_requests_are_the_gateways_own():
    one, two = sockets.chat_opening(), sockets.chat_opening()

    assert one.session_id != two.session_id
    assert sockets.VALID_ID.fullmatch(one.session_id)
