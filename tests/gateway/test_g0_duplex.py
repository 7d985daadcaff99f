from __future__ import annotations

import base64
import json
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.dialects.contract import Diagnostic, RefusedChunk
from gateway.dialects.g0_duplex import SETTINGS, G0Duplex
from gateway.tickets import Place
from shared.errors import BadAudio, BadImage, BadMessage, NotJson
from shared.limits import MAX_IMAGES_PER_CHUNK, MAX_PROMPT_CHARS
from shared.protocol import (
    DuplexSettings,
    Input,
    Interrupt,
    Notice,
    Pause,
    Prepare,
    Prepared,
    Result,
    Resume,
    Stop,
    Timings,
)

REFERENCE_FIELDS = {
    "type",
    "is_listen",
    "text",
    "audio_data",
    "end_of_turn",
    "current_time",
    "cost_llm_ms",
    "cost_tts_prep_ms",
    "cost_tts_ms",
    "cost_token2wav_ms",
    "cost_all_ms",
    "n_tokens",
    "n_tts_tokens",
    "server_send_ts",
    "wall_clock_ms",
    "kv_cache_length",
    "vision_slices",
    "vision_tokens",
}


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def parse(kind: str, **fields: object) -> object:
    command = G0Duplex().parse(json.dumps({"type": kind, **fields}))
    if isinstance(command, RefusedChunk):
        raise command.error
    return command


def shown(event: object) -> dict[str, object]:
    (frame,) = G0Duplex().event(event, 12.5, 1700.25)
    return json.loads(frame)


@given(
    audio=st.binary(min_size=4, max_size=400).filter(lambda b: len(b) % 4 == 0),
    frames=st.lists(st.binary(min_size=1, max_size=50), max_size=4),
    force_listen=st.booleans(),
    slices=st.none() | st.integers(1, 9),
)
def test_a_chunk_keeps_its_bytes(audio, frames, force_listen, slices):
    chunk = parse(
        "audio_chunk",
        audio_base64=b64(audio),
        frame_base64_list=[b64(frame) for frame in frames],
        force_listen=force_listen,
        max_slice_nums=slices,
    )

    assert chunk == Input(-1, audio, frames, force_listen, slices)


@given(audio=st.binary(max_size=400))
def test_a_results_audio_keeps_its_bytes(audio):
    message = shown(Result(0, False, 1, audio=audio))

    assert base64.b64decode(message["audio_data"] or "") == audio


def test_a_listen_result_has_every_field_of_the_reference_and_no_other():
    message = shown(Result(0, True, 3))

    assert set(message) == REFERENCE_FIELDS
    assert (message["audio_data"], message["text"], message["current_time"]) == (None, "", 3)


def test_stage_times_map_to_the_references_names():
    timings = Timings(
        prefill_ms=1, decode_ms=2, speech_tokens_ms=4, vocode_ms=8, total_ms=16, vision_ms=32
    )

    message = shown(Result(0, False, 1, timings=timings, n_speech_tokens=25, kv_tokens=90))

    assert message["cost_llm_ms"] == 3
    assert message["cost_tts_prep_ms"] == 0
    assert message["cost_tts_ms"] == 4
    assert message["cost_token2wav_ms"] == 8
    assert message["cost_all_ms"] == 16
    assert message["n_tts_tokens"] == 25
    assert message["kv_cache_length"] == 90
    assert message["wall_clock_ms"] == 12.5
    assert message["server_send_ts"] == 1700.25


def test_our_additions_are_sent_only_when_they_say_something():
    message = shown(Result(0, True, 1, interrupted=True, dropped=True, heard="hello"))

    assert set(message) - REFERENCE_FIELDS == {"interrupted", "dropped", "heard"}


def test_a_dropped_chunk_repeats_the_current_listen_state():
    dialect = G0Duplex()
    dialect.event(Result(0, False, 7, text="x", kv_tokens=300), 0.0, 0.0)

    message = json.loads(dialect.dropped(1.0, 2.0))

    assert set(message) == REFERENCE_FIELDS | {"dropped"}
    assert (message["is_listen"], message["current_time"]) == (True, 7)
    assert message["kv_cache_length"] == 300


