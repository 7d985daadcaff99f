"""The full-duplex page's choices: presets, voices, devices, pictures; where a unit's time went."""

from __future__ import annotations

import base64
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest

from tests.fakes.browser import PHONE, Visit
from tests.fakes.g0_server import Scenario
from tests.fakes.page_routes import PRESET_VOICE, UPLOADED_VOICE

OpenPage = Callable[..., AbstractContextManager[Visit]]


def test_a_spoken_question_is_answered_aloud_on_a_phone_whose_language_changes_in_mid_session(
    open_page: OpenPage, scenario: Scenario
) -> None:
    scenario.recording = "20260101_000000_omni_x_abc"
    scenario.pages.titles[scenario.recording] = ""

    with open_page("/audio_duplex?lang=en", PHONE) as opened:
        page = opened.page
        page.click(".settings summary")
        page.fill("#prompt", "Be brief.")
        page.click("#start")
        opened.wait_for_state("listening")
        page.click("[data-language-switch]")
        switched = page.inner_text("#state")
        opened.wait_for_state("speaking")
        opened.wait_until(lambda: "on the Seine." in page.inner_text("#captions"))
        opened.wait_for_state("listening")
        # A bar is told apart by more than its colour; its stages by the keyboard too.
        page.focus("#timeline")
        page.keyboard.press("Home")
        first = page.inner_text("#unit-detail")
        page.hover("#timeline li.speak >> nth=0")
        spoken = page.inner_text("#unit-detail")
        selected = page.get_attribute("#timeline li[aria-selected=true]", "class")
        n_spoken = page.locator("#timeline li.speak").count()
        underruns, median = page.inner_text("#f-underruns"), page.inner_text("#f-median")
        said = page.locator(".bubble").all_inner_texts()
        assert opened.barriers() == []
        page.click("#stop")
        opened.wait_for_state("ended")
        link = page.get_attribute("#recording-link", "href")
        width = page.evaluate("document.documentElement.scrollWidth")
        is_without_camera = page.is_hidden("#camera") and page.is_hidden("#hd")
        page.click(".home")
        page.wait_for_selector("#recordings a")

        assert switched in ("正在聆听", "正在说话")
        assert said[0] == "What is the capital of France?"
        assert said[1].startswith("The capital of France is Paris")
        assert (underruns, n_spoken) == ("0", scenario.answer_units)
        assert median.endswith(" ms")
        assert first.startswith("第 1 个单元，聆听：模型 100 ms · 单元 120 ms · 往返 ")
        assert "，说话：模型 100 ms · 单元 430 ms · 往返 " in spoken
        assert selected == "speak"
        assert link.endswith("/s/20260101_000000_omni_x_abc")
        assert page.eval_on_selector("#recordings a", "a => a.href") == link
        assert page.inner_text("#recordings").startswith("全双工语音, ")
        assert width <= PHONE["width"]
        assert is_without_camera
        assert opened.complaints == []
    assert scenario.session_ids[0].startswith("adx_")
    (prepare,) = scenario.of_type("prepare")
    assert prepare["system_prompt"] == "Be brief."
    # Without a camera there is nothing to be said about pictures.
    assert "max_slice_nums" not in prepare
    assert not any("frame_base64_list" in chunk for chunk in scenario.of_type("audio_chunk"))


def test_a_preset_brings_its_prompt_and_voice_and_another_voice_may_be_chosen(
    open_page: OpenPage, scenario: Scenario
) -> None:
    with open_page("/omni") as opened:
        page = opened.page
        page.click(".settings summary")
        page.wait_for_selector("#preset option[value=pirate]", state="attached")
        page.wait_for_selector("#voice-choice option[value='id:v1']", state="attached")
        page.select_option("#preset", "pirate")
        for voice in ("preset", "id:v1", ""):
            n_before = len(scenario.of_type("prepare"))
            page.select_option("#voice-choice", voice)
            page.click("#start")
            opened.wait_until(lambda n=n_before: len(scenario.of_type("prepare")) > n)
            page.click("#stop")
        assert opened.complaints == []

    voices = [message.get("ref_audio_base64") for message in scenario.of_type("prepare")]
    assert voices == [PRESET_VOICE, UPLOADED_VOICE, None]
    assert scenario.of_type("prepare")[0]["system_prompt"] == "You are a pirate."


def test_a_jpeg_goes_with_each_chunk_and_hd_asks_for_two_slices_from_then_on(
    open_page: OpenPage, scenario: Scenario
) -> None:
    with open_page("/omni") as opened:
        opened.page.check("#camera")
        opened.page.click("#start")
        opened.wait_until(lambda: bool(scenario.of_type("audio_chunk")))
        opened.page.check("#hd")
        opened.wait_until(lambda: scenario.of_type("audio_chunk")[-1].get("max_slice_nums") == 2)

    assert scenario.of_type("prepare")[0]["max_slice_nums"] == 1
    assert scenario.of_type("audio_chunk")[0]["max_slice_nums"] == 1
    for chunk in scenario.of_type("audio_chunk"):
        (frame,) = chunk["frame_base64_list"]
        assert base64.b64decode(frame).startswith(b"\xff\xd8\xff")


