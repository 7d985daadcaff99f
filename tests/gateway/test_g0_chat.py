from __future__ import annotations

import base64
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.dialects.g0_chat import Course, G0Chat, read_request, response
from gateway.dialects.g0_messages import messages
from gateway.tickets import Place
from shared.errors import BadAudio, BadImage, BadMessage, NotJson
from shared.limits import MAX_CHAT_CHARS, MAX_CHAT_PARTS
from shared.protocol import (
    Answered,
    Ask,
    AudioPart,
    ChatMessage,
    Delta,
    GenerationSettings,
    ImagePart,
    Notice,
    Prefilled,
    TextPart,
    VideoPart,
)

HELLO = [{"role": "user", "content": "Hello"}]
ASKED = [ChatMessage("user", [TextPart("Hello")])]
PLACE = Place(1, 2.0, 1, is_starting=False)


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def read(**fields: object) -> Ask:
    return read_request({"messages": HELLO, **fields}, is_streaming=True).ask


def asked(**fields: object) -> G0Chat:
    dialect = G0Chat()
    dialect.parse(json.dumps({"messages": HELLO, **fields}))
    return dialect


def shown(dialect: G0Chat, event: object) -> dict[str, object]:
    (frame,) = dialect.event(event, 0.0, 0.0)
    return json.loads(frame)


def user(*items: object) -> list[object]:
    return [{"role": "user", "content": list(items)}]


# ---- what is asked


def test_a_request_of_text_alone_has_the_references_defaults():
    assert read() == Ask(ASKED, GenerationSettings(max_new_tokens=256))


def test_the_same_request_over_http_may_be_answered_at_twice_the_length():
    ask = read_request({"messages": HELLO, "streaming": True}, is_streaming=False).ask

    assert ask == Ask(ASKED, GenerationSettings(max_new_tokens=512), is_streaming=False)


def test_everything_that_can_be_said_arrives():
    ask = read(
        streaming=False,
        generation={
            "max_new_tokens": 4096,
            "min_new_tokens": 3,
            "do_sample": True,
            "temperature": 0.1,
            "top_p": 0.2,
            "top_k": 4,
            "repetition_penalty": 1.5,
            "length_penalty": 1.6,
            "max_inp_length": 7,
        },
        tts={"enabled": True, "ref_audio_data": b64(bytes(80_000)), "ref_audio_max_ms": 1000},
        image={"max_slice_nums": 2, "use_image_id": False},
        omni_mode=True,
        enable_thinking=True,
        use_tts_template=True,
    )

    assert ask == Ask(
        messages=ASKED,
        generation=GenerationSettings(
            max_new_tokens=4096,
            min_new_tokens=3,
            do_sample=True,
            temperature=0.1,
            top_p=0.2,
            top_k=4,
            repetition_penalty=1.5,
            length_penalty=1.6,
            max_input_tokens=7,
        ),
        is_streaming=False,
        speaks=True,
        voice=bytes(64_000),
        max_slice_nums=2,
        use_image_id=False,
        is_omni=True,
        enable_thinking=True,
        use_tts_template=True,
    )


def test_settings_that_are_null_are_not_said():
    ask = read(generation={"top_k": None}, tts=None, image={"max_slice_nums": None}, streaming=None)

    assert ask == read()


