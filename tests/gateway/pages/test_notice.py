"""What is shown instead of a page: to somebody without a key, and where there is none."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Request, expect

from tests.fakes.browser import PHONE, visit
from tests.fakes.page_server import gateway_alone

KEY = "users-key"
AWKWARD = "a key; with spaces"
"""No cookie can hold it."""


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    keys = {"api_keys": [KEY, AWKWARD], "admin_keys": ["admins-key"]}
    with gateway_alone(tmp_path_factory.mktemp("locked"), security=keys) as address:
        yield address


def test_a_key_opens_the_page_that_was_asked_for_and_stands_in_no_address(
    browser: Browser, locked: str
) -> None:
    addresses = []
    with visit(browser, f"{locked}/omni?lang=en#x", PHONE) as opened:
        page = opened.page
        page.on("framenavigated", lambda frame: addresses.append(frame.url))
        assert opened.barriers() == []
        assert page.evaluate("document.activeElement.id") == "key"
        page.keyboard.type("wrong")
        page.keyboard.press("Enter")
        expect(page.get_by_role("alert")).to_have_text(
            "This is not a key of this service.", use_inner_text=True
        )
        assert opened.barriers() == []
        page.click("[data-language-switch]")
        expect(page.get_by_role("heading")).to_have_text("需要密钥", use_inner_text=True)
        page.click("[data-language-switch]")
        page.get_by_label("Key").fill(f" {KEY} ")
        page.get_by_role("button", name="Go on").click()
        page.wait_for_selector("#start:has-text('Start')")
        page.goto(f"{locked}/admin")
        page.wait_for_selector("body.admin")
        cookies = page.context.cookies()

    assert [address.removeprefix(locked) for address in addresses] == ["/omni?lang=en#x", "/admin"]
    assert [(cookie["httpOnly"], cookie["sameSite"]) for cookie in cookies] == [(True, "Strict")]


def test_a_wrong_key_in_the_address_is_taken_out_of_it(browser: Browser, locked: str) -> None:
    with visit(browser, f"{locked}/?api_key=wrong&lang=en") as opened:
        expect(opened.page.get_by_role("alert")).to_have_text(
            "This is not a key of this service.", use_inner_text=True
        )

        assert opened.page.url == f"{locked}/?lang=en"


def test_a_key_that_the_browser_does_not_keep_is_explained(browser: Browser, locked: str) -> None:
    with visit(browser, f"{locked}/?lang=en") as opened:
        opened.page.fill("#key", AWKWARD)
        opened.page.keyboard.press("Enter")

        expect(opened.page.get_by_role("alert")).to_contain_text(
            "does not keep it", use_inner_text=True
        )


def test_a_service_that_has_gone_away_is_said_not_to_answer(browser: Browser, locked: str) -> None:
    with visit(browser, f"{locked}/?lang=en") as opened:
        opened.page.route("**/api/**", lambda route: route.abort())
        opened.page.fill("#key", KEY)
        opened.page.keyboard.press("Enter")

        expect(opened.page.get_by_role("alert")).to_contain_text(
            "does not answer", use_inner_text=True
        )


def test_without_scripts_the_form_alone_takes_the_key(browser: Browser, locked: str) -> None:
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(f"{locked}/omni")
    page.fill("#key", KEY)
    page.keyboard.press("Enter")

    expect(page.locator("#start")).to_be_visible()
    context.close()


@pytest.mark.parametrize(
    ("path", "said"),
    [("/nope", "There is no such page"), ("/s/nope", "There is no such recording")],
)
def test_an_address_without_a_page_leads_on(
    browser: Browser, locked: str, path: str, said: str
) -> None:
    with visit(browser, f"{locked}{path}?lang=en&api_key={KEY}", PHONE) as opened:
        page = opened.page
        expect(page.get_by_role("heading")).to_have_text(said, use_inner_text=True)
        assert opened.barriers() == []
        assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
        page.click("text=All apps")
        page.wait_for_selector(".app")
        assert page.url == f"{locked}/"


@pytest.mark.parametrize("path", ["/", "/omni", "/half_duplex", "/turnbased", "/admin"])
def test_a_key_in_a_link_is_told_to_nobody_else(browser: Browser, locked: str, path: str) -> None:
    """The address is in the Referer of every part of a page until it is taken out of it."""
    with visit(browser, f"{locked}/nope?api_key={KEY}") as opened:
        parts: list[Request] = []
        opened.page.on("requestfinished", lambda request: parts.append(request))
        opened.page.goto(f"{locked}{path}?api_key={KEY}")
        opened.wait_for_script()
        referrers = {part.all_headers().get("referer") for part in parts}

    assert referrers <= {None, f"{locked}/"}
    assert f"{locked}/" in referrers
