from __future__ import annotations

import base64
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.dialects.g0_half_duplex import G0HalfDuplex
from shared.errors import BadAudio, BadImage, BadMessage, NotJson, NotPrepared
from shared.limits import MAX_CHUNK_S, MAX_PROMPT_CHARS
from shared.protocol import (
    AudioPart,
    Delta,
    Generating,
    GenerationSettings,
    Input,
    Interrupt,
    Interrupted,
    Notice,
    Prepared,
    PrepareTurns,
    Speaking,
    Stop,
    Stopped,
    TextPart,
    TurnDone,
    VadSettings,
)

PAGE_PREPARE = {
    "type": "prepare",
    "system_content": [
        {"type": "text", "text": "Be brief."},
        {"type": "audio", "data": base64.b64encode(bytes(64)).decode()},
        {"type": "text", "text": "Answer in English."},
    ],
    "config": {
        "vad": {
            "threshold": 0.8,
            "min_speech_duration_ms": 128,
            "min_silence_duration_ms": 800,
            "speech_pad_ms": 30,
        },
        "generation": {"max_new_tokens": 100, "length_penalty": 1.2, "temperature": 0.5},
        "tts": {"enabled": False},
        "session": {"timeout_s": 180},
    },
}
"""What the reference's page says."""


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def parse(kind: str, **fields: object) -> object:
    return G0HalfDuplex("hdx_1").parse(json.dumps({"type": kind, **fields}))


def prepared_dialect() -> G0HalfDuplex:
    dialect = G0HalfDuplex("hdx_1")
    dialect.parse('{"type": "prepare"}')
    return dialect


def shown(dialect: G0HalfDuplex, event: object, sent_at: float = 100.0) -> list[dict[str, object]]:
    return [json.loads(frame) for frame in dialect.event(event, 0.0, sent_at)]


def test_everything_that_the_references_page_prepares_takes_effect():
    prepare = parse(**{"kind": "prepare", **{k: v for k, v in PAGE_PREPARE.items() if k != "type"}})

    assert prepare == PrepareTurns(
        system=[TextPart("Be brief."), AudioPart(bytes(64)), TextPart("Answer in English.")],
        vad=VadSettings(0.8, 128.0, 800.0, 30.0),
        generation=GenerationSettings(max_new_tokens=100, length_penalty=1.2, temperature=0.5),
        speaks=False,
        timeout_s=180.0,
    )


def test_what_is_not_said_is_the_references_default():
    assert parse("prepare") == PrepareTurns(
        system=[],
        vad=VadSettings(0.7, 128.0, 500.0, 30.0),
        generation=GenerationSettings(max_new_tokens=256),
        speaks=True,
        timeout_s=300.0,
    )


@given(
    threshold=st.floats(0.06, 1.0),
    min_speech_ms=st.floats(0, 10_000),
    min_silence_ms=st.floats(0, 10_000),
    speech_pad_ms=st.floats(0, 2000),
    timeout_s=st.floats(1, 3600),
)
def test_settings_in_range_arrive_as_they_were_said(
    threshold, min_speech_ms, min_silence_ms, speech_pad_ms, timeout_s
):
    vad = {
        "threshold": threshold,
        "min_speech_duration_ms": min_speech_ms,
        "min_silence_duration_ms": min_silence_ms,
        "speech_pad_ms": speech_pad_ms,
    }

    prepare = parse("prepare", config={"vad": vad, "session": {"timeout_s": timeout_s}})

    assert prepare.vad == VadSettings(threshold, min_speech_ms, min_silence_ms, speech_pad_ms)
    assert prepare.timeout_s == timeout_s


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("vad", "threshold", 0.05),
        ("vad", "threshold", 1.01),
        ("vad", "threshold", "0.5"),
        ("vad", "min_speech_duration_ms", -1),
        ("vad", "min_silence_duration_ms", 10_001),
        ("vad", "speech_pad_ms", 2001),
        ("generation", "max_new_tokens", 0),
        ("generation", "max_new_tokens", 4097),
        ("generation", "length_penalty", 0.05),
        ("generation", "temperature", 2.1),
        ("tts", "enabled", "yes"),
        ("session", "timeout_s", 0.5),
        ("session", "timeout_s", 3601),
    ],
)
def test_a_setting_out_of_range_is_named(section, key, value):
    with pytest.raises(BadMessage, match=rf"^{section}\.{key} is "):
        parse("prepare", config={section: {key: value}})


