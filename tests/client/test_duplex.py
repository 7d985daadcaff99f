from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from shutil import which

import numpy as np
import pytest

from client.duplex import (
    Closed,
    DuplexClient,
    ErrorEvent,
    Paused,
    Queued,
    QueueUpdate,
    Result,
    Resumed,
    SessionError,
    Stopped,
)
from client.events import parse_event
from scripts.machine import ensure_certificate
from shared.audio import encode_base64, samples_to_f32
from tests.fakes.g0_server import Scenario, Service, serving

QUIET = np.zeros(16_000, np.float32)
LOUD = np.full(16_000, 0.1, np.float32)


async def next_result(session: DuplexClient) -> Result:
    async for event in session:
        if isinstance(event, Result):
            return event
    raise AssertionError("the session ended without a result")


async def test_a_question_is_answered_with_text_and_audio(service: Service) -> None:
    async with DuplexClient(service.ws_url) as session:
        await session.prepare("Be brief.")
        await session.send_audio(LOUD)
        listening = await next_result(session)
        await session.send_audio(QUIET)
        speaking = await next_result(session)

    assert listening.is_listen
    assert listening.audio.size == 0
    assert not speaking.is_listen
    assert speaking.heard == "What is the capital of France?"
    assert speaking.audio.shape == (24_000,)
    assert speaking.audio.dtype == np.float32


async def test_frames_and_switches_travel_with_their_chunk(
    service: Service, scenario: Scenario
) -> None:
    async with DuplexClient(service.ws_url) as session:
        await session.prepare("Look.", settings={"temperature": 0.5}, max_slice_nums=2)
        await session.send_audio(QUIET, frames=[b"jpeg"], force_listen=True, max_slice_nums=1)
        await next_result(session)

    (prepare,) = scenario.of_type("prepare")
    (chunk,) = scenario.of_type("audio_chunk")
    assert prepare["system_prompt"] == "Look."
    assert prepare["config"] == {"temperature": 0.5}
    assert prepare["max_slice_nums"] == 2
    assert chunk["frame_base64_list"] == [encode_base64(b"jpeg")]
    assert chunk["force_listen"] is True
    assert chunk["max_slice_nums"] == 1


async def test_places_in_the_queue_are_reported_while_preparing(
    service: Service, scenario: Scenario
) -> None:
    place = {"position": 2, "estimated_wait_s": 31.5, "queue_length": 2}
    scenario.queue = [
        {"type": "queued", "ticket_id": "q_0123456789ab", "state": "starting", **place},
        {"type": "queue_update", **place, "position": 1},
    ]
    seen: list[Queued | QueueUpdate] = []

    async with DuplexClient(service.ws_url) as session:
        await session.prepare(on_wait=seen.append)

    assert seen == [
        Queued(2, 31.5, 2, "q_0123456789ab", "starting"),
        QueueUpdate(1, 31.5, 2, ""),
    ]


async def test_ignored_settings_are_named(service: Service, scenario: Scenario) -> None:
    scenario.ignored = ["temperature"]

    async with DuplexClient(service.ws_url) as session:
        prepared = await session.prepare()

    assert prepared.ignored == ("temperature",)


async def test_a_refused_session_raises_with_the_servers_slug(
    service: Service, scenario: Scenario
) -> None:
    scenario.refuse_with = "No worker available"

    async with DuplexClient(service.ws_url) as session:
        with pytest.raises(SessionError, match="No worker available") as caught:
            await session.prepare()

    assert caught.value.slug == "no_worker"


async def test_an_error_and_the_close_code_arrive_as_events(
    service: Service, scenario: Scenario
) -> None:
    scenario.close_after_chunks = 1

    async with DuplexClient(service.ws_url) as session:
        await session.prepare()
        await session.send_audio(QUIET)
        events = [event async for event in session]

    assert events[-2:] == [ErrorEvent("worker lost", "worker_lost"), Closed(1011, "worker lost")]


