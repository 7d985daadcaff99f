"""A whole conversation in a real browser: the camera is asked about, a story is interrupted, and
the recording of it plays."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageDraw
from playwright.sync_api import sync_playwright

from shared.audio import read_wav, write_wav
from tests.e2e.conftest import ROOT, RunningService, started
from tests.fakes.browser import CHROMIUM, FLAGS, Visit, visit
from worker.models.cascade.speech import Speaker, SynthesizeRequest

pytestmark = [
    pytest.mark.browser,
    pytest.mark.weights,
    pytest.mark.slow,
    pytest.mark.realtime,
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed"),
]

ASSETS = ROOT / "tests/assets"
RATE_HZ = 16_000
SIGN = "EXIT 42"
QUESTION = "Can you read this sign for me?"
PATIENCE_S = 60.0


@pytest.fixture(scope="module")
def recording_service(
    running_service: RunningService, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningService]:
    """One that records, into a folder of its own; the other one has converted the weights."""
    folder = tmp_path_factory.mktemp("recording")
    data = folder / "data"
    data.mkdir()
    (data / "cache").symlink_to(ROOT / "data/cache")
    settings = {"recording": {"enabled": True}, "service": {"data_dir": str(data)}}
    with started(folder, settings) as service:
        yield service


def silence(seconds: float) -> np.ndarray:
    return np.zeros(round(seconds * RATE_HZ), np.float32)


def spoken(text: str) -> np.ndarray:
    """16 kHz, by the embedded voice."""
    samples = Speaker().synthesize(SynthesizeRequest(text))
    places = np.arange(0, len(samples), 24_000 / RATE_HZ)
    return np.interp(places, np.arange(len(samples)), samples).astype(np.float32)


def microphone(path: Path) -> Path:
    """A question about the sign, then one for a story, which is cut off by a third."""
    story, stop = (read_wav(ASSETS / f"{name}.wav")[0] for name in ("long_story", "stop_talking"))
    parts = [silence(3), spoken(QUESTION), silence(15), story, silence(6), stop, silence(90)]
    write_wav(path, np.concatenate(parts), RATE_HZ)
    return path


def camera(path: Path) -> Path:
    """Uncompressed video (YUV4MPEG2) of a sign."""
    image = Image.new("L", (640, 480), 255)
    ImageDraw.Draw(image).text((120, 180), SIGN, fill=0, font_size=96)
    grey = bytes([128]) * (320 * 240 * 2)
    frame = b"FRAME\n" + image.tobytes() + grey
    path.write_bytes(b"YUV4MPEG2 W640 H480 F5:1 Ip A1:1 C420jpeg\n" + frame * 5)
    return path


@pytest.fixture
def opened(recording_service: RunningService, tmp_path: Path) -> Iterator[Visit]:
    heard = microphone(tmp_path / "microphone.wav")
    seen = camera(tmp_path / "camera.y4m")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM,
            args=[
                *FLAGS,
                f"--use-file-for-fake-audio-capture={heard}",
                f"--use-file-for-fake-video-capture={seen}",
            ],
        )
        with visit(browser, f"{recording_service.http_url}/omni") as opened:
            yield opened
        browser.close()


@pytest.mark.timeout(240)
def test_what_is_seen_is_read_an_interruption_is_obeyed_and_all_of_it_plays_again(
    opened: Visit,
) -> None:
    page = opened.page
    page.check("#camera")
    page.click("#start")

    def said(text: str) -> bool:
        bubbles = page.locator(".bubble.assistant").all_inner_texts()
        return any(text.lower() in bubble.lower() for bubble in bubbles)

    opened.wait_until(lambda: said("42"), PATIENCE_S)
    opened.wait_until(lambda: page.locator("#timeline li.cut").count() > 0, PATIENCE_S)
    opened.wait_for_state("listening", timeout_s=PATIENCE_S)
    page.click("#stop")
    opened.wait_for_state("ended")
    assert opened.complaints == []

    address = page.get_attribute("#recording-link", "href")
    assert address
    page.goto(page.evaluate("(link) => new URL(link, location.href).href", address))
    page.wait_for_selector("#media video, #media audio", timeout=1000 * PATIENCE_S)
    page.evaluate("document.querySelector('#media video, #media audio').play()")
    moves = "document.querySelector('#media video, #media audio').currentTime > 0.5"
    page.wait_for_function(moves, timeout=1000 * PATIENCE_S)

    assert "42" in page.inner_text("#pieces")
    assert page.locator("#media video").count() == 1
    # It asked for the recording before it was finished.
    assert all("404" in complaint for complaint in opened.complaints)
