"""The page in a real browser against a small fake server."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from playwright.sync_api import Browser, Route

from tests.fakes.browser import CHROMIUM, Visit, chromium, microphone_file, visit
from tests.fakes.g0_server import LOUD_RMS, Scenario, Service, serving

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed"),
]

QUESTION = Path(__file__).parents[1] / "assets" / "capital_france.wav"
PAUSE_S = 3.0
"""Silence between two questions; an answer of the fake fits into it."""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    folder = tmp_path_factory.mktemp("microphone")
    with chromium(microphone_file(folder, QUESTION, PAUSE_S)) as opened:
        yield opened


@pytest.fixture
def scenario() -> Scenario:
    return Scenario()


@pytest.fixture
def service(scenario: Scenario) -> Iterator[Service]:
    with serving(scenario) as running:
        yield running


@pytest.fixture
def open_page(browser: Browser, service: Service) -> Iterator[Visit]:
    with visit(browser, f"{service.http_url}/omni") as opened:
        yield opened


def chunk_rms(message: dict[str, str]) -> float:
    samples = np.frombuffer(base64.b64decode(message["audio_base64"]), "<f4")
    return float(np.sqrt(np.mean(samples**2)))


def figure(opened: Visit, name: str) -> str:
    return opened.page.inner_text(f"#f-{name}")


def test_an_interrupted_result_drops_what_was_not_played(
    open_page: Visit, scenario: Scenario
) -> None:
    """Each speak result brings three seconds, so that seconds are waiting when the user's next
    question interrupts; they have to be gone at once, not played to their end."""
    scenario.answer_units = 20
    scenario.unit_audio_s = 3.0
    page = open_page.page

    page.click("#start")
    page.wait_for_selector(".bubble.assistant.cut", timeout=15_000)
    page.wait_for_timeout(300)

    assert figure(open_page, "buffer") == "0 ms"
    assert open_page.state() == "listening"
    assert page.locator("#timeline li.cut").count() == 1
    assert page.locator(".bubble").last.inner_text() == "Wait."


def test_the_interrupt_key_silences_at_once_and_tells_the_server(
    open_page: Visit, scenario: Scenario
) -> None:
    scenario.answer_units = 20
    scenario.unit_audio_s = 3.0
    page = open_page.page

    page.click("#start")
    open_page.wait_for_state("speaking")
    page.keyboard.press("Escape")
    page.wait_for_timeout(300)

    assert figure(open_page, "buffer") == "0 ms"
    assert open_page.state() == "listening"
    assert len(scenario.of_type("interrupt")) == 1
    open_page.wait_until(lambda: any("force_listen" in c for c in scenario.of_type("audio_chunk")))
    assert page.locator("#timeline li.cut").count() <= 1


def test_pause_holds_the_microphone_until_resume(open_page: Visit, scenario: Scenario) -> None:
    page = open_page.page
    page.click("#start")
    open_page.wait_until(lambda: bool(scenario.of_type("audio_chunk")))

    page.click("#pause")
    open_page.wait_for_state("paused")
    n_before = len(scenario.of_type("audio_chunk"))
    page.wait_for_timeout(1_500)
    n_paused = len(scenario.of_type("audio_chunk"))
    page.click("#pause")
    open_page.wait_for_state("listening", "speaking")

    assert n_paused == n_before
    open_page.wait_until(lambda: len(scenario.of_type("audio_chunk")) > n_paused)


def test_the_keyboard_keeps_its_place_from_start_to_stop(open_page: Visit) -> None:
    """The hidden Start button took the focus with it, to the top of the page."""
    page = open_page.page
    page.focus("#start")
    page.keyboard.press("Enter")
    open_page.wait_for_state("listening")

    focused = page.evaluate("document.activeElement.id")
    page.keyboard.press("Shift+KeyP")
    open_page.wait_for_state("paused")
    page.focus("#stop")
    page.keyboard.press("Enter")

    open_page.wait_for_state("ended")
    assert focused == "stop"
    assert page.evaluate("document.activeElement.id") == "start"


def test_what_is_told_of_a_unit_changes_with_the_language(open_page: Visit) -> None:
    page = open_page.page
    page.click("#start")
    open_page.wait_until(lambda: int(figure(open_page, "units")) > 0)
    page.focus("#timeline")
    page.keyboard.press("Home")
    english = page.inner_text("#unit-detail")
    page.click("[data-language-switch]")

    assert english.startswith("Unit 1, listen: model ")
    assert page.inner_text("#unit-detail").startswith("第 1 个单元，聆听：模型 ")


def test_a_page_from_another_machine_without_https_explains_what_to_do(
    browser: Browser, service: Service
) -> None:
    address = f"http://omni.localtest:{service.port}/omni"

    with visit(browser, address) as opened:
        problem = opened.page.inner_text("#problem")
        opened.page.click("#start")
        state = opened.state()

    assert "only over HTTPS or on this machine" in problem
    assert f"http://127.0.0.1:{service.port}/" in problem
    assert state == "idle"


def test_a_key_in_the_address_does_not_stay_there(browser: Browser, service: Service) -> None:
    with visit(browser, f"{service.http_url}/omni?api_key=secret&x=1") as opened:
        opened.page.wait_for_function("!location.search.includes('secret')")

        assert opened.page.url == f"{service.http_url}/omni?x=1"


def test_the_microphone_arrives_as_seconds_of_16_khz(open_page: Visit, scenario: Scenario) -> None:
    """Muted, it goes on as silence."""
    open_page.page.click("#start")
    open_page.wait_until(lambda: len(scenario.of_type("audio_chunk")) >= 3)
    open_page.page.keyboard.press("m")
    n_before = len(scenario.of_type("audio_chunk"))
    open_page.wait_until(lambda: len(scenario.of_type("audio_chunk")) >= n_before + 2)

    chunks = scenario.of_type("audio_chunk")
    assert {len(chunk["audio_base64"]) for chunk in chunks} == {85_336}
    assert max(chunk_rms(chunk) for chunk in chunks[:3]) > LOUD_RMS
    assert open_page.page.get_attribute("#mute", "aria-pressed") == "true"
    assert chunk_rms(chunks[-1]) == 0.0


def test_stop_ends_the_session_and_a_new_one_begins_with_empty_figures(
    open_page: Visit, scenario: Scenario
) -> None:
    page = open_page.page
    page.click("#start")
    open_page.wait_until(lambda: int(figure(open_page, "units")) > 1)
    page.click("#stop")
    open_page.wait_for_state("ended")
    open_page.wait_until(lambda: bool(scenario.of_type("stop")))

    page.click("#start")
    open_page.wait_for_state("listening")

    assert len(scenario.of_type("prepare")) == 2
    assert page.is_hidden("#problem")
    assert page.is_visible("#captions .empty")
    # The first one may be there already.
    assert int(figure(open_page, "units")) <= 1


def test_the_place_in_the_queue_is_shown(open_page: Visit, scenario: Scenario) -> None:
    scenario.stays_queued = True
    place = {"type": "queued", "ticket_id": "q_1", "queue_length": 2}
    waits = {
        "Place 2 in the queue, about 30 s": {"position": 2, "estimated_wait_s": 30.4},
        "The service is starting, about 12 s": {
            "position": 1,
            "estimated_wait_s": 12.0,
            "state": "starting",
        },
    }
    for said, values in waits.items():
        scenario.queue = [place | values]
        open_page.page.click("#start")
        open_page.wait_for_state("queued")

        assert open_page.page.inner_text("#state") == said
        # Its parts change with the language too.
        open_page.page.click("[data-language-switch]")
        assert open_page.page.inner_text("#state").endswith(" 秒")
        open_page.page.click("[data-language-switch]")
        open_page.page.click("#stop")


def fail(opened: Visit) -> str:
    """Start a session that comes to a bad end; what the page says of it."""
    opened.page.click("#start")
    opened.wait_for_state("failed")
    return opened.page.inner_text("#problem")


def test_a_refusal_is_shown_with_advice(open_page: Visit, scenario: Scenario) -> None:
    scenario.refuse_with = "No worker available"

    assert fail(open_page).startswith("No worker available. Look at the service's log")
    assert open_page.page.is_visible("#start")


LOSE_WORKLETS = """() => {
    AudioWorklet.prototype.addModule = () => Promise.reject(new DOMException("lost", "AbortError"));
}"""


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (None, "The service does not answer. Try again in a moment."),
        (401, "Load this page again; it asks for your key."),
    ],
)
def test_a_service_that_has_gone_away_since_the_page_was_opened_is_named(
    open_page: Visit, status: int | None, said: str
) -> None:
    """The browser's words were shown: "Failed to load worklet module script: …"."""

    def refuse(route: Route) -> None:
        if status is None:
            route.abort()
        else:
            route.fulfill(status=status, json={"detail": "A key is needed", "slug": "unauthorized"})

    open_page.page.evaluate(LOSE_WORKLETS)
    open_page.page.route("**/api/**", refuse)

    assert fail(open_page) == said


