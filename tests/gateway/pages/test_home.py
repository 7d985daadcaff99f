"""The home page, and what is the same on every page: languages, names of controls, widths."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from playwright.sync_api import Browser

from tests.fakes.browser import DESKTOP, PHONE, Visit, visit
from tests.fakes.g0_server import Scenario
from tests.fakes.page_routes import STATUS
from tests.fakes.page_server import gateway_alone

OpenPage = Callable[..., AbstractContextManager[Visit]]

PAGES = ("/", "/omni", "/audio_duplex", "/half_duplex", "/turnbased")
HAN = re.compile(r"[\u4e00-\u9fff]")

WIDTH = "document.documentElement.scrollWidth"
HEIGHTS = """[...document.querySelectorAll("button, .switch")]
    .map((e) => e.offsetHeight).filter(Boolean)"""

NAMELESS = """() => [...document.querySelectorAll(
    "button, a, input:not([hidden]), select, textarea, [role=img], [role=log], [role=listbox]"
)].filter((e) => {
    if (e.closest("[hidden]")) return false;
    const byId = e.getAttribute("aria-labelledby");
    const name = e.getAttribute("aria-label")
        || (byId && document.getElementById(byId)?.textContent)
        || [...(e.labels ?? [])].map((label) => label.textContent).join("") || e.textContent;
    return !name.trim();
}).map((e) => e.outerHTML)"""

ENGLISH_LEFT = """() => [...document.querySelectorAll("[data-i18n]")]
    .filter((e) => !/[\\u4e00-\\u9fff]/.test(e.textContent) && e.dataset.i18n !== "home.title")
    .map((e) => e.dataset.i18n)"""


@pytest.mark.parametrize("path", PAGES)
def test_a_page_fits_names_its_controls_and_speaks_both_languages(
    open_page: OpenPage, path: str
) -> None:
    with open_page(f"{path}?lang=en", PHONE) as opened:
        page = opened.page
        for summary in page.locator(".settings summary").all():
            summary.click()
        english = page.inner_text("main")
        widths = [page.evaluate(WIDTH)]
        heights = page.evaluate(HEIGHTS)
        nameless = page.evaluate(NAMELESS)
        page.click("[data-language-switch]")
        widths.append(page.evaluate(WIDTH))
        left = page.evaluate(ENGLISH_LEFT)
        page.set_viewport_size(DESKTOP)
        on_desktop = page.evaluate(WIDTH)
        barriers = opened.barriers()

        assert max(widths) <= PHONE["width"]
        assert on_desktop <= DESKTOP["width"]
        # What a finger can hit.
        assert min(heights) >= 44
        assert nameless == []
        assert barriers == []
        assert not HAN.search(english)
        assert left == []
        assert page.get_attribute("html", "lang") == "zh-CN"
        assert page.locator("h1").count() == 1
        assert opened.complaints == []


def test_every_text_exists_in_both_languages(open_page: OpenPage) -> None:
    with open_page("/") as opened:
        keys = opened.page.evaluate(
            """async () => {
                const pages = ["duplex", "half-duplex", "chat", "home", "admin", "session"];
                const names = ["common", ...pages];
                const found = await Promise.all(names.map((n) => import(`/static/texts-${n}.js`)));
                return found.flatMap((module) => Object.values(module))
                    .map(({ en, zh }) => [Object.entries(en), Object.entries(zh)]);
            }"""
        )

    assert len(keys) == 7
    for english, chinese in keys:
        values = re.compile(r"\{\w+\}")
        assert [key for key, _ in english] == [key for key, _ in chinese]
        for (key, ours), (_, theirs) in zip(english, chinese, strict=True):
            assert sorted(values.findall(ours)) == sorted(values.findall(theirs)), key


def test_the_apps_that_are_switched_on_are_offered(open_page: OpenPage, scenario: Scenario) -> None:
    scenario.pages.enabled = ["turnbased", "omni"]

    with open_page("/") as opened:
        opened.page.wait_for_selector(".app")
        links = opened.page.eval_on_selector_all(".app", "found => found.map(a => a.pathname)")
        opened.page.click(".app >> nth=1")
        opened.page.wait_for_url("**/omni")

        assert links == ["/turnbased", "/omni"]
        assert opened.complaints == []


def test_the_address_for_phones_leads_to_the_page_that_fits_one(
    tmp_path: Path, browser: Browser
) -> None:
    with (
        gateway_alone(tmp_path) as address,
        visit(browser, f"{address}/mobile-omni/?lang=zh", PHONE) as opened,
    ):
        opened.page.wait_for_selector("#start:has-text('开始')")

        assert opened.page.url == f"{address}/omni?lang=zh"
        assert opened.complaints == []


def test_the_state_of_the_service_is_shown(open_page: OpenPage, scenario: Scenario) -> None:
    states = [
        ("Ready", {}),
        ("All places are taken", {"slots_free": 0}),
        ("Starting", {"idle_workers": 0, "busy_workers": 0, "loading_workers": 2}),
        ("No worker is ready", {"idle_workers": 0, "busy_workers": 0}),
    ]
    with open_page("/") as opened:
        for said, changes in states:
            scenario.pages.status = STATUS | changes
            opened.page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
            opened.page.wait_for_function(
                "said => document.getElementById('state').textContent === said", arg=said
            )

        assert opened.page.inner_text("#f-queue") == "3"

        opened.page.route("**/status", lambda route: route.abort())
        opened.page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
        opened.page.wait_for_selector("#problem:visible")
        assert opened.page.inner_text("#state") == "No answer"
        said = "The service does not answer. Try again in a moment."
        assert opened.page.inner_text("#problem") == said


def test_conversations_recorded_here_are_linked_by_their_titles_while_they_are_kept(
    open_page: OpenPage, scenario: Scenario
) -> None:
    """The list led to recordings that the service had removed long ago."""
    scenario.pages.titles = {"20260101_x": "A talk about France", "20260101_y": ""}
    with open_page("/") as opened:
        page = opened.page
        assert page.is_visible("#no-recordings")
        ids = ("20260101_gone", "20260101_x", "20260101_y")
        stored = json.dumps([{"id": i, "app": "omni", "at": 1_767_225_600_000} for i in ids])
        page.evaluate("stored => localStorage.setItem('omni.recordings', stored)", stored)
        page.reload()
        opened.wait_until(lambda: page.locator("#recordings a").count() == 2)

        links = page.eval_on_selector_all("#recordings a", "found => found.map(a => a.pathname)")
        lines = page.locator("#recordings li").all_inner_texts()
        assert links == ["/s/20260101_x", "/s/20260101_y"]
        assert lines[0] == "A talk about France Omni full duplex"
        assert lines[1].startswith("Omni full duplex, ")
        assert page.is_hidden("#no-recordings")
        kept = page.evaluate("JSON.parse(localStorage.getItem('omni.recordings')).map((r) => r.id)")
        assert kept == ["20260101_x", "20260101_y"]
        assert opened.barriers() == []


def title(opened: Visit) -> str:
    return opened.page.inner_text("#apps-title")


def test_the_language_is_the_browsers_unless_the_service_or_the_user_says_another(
    open_page: OpenPage, scenario: Scenario
) -> None:
    with open_page("/", locale="zh-CN") as opened:
        of_browser = title(opened)
    scenario.pages.default_lang = "zh"
    with open_page("/") as opened:
        of_service = title(opened)
        opened.page.click("[data-language-switch]")
        opened.page.reload()
        of_user = title(opened)
        opened.page.goto(f"{opened.page.url}?lang=zh")
        of_address = title(opened)

    assert (of_browser, of_service, of_user, of_address) == ("应用", "应用", "Apps", "应用")


@pytest.mark.parametrize("path", ["/docs", "/redoc"])
def test_without_the_internet_the_schema_of_the_routes_can_still_be_found(
    browser: Browser, tmp_path: Path, path: str
) -> None:
    """What draws them comes from elsewhere: they were white and empty."""
    with gateway_alone(tmp_path) as address, browser.new_context() as context:
        context.route(re.compile(r"https://"), lambda route: route.abort())
        page = context.new_page()
        page.goto(f"{address}{path}")

        page.get_by_role("link", name="The schema itself").click()

        assert '"/api/chat"' in page.inner_text("body")
