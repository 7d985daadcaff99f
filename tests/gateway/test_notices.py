"""What a person is told whose browser opens an address that answers with an error."""

from __future__ import annotations

import re

import pytest

from gateway.notices import prefers_html
from shared.config import Config
from tests.fakes.front import open_front

BROWSER = "text/html,application/xhtml+xml,application/xml;q=0.9,image/avif,image/webp,*/*;q=0.8"
LOCKED = Config.model_validate({"security": {"api_keys": ["users-key"], "admin_keys": ["admins"]}})
PAGES = ("/", "/omni", "/admin", "/turnbased", "/s/20260130_x", "/api/sessions/x/download")


def kind(text: str) -> str:
    (found,) = re.findall(r'<body data-kind="(\w+)"', text)
    return found


@pytest.mark.parametrize("path", PAGES)
async def test_a_browser_without_a_key_is_asked_for_one(path: str) -> None:
    """It was shown the JSON that programs get."""
    async with open_front(LOCKED) as front:
        answer = await front.http.get(path, headers={"Accept": BROWSER})
        head = await front.http.head(path, headers={"Accept": BROWSER})
        counted = front.gateway.desk.counts["unauthorized"]

    assert (answer.status_code, head.status_code, counted) == (401, 401, 2)
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert answer.headers["www-authenticate"] == "Bearer"
    # A wrong key may stand in the address; and with a key the same address is another page.
    assert answer.headers["referrer-policy"] == "no-referrer"
    assert answer.headers["cache-control"] == "no-store"
    assert kind(answer.text) == "key"
    # Nothing that it would have to ask for without a key.
    assert not re.search(r'(src|href)="(?!data:|[./]*")', answer.text)


@pytest.mark.parametrize("accept", ["*/*", "application/json", "application/json, text/html", ""])
async def test_a_program_without_a_key_is_told_in_json(accept: str) -> None:
    async with open_front(LOCKED) as front:
        answer = await front.http.get("/omni", headers={"Accept": accept})
        posted = await front.http.post("/api/chat", headers={"Accept": BROWSER}, json={})

    assert answer.json()["slug"] == posted.json()["slug"] == "unauthorized"
    assert answer.status_code == posted.status_code == 401


async def test_a_browser_with_a_key_gets_the_page() -> None:
    async with open_front(LOCKED) as front:
        answer = await front.http.get("/omni?api_key=users-key", headers={"Accept": BROWSER})

    assert answer.status_code == 200
    assert "data-kind" not in answer.text


@pytest.mark.parametrize(
    ("path", "said", "home"),
    [
        ("/nope", "missing", "./"),
        ("/no/such/page", "missing", "../../"),
        ("/a%2Fb", "missing", "./"),
        ("/s/nope", "recording", "../"),
        ("/static/nope.js", "missing", "../"),
        ("/mobile/%2e%2e%2fx", "failed", "../"),
    ],
)
async def test_an_address_without_a_page_leads_home(path: str, said: str, home: str) -> None:
    async with open_front() as front:
        answer = await front.http.get(path, headers={"Accept": BROWSER})
        as_json = await front.http.get(path)

    assert answer.status_code == as_json.status_code
    assert kind(answer.text) == said
    # Relative, so that it holds behind a proxy's path too.
    assert f'href="{home}"' in answer.text
    assert set(as_json.json()) == {"detail", "slug"}


async def test_what_a_client_has_chosen_is_text_in_the_page() -> None:
    async with open_front() as front:
        answer = await front.http.get("/s/<b>x", headers={"Accept": BROWSER})

    assert "<b>x" not in answer.text
    assert "&lt;b&gt;x" in answer.text


@pytest.mark.parametrize(
    ("served", "asked", "language"),
    [
        (None, "zh-CN,zh;q=0.9,en;q=0.8", "zh-CN"),
        (None, "de,en;q=0.5", "en"),
        (None, "", "en"),
        ("zh", "en-US", "zh-CN"),
        ("en", "zh", "en"),
    ],
)
async def test_it_begins_in_the_language_of_the_service_or_the_browser(
    served: str | None, asked: str, language: str
) -> None:
    async with open_front(LOCKED, default_lang=served) as front:
        headers = {"Accept": BROWSER, "Accept-Language": asked}
        answer = await front.http.get("/", headers=headers)

    assert f'<html lang="{language}">' in answer.text


@pytest.mark.parametrize(
    ("accept", "wanted"),
    [
        (BROWSER, True),
        ("text/html", True),
        ("text/*;q=0.5, */*;q=0.1", True),
        ("TEXT/HTML", True),
        ("text/html;q=0, */*", False),
        ("application/json;q=0.9, text/html;q=0.8", False),
        ("text/html;q=nonsense", False),
        (",;,=", False),
    ],
)
def test_html_is_for_those_who_would_rather_have_it(accept: str, wanted: bool) -> None:
    assert prefers_html(accept) is wanted
