"""The examples of the documents talk to a gateway: Python, and JavaScript in a browser."""

from __future__ import annotations

import asyncio
import re
import struct
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import async_playwright

from shared.protocol import Ask, ImagePart
from tests.fakes.browser import CHROMIUM, FLAGS
from tests.fakes.scripted_worker import TONE, WORDS, Script, ScriptedWorker, speak

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


async def test_the_full_duplex_example_hears_an_answer(serve, capsys):
    talk = example("protocol.md", "talk")
    async with ScriptedWorker(script=Script(speak)) as worker, serve([worker]) as running:
        question = struct.pack("<4f", *[0.5] * 4) * 4000
        sound = await talk(running.http.replace("http", "ws"), [question, question])

    assert len(worker.sessions[0].chunks) == 2
    assert sound == question * 2
    assert capsys.readouterr().out == "unit 1\nunit 2\n"


def script(document: str) -> str:
    """Return the one example for browsers of a document."""
    (source,) = re.findall(r"^```javascript\n(.*?)^```", (DOCS / document).read_text(), re.S | re.M)
    return source


@pytest.fixture
async def in_browser():
    """Run JavaScript on a page of a gateway; return its value."""
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)

        async def run(http: str, source: str) -> Any:
            page = await browser.new_page()
            await page.goto(f"{http}/health")
            return await page.evaluate(f"async () => {{ {source} }}")

        yield run
        await browser.close()


needs_browser = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium"),
]

MICROPHONE = """
const played = [];
const play = (samples) => played.push(samples.length);
const startMicrophone = (send) => {
  for (let i = 0; i < 4; i++) send(new Float32Array(SIZE).fill(0.5));
};
"""
FIRST_LINE = """
return await new Promise((done) => { console.log = (line) => done([line, played]); });
"""


class TestInABrowser:
    pytestmark = needs_browser

    async def test_chat(self, serve, in_browser):
        async with ScriptedWorker() as worker, serve([worker]) as running:
            assert await in_browser(running.http, script("chat.md") + "return text;") == TEXT

    async def test_half_duplex(self, serve, in_browser):
        source = MICROPHONE.replace("SIZE", "8000") + script("half_duplex.md")
        async with ScriptedWorker() as worker, serve([worker]) as running:
            text, played = await in_browser(running.http, source + FIRST_LINE)

        assert (text, played) == (TEXT, [600 * 4])

    async def test_full_duplex(self, serve, in_browser):
        source = MICROPHONE.replace("SIZE", "16000") + script("protocol.md")
        async with ScriptedWorker(script=Script(speak)) as worker, serve([worker]) as running:
            text, played = await in_browser(running.http, source + FIRST_LINE)

        assert (text, played) == ("unit 1", [16_000])