async def test_pause_and_resume_are_confirmed(service: Service) -> None:
    async with DuplexClient(service.ws_url) as session:
        await session.prepare()
        await session.pause(timeout_s=5)
        await session.resume()
        await session.stop()
        events = [event async for event in session]

    assert events == [Paused(60.0), Resumed(), Stopped(), Closed(1000, "")]


async def test_sending_after_the_end_is_a_clear_error(service: Service) -> None:
    async with DuplexClient(service.ws_url) as session:
        await session.prepare()
        await session.stop()
        [event async for event in session]

        with pytest.raises(SessionError, match="closed"):
            await session.send_audio(QUIET)


async def test_the_api_key_is_sent_as_bearer_token(service: Service, scenario: Scenario) -> None:
    async with DuplexClient(service.ws_url, api_key="secret") as session:
        await session.prepare()

    assert scenario.authorization == ["Bearer secret"]


async def test_an_unreachable_server_is_a_clear_error(unused_tcp_port: int) -> None:
    with pytest.raises(SessionError, match="cannot connect"):
        async with DuplexClient(f"ws://127.0.0.1:{unused_tcp_port}"):
            pass


async def test_proxy_settings_of_the_environment_do_not_catch_loopback(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "ws_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")

    async with DuplexClient(service.ws_url) as session:
        await session.prepare()


@pytest.mark.skipif(which("openssl") is None, reason="openssl is not installed")
async def test_a_self_made_certificate_is_trusted_when_its_file_is_given(tmp_path: Path) -> None:
    certificate = ensure_certificate(tmp_path / "certs")

    with serving(Scenario(), certificate) as service:
        url = f"https://127.0.0.1:{service.port}"
        async with DuplexClient(url, ca_file=certificate[0]) as session:
            await session.prepare()
        with pytest.raises(SessionError, match="a self-made one is trusted when its file is given"):
            await DuplexClient(url).__aenter__()


def test_messages_of_unknown_type_are_skipped() -> None:
    assert parse_event('{"type": "from_the_future"}') is None


@pytest.mark.parametrize("frame", ["not json", "[1]", b"\xff\xfe"])
def test_a_message_that_is_no_object_is_an_error(frame: str | bytes) -> None:
    with pytest.raises(SessionError, match="JSON"):
        parse_event(frame)


def test_interrupted_dropped_and_null_fields_are_read() -> None:
    event = parse_event(
        json.dumps(
            {"type": "result", "is_listen": True, "text": None, "audio_data": None}
            | {"interrupted": True, "dropped": True, "current_time": 7}
        )
    )

    assert isinstance(event, Result)
    assert (event.interrupted, event.dropped, event.unit_index) == (True, True, 7)
    assert event.text == ""


@pytest.mark.parametrize(
    "frame",
    ['{"type": "queued", "position": "first"}', '{"type": "result", "current_time": [1]}'],
)
def test_a_field_of_the_wrong_type_is_an_error(frame: str) -> None:
    """It ended the reader without a word: `talk` said that no answer came."""
    with pytest.raises(SessionError, match="damaged"):
        parse_event(frame)


def test_damaged_audio_in_a_result_is_an_error() -> None:
    odd = encode_base64(samples_to_f32(np.zeros(2, np.float32))[:-1])

    with pytest.raises(SessionError, match="damaged audio"):
        parse_event(json.dumps({"type": "result", "is_listen": False, "audio_data": odd}))


async def test_the_stamp_of_an_event_is_that_of_its_arrival_not_of_its_reading(
    service: Service,
) -> None:
    async with DuplexClient(service.ws_url) as session:
        await session.prepare()
        await session.send_audio(QUIET)
        await asyncio.sleep(0.2)
        await next_result(session)
        read_at = time.monotonic()

    assert session.sent_at < session.received_at < read_at - 0.1


def test_sessions_of_the_same_instant_have_ids_of_their_own() -> None:
    ids = {DuplexClient("ws://host").session_id for _ in range(50)}

    assert len(ids) == 50