@given(
    image=st.binary(min_size=1, max_size=60),
    sound=st.binary(min_size=4, max_size=60).map(lambda b: b[: len(b) // 4 * 4]),
    video=st.binary(min_size=1, max_size=60),
)
def test_media_keep_their_bytes(image, sound, video):
    (message,) = messages(
        user(
            {"type": "image", "data": b64(image)},
            {"type": "audio", "data": b64(sound), "sample_rate": 16000},
            {"type": "video", "data": b64(video), "stack_frames": 3},
            {"type": "video", "data": b64(video)},
        )
    )

    assert message.parts == [
        ImagePart(image),
        AudioPart(sound),
        VideoPart(video, 3),
        VideoPart(video, 1),
    ]


def test_what_brings_nothing_is_left_out():
    found = messages(
        [
            {"role": "system", "content": [{"type": "audio", "data": None}]},
            {"role": "assistant", "content": ""},
            {"role": "user"},
            {"role": "user", "content": [{"type": "image", "data": ""}, {"type": "text"}]},
            *HELLO,
        ]
    )

    assert found == ASKED


@pytest.mark.parametrize(
    ("value", "error"),
    [
        (None, BadMessage),
        ([], BadMessage),
        ("Hello", BadMessage),
        ([5], BadMessage),
        ([{"role": "user", "content": ""}], BadMessage),
        ([{"role": "robot", "content": "Hello"}], BadMessage),
        ([{"role": ["user"], "content": "Hello"}], BadMessage),
        ([{"role": "user", "content": 5}], BadMessage),
        (user(5), BadMessage),
        (user({"text": "Hello"}), BadMessage),
        (user({"type": "file", "data": "AAAA"}), BadMessage),
        (user({"type": "text", "text": 5}), BadMessage),
        (user({"type": "image", "data": 5}), BadImage),
        (user({"type": "image", "data": "data:image/png;base64,AAAA"}), BadImage),
        (user({"type": "video", "data": "*"}), BadImage),
        (user({"type": "video", "data": "AAAA", "stack_frames": 0}), BadMessage),
        (user({"type": "video", "data": "AAAA", "stack_frames": 1000}), BadMessage),
        (user({"type": "audio", "data": "AAA"}), BadAudio),
        (user({"type": "audio", "data": "AAAA"}), BadAudio),
        (user({"type": "audio", "data": b64(bytes(4)), "sample_rate": 48000}), BadMessage),
        (user({"type": "audio", "data": b64(bytes(64_000 * 301))}), BadAudio),
        (user({"type": "text", "text": "x" * (MAX_CHAT_CHARS + 1)}), BadMessage),
        (user(*[{"type": "text", "text": "x"}] * (MAX_CHAT_PARTS + 1)), BadMessage),
        (HELLO * (MAX_CHAT_PARTS + 1), BadMessage),
        (user({"type": "text", "text": "x"}) * (MAX_CHAT_PARTS // 2 + 1), BadMessage),
    ],
)
def test_messages_that_cannot_be_asked_are_refused_by_kind(value, error):
    with pytest.raises(BadMessage) as caught:
        messages(value)

    assert type(caught.value) is error
    assert len(str(caught.value)) < 200


def test_a_message_that_is_a_plain_text_counts_once():
    assert len(messages(HELLO * MAX_CHAT_PARTS)) == MAX_CHAT_PARTS


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("generation", "max_new_tokens", 0),
        ("generation", "max_new_tokens", 4097),
        ("generation", "do_sample", 1),
        ("generation", "temperature", 2.5),
        ("generation", "top_p", -0.1),
        ("generation", "length_penalty", 6),
        ("generation", "repetition_penalty", 0.5),
        ("generation", "min_new_tokens", 300),
        ("image", "max_slice_nums", 17),
        ("image", "use_image_id", "no"),
        ("tts", "enabled", 1),
        ("tts", "ref_audio_max_ms", 10),
        ("tts", "ref_audio_data", "AAA"),
    ],
)
def test_a_setting_out_of_range_is_named(section, key, value):
    with pytest.raises(BadMessage, match=rf"^{section}\.{key} is "):
        read(**{section: {key: value}})


@pytest.mark.parametrize("key", ["ref_audio_path", "output_path"])
def test_a_client_names_no_file_of_the_service(key):
    """W11: the first was read and the second written, wherever it was."""
    with pytest.raises(BadMessage, match=key):
        read(tts={"enabled": True, key: "/etc/passwd"})


@pytest.mark.parametrize("flag", ["omni_mode", "enable_thinking", "streaming", "queue_events"])
def test_a_flag_is_true_or_false(flag):
    with pytest.raises(BadMessage, match=flag):
        read(**{flag: "yes"})


@pytest.mark.parametrize("frame", ["", "hello", '{"messages": NaN}'])
def test_a_frame_that_is_no_json_is_told_apart(frame):
    with pytest.raises(NotJson):
        G0Chat().parse(frame)


def test_a_second_request_on_a_connection_is_refused():
    with pytest.raises(BadMessage, match="One request per connection"):
        asked().parse(json.dumps({"messages": HELLO}))


def test_a_request_that_was_refused_does_not_count():
    dialect = G0Chat()
    with pytest.raises(BadMessage):
        dialect.parse("{}")

    assert isinstance(dialect.parse(json.dumps({"messages": HELLO})), Ask)


JSON = st.recursive(st.none() | st.booleans() | st.floats() | st.text(), st.lists)


@settings(max_examples=30)
@given(st.dictionaries(st.sampled_from(["messages", "tts", "generation", "image"]), JSON))
def test_no_input_raises_anything_but_a_typed_error(fields):
    for body in (fields, {"messages": HELLO, **fields}):
        try:
            read_request(body, is_streaming=False)
        except (BadMessage, NotJson):
            continue


# ---- what is answered


def test_the_answer_is_told_in_the_references_shapes():
    dialect = asked()

    assert shown(dialect, Prefilled(12)) == {"type": "prefill_done", "input_tokens": 12}
    assert shown(dialect, Delta(0, "Hi", b"1234")) == {
        "type": "chunk",
        "text_delta": "Hi",
        "audio_data": b64(b"1234"),
    }
    assert shown(dialect, Delta(1, "!")) == {"type": "chunk", "text_delta": "!"}
    assert shown(dialect, Delta(2, "", b"1234")) == {"type": "chunk", "audio_data": b64(b"1234")}
    assert shown(dialect, Answered("Hi!", 12, 3)) == {
        "type": "done",
        "text": "Hi!",
        "generated_tokens": 3,
        "input_tokens": 12,
        "ignored": [],
    }
    assert dialect.event(Notice("x", "y"), 0.0, 0.0) == ()


def test_a_whole_answer_brings_its_sound_or_null():
    assert shown(asked(streaming=False), Answered("Hi", 1, 1, b"1234"))["audio_data"] == b64(
        b"1234"
    )
    assert shown(asked(streaming=False), Answered("Hi", 1, 1))["audio_data"] is None


def test_done_names_the_recording_and_what_had_no_effect():
    dialect = asked(mood=1, tts={"mode": "omni"}, generation={"beams": 3})
    dialect.recorded("rec_1")

    message = shown(dialect, Answered("Hi", 1, 1, ignored=["enable_thinking"]))

    assert message["recording_session_id"] == "rec_1"
    assert message["ignored"] == ["enable_thinking", "generation.beams", "mood", "tts.mode"]


def test_the_prompt_is_shown_to_whoever_asks_for_it():
    answered = Answered("Hi", 1, 1, prompt="user: Hello")

    assert shown(asked(return_prompt=True), answered)["prompt"] == "user: Hello"
    assert "prompt" not in shown(asked(), answered)


def test_the_queue_is_told_only_to_clients_that_know_its_messages():
    quiet, curious = asked(), asked(queue_events=True)

    told = (quiet.queued("q", PLACE), quiet.queue_update(PLACE), quiet.queue_done(0.0))
    assert told == (None,) * 3
    assert json.loads(curious.queued("q", PLACE))["type"] == "queued"
    assert json.loads(curious.queue_update(PLACE))["type"] == "queue_update"
    assert json.loads(curious.queue_done(0.0)) == {"type": "queue_done"}


def test_the_body_of_an_answer_has_every_field_of_the_reference():
    answered = Answered("Hi", 12, 3, b"1234", prompt="p", ignored=["length_penalty"])
    course = Course("rec_1", 120.04, 1500.4, 2.5)

    body = json.loads(response(answered, course, ("mood",), returns_prompt=False))

    assert body == {
        "success": True,
        "text": "Hi",
        "audio_path": None,
        "audio_data": b64(b"1234"),
        "audio_sample_rate": 24_000,
        "tokens_generated": 3,
        "duration_ms": 120.0,
        "prompt": None,
        "token_stats": {
            "cached_tokens": 0,
            "input_tokens": 12,
            "generated_tokens": 3,
            "total_tokens": 15,
        },
        "recording_session_id": "rec_1",
        "error": None,
        "ignored": ["length_penalty", "mood"],
        "queue_wait_ms": 1500,
        "estimated_queue_wait_s": 2.5,
    }
    assert json.loads(response(answered, course, (), returns_prompt=True))["prompt"] == "p"