@pytest.mark.parametrize(
    "fields",
    [
        {"config": []},
        {"config": {"vad": 5}},
        {"system_content": 7},
        {"system_content": ["text"]},
        {"system_content": [{"type": "image", "data": "AAAA"}]},
        {"system_content": [{"type": "text", "text": 5}]},
        {"system_content": [{"type": "text", "text": "x" * (MAX_PROMPT_CHARS + 1)}]},
        {"system_content": [{"type": "audio", "data": "AAAA"}]},
        {"system_content": [{"type": "audio", "data": b64(bytes(4)), "sample_rate": 8000}]},
        {"system_content": [{"type": "audio", "data": b64(bytes(2_000_000))}] * 2},
    ],
)
def test_a_prepare_that_is_no_prepare_is_refused(fields):
    with pytest.raises(BadMessage):
        parse("prepare", **fields)


def test_sound_of_a_preset_that_was_not_loaded_is_left_out():
    prepare = parse(
        "prepare",
        system_content=[{"type": "audio", "data": None, "path": "x.wav"}, {"type": "text"}],
    )

    assert prepare.system == []


def test_prepared_names_the_session_its_time_and_what_has_no_effect():
    dialect = G0HalfDuplex("hdx_1")
    dialect.parse(
        json.dumps(
            {
                "type": "prepare",
                "system_prompt": "as the documents of the reference say",
                "config": {"vad": {"mood": 1}, "extra": 2, "session": {"timeout_s": 60}},
            }
        )
    )
    dialect.recorded("20260101_120000_hdx_1_abc")

    assert shown(dialect, Prepared(9, 5, ["temperature"], languages=["en"])) == [
        {
            "type": "prepared",
            "session_id": "hdx_1",
            "timeout_s": 60.0,
            "ignored": ["extra", "system_prompt", "temperature", "vad.mood"],
            "languages": ["en"],
            "recording_session_id": "20260101_120000_hdx_1_abc",
        }
    ]


def test_a_session_that_is_not_recorded_names_no_recording():
    assert "recording_session_id" not in shown(prepared_dialect(), Prepared(9, 5))[0]


def test_sound_before_prepare_is_refused_in_the_references_words():
    with pytest.raises(NotPrepared, match="^Not prepared yet$"):
        parse("audio_chunk", audio_base64=b64(bytes(4)))


def test_the_worker_says_it_in_the_same_words():
    message = json.loads(prepared_dialect().failure("not_prepared", "prepare failed", 0.0))

    assert message == {"type": "error", "error": "Not prepared yet", "slug": "not_prepared"}


def test_commands_are_recognised():
    dialect = prepared_dialect()
    chunk = json.dumps({"type": "audio_chunk", "audio_base64": b64(bytes(32_000))})

    assert dialect.parse(chunk) == Input(-1, bytes(32_000))
    assert dialect.parse('{"type": "interrupt"}') == Interrupt()
    assert dialect.parse('{"type": "stop"}') == Stop()


@pytest.mark.parametrize("text", [None, 5, "", "AAA", "AAAA", b64(bytes(64_000 * 31))])
def test_sound_that_is_none_is_refused(text):
    assert MAX_CHUNK_S == 30
    frame = json.dumps({"type": "audio_chunk", "audio_base64": text})
    with pytest.raises(BadAudio if text is not None else BadMessage):
        prepared_dialect().parse(frame)


@pytest.mark.parametrize("kind", ["pause", "resume", "video_frame", "x" * 1000, 5, None])
def test_an_unknown_type_is_refused_in_the_references_words(kind):
    with pytest.raises(BadMessage, match="^Unknown type: ") as caught:
        parse(kind)

    assert len(str(caught.value)) < 100


