"""Chat requests on the real engine, with scripted models (`tests.fakes.cascade`)."""

import math
import re
import weakref

import numpy as np
import pytest

from shared.errors import BadMessage
from shared.protocol import GenerationSettings
from tests.fakes.cascade import WORD_S, Desk, FakeCascade, ops_of
from worker.models.cascade import chat
from worker.models.cascade.answer import DEFAULT_SYSTEM
from worker.models.contract import (
    ChatQuestion,
    Clip,
    Picture,
    Piece,
    Taken,
    TurnMessage,
    Video,
)

PICTURE = Picture(np.zeros((8, 8, 3), np.uint8))
ALPHA, BRAVO, SILENCE = (Clip(np.full(1600, n, np.float32)) for n in (1, 2, 5))


def user(*parts):
    return TurnMessage("user", parts)


def question(*messages, generation=None, **changes):
    generation = generation or GenerationSettings()
    return ChatQuestion(messages or (user("hi"),), generation, **changes)


def ask(model, *messages, **changes):
    """Return the finished task of a request."""
    program = chat.chat(model, chat.new_state(0), question(*messages, **changes))
    return Desk(model).play(program)


def answered(model, *messages, **changes):
    task = ask(model, *messages, **changes)
    assert task.error is None, task.error
    return task.value


def test_text_is_streamed_token_by_token_after_the_prefill_is_told():
    task = ask(FakeCascade(answer_words=3))

    taken, *pieces = task.emitted
    assert taken == Taken(task.value.n_input_tokens)
    assert [piece.text for piece in pieces] == ["w0 ", "w1 ", "w2 "]
    assert not any(piece.audio.size for piece in pieces)
    assert (task.value.text, task.value.n_generated_tokens) == ("w0 w1 w2 ", 3)
    assert not task.value.was_cut


def test_a_spoken_answer_comes_phrase_by_phrase_with_its_sound():
    task = ask(FakeCascade(answer_words=20), speaks=True)

    pieces = [item for item in task.emitted if isinstance(item, Piece)]
    assert [len(piece.text.split()) for piece in pieces] == [8, 12]
    assert [piece.audio.size for piece in pieces] == [8 * WORD_S * 24_000, 12 * WORD_S * 24_000]
    assert "".join(piece.text for piece in pieces) == task.value.text
    assert not task.value.audio.size


def test_without_streaming_the_sound_is_in_the_answer():
    task = ask(FakeCascade(answer_words=20), speaks=True, is_streaming=False)

    assert task.emitted == [Taken(task.value.n_input_tokens)]
    assert task.value.audio.size == 20 * WORD_S * 24_000


