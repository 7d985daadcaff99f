"""A chat request on the fake model: one question, one answer, and every way it ends early."""

from __future__ import annotations

import asyncio
import gc
import io
import logging

import numpy as np
import pytest
from PIL import Image

from shared.audio import samples_to_f32
from shared.errors import EngineFault
from shared.protocol import (
    Answered,
    Ask,
    AudioPart,
    ChatMessage,
    Closed,
    Delta,
    Failure,
    GenerationSettings,
    ImagePart,
    Interrupt,
    Opened,
    Prefilled,
    Prepare,
    Stop,
    Stopped,
    TextPart,
)
from shared.states import SessionState
from tests.fakes.model import FakeDuplexModel
from tests.fakes.patience import PATIENCE_S
from tests.fakes.session import LOUD, Stage, chunk, entered, eventually, gated
from worker.engine.slots import SlotState
from worker.models.contract import Clip, Picture, TurnMessage
from worker.sessions import message_media
from worker.sessions.failures import WorkerStopping
from worker.sessions.host import SessionLimits


def ask(*parts, **fields) -> Ask:
    return Ask(
        [ChatMessage("user", [TextPart(p) if isinstance(p, str) else p for p in parts])], **fields
    )


def png(size=(20, 10)) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", size).save(out, "PNG")
    return out.getvalue()


def sample(stage: Stage, name: str, **labels: str) -> float | None:
    return stage.host.metrics.registry.get_sample_value(f"omni_worker_{name}", labels)


async def answered(client) -> list:
    """All events up to the end of the session."""
    await client.code()
    return list(client.rest())


# ---- the ordinary life


async def test_an_answer_streams_and_its_session_ends_by_itself(stage):
    client = stage.chat()
    client.send(ask("hello"))
    events = await answered(client)

    assert [type(event) for event in events] == [
        Opened, Prefilled, Delta, Delta, Delta, Answered, Closed,
    ]  # fmt: skip
    assert events[1].n_input_tokens == 5
    assert [(delta.index, delta.text, delta.audio) for delta in events[2:5]] == [
        (0, "w0 ", b""), (1, "w1 ", b""), (2, "w2 ", b""),
    ]  # fmt: skip
    end = events[5]
    assert (end.text, end.n_input_tokens, end.n_generated_tokens) == ("w0 w1 w2 ", 5, 3)
    assert (end.audio, end.ignored) == (b"", ["length_penalty"])
    assert end.timings.total_ms > 0
    assert events[-1] == Closed("done")
    assert await client.code() == 1000
    assert stage.host.slots.n_free == 2


async def test_sound_goes_out_with_its_text(stage):
    client = stage.chat()
    client.send(ask("hello", speaks=True))
    await client.until(Prefilled)

    assert len((await client.next(Delta)).audio) == 4 * stage.model.speech_samples


async def test_without_streaming_the_answer_holds_the_sound(stage):
    client = stage.chat()
    client.send(ask("hello", speaks=True, is_streaming=False))
    events = await answered(client)

    assert [type(event) for event in events] == [Opened, Prefilled, Answered, Closed]
    assert len(events[2].audio) == 3 * 4 * stage.model.speech_samples


async def test_the_model_gets_everything_that_was_asked(stage):
    client = stage.chat()
    voice = samples_to_f32(np.full(8, 0.5, np.float32))
    client.send(
        Ask(
            [
                ChatMessage("system", [TextPart("be brief")]),
                ChatMessage("user", [ImagePart(png()), AudioPart(voice), TextPart("what?")]),
            ],
            GenerationSettings(top_k=3),
            speaks=True,
            voice=voice,
            max_slice_nums=2,
            use_image_id=False,
            is_omni=True,
            enable_thinking=True,
            use_tts_template=True,
        )
    )
    await client.code()
    (question,) = stage.model.states[0].questions
    system, user = question.messages
    picture, clip, text = user.parts

    assert system == TurnMessage("system", ("be brief",))
    assert isinstance(picture, Picture)
    assert picture.pixels.shape == (10, 20, 3)
    assert isinstance(clip, Clip)
    assert clip.samples.tolist() == question.voice.tolist() == [0.5] * 8
    assert (user.role, text) == ("user", "what?")
    assert question.generation == GenerationSettings(top_k=3)
    assert (question.max_slice_nums, question.use_image_id) == (2, False)
    assert (question.is_streaming, question.speaks, question.is_omni) == (True, True, True)
    assert (question.enable_thinking, question.use_tts_template) == (True, True)


