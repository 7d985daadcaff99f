"""The chat page: questions with attachments, streamed and spoken answers."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.fakes.browser import PHONE, Visit
from tests.fakes.g0_server import Scenario
from tests.fakes.page_routes import PRESET_VOICE

OpenPage = Callable[..., AbstractContextManager[Visit]]

ASSETS = Path(__file__).parents[2] / "assets"
ANSWER = "The capital of France is Paris."


@pytest.fixture(scope="module")
def pause_s() -> float:
    """Whenever a recording begins, somebody speaks."""
    return 0.0


def picture() -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (8, 8), "red").save(file, "PNG")
    return file.getvalue()


def upload(name: str, mime: str, data: bytes) -> Any:
    return {"name": name, "mimeType": mime, "buffer": data}


def ask(opened: Visit, text: str) -> None:
    opened.page.fill("#question", text)
    opened.page.press("#question", "Enter")


def test_two_questions_make_one_conversation(open_page: OpenPage, scenario: Scenario) -> None:
    with open_page("/turnbased?lang=zh", PHONE) as opened:
        page = opened.page
        ask(opened, "What is the capital of France?")
        opened.wait_for_state("idle")
        ask(opened, "And of Spain?")
        opened.wait_until(lambda: len(scenario.turns.questions) == 2)
        opened.wait_for_state("idle")

        assert page.locator(".bubble.assistant p").all_inner_texts() == [ANSWER, ANSWER]
        assert page.get_attribute("#recording-link", "href").endswith("/s/rec_1")
        assert opened.barriers() == []
        assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
        page.click("#new-chat")
        assert page.is_visible("#thread .empty")
        ask(opened, "Anew.")
        opened.wait_until(lambda: len(scenario.turns.questions) == 3)
        assert page.locator(".bubble.you").count() == 1
        assert opened.complaints == []
    first, second, anew = (question["messages"] for question in scenario.turns.questions)
    asked = {
        "role": "user",
        "content": [{"type": "text", "text": "What is the capital of France?"}],
    }
    answered = {"role": "assistant", "content": [{"type": "text", "text": ANSWER}]}
    assert first == [asked]
    assert second == [
        asked,
        answered,
        {"role": "user", "content": [{"type": "text", "text": "And of Spain?"}]},
    ]
    assert anew == [{"role": "user", "content": [{"type": "text", "text": "Anew."}]}]
    assert "tts" not in scenario.turns.questions[0]


def test_pictures_sound_and_films_go_along(open_page: OpenPage, scenario: Scenario) -> None:
    sound = ASSETS / "capital_france.wav"
    film = (ASSETS.parents[1] / "assets" / "warmup.mp4").read_bytes()

    with open_page("/turnbased") as opened:
        page = opened.page
        files = [
            upload("red.png", "image/png", picture()),
            upload("question.wav", "audio/wav", sound.read_bytes()),
            upload("clip.mp4", "video/mp4", film),
            upload("notes.txt", "text/plain", b"no picture"),
        ]
        page.set_input_files("#files", files)
        page.wait_for_function("document.getElementById('attachments').children.length === 3")
        refused = page.inner_text("#problem")
        barriers = opened.barriers()
        page.press("#question", "Enter")
        opened.wait_until(lambda: bool(scenario.turns.questions))

        assert barriers == []
        assert refused == "notes.txt is neither a picture nor sound nor a film."
        assert page.locator(".bubble.you :is(img, audio, video)").count() == 3
        assert page.is_hidden("#attachments")
    (question,) = scenario.turns.questions
    image, audio, video = question["messages"][0]["content"]
    assert base64.b64decode(image["data"]) == picture()
    assert base64.b64decode(video["data"]) == film
    samples = np.frombuffer(base64.b64decode(audio["data"]), "<f4")
    assert abs(samples.size - sound.stat().st_size // 2) < 100
    assert question["omni_mode"] is True
    assert question["image"] == {"max_slice_nums": 1}


FILL = """async () => {
    const { Attachments, TooLarge } = await import("/static/attachments.js");
    const revoked = [];
    URL.revokeObjectURL = (url) => revoked.push(url);
    const half = { kind: "video", data: { length: 70 * 1024 * 1024 } };
    const attachments = new Attachments(() => {});
    const fits = (url) => {
        try {
            attachments.add({ ...half, url });
            return true;
        } catch (error) {
            if (error instanceof TooLarge) return false;
            throw error;
        }
    };
    const first = fits("a");
    const together = fits("b");
    const asked = attachments.take();
    const withHistory = fits("c");
    attachments.putBack(asked);
    attachments.remove(attachments.list[0]);
    const afterRemoval = fits("d");
    attachments.take();
    attachments.clear();
    return { fits: [first, together, withHistory, afterRemoval, fits("e")], revoked };
}"""


def test_what_was_sent_before_counts_since_it_is_sent_again(open_page: OpenPage) -> None:
    with open_page("/turnbased") as opened:
        found = opened.page.evaluate(FILL)

    assert found["fits"] == [True, False, False, True, True]
    assert found["revoked"] == ["b", "c", "a"]


def test_a_spoken_message_is_recorded_as_16_khz_and_can_be_taken_back(
    open_page: OpenPage, scenario: Scenario
) -> None:
    with open_page("/turnbased") as opened:
        page = opened.page
        # The clip begins with a moment of silence.
        for length_ms in (300, 1_500):
            page.click("#record")
            page.wait_for_selector("#record[aria-pressed=true]")
            page.wait_for_timeout(length_ms)
            page.click("#record")
            page.wait_for_selector("#record[aria-pressed=false]")
        page.click("#attachments button >> nth=0")
        page.click("#send")
        opened.wait_until(lambda: bool(scenario.turns.questions))
        assert opened.complaints == []

    (item,) = scenario.turns.questions[0]["messages"][0]["content"]
    samples = np.frombuffer(base64.b64decode(item["data"]), "<f4")
    assert item["type"] == "audio"
    assert 0.5 * 16_000 < samples.size < 3 * 16_000
    assert np.abs(samples).max() > 0.01


def test_a_spoken_answer_plays_and_can_be_played_again(
    open_page: OpenPage, scenario: Scenario
) -> None:
    with open_page("/turnbased") as opened:
        page = opened.page
        page.click(".settings summary")
        page.check("#speak")
        page.wait_for_selector("#preset option[value=pirate]", state="attached")
        page.select_option("#preset", "pirate")
        ask(opened, "Say it.")
        page.wait_for_selector(".play[aria-pressed=true]")
        page.wait_for_selector(".play[aria-pressed=false]")
        page.click(".play")
        page.wait_for_selector(".play[aria-pressed=true]")
        playing = page.inner_text(".play")
        page.click(".play")
        page.wait_for_selector(".play[aria-pressed=false]")

        assert playing == "Stop playing"
        assert page.inner_text(".play") == "Play"
        assert opened.complaints == []
    (question,) = scenario.turns.questions
    assert question["tts"] == {"enabled": True, "ref_audio_data": PRESET_VOICE}
    assert [item["type"] for item in question["messages"][0]["content"]] == [
        "text",
        "audio",
        "text",
    ]


def test_stop_closes_the_connection_and_keeps_what_was_said(
    open_page: OpenPage, scenario: Scenario
) -> None:
    scenario.turns.waits_before_piece = 2

    with open_page("/turnbased") as opened:
        page = opened.page
        ask(opened, "Tell me.")
        page.wait_for_function("document.body.textContent.includes('of France')")
        page.click("#stop")
        opened.wait_until(lambda: scenario.turns.n_lost == 1)

        assert opened.state() == "idle"
        assert page.inner_text(".bubble.assistant.cut p") == "The capital of France "
        scenario.turns.waits_before_piece = None
        ask(opened, "Go on.")
        opened.wait_until(lambda: len(scenario.turns.questions) == 2)
    said = scenario.turns.questions[1]["messages"][1]
    assert said == {
        "role": "assistant",
        "content": [{"type": "text", "text": "The capital of France "}],
    }


def test_a_refused_question_comes_back_to_be_asked_again(
    open_page: OpenPage, scenario: Scenario
) -> None:
    scenario.turns.chat_error = "Queue full"

    with open_page("/turnbased") as opened:
        page = opened.page
        page.set_input_files("#files", [upload("red.png", "image/png", picture())])
        page.wait_for_selector("#attachments img")
        ask(opened, "What is this?")
        opened.wait_for_state("failed")

        assert page.inner_text("#problem") == "Queue full. Try again in a minute."
        assert page.input_value("#question") == "What is this?"
        assert page.locator("#attachments img").count() == 1
        assert page.locator(".bubble").count() == 0
        scenario.turns.chat_error = None
        page.click("#send")
        opened.wait_for_state("idle")
        assert page.is_hidden("#problem")
    assert len(scenario.turns.questions[1]["messages"]) == 1


def test_a_place_in_the_queue_is_shown(open_page: OpenPage, scenario: Scenario) -> None:
    place = {"position": 3, "estimated_wait_s": 12.0, "queue_length": 4, "ticket_id": "q_1"}
    scenario.turns.chat_queue = [{"type": "queued", **place}]

    with open_page("/turnbased") as opened:
        ask(opened, "Hello?")
        opened.wait_for_state("queued")

        assert opened.page.inner_text("#state") == "Place 3 in the queue, about 12 s"
        opened.page.click("#stop")
        opened.wait_until(lambda: scenario.turns.n_lost == 1)
        assert opened.page.input_value("#question") == "Hello?"
    assert scenario.turns.questions[0]["queue_events"] is True


def test_without_https_one_can_write_and_is_told_why_not_speak(
    open_page: OpenPage, scenario: Scenario, service: Any
) -> None:
    with open_page("/turnbased") as opened:
        page = opened.page
        page.goto(f"http://omni.localtest:{service.port}/turnbased")
        page.click("#record")
        problem = page.inner_text("#problem")
        page.check("#speak")
        ask(opened, "Hello?")
        page.wait_for_selector(".play[aria-pressed=false]")

        assert "only over HTTPS or on this machine" in problem
        assert page.inner_text(".bubble.assistant p") == ANSWER
        assert opened.complaints == []