@settings(max_examples=30)
@given(st.recursive(st.none() | st.booleans() | st.floats() | st.text(), st.lists) | st.binary())
def test_no_input_raises_anything_but_a_typed_error(value):
    text = value.decode("latin-1") if isinstance(value, bytes) else value
    for frame in (
        json.dumps({"type": text}),
        json.dumps({"type": "prepare", "config": text, "system_content": text}),
        json.dumps({"type": "prepare", "config": {"vad": text, "generation": text}}),
        json.dumps({"type": "audio_chunk", "audio_base64": text}),
        text if isinstance(text, str) else "",
    ):
        try:
            G0HalfDuplex("x").parse(frame)
        except (BadMessage, BadImage, NotJson):
            continue


def test_a_turn_is_told_in_the_references_order_and_shapes():
    dialect = prepared_dialect()
    sound = bytes(4 * 24_000)
    events = [
        Speaking(True),
        Speaking(False),
        Generating(1234.56),
        Delta(0, "Hello", sound),
        Delta(1, " world"),
        TurnDone(3, "Hello world", heard="hi"),
    ]

    messages = [message for event in events for message in shown(dialect, event)]

    chunk = {"type": "chunk", "audio_sample_rate": 24_000, "is_final": False}
    assert messages == [
        {"type": "vad_state", "speaking": True},
        {"type": "vad_state", "speaking": False},
        {"type": "generating", "speech_duration_ms": 1234.6},
        {
            **chunk,
            "chunk_index": 0,
            "text_delta": "Hello",
            "audio_data": b64(sound),
            "duration_ms": 1000.0,
        },
        {**chunk, "chunk_index": 1, "text_delta": " world", "audio_data": None, "duration_ms": 0.0},
        {
            **chunk,
            "chunk_index": 2,
            "text_delta": "",
            "audio_data": None,
            "duration_ms": 0.0,
            "is_final": True,
        },
        {"type": "turn_done", "turn_index": 3, "text": "Hello world", "heard": "hi"},
    ]


def test_each_answer_counts_its_chunks_from_0():
    dialect = prepared_dialect()
    for _ in range(2):
        shown(dialect, Generating(1.0))
        (first,) = shown(dialect, Delta(0, "a"))
        shown(dialect, TurnDone(1, "a"))

        assert first["chunk_index"] == 0


def test_a_turn_that_was_not_understood_has_no_caption():
    assert "heard" not in shown(prepared_dialect(), TurnDone(1, ""))[-1]


def test_the_end_of_the_time_says_how_long_it_was():
    dialect = prepared_dialect()
    shown(dialect, Prepared(1, 1), sent_at=100.0)

    message = json.loads(dialect.failure("session_timeout", "Session timeout (60.0s)", 160.04))

    assert message == {
        "type": "timeout",
        "elapsed_s": 60.0,
        "reason": "Session timeout (60.0s)",
        "slug": "session_timeout",
    }


def test_a_timeout_before_prepared_says_how_long_the_place_was_kept():
    """It said 0."""
    dialect = G0HalfDuplex("x")
    dialect.queue_done(130.0)

    message = json.loads(dialect.failure("session_timeout", "idle", 160.04))

    assert message["elapsed_s"] == 30.0


def test_dropped_sound_is_said_and_counted():
    dropped = json.loads(prepared_dialect().dropped(1.0, 2.0))
    (told,) = shown(prepared_dialect(), Notice("dropped", "2 chunks", 2))

    assert (dropped["type"], dropped["slug"], dropped["count"]) == ("notice", "input_dropped", 1)
    assert told == {"type": "notice", "slug": "dropped", "message": "2 chunks", "count": 2}


def test_an_interruption_and_a_stop_are_confirmed():
    dialect = prepared_dialect()

    assert shown(dialect, Interrupted()) == [{"type": "interrupted"}]
    assert shown(dialect, Stopped()) == [{"type": "stopped"}]
