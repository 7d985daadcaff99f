from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from client.half_duplex import (
    Closed,
    Delta,
    ErrorEvent,
    Generating,
    HalfDuplexClient,
    Interrupted,
    Notice,
    Queued,
    SessionError,
    Speaking,
    Stopped,
    TimedOut,
    TurnDone,
    TurnEvent,
    TurnsPrepared,
    parse_event,
)
from shared.audio import encode_base64, samples_to_f32
from tests.fakes.g0_server import Scenario, Service
from tests.fakes.turn_sockets import PIECES, QUESTION

QUIET = np.zeros(8000, np.float32)
LOUD = np.full(8000, 0.1, np.float32)


def event_of(**message: Any) -> TurnEvent | None:
    return parse_event(json.dumps(message))


async def until(session: HalfDuplexClient, kind: type[object]) -> list[object]:
    events: list[object] = []
    async for event in session:
        events.append(event)
        if isinstance(event, kind):
            return events
    raise AssertionError(f"the session ended without {kind}: {events}")


async def test_a_turn_is_heard_and_answered_with_text_and_sound(service: Service) -> None:
    async with HalfDuplexClient(service.ws_url) as session:
        prepared = await session.prepare()
        for samples in (LOUD, LOUD, QUIET):
            await session.send_audio(samples)
        events = await until(session, TurnDone)
        await session.stop()
        goodbye = [event async for event in session]

    assert prepared == TurnsPrepared(300.0, "rec_1", ())
    assert events[:3] == [Speaking(True), Speaking(False), Generating(1000.0)]
    pieces = [event for event in events if isinstance(event, Delta)]
    assert tuple(piece.text for piece in pieces) == PIECES
    assert all(piece.audio.shape == (7200,) for piece in pieces)
    assert events[-1] == TurnDone(1, "", QUESTION)
    assert goodbye == [Stopped(), Closed(1000, "")]


async def test_prompt_voice_and_settings_travel_in_prepare(
    service: Service, scenario: Scenario
) -> None:
    settings = {"vad": {"threshold": 0.8}, "tts": {"enabled": False}}

    async with HalfDuplexClient(service.ws_url) as session:
        await session.prepare("Be brief.", settings=settings, reference_voice=LOUD)

    (prepare,) = scenario.of_type("prepare")
    assert prepare["system_content"] == [
        {"type": "text", "text": "Be brief."},
        {"type": "audio", "data": encode_base64(samples_to_f32(LOUD))},
    ]
    assert prepare["config"] == settings
    assert scenario.session_ids == [session.session_id]


async def test_an_interruption_ends_the_answer(service: Service, scenario: Scenario) -> None:
    scenario.turns.waits_before_piece = 1

    async with HalfDuplexClient(service.ws_url) as session:
        await session.prepare()
        await session.send_audio(LOUD)
        await session.send_audio(QUIET)
        await until(session, Delta)
        await session.interrupt()
        events = await until(session, TurnDone)

    assert Interrupted() in events


async def test_a_refused_prompt_raises_with_its_slug(service: Service, scenario: Scenario) -> None:
    scenario.turns.prepare_error = "vad.threshold is 7, must be at most 1"

    async with HalfDuplexClient(service.ws_url) as session:
        with pytest.raises(SessionError, match=r"vad\.threshold is 7") as caught:
            await session.prepare(settings={"vad": {"threshold": 7}})

    assert caught.value.slug == "bad_message"


@pytest.mark.parametrize(
    ("message", "event"),
    [
        ({"type": "timeout", "elapsed_s": 3, "reason": "idle"}, TimedOut("idle")),
        ({"type": "error", "error": "no", "slug": "bad_audio"}, ErrorEvent("no", "bad_audio")),
        (
            {"type": "notice", "slug": "input_dropped", "message": "too fast", "count": 2},
            Notice("input_dropped", "too fast", 2),
        ),
        ({"type": "queued", "position": 2, "ticket_id": "q"}, Queued(2, 0.0, 0, "q", "")),
        ({"type": "from_the_future"}, None),
    ],
)
def test_messages_become_typed_events(message: dict[str, Any], event: TurnEvent | None) -> None:
    assert event_of(**message) == event


def test_the_piece_that_ends_an_answer_brings_nothing() -> None:
    last = event_of(type="chunk", text_delta="", audio_data=None, is_final=True)

    assert isinstance(last, Delta)
    assert (last.text, last.audio.size) == ("", 0)


@pytest.mark.parametrize(
    "message", [{"type": "chunk", "audio_data": "AAA"}, {"type": "turn_done", "turn_index": "x"}]
)
def test_a_damaged_message_is_an_error(message: dict[str, Any]) -> None:
    with pytest.raises(SessionError, match="damaged"):
        event_of(**message)