async def test_answers_are_counted(stage):
    for text in ("hello", "fail"):
        client = stage.chat()
        client.send(ask(text))
        await client.code()

    assert sample(stage, "answers_total", kind="chat") == 1
    assert sample(stage, "answers_total", kind="failed") == 1
    assert sample(stage, "answer_seconds_count") == sample(stage, "first_piece_seconds_count") == 1
    assert sample(stage, "sessions_ended_total", reason="done") == 1
    assert sample(stage, "sessions_ended_total", reason="failed") == 1
    assert stage.host.metrics.n_requests == 1


async def test_a_duplex_session_goes_on_beside_it(make):
    stage = make(model=gated("write"))
    talking, asking = stage.client(), stage.chat()
    await talking.prepared()
    asking.send(ask("hello"))
    await asking.until(Prefilled)
    talking.send(chunk(0, LOUD))
    await entered(stage, "write")
    stage.model.gates["write"].set()

    assert (await talking.next(object)).text == "u0 "
    assert (await asking.until(Answered)).text == "w0 w1 w2 "


# ---- nobody waits any more


@pytest.mark.parametrize("kind", ["read", "write", "speak"])
@pytest.mark.parametrize("ending", ["stop", "vanish", "drain", "timeout", "cancel"])
async def test_an_answer_that_nobody_waits_for_is_not_computed(make, kind, ending):
    """W4: the reference goes on to the last token."""
    limits = SessionLimits(ask_timeout_s=0.05 if ending == "timeout" else 300.0)
    stage = make(model=gated(kind, n_pieces=50), limits=limits, n_slots=1)
    client = stage.chat()
    client.send(ask("hello", speaks=True))
    await entered(stage, kind)
    match ending:
        case "stop":
            client.send(Stop())
        case "vanish":
            client.disconnect()
        case "drain":
            client.session.end("draining", WorkerStopping("The worker is shutting down"))
        case "cancel":
            client.task.cancel()
    await eventually(lambda: client.session.state is SessionState.CLOSING)
    n_batches = len(stage.model.batches)
    # The op that runs cannot be stopped, and until it is over the slot is not clean.
    assert not any(isinstance(event, Closed) for event in client.rest())
    assert stage.host.slots.state(0) is not SlotState.FREE
    stage.model.gates[kind].set()
    await client.session.closed.wait()

    assert len(stage.model.batches) == n_batches
    assert stage.model.states[0].ended
    assert isinstance(client.rest()[-1], Closed)
    assert stage.host.slots.n_free == 1
    assert stage.host.engine.n_programs == 0
    if ending != "cancel":
        assert await client.code() == (1001 if ending == "drain" else 1000)


async def test_a_request_that_takes_too_long_is_told(make):
    stage = make(model=gated("write"), limits=SessionLimits(ask_timeout_s=0.05))
    client = stage.chat()
    client.send(ask("hello"))
    failure = await client.until(Failure)
    stage.model.gates["write"].set()

    assert failure == Failure("session_timeout", "Request timeout (0.1s)", 1000)
    assert await client.next(Closed) == Closed("timeout")


async def test_a_client_that_asks_nothing_is_let_go(make):
    stage = make(limits=SessionLimits(idle_timeout_s=0.05))
    client = stage.chat()
    events = await answered(client)

    assert events[1] == Failure("session_timeout", "Idle timeout (0.1s)", 1000)


async def test_a_stop_is_answered(make):
    stage = make(model=gated("write"))
    client = stage.chat()
    client.send(ask("hello"))
    await client.until(Prefilled)
    client.send(Stop("client_gone"))
    await client.until(Stopped)
    stage.model.gates["write"].set()

    assert await client.next(Closed) == Closed("client_gone")


