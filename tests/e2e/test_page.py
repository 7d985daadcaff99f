"""The page against the whole service: a spoken question, a spoken answer, in a real browser."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import pytest
from playwright.sync_api import Browser

from tests.fakes.browser import CHROMIUM, chromium, microphone_file, visit

pytestmark = [
    pytest.mark.browser,
    pytest.mark.weights,
    pytest.mark.slow,
    pytest.mark.realtime,
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed"),
]

QUESTION = Path(__file__).parents[1] / "assets" / "capital_france.wav"
SILENCE_S = 40.0
"""Long enough for one answer on a slow machine before the file begins again."""

ANSWER_TIMEOUT_S = 60.0


class RunningService(Protocol):
    @property
    def http_url(self) -> str: ...

    @property
    def ws_url(self) -> str: ...


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    folder = tmp_path_factory.mktemp("microphone")
    with chromium(microphone_file(folder, QUESTION, SILENCE_S)) as opened:
        yield opened


@pytest.mark.timeout(180)
def test_a_spoken_question_is_heard_and_answered_aloud(
    browser: Browser, running_service: RunningService
) -> None:
    with visit(browser, f"{running_service.http_url}/omni") as opened:
        page = opened.page
        page.click("#start")
        opened.wait_for_state("speaking", timeout_s=ANSWER_TIMEOUT_S)
        page.wait_for_selector(".bubble.you", timeout=1000 * ANSWER_TIMEOUT_S)
        heard = page.inner_text(".bubble.you")
        answer = page.inner_text(".bubble.assistant")
        opened.wait_for_state("listening", timeout_s=ANSWER_TIMEOUT_S)
        page.click("#stop")
        opened.wait_for_state("ended")

        assert re.search(r"capital of france", heard, re.IGNORECASE)
        assert answer
        assert page.locator("#timeline li.speak").count() >= 1
        assert page.is_hidden("#problem")
        assert opened.complaints == []
