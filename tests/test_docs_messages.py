"""The documents of the wire name the fields that the code reads and writes, and no others."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

from gateway.dialects import g0_chat, g0_duplex, g0_half_duplex
from gateway.dialects.g0 import G0
from gateway.dialects.g0_chat import G0Chat
from gateway.dialects.g0_duplex import G0Duplex
from gateway.dialects.g0_half_duplex import G0HalfDuplex
from gateway.dialects.g0_messages import GENERATION
from gateway.tickets import Place
from shared import protocol
from shared.errors import SessionTimeout

DOCS = Path(__file__).parents[1] / "docs"
AUDIO = bytes(8)
PLACE = Place(1, 2.0, 1, is_starting=False)
SERVER_PATHS = {"tts.ref_audio_path", "tts.output_path"}
ELSEWHERE = {"queued", "queue_update", "queue_done", "result"}
"""What the table of another document describes, or the text below it."""
OTHER_WORDS = {"false", "prepare", "interrupt", "turn_done", "input_dropped", "queue_events"}
"""What descriptions of fields speak of."""


def section(document: str, title: str) -> str:
    """Return the text between one heading and the next."""
    text = (DOCS / document).read_text(encoding="utf-8")
    (found,) = re.findall(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", text, re.M | re.S)
    return str(found)


def rows(text: str) -> list[tuple[str, str]]:
    """Return the first two cells of each row that names something."""
    lines = [line.replace(r"\|", "/") for line in text.splitlines() if line.startswith("| `")]
    found = [(cells[1], cells[2]) for cells in (line.split("|") for line in lines)]
    return [(first, second) for first, second in found if first.strip() != "`type`"]


def names(text: str) -> set[str]:
    """Return what is marked as code and can be a field or a path of fields."""
    return set(re.findall(r"`([a-z]\w*(?:\.\w+)?)`", text))


def settings_of(text: str) -> set[str]:
    """Return the paths in the first column; names behind a path are its neighbours."""
    found = set()
    for cell, _ in rows(text):
        inside = ""
        for name in re.findall(r"`([\w.]+)`", cell):
            inside = f"{name.split('.')[0]}." if "." in name else inside
            found.add(name if "." in name else inside + name)
    return found


def paths(sections: Mapping[str, Iterable[str]]) -> set[str]:
    return {f"{name}.{key}" for name, keys in sections.items() for key in keys}


def written(
    dialect: G0Duplex | G0HalfDuplex | G0Chat, *events: protocol.Event
) -> dict[str, set[str]]:
    """Return the fields of every message that the events become, and of those of every dialect."""
    dialect.recorded("recording")
    frames = [frame for event in events for frame in dialect.event(event, 0.0, 0.0)]
    frames += [dialect.failure("model_fault", "", 0.0), dialect.failure(SessionTimeout.slug, "", 0)]
    found: dict[str, set[str]] = {}
    for message in map(json.loads, frames):
        found.setdefault(message.pop("type"), set()).update(message)
    return found


def half_duplex() -> dict[str, set[str]]:
    return written(
        G0HalfDuplex("hdx_1"),
        protocol.Prepared(1, 1),
        protocol.Speaking(is_speaking=True),
        protocol.Generating(1.0),
        protocol.Delta(0, "a", AUDIO),
        protocol.TurnDone(1, "a", "b"),
        protocol.Interrupted(),
        protocol.Notice("input_dropped", "", 1),
        protocol.Stopped(),
    )


def chat() -> dict[str, set[str]]:
    dialect = G0Chat()
    said = {"messages": [{"role": "user", "content": "a"}]}
    dialect.parse(json.dumps({**said, "streaming": False, "return_prompt": True}))
    found = written(
        dialect,
        protocol.Prefilled(1),
        protocol.Delta(0, "a", AUDIO),
        protocol.Answered("a", 1, 1, AUDIO),
    )
    # A question that takes too long ends as every other one that fails.
    assert "timeout" not in found
    return found


def duplex() -> dict[str, set[str]]:
    found = written(
        G0Duplex(),
        protocol.Prepared(1, 1),
        protocol.Paused(1.0),
        protocol.Resumed(),
        protocol.Interrupted(),
        protocol.Stopped(),
    )
    frames = [G0().queued("t", PLACE), G0().queue_update(PLACE), G0().queue_done(0.0)]
    for frame in frames:
        message = json.loads(frame or "")
        found.setdefault(message.pop("type"), set()).update(message)
    return found


@pytest.mark.parametrize(
    ("document", "title", "messages"),
    [
        ("protocol.md", "Server to client", duplex()),
        ("half_duplex.md", "Server to client", half_duplex()),
        ("chat.md", "`WS /ws/chat`", chat()),
    ],
    ids=["duplex", "half_duplex", "chat"],
)
def test_every_message_is_documented_with_its_fields(
    document: str, title: str, messages: dict[str, set[str]]
) -> None:
    missing = set(messages)
    for kinds, cell in ((names(first), second) for first, second in rows(section(document, title))):
        if kinds <= ELSEWHERE - set(messages):
            continue
        missing -= kinds
        fields = {field for kind in kinds for field in messages[kind]}
        assert fields <= names(cell), f"{document} does not name all fields of {kinds}"
        assert names(cell) - kinds - OTHER_WORDS <= fields, f"{kinds} have no such fields"

    assert not missing


def test_every_field_of_a_result_is_documented() -> None:
    result = protocol.Result(0, True, 1, heard="a", interrupted=True, dropped=True)
    (frame,) = G0Duplex().event(result, 0.0, 0.0)

    text = (DOCS / "protocol.md").read_text(encoding="utf-8")

    assert {key for key in json.loads(frame) if f"`{key}`" not in text} == set()


def test_settings_of_a_duplex_session_are_those_that_are_read() -> None:
    table = section("protocol.md", "Client to server").split("key of `config`")[1]

    assert settings_of(table) == set(g0_duplex.SETTINGS)


def test_settings_of_a_half_duplex_session_are_those_that_are_read() -> None:
    table = section("half_duplex.md", "Client to server").split("key of `config`")[1]

    assert settings_of(table) == paths(g0_half_duplex.CONFIG)


def test_fields_of_a_chat_request_are_those_that_are_read() -> None:
    table = section("chat.md", "The request").split("| item |")[0]
    inside = {"generation": GENERATION, "tts": g0_chat.TTS, "image": g0_chat.IMAGE}

    documented = {name for cell, _ in rows(table) for name in names(cell)}

    alone = {*g0_chat.REQUEST} - {*inside}
    assert documented == (alone | paths(inside)) - SERVER_PATHS


def test_fields_of_a_whole_chat_answer_are_those_that_are_written() -> None:
    answer = protocol.Answered("a", 1, 1)
    course = g0_chat.Course("recording", 1.0, 1.0, 1.0)
    body = json.loads(g0_chat.response(answer, course, (), returns_prompt=True))

    prose = section("chat.md", "`POST /api/chat`").split("A client that closes")[0]

    assert names(prose) == {*body, *body["token_stats"]}
