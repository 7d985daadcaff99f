"""The internal frames: what is written is read back, anything else is a typed error."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared import protocol as p
from shared.errors import BadMessage

COMMANDS = [
    p.Open("s", "duplex", "omni_duplex"),
    p.Prepare("Be kind.", p.DuplexSettings(top_k=3), b"\x00" * 8),
    p.PrepareTurns(
        [p.TextPart("Be kind."), p.AudioPart(b"\x00" * 8)],
        p.VadSettings(threshold=0.8),
        p.GenerationSettings(max_new_tokens=256),
        timeout_s=60.0,
    ),
    p.Ask(
        [
            p.ChatMessage("system", [p.TextPart("Be brief.")]),
            p.ChatMessage("user", [p.ImagePart(b"png"), p.VideoPart(b"mp4", 2)]),
        ],
        p.GenerationSettings(do_sample=False),
        is_streaming=False,
        voice=b"\x00" * 8,
        max_slice_nums=1,
    ),
    p.Input(3, b"\x00" * 16, [b"jpeg"], force_listen=True, max_slice_nums=2),
    p.Pause(2.5),
    p.Resume(),
    p.Interrupt(),
    p.Stop("bye"),
]
EVENTS = [
    p.Opened(1),
    p.Prepared(5, 7, ["length_penalty"], "heart", ["en"]),
    p.Result(0, False, 1, "hi", b"\x00" * 4, True, timings=p.Timings(decode_ms=1.5)),
    p.Speaking(True),
    p.Generating(1500.0),
    p.Delta(2, "hi", b"\x00" * 4),
    p.TurnDone(1, "hi there", "hello", p.Timings(total_ms=9.0), 3, 40),
    p.Prefilled(12),
    p.Answered("hi", 12, 3, b"\x00" * 4, was_cut=True, ignored=["voice"], prompt="user: hello"),
    p.Paused(60.0),
    p.Resumed(),
    p.Interrupted(),
    p.Stopped(),
    p.Notice("dropped", "too fast", 3),
    p.Failure("bad_audio", "odd", None, 4),
    p.Closed("stopped"),
]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda c: type(c).__name__)
def test_a_command_is_read_back(command):
    assert p.decode_command(p.encode(command)) == command


@pytest.mark.parametrize("event", EVENTS, ids=lambda e: type(e).__name__)
def test_an_event_is_read_back(event):
    assert p.decode_event(p.encode(event)) == event


def test_every_kind_of_message_has_an_example_here():
    assert {type(c) for c in COMMANDS} == set(p.Command.__args__)
    assert {type(e) for e in EVENTS} == set(p.Event.__args__)


@given(st.binary(max_size=200))
def test_garbage_is_a_bad_message(frame):
    for decode in (p.decode_command, p.decode_event):
        with pytest.raises(BadMessage):
            decode(frame)


def test_an_event_is_no_command():
    with pytest.raises(BadMessage):
        p.decode_command(p.encode(p.Stopped()))


def test_an_unknown_field_is_refused():
    with pytest.raises(BadMessage, match="unknown field"):
        p.decode_command(msgspec.msgpack.encode({"type": "stop", "sotp": 1}))


def test_a_part_of_an_unknown_kind_is_refused():
    part = {"type": "smell", "data": b"x"}
    message = {"type": "ask", "messages": [{"role": "user", "parts": [part]}]}

    with pytest.raises(BadMessage, match="Invalid value 'smell'"):
        p.decode_command(msgspec.msgpack.encode(message))


def test_settings_know_what_was_said():
    assert p.GenerationSettings(top_k=0).said() == {"top_k"}
    assert p.DuplexSettings(top_k=0, temperature=None).said() == {"top_k"}
