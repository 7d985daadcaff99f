from __future__ import annotations

import asyncio
import json

import numpy as np
import pytest

from client.chat import (
    ChatClient,
    Closed,
    Delta,
    Done,
    ErrorEvent,
    Prefilled,
    Queued,
    QueueDone,
    film,
    parse_event,
    picture,
    sound,
)
from tests.fakes.g0_server import Scenario, Service
from tests.fakes.turn_sockets import PIECES
from tests.faults.processes import wait_until

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


async def test_an_answer_streams_in_and_the_connection_ends(service: Service) -> None:
    async with ChatClient(service.ws_url) as chat:
        await chat.ask(QUESTION)
        events = [event async for event in chat]

    assert events[0] == Prefilled(12)
    pieces = [event for event in events if isinstance(event, Delta)]
    assert tuple(piece.text for piece in pieces) == PIECES
    assert not any(piece.audio.size for piece in pieces)
    assert events[-2:] == [Done("".join(PIECES), 6, 12, (), "rec_1"), Closed(1000, "")]


async def test_an_answer_that_is_to_be_spoken_comes_with_sound(service: Service) -> None:
    async with ChatClient(service.ws_url) as chat:
        await chat.ask(QUESTION, speaks=True)
        events = [event async for event in chat]

    assert [event.audio.size for event in events if isinstance(event, Delta)] == [7200] * 3


async def test_voice_and_settings_travel_with_the_question(
    service: Service, scenario: Scenario
) -> None:
    async with ChatClient(service.ws_url) as chat:
        await chat.ask(
            QUESTION,
            reference_voice=np.zeros(1, np.float32),
            settings={"generation": {"max_new_tokens": 64}, "tts": {"ref_audio_max_ms": 5000}},
        )
        _ = [event async for event in chat]

    assert scenario.turns.questions == [
        {
            "messages": QUESTION,
            "tts": {"enabled": False, "ref_audio_data": "AAAAAA==", "ref_audio_max_ms": 5000},
            "generation": {"max_new_tokens": 64},
            "queue_events": True,
        }
    ]


async def test_leaving_stops_the_answer(service: Service, scenario: Scenario) -> None:
    scenario.turns.waits_before_piece = 1

    async with ChatClient(service.ws_url) as chat:
        await chat.ask(QUESTION)
        async for event in chat:
            if isinstance(event, Delta):
                break

    await asyncio.to_thread(wait_until, lambda: scenario.turns.n_lost, "the chat is given up")


async def test_leaving_the_queue_gives_the_place_up(service: Service, scenario: Scenario) -> None:
    scenario.turns.chat_queue = [{"type": "queued", "position": 3, "ticket_id": "q_1"}]

    async with ChatClient(service.ws_url) as chat:
        await chat.ask(QUESTION)
        place = await anext(chat)

    assert place == Queued(3, 0.0, 0, "q_1", "")
    await asyncio.to_thread(wait_until, lambda: scenario.turns.n_lost, "the chat is given up")


async def test_a_refusal_is_an_event_with_its_slug(service: Service, scenario: Scenario) -> None:
    scenario.turns.chat_error = "The queue is full"

    async with ChatClient(service.ws_url) as chat:
        await chat.ask(QUESTION)
        events = [event async for event in chat]

    assert events == [ErrorEvent("The queue is full", "queue_full"), Closed(1000, "")]


def test_files_become_items_of_a_message() -> None:
    assert picture(b"jpeg") == {"type": "image", "data": "anBlZw=="}
    assert sound(np.zeros(1, np.float32)) == {"type": "audio", "data": "AAAAAA=="}
    assert film(b"mp4") == {"type": "video", "data": "bXA0"}


@pytest.mark.parametrize(
    ("message", "event"), [({"type": "queue_done"}, QueueDone()), ({"type": "vad_state"}, None)]
)
def test_messages_become_typed_events(message: dict[str, str], event: object) -> None:
    assert parse_event(json.dumps(message)) == event
