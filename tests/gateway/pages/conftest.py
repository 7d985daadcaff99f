"""A browser for each module, whose microphone says a question over and over."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from playwright.sync_api import Browser, ViewportSize

from tests.fakes.browser import CHROMIUM, DESKTOP, Visit, chromium, microphone_file, visit
from tests.fakes.g0_server import Scenario, Service, serving

QUESTION = Path(__file__).parents[2] / "assets" / "capital_france.wav"
PAUSE_S = 3.0

OpenPage = Callable[..., AbstractContextManager[Visit]]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    folder = Path(__file__).parent
    for item in items:
        if folder in item.path.parents:
            item.add_marker(pytest.mark.browser)
            item.add_marker(
                pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
            )


@pytest.fixture(scope="module")
def pause_s() -> float:
    """Silence between two questions; a module may have another one."""
    return PAUSE_S


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory, pause_s: float) -> Iterator[Browser]:
    folder = tmp_path_factory.mktemp("microphone")
    with chromium(microphone_file(folder, QUESTION, pause_s)) as opened:
        yield opened


@pytest.fixture
def scenario() -> Scenario:
    return Scenario()


@pytest.fixture
def service(scenario: Scenario) -> Iterator[Service]:
    with serving(scenario) as running:
        yield running


@pytest.fixture
def open_page(browser: Browser, service: Service) -> OpenPage:
    def opened(
        path: str, viewport: ViewportSize = DESKTOP, locale: str = "en-US"
    ) -> AbstractContextManager[Visit]:
        return visit(browser, f"{service.http_url}{path}", viewport, locale)

    return opened