def test_the_model_reads_the_whole_history_in_its_order():
    model = FakeCascade(answer_words=1)

    value = answered(
        model,
        TurnMessage("system", ("Be kind.",)),
        user("one"),
        TurnMessage("assistant", ("two",)),
        user("three"),
    )

    assert value.prompt == (
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\none<|im_end|>\n"
        "<|im_start|>assistant\ntwo<|im_end|>\n<|im_start|>user\nthree<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    fed = (1, *map(ord, "Be kind."), 2, *map(ord, "one"), 3, *map(ord, "two"), 2)
    assert model.prompts[0] == (*fed, *map(ord, "three"), 3)
    assert value.n_input_tokens == len(model.prompts[0])


def test_messages_without_a_system_message_get_one():
    value = answered(FakeCascade(answer_words=1))

    assert value.prompt.startswith(f"<|im_start|>system\n{DEFAULT_SYSTEM}<|im_end|>\n")


def test_sound_is_transcribed_and_the_newest_of_the_user_is_the_caption():
    value = answered(
        FakeCascade(answer_words=1),
        user(ALPHA),
        TurnMessage("assistant", ("yes",)),
        user("Answer this:", BRAVO),
    )

    assert value.heard == "bravo"
    assert "user\nalpha<|im_end|>" in value.prompt
    assert "user\nAnswer this:\nbravo<|im_end|>" in value.prompt


def test_sound_without_speech_is_told_to_the_model():
    value = answered(FakeCascade(answer_words=1), user(SILENCE))

    assert "user\nThe recording has no speech in it.<|im_end|>" in value.prompt
    assert value.heard == ""


def test_text_in_a_picture_stands_before_the_question():
    value = answered(FakeCascade(answer_words=1), user("Where to?", PICTURE))

    assert "user\nThe picture shows this text:\nEXIT 42\n\nWhere to?<|im_end|>" in value.prompt
    assert value.ignored == ()


def test_of_a_picture_without_text_the_model_and_the_client_are_told():
    value = answered(FakeCascade(answer_words=1, sign=""), user("What is it?", PICTURE))

    assert "user\nThe picture shows no text.\n\nWhat is it?<|im_end|>" in value.prompt
    assert value.ignored == ("image_content",)


def test_a_page_full_of_text_is_cut():
    value = answered(FakeCascade(answer_words=1, sign="z" * 5000), user(PICTURE))

    assert value.prompt.count("z") == 1200


def film(n_seconds, samples=()):
    """A film of two pictures a second, each one of the value of its second."""
    pictures = [np.full((8, 8, 3), second, np.uint8) for second in range(n_seconds)]
    return Video(tuple((picture, picture) for picture in pictures), np.float32(samples))


@pytest.mark.parametrize(
    ("n_seconds", "seconds"),
    [(0, []), (1, [0]), (5, [2]), (12, [2, 6, 10]), (60, [7, 22, 37, 52])],
)
def test_a_few_pictures_of_a_film_are_read(n_seconds, seconds):
    model = FakeCascade(answer_words=1)

    answered(model, user(film(n_seconds)))

    assert [int(frame[0, 0, 0]) for frame in model.frames] == seconds


def test_of_a_film_sound_and_text_reach_the_model_once():
    value = answered(FakeCascade(answer_words=1), user("?", film(12, [1.0] * 1600)))

    assert "user\nThe video shows this text:\nEXIT 42\n\n?\nalpha<|im_end|>" in value.prompt
    assert value.heard == "alpha"


def test_a_silent_film_without_text_is_told():
    value = answered(FakeCascade(answer_words=1, sign=""), user(film(2)))

    assert "user\nThe video shows no text.<|im_end|>" in value.prompt
    assert value.ignored == ("image_content",)


def test_a_voice_in_the_system_message_is_not_taken_for_words():
    system = TurnMessage("system", ("Speak like this:", ALPHA))
    value = answered(FakeCascade(answer_words=1), system, user("hi"))

    assert "alpha" not in value.prompt
    assert value.ignored == ("reference_voice",)


def test_what_cannot_be_honoured_is_named():
    value = answered(
        FakeCascade(answer_words=1),
        generation=GenerationSettings(length_penalty=1.1, top_k=5, max_input_tokens=2000),
        voice=np.ones(3, np.float32),
        max_slice_nums=1,
        use_image_id=False,
        is_omni=True,
        enable_thinking=True,
        use_tts_template=True,
    )

    assert value.ignored == (
        "enable_thinking",
        "length_penalty",
        "max_slice_nums",
        "omni_mode",
        "ref_audio_data",
        "use_image_id",
        "use_tts_template",
    )


def test_an_answer_is_cut_at_the_tokens_asked_for():
    value = answered(FakeCascade(), generation=GenerationSettings(max_new_tokens=4))

    assert (value.text, value.was_cut, value.n_generated_tokens) == ("w0 w1 w2 w3 ", True, 4)


def test_an_answer_is_cut_where_the_context_ends():
    model = FakeCascade(answer_words=500, context_tokens=100)

    value = answered(model, user("x" * 40), generation=GenerationSettings(max_new_tokens=400))

    assert value.n_input_tokens + value.n_generated_tokens == 100
    assert value.was_cut


def test_a_loop_is_cut():
    model = FakeCascade()
    model.decode = lambda request: 100 + (request.token + 1) % 4

    assert answered(model).n_generated_tokens < 30


@pytest.mark.parametrize(
    ("text", "settings", "words"),
    [
        ("x" * 60, GenerationSettings(), "have 91 tokens, at most 84.* context 100"),
        ("x" * 20, GenerationSettings(max_input_tokens=40), "at most 40.*max_input_tokens is 40"),
        ("x" * 9000, GenerationSettings(), "9000 characters .* shorten it"),
        ("x", GenerationSettings(max_new_tokens=0), "max_new_tokens is 0"),
        ("x", GenerationSettings(repetition_penalty=math.nan), "repetition_penalty is nan"),
    ],
)
def test_what_cannot_be_answered_is_refused_with_numbers(text, settings, words):
    model = FakeCascade(context_tokens=100)

    error = ask(model, user(text), generation=settings).error

    assert isinstance(error, BadMessage)
    assert re.search(words, str(error)), str(error)
    assert not model.kinds


def test_no_messages_are_no_question():
    program = chat.chat(FakeCascade(), chat.new_state(0), ChatQuestion((), GenerationSettings()))

    assert isinstance(Desk(FakeCascade()).play(program).error, BadMessage)


def test_closing_stops_at_once_and_the_next_request_on_the_slot_is_right():
    model = FakeCascade(answer_words=100)
    desk, state = Desk(model), chat.new_state(0)
    task = desk.start(chat.chat(model, state, question(user("a" * 90))))
    desk.until(lambda: len(task.emitted) > 3)

    quiet = desk.engine.cancel_session(0)
    desk.engine.advance()
    n_ops = len(model.kinds)

    assert quiet.done()
    assert not desk.step()
    assert len(model.kinds) == n_ops
    model.answer_words = 2
    value = desk.value(chat.chat(model, chat.new_state(0), question(user("b"))))
    assert value.text == "w0 w1 "
    assert model.prompts[-1][-3:] == (2, ord("b"), 3)


@pytest.mark.parametrize(
    "kind", ["transcribe_step", "read_text", "prefill", "decode", "synthesize"]
)
def test_a_closed_request_runs_no_further_op(kind):
    model = FakeCascade(answer_words=100)
    desk = Desk(model)
    asked = question(user(ALPHA, PICTURE, "x" * 90), speaks=True)
    task = desk.start(chat.chat(model, chat.new_state(0), asked))
    desk.until(lambda: kind in model.kinds)
    n_ops, n_told = len(model.kinds), len(task.emitted)

    quiet = desk.engine.cancel_session(0)
    desk.engine.advance()

    assert quiet.done()
    assert not desk.step()
    assert (len(model.kinds), len(task.emitted)) == (n_ops, n_told)


def test_pictures_are_let_go_when_they_have_been_read():
    """They were held for as long as the answer took: a request may bring 150 MB of them."""
    model = FakeCascade()
    model.read_text = lambda request: "EXIT"
    desk = Desk(model)
    pixels = np.zeros((8, 8, 3), np.uint8)
    gone = weakref.ref(pixels)
    task = desk.start(chat.chat(model, chat.new_state(0), question(user(Picture(pixels)))))
    del pixels

    desk.until(lambda: task.emitted)

    assert not task.done
    assert gone() is None


@pytest.mark.parametrize(
    "kind", ["transcribe_step", "read_text", "prefill", "decode", "synthesize"]
)
def test_a_failing_op_fails_its_request_alone(kind, caplog):
    model = FakeCascade(answer_words=2)
    parts = user("hi", ALPHA, PICTURE)
    model.broken = {kind}

    task = ask(model, parts, speaks=True)
    model.broken = set()

    assert task.error is not None
    assert answered(model, parts).text == "w0 w1 "


def test_every_op_lets_live_units_pass():
    model = FakeCascade(answer_words=12)
    asked = question(user(ALPHA, PICTURE, "x" * 80), speaks=True)

    ops = ops_of(model, chat.chat(model, chat.new_state(0), asked))

    assert {op.kind for op in ops} == set(model.lanes) - {"detect_speech"}
    assert {op.deadline for op in ops} == {math.inf}


def test_the_time_of_the_stages_is_told():
    value = answered(FakeCascade(answer_words=2), user(ALPHA, PICTURE), speaks=True)

    assert value.timings.total_ms >= value.timings.decode_ms