async def test_a_stop_while_files_are_decoded_ends_the_session(make, monkeypatch):
    stage = make()
    decode = message_media.decode_image
    inside = asyncio.Event()
    loop = asyncio.get_running_loop()

    def slow(data, account, *rest):
        loop.call_soon_threadsafe(inside.set)
        while not account.is_closed:
            pass
        return decode(data, account, *rest)

    monkeypatch.setattr(message_media, "decode_image", slow)
    client = stage.chat()
    client.send(ask(ImagePart(png())))
    await asyncio.wait_for(inside.wait(), PATIENCE_S)
    client.send(Stop())
    events = await answered(client)

    assert [type(event) for event in events] == [Opened, Stopped, Closed]
    assert stage.model.states[0].questions == []


# ---- failures


@pytest.mark.parametrize(
    ("parts", "slug", "words"),
    [
        (["fail"], "model_fault", "chat failed in the model"),
        (["too long"], "bad_message", "9000 tokens, at most 8000"),
        ([ImagePart(b"junk")], "bad_image", "no readable JPEG or PNG or GIF or WEBP"),
        ([AudioPart(b"123")], "bad_audio", "multiple of 4"),
        ([], "bad_message", "a message is empty"),
    ],
)
async def test_a_question_that_fails_ends_its_session(stage, parts, slug, words):
    client = stage.chat()
    client.send(ask(*parts))
    opened, failure, closed = await answered(client)

    assert (failure.slug, failure.close_code) == (slug, 1000)
    assert words in failure.message
    assert closed == Closed("failed")
    assert await client.code() == 1000
    assert stage.host.slots.n_free == 2


@pytest.mark.parametrize(
    ("fields", "slug"),
    [({"voice": b"123"}, "bad_audio"), ({"max_slice_nums": 0}, "bad_message")],
)
async def test_a_setting_that_is_impossible_ends_the_session_too(stage, fields, slug):
    client = stage.chat()
    client.send(ask("hello", **fields))

    assert (await client.until(Failure)).slug == slug
    assert await client.code() == 1000


async def test_what_a_model_says_about_a_fault_is_not_told(stage, caplog):
    client = stage.chat()
    client.send(ask("fail"))
    failure = await client.until(Failure)

    assert "question says fail" not in failure.message
    assert any(r.levelno == logging.ERROR and "chat failed" in r.message for r in caplog.records)


@pytest.mark.parametrize("command", [ask("again"), Prepare("x"), chunk(0), Interrupt()])
async def test_other_commands_are_refused_and_the_answer_goes_on(make, command):
    stage = make(model=gated("write"))
    client = stage.chat()
    client.send(ask("hello"))
    await client.until(Prefilled)
    client.send(command)
    failure = await client.next(Failure)
    stage.model.gates["write"].set()

    assert (failure.slug, failure.close_code) == ("bad_message", None)
    assert (await client.until(Answered)).text == "w0 w1 w2 "


async def test_a_lost_device_ends_it_as_every_session(make):
    stage = make(model=FakeDuplexModel(fault_kinds={"write"}))
    client = stage.chat()
    client.send(ask("hello"))
    failure = await client.until(Failure)

    assert (failure.slug, failure.close_code) == ("engine_fault", 1011)
    assert await client.code() == 1011


async def test_a_device_that_is_lost_before_the_session_knows_of_it_is_no_failed_question(stage):
    """The engine refuses programs at once, the event loop hears of the fault a moment later."""
    stage.host.engine._on_fault = None
    stage.host.engine.fail(EngineFault("the device is gone"))
    client = stage.chat()
    client.send(ask("hello"))

    assert (await client.until(Failure)).close_code == 1011
    assert await client.code() == 1011


@pytest.mark.parametrize("text", ["hello", "fail", "too long"])
async def test_a_request_that_ended_holds_no_pictures(make, caplog, text):
    # Records that are kept keep their tracebacks.
    caplog.set_level(logging.CRITICAL, "worker.sessions.failures")
    stage = make()
    budget = stage.host.media.budget
    gc.disable()
    try:
        client = stage.chat()
        client.send(ask(text, ImagePart(png((100, 100)))))
        await client.code()
        # The fake remembers everything.
        stage.model.states.clear()

        await eventually(lambda: budget.total == 0)
    finally:
        gc.enable()