def test_a_refused_prompt_ends_the_start(open_page: Visit, scenario: Scenario) -> None:
    """The service waits for a better one, so the page stayed at "Starting the session"."""
    scenario.prepare_error = "ref_audio_base64 is too long"

    assert fail(open_page) == "ref_audio_base64 is too long."


def test_a_lost_session_is_shown(open_page: Visit, scenario: Scenario) -> None:
    """An error that was survived does not hide the real end."""
    scenario.close_after_chunks = 1
    assert "worker lost" in fail(open_page)
    assert open_page.barriers() == []

    scenario.bad_chunk, scenario.close_after_chunks, scenario.says_why = 1, 2, False
    assert "worker lost" in fail(open_page)


def test_a_voice_sample_is_sent_as_16_khz_and_its_refusal_is_named(
    open_page: Visit, scenario: Scenario
) -> None:
    scenario.ignored = ["ref_audio_base64", "max_slice_nums"]
    open_page.page.set_input_files("#voice", QUESTION)

    open_page.page.click("#start")
    open_page.wait_for_state("listening")

    (prepare,) = scenario.of_type("prepare")
    voice = base64.b64decode(prepare["ref_audio_base64"])
    n_expected = QUESTION.stat().st_size // 2
    assert abs(len(voice) // 4 - n_expected) < 100
    assert open_page.page.inner_text("#note") == (
        "This server does not use: ref_audio_base64, the camera's details."
    )
    open_page.page.click("[data-language-switch]")
    assert open_page.page.inner_text("#note") == "此服务器不使用：ref_audio_base64, 画面细节。"


RESAMPLE = """async ([from, to, hz]) => {
    const { Resampler } = await import("/static/resampler.js");
    const wave = (_, n) => Math.sin(2 * Math.PI * hz * n / from);
    const tone = Float32Array.from({ length: from }, wave);
    const whole = new Resampler(from, to).push(tone);
    const cut = new Resampler(from, to);
    const pieces = [];
    for (let at = 0; at < from; at += 128) pieces.push(...cut.push(tone.subarray(at, at + 128)));
    return { whole: [...whole], pieces };
}"""


def test_resampling_in_pieces_equals_the_whole_and_keeps_a_tone(open_page: Visit) -> None:
    for rate, target in ((48_000, 16_000), (44_100, 16_000), (24_000, 44_100)):
        result = open_page.page.evaluate(RESAMPLE, [rate, target, 1_000])

        whole, pieces = np.array(result["whole"]), np.array(result["pieces"])
        n = np.arange(whole.size)
        expected = np.sin(2 * np.pi * 1_000 * n / target)
        np.testing.assert_allclose(pieces, whole, atol=1e-4)
        np.testing.assert_allclose(whole[200:], expected[200:], atol=0.01)
        assert abs(whole.size - target) < 100
    # Down, it removes what would fold back.
    high = open_page.page.evaluate(RESAMPLE, [48_000, 16_000, 10_000])
    assert np.abs(high["whole"][200:]).max() < 0.01
