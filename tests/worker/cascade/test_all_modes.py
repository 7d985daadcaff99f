"""Duplex, turns and chat on one real model (mark `weights`), and on one scripted one."""

import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageFont

from shared.protocol import GenerationSettings
from tests.fakes.cascade import Desk, FakeCascade
from worker.engine.engine import Engine
from worker.models.cascade import chat, conversation
from worker.models.contract import ChatQuestion, Picture, TurnMessage, TurnPrompt, Unit

UNSAID = GenerationSettings()


def question(*parts, generation=UNSAID, **changes):
    return ChatQuestion((TurnMessage("user", parts),), generation, **changes)


def sign(text):
    image = Image.new("RGB", (480, 160), "white")
    ImageDraw.Draw(image).text((20, 50), text, "black", ImageFont.load_default(48))
    return Picture(np.asarray(image))


def test_a_live_unit_passes_a_chat_request_that_waits():
    model = FakeCascade(answer_words=200)
    desk = Desk(model)
    desk.start(chat.chat(model, chat.new_state(0), question("hi", speaks=True)))
    desk.until(lambda: "synthesize" in model.kinds)
    live = conversation.new_state(model, 1)
    live.clock = desk.engine.clock
    audio = np.repeat(np.float32([0, 1, 0]), [2, 10, 20]).repeat(512)
    unit = Unit(0, audio, arrived_at=100.0, deadline=101.0)

    results = []
    n_before = len(model.kinds)
    desk.engine.spawn(1, conversation.unit(model, live, unit), results.append)
    desk.until(lambda: results)

    assert results[0].audio.size
    # Detection, transcription, the question, a phrase of 8 words: a step of chat may be batched
    # with, or run beside, each of these, and no more.
    live_ops = len(live.answer.tokens) + 5
    assert len(model.kinds) - n_before <= 2 * live_ops


@pytest.mark.weights
def test_a_spoken_question_is_answered_as_a_turn_with_sound(cascade, clip):
    desk, state = Desk(cascade), cascade.turn_state(0)
    info = desk.value(cascade.prepare_turns(state, TurnPrompt((), UNSAID)))
    samples = clip("capital_france")
    found = desk.value(cascade.detect_speech(state, samples))

    task = desk.play(cascade.turn(state, samples))

    assert task.error is None
    assert info.prompt_tokens > 10
    assert found.max() > 0.9
    assert "capital of France" in task.value.heard
    assert "Paris" in task.value.text
    assert task.value.text == "".join(piece.text for piece in task.emitted)
    assert sum(piece.audio.size for piece in task.emitted) > 24_000


@pytest.mark.weights
def test_chat_reads_the_text_in_a_picture(cascade):
    desk = Desk(cascade)
    asked = question("What number is on the sign?", sign("ROOM 314"))

    value = desk.value(cascade.chat(cascade.chat_state(1), asked))

    assert "ROOM 314" in value.prompt
    assert "314" in value.text


@pytest.mark.weights
def test_chat_that_was_closed_leaves_a_slot_on_which_the_next_is_right(cascade):
    """And beside another session it says what it says alone."""
    asked = question("What is the capital of France?")
    alone = Desk(cascade, slot=2).value(cascade.chat(cascade.chat_state(2), asked))
    engine = Engine(cascade)
    first = []
    closed = question("Tell me a long story.")
    engine.spawn(0, cascade.chat(cascade.chat_state(0), closed), first.append)
    while len(first) < 4:
        engine.step("language")
    quiet = engine.cancel_session(0)
    engine.advance()
    assert quiet.done()
    assert not any(engine.step(lane) for lane in engine.lanes)
    cascade.poison_slot(0)

    tasks = [engine.spawn(slot, cascade.chat(cascade.chat_state(slot), asked)) for slot in (0, 1)]
    while engine.step("language"):
        pass

    assert "Paris" in alone.text
    assert [task.value.text for task in tasks] == [alone.text] * 2


@pytest.mark.weights
def test_an_answer_of_a_least_length_does_not_end_before(cascade):
    def n_tokens(settings):
        speck = Picture(np.zeros((4, 4, 3), np.uint8))
        asked = question("What is in the picture?", speck, generation=settings)
        return Desk(cascade).value(cascade.chat(cascade.chat_state(0), asked)).n_generated_tokens

    assert n_tokens(GenerationSettings(max_new_tokens=14)) < 10
    assert n_tokens(GenerationSettings(max_new_tokens=14, min_new_tokens=12)) >= 12
