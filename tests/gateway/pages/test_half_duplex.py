"""The half-duplex page: turns by voice against a scripted server."""

from __future__ import annotations

import base64
from collections.abc import Callable
from contextlib import AbstractContextManager

from tests.fakes.browser import PHONE, Visit
from tests.fakes.g0_server import Scenario
from tests.fakes.page_routes import PRESET_VOICE, UPLOADED_VOICE
from tests.fakes.turn_sockets import LOUD_RMS, QUESTION, rms

OpenPage = Callable[..., AbstractContextManager[Visit]]


def test_a_spoken_turn_is_answered_aloud_while_the_microphone_rests(
    open_page: OpenPage, scenario: Scenario
) -> None:
    with open_page("/half_duplex?lang=zh", PHONE) as opened:
        page = opened.page
        page.click("#start")
        opened.wait_for_state("hearing")
        opened.wait_for_state("speaking")
        n_sent = len(scenario.of_type("audio_chunk"))
        opened.wait_for_state("listening")
        page.wait_for_timeout(500)
        n_after_answer = len(scenario.of_type("audio_chunk"))
        opened.wait_until(lambda: len(scenario.of_type("audio_chunk")) > n_after_answer)
        page.wait_for_function("document.getElementById('f-turns').textContent === '1'")

        texts = page.locator(".bubble").all_inner_texts()
        barriers = opened.barriers()
        page.click("#stop")
        opened.wait_for_state("ended")

        assert barriers == []
        assert texts == [QUESTION, "The capital of France is Paris."]
        # One may have been on its way when the first sound began to play.
        assert n_after_answer - n_sent <= 1
        assert page.inner_text("#state") == "会话已结束"
        assert page.get_attribute("#recording-link", "href").endswith("/s/rec_1")
        assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
        assert opened.complaints == []
    chunks = scenario.of_type("audio_chunk")
    assert {len(base64.b64decode(chunk["audio_base64"])) for chunk in chunks} == {4 * 8_000}
    assert max(map(rms, chunks)) > LOUD_RMS
    assert scenario.session_ids[0].startswith("hdx_")
    assert len(scenario.of_type("stop")) == 1


def test_the_settings_are_sent(open_page: OpenPage, scenario: Scenario) -> None:
    with open_page("/half_duplex") as opened:
        page = opened.page
        page.click(".settings summary")
        page.fill("#prompt", "Be brief.")
        page.fill("#threshold", "0.6")
        page.fill("#silence", "1200")
        page.fill("#max-tokens", "64")
        page.uncheck("#speech")
        page.wait_for_selector("#voice-choice option[value='id:v1']", state="attached")
        page.select_option("#voice-choice", "id:v1")
        page.click("#start")
        opened.wait_until(lambda: bool(scenario.of_type("prepare")))

    (prepare,) = scenario.of_type("prepare")
    assert prepare["system_content"] == [
        {"type": "text", "text": "Be brief."},
        {"type": "audio", "data": UPLOADED_VOICE},
    ]
    assert prepare["config"] == {
        "vad": {"threshold": 0.6, "min_silence_duration_ms": 1200},
        "generation": {"max_new_tokens": 64},
        "tts": {"enabled": False},
    }


def test_a_preset_keeps_the_order_of_its_text_and_sound_until_it_is_edited(
    open_page: OpenPage, scenario: Scenario
) -> None:
    with open_page("/half_duplex") as opened:
        page = opened.page
        page.click(".settings summary")
        page.wait_for_selector("#preset option[value=pirate]", state="attached")
        page.select_option("#preset", "pirate")
        page.click("#start")
        opened.wait_until(lambda: len(scenario.of_type("prepare")) == 1)
        page.click("#stop")
        page.fill("#prompt", "You are a parrot.")
        page.click("#start")
        opened.wait_until(lambda: len(scenario.of_type("prepare")) == 2)

    as_it_is, edited = (message["system_content"] for message in scenario.of_type("prepare"))
    sound = {"type": "audio", "data": PRESET_VOICE}
    first = {"type": "text", "text": "You are a pirate with this voice:"}
    assert as_it_is == [first, sound, {"type": "text", "text": "Be brief."}]
    assert edited == [{"type": "text", "text": "You are a parrot."}, sound]


def test_an_interrupted_answer_is_silent_at_once_and_marked(
    open_page: OpenPage, scenario: Scenario
) -> None:
    scenario.turns.piece_audio_s = 4.0
    scenario.turns.waits_before_piece = 1

    with open_page("/half_duplex") as opened:
        page = opened.page
        page.click("#start")
        opened.wait_for_state("speaking")
        page.keyboard.press("Escape")
        opened.wait_for_state("listening")
        n_before = len(scenario.of_type("audio_chunk"))
        opened.wait_until(lambda: len(scenario.of_type("audio_chunk")) > n_before, timeout_s=2)
        page.wait_for_selector(".bubble.assistant.cut")

        assert len(scenario.of_type("interrupt")) == 1
        # What was asked is known only afterwards, and stands above the answer all the same.
        assert page.locator(".bubble").all_inner_texts() == [QUESTION, "The capital "]
        assert opened.complaints == []


HOLD = """async () => {
    const { Turns } = await import("/static/turns.js");
    const sent = [];
    const session = { sendChunk: (samples) => sent.push(Math.max(...samples)) };
    const turns = { live: true, deaf: true, held: 0, session };
    const hear = () => Turns.prototype.sendChunk.call(turns, new Float32Array(8000).fill(0.5));
    for (let i = 0; i < 120; i += 1) hear();
    turns.deaf = false;
    hear();
    return sent;
}"""


def test_a_long_answer_does_not_look_like_a_client_that_has_gone(open_page: OpenPage) -> None:
    with open_page("/half_duplex") as opened:
        assert opened.page.evaluate(HOLD) == [0, 0, 0.5]