NOTE_DEVICES = """() => {
    window.asked = [];
    const ask = navigator.mediaDevices.getUserMedia.bind(navigator.mediaDevices);
    navigator.mediaDevices.getUserMedia = (wanted) => {
        window.asked.push(wanted);
        return ask(wanted);
    };
}"""


def test_the_chosen_devices_are_used_and_remembered_until_they_are_gone(
    open_page: OpenPage,
) -> None:
    choices = "id => [...document.getElementById(id).options].map((o) => o.value)"
    with open_page("/omni") as opened:
        page = opened.page
        page.wait_for_function("document.getElementById('microphone').options.length > 1")
        microphone = page.evaluate(choices, "microphone")[-1]
        camera = page.evaluate(choices, "camera-device")[-1]
        page.click(".settings summary")
        page.select_option("#microphone", microphone)
        page.select_option("#camera-device", camera)
        page.reload()
        page.wait_for_function("document.getElementById('microphone').value !== ''")
        page.evaluate(NOTE_DEVICES)
        page.check("#camera")
        page.click("#start")
        opened.wait_for_state("listening")
        asked = page.evaluate("asked")
        page.click("#stop")
        page.evaluate(
            "document.getElementById('microphone').append(new Option('Gone', 'gone', true, true))"
        )
        page.click("#start")
        opened.wait_for_state("failed")
        problem = page.inner_text("#problem")

    ids = [(media.get("audio") or media["video"])["deviceId"]["exact"] for media in asked]
    assert ids == [camera, microphone]
    assert "no longer there" in problem


REFUSE_CAMERA = """(name) => {
    const ask = navigator.mediaDevices.getUserMedia.bind(navigator.mediaDevices);
    navigator.mediaDevices.getUserMedia = async (wanted) => {
        if (wanted.video) throw new DOMException("refused", name);
        return ask(wanted);
    };
}"""


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("NotFoundError", "No camera was found. Connect one, or go on without it."),
        ("NotAllowedError", "The browser may not use the camera. Allow it"),
    ],
)
def test_a_camera_that_cannot_be_had_is_named_and_the_next_start_does_without(
    open_page: OpenPage, name: str, said: str
) -> None:
    """ "No microphone or camera was found", at every start."""
    with open_page("/omni?lang=en") as opened:
        page = opened.page
        page.evaluate(REFUSE_CAMERA, name)
        page.check("#camera")
        page.click("#start")
        opened.wait_for_state("failed")
        problem = page.inner_text("#problem")
        page.click("#start")
        opened.wait_for_state("listening")
        page.locator("#camera").click()
        opened.wait_until(lambda: page.is_visible("#problem"))

        assert problem.startswith(said)
        assert not page.is_checked("#camera")
        assert opened.state() in ("listening", "speaking")


UNSENT_BYTES = """(n) => Object.defineProperty(
    WebSocket.prototype, "bufferedAmount", { get: () => n, configurable: true })"""


def test_sound_does_not_pile_up_before_a_connection_that_takes_none(
    open_page: OpenPage, scenario: Scenario
) -> None:
    """W27: what could not be sent was sent later, all of it."""
    with open_page("/omni") as opened:
        page = opened.page

        def n_dropped() -> int:
            return int(page.text_content("#f-dropped") or 0)

        page.click("#start")
        opened.wait_until(lambda: bool(scenario.of_type("audio_chunk")))
        page.evaluate(UNSENT_BYTES, 10_000_000)
        opened.wait_until(lambda: n_dropped() >= 1)
        n_sent = len(scenario.of_type("audio_chunk"))
        opened.wait_until(lambda: n_dropped() >= 2)
        assert len(scenario.of_type("audio_chunk")) == n_sent
        page.evaluate(UNSENT_BYTES, 0)
        opened.wait_until(lambda: len(scenario.of_type("audio_chunk")) > n_sent)


CAPTURE_48K = """async () => {
    const { Microphone } = await import("/static/audio.js");
    const context = new AudioContext({ sampleRate: 48000 });
    const chunks = [];
    const microphone = await Microphone.open(context, {
        chunkSamples: 8000, deviceId: "", onChunk: (c) => chunks.push([...c]), onLost: () => {},
    });
    await context.resume();
    const began = context.currentTime;
    const isHeard = () => chunks.length >= 3 && Math.max(...chunks.flat()) > 0.01;
    while (!isHeard()) await new Promise((done) => setTimeout(done, 20));
    const took = context.currentTime - began;
    microphone.close();
    await context.close();
    return { rate: context.sampleRate, took, chunks };
}"""


def test_a_48_khz_context_gives_half_seconds_of_16_khz(open_page: OpenPage) -> None:
    with open_page("/half_duplex") as opened:
        captured = opened.page.evaluate(CAPTURE_48K)

    assert captured["rate"] == 48_000
    assert {len(chunk) for chunk in captured["chunks"]} == {8_000}
    assert captured["took"] / len(captured["chunks"]) == pytest.approx(0.5, rel=0.3)