def test_prepare_has_the_references_defaults():
    assert parse("prepare") == Prepare("You are a helpful assistant.")


def test_the_speech_voice_defaults_to_the_language_models_voice():
    voice = struct.pack("<2f", 0.1, 0.2)

    one = parse("prepare", ref_audio_base64=b64(voice))
    two = parse("prepare", ref_audio_base64=b64(voice), tts_ref_audio_base64=b64(voice * 2))

    assert (one.reference_voice, one.tts_reference_voice) == (voice, voice)
    assert (two.reference_voice, two.tts_reference_voice) == (voice, voice * 2)


def test_settings_outside_our_knowledge_are_listed_as_ignored():
    dialect = G0Duplex()
    config = {"top_k": 30, "chunk_ms": 500, "sample_rate": 16000, "mood": 1, "listen_top_k": None}

    prepare = dialect.parse(json.dumps({"type": "prepare", "config": config}))
    (prepared,) = dialect.event(Prepared(9, 5, ["top_k"], languages=["en"]), 0.0, 0.0)

    assert prepare.settings == DuplexSettings(top_k=30)
    assert json.loads(prepared) == {
        "type": "prepared",
        "prompt_length": 9,
        "prompt_tokens": 5,
        "ignored": ["chunk_ms", "mood", "top_k"],
        "languages": ["en"],
    }


def test_max_slice_nums_beside_the_config_wins():
    prepare = parse("prepare", max_slice_nums=2, config={"max_slice_nums": 1})

    assert prepare.settings.max_slice_nums == 2


def test_every_setting_of_the_contract_is_checked():
    assert set(SETTINGS) == set(DuplexSettings.__struct_fields__)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("temperature", 2.1),
        ("temperature", "hot"),
        ("temperature", True),
        ("top_k", -1),
        ("top_k", 1.5),
        ("top_p", 1.01),
        ("text_repetition_penalty", 0.99),
        ("length_penalty", 0.05),
        ("listen_top_k", 0),
        ("decode_mode", "beam"),
        ("decode_mode", ["sampling"]),
        ("generate_audio", "yes"),
        ("max_slice_nums", 0),
        ("max_slice_nums", 1000),
    ],
)
def test_a_setting_out_of_bounds_is_named(key, value):
    with pytest.raises(BadMessage, match=key):
        parse("prepare", config={key: value})


@pytest.mark.parametrize("number", ["1e400", "-1e400", "1" + "0" * 400])
def test_a_number_beyond_all_bounds_does_not_end_the_session(number):
    """It is valid JSON, so the framing is intact."""
    for frame in ('{"type": "pause", "timeout": %s}', '{"type": "audio_chunk", "x": [%s]}'):
        with pytest.raises(BadMessage, match="number is too large"):
            G0Duplex().parse(frame % number)


def test_the_last_of_two_equal_keys_counts():
    assert G0Duplex().parse('{"type": "stop", "type": "resume"}') == Resume()


@pytest.mark.parametrize("path", ["/etc/passwd", "../../config.json", "http://169.254.169.254/"])
def test_a_voice_is_never_a_path_of_the_service(path):
    """W11: client-supplied paths were opened on the server."""
    with pytest.raises(BadMessage, match="ref_audio_path"):
        parse("prepare", ref_audio_path=path, ref_audio_base64=b64(bytes(8)))


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({}, BadMessage),
        ({"audio_base64": None}, BadMessage),
        ({"audio_base64": 5}, BadAudio),
        ({"audio_base64": ""}, BadAudio),
        ({"audio_base64": "AAA"}, BadAudio),
        ({"audio_base64": "AA==AAAA"}, BadAudio),
        ({"audio_base64": "AAAA"}, BadAudio),
        ({"audio_base64": "data:audio/wav;base64,AAAA"}, BadAudio),
        ({"audio_base64": b64(bytes(4 * 16_000 * 31))}, BadAudio),
        ({"audio_base64": b64(bytes(4)), "frame_base64_list": "AAAA"}, BadImage),
        ({"audio_base64": b64(bytes(4)), "frame_base64_list": [7]}, BadImage),
        ({"audio_base64": b64(bytes(4)), "frame_base64_list": [""]}, BadImage),
        (
            {
                "audio_base64": b64(bytes(4)),
                "frame_base64_list": ["AAAA"] * (MAX_IMAGES_PER_CHUNK + 1),
            },
            BadImage,
        ),
        ({"audio_base64": b64(bytes(4)), "force_listen": 1}, BadMessage),
        ({"audio_base64": b64(bytes(4)), "max_slice_nums": 99}, BadMessage),
    ],
)
def test_a_chunk_that_cannot_be_used_is_refused_by_kind(fields, error):
    with pytest.raises(error):
        parse("audio_chunk", **fields)


