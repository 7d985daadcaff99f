"""The Python examples of the documents talk to a gateway."""

from __future__ import annotations

import asyncio
import re
import struct
from pathlib import Path
from typing import Any

import pytest

from shared.protocol import Ask, ImagePart
from tests.fakes.scripted_worker import TONE, WORDS, ScriptedWorker

DOCS = Path(__file__).parents[2] / "docs"
TEXT = "".join(WORDS)


def example(document: str, function: str) -> Any:
    """Return a function that an example defines."""
    text = (DOCS / document).read_text()
    (source,) = [
        block
        for block in re.findall(r"^```python\n(.*?)^```", text, re.S | re.M)
        if f"def {function}(" in block
    ]
    names: dict[str, Any] = {}
    exec(compile(source, document, "exec"), names)
    return names[function]


async def test_the_half_duplex_example_hears_an_answer(serve, capsys):
    ask_aloud = example("half_duplex.md", "ask_aloud")
    async with ScriptedWorker() as worker, serve([worker]) as running:
        question = struct.pack("<4f", *[0.5] * 4) * 2000
        answer = await ask_aloud(running.http.replace("http", "ws"), question)

    assert answer == TEXT
    assert "0.1 s of speech" in capsys.readouterr().out


async def test_the_streaming_chat_example_gets_text_and_speech(serve, capsys):
    ask = example("chat.md", "ask")
    async with ScriptedWorker() as worker, serve([worker]) as running:
        text, sound = await ask(running.http.replace("http", "ws"), "What is the capital?")

    assert (text, sound) == (TEXT, TONE * 2)
    assert capsys.readouterr().out == TEXT


async def test_the_http_chat_example_asks_about_a_picture(serve):
    describe = example("chat.md", "describe")
    async with ScriptedWorker() as worker, serve([worker]) as running:
        answer = await asyncio.to_thread(describe, running.http, b"a picture")

    assert answer == TEXT
    (asked,) = worker.sessions[0].commands
    assert isinstance(asked, Ask)
    assert asked.messages[0].parts[0] == ImagePart(b"a picture")


@pytest.mark.parametrize("document", ["half_duplex.md", "chat.md"])
def test_every_page_has_an_example_for_browsers(document):
    assert "```javascript" in (DOCS / document).read_text()