def test_a_prompt_that_is_too_long_is_refused():
    with pytest.raises(BadMessage, match="system_prompt"):
        parse("prepare", system_prompt="x" * (MAX_PROMPT_CHARS + 1))


@pytest.mark.parametrize("timeout", [0, -1, 1e9, "5", True])
def test_a_pause_without_a_sensible_end_is_refused(timeout):
    with pytest.raises(BadMessage, match="timeout"):
        parse("pause", timeout=timeout)


def test_plain_commands_are_recognised():
    commands = [parse(kind) for kind in ("pause", "resume", "interrupt", "stop")]

    assert commands == [Pause(), Resume(), Interrupt(), Stop()]
    assert parse("pause", timeout=5) == Pause(5.0)
    assert parse("client_diagnostic", event="gap") == Diagnostic()


@pytest.mark.parametrize("frame", ["", "hello", "{", '{"a": NaN}', "\0", '{"a": "\ud83d"}'])
def test_text_that_is_no_json_is_told_apart(frame):
    with pytest.raises(NotJson):
        G0Duplex().parse(frame)


@pytest.mark.parametrize("half", [r"\ud83d", r"\ude00", r"\ud83dx"])
def test_half_an_emoji_does_not_end_the_session(half):
    """It is valid JSON, and what browsers and Python send for a text cut in the middle of one."""
    with pytest.raises(BadMessage, match="surrogate"):
        G0Duplex().parse('{"type": "prepare", "system_prompt": "' + half + '"}')


@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"a":', "}")])
def test_deep_json_is_refused_without_a_crash(opening, closing):
    with pytest.raises(BadMessage, match="nested"):
        G0Duplex().parse(opening * 10_000 + "1" + closing * 10_000)


def test_a_long_unknown_type_is_cut_in_the_answer():
    with pytest.raises(BadMessage) as caught:
        parse("x" * 100_000)

    assert len(str(caught.value)) < 100


@given(st.recursive(st.none() | st.booleans() | st.floats() | st.text(), st.lists) | st.binary())
def test_no_input_raises_anything_but_a_typed_error(value):
    text = value.decode("latin-1") if isinstance(value, bytes) else json.dumps({"type": value})
    for frame in (text, json.dumps({"type": "prepare", "config": text, "system_prompt": text})):
        with pytest.raises((BadMessage, NotJson)):
            G0Duplex().parse(frame)


def test_errors_are_strings_with_a_slug():
    assert json.loads(G0Duplex().failure("bad_audio", "no", 0.0)) == {
        "type": "error",
        "error": "no",
        "slug": "bad_audio",
    }


def test_a_session_timeout_has_the_references_own_message():
    message = json.loads(G0Duplex().failure("session_timeout", "Pause timeout (60.0s)", 0.0))

    assert message["type"] == "timeout"
    assert message["reason"] == "Pause timeout (60.0s)"


def test_notices_have_no_message_in_this_dialect():
    assert G0Duplex().event(Notice("dropped", "2 chunks", 2), 0.0, 0.0) == ()


def test_queue_messages_have_the_references_fields():
    place = Place(2, 12.5, 3, is_starting=False)

    queued = json.loads(G0Duplex().queued("q_1", place))
    update = json.loads(G0Duplex().queue_update(place))

    fields = {"position": 2, "estimated_wait_s": 12.5, "queue_length": 3, "state": "waiting"}
    assert queued == {"type": "queued", "ticket_id": "q_1", **fields}
    assert update == {"type": "queue_update", **fields}
    assert json.loads(G0Duplex().queue_done(0.0)) == {"type": "queue_done"}
    assert isinstance(parse("resume"), Resume)
