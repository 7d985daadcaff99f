"""Pages of our tree and of others, and their files."""

from __future__ import annotations

import pytest

from gateway.__main__ import parse_arguments
from shared.config import Config
from tests.fakes.front import open_front

APP_ROUTES = {
    "turnbased": "/turnbased",
    "half_duplex_audio": "/half_duplex",
    "omni": "/omni",
    "audio_duplex": "/audio_duplex",
}
OWN_TREE = {
    "/": "index.html",
    "/omni": "duplex.html",
    "/audio_duplex": "duplex.html",
    "/half_duplex": "half_duplex.html",
    "/turnbased": "chat.html",
    "/admin": "admin.html",
    "/mobile-omni/": "duplex.html",
}
REFERENCE_TREE = {
    "/": "index.html",
    "/omni": "omni/omni.html",
    "/audio_duplex": "audio-duplex/audio_duplex.html",
    "/half_duplex": "half-duplex/half_duplex.html",
    "/turnbased": "turnbased.html",
    "/admin": "admin.html",
    "/mobile/": "mobile/index.html",
    "/mobile-omni/": "mobile-omni/index.html",
}


@pytest.fixture
def tree(tmp_path):
    """Makes a page tree; every file says its own name."""

    def make(*names):
        for name in names:
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(name)
        return tmp_path

    return make


@pytest.mark.parametrize("pages", [OWN_TREE, REFERENCE_TREE], ids=["own", "reference"])
async def test_every_route_leads_to_its_page(tree, pages):
    static_dir = tree(*pages.values())
    async with open_front(static_dir=static_dir) as front:
        answers = {route: await front.http.get(route) for route in pages}

    assert {route: answer.text for route, answer in answers.items()} == pages
    assert {answer.headers["content-type"] for answer in answers.values()} == {
        "text/html; charset=utf-8"
    }


async def test_a_tree_with_one_page_serves_every_app_there(tree):
    async with open_front(static_dir=tree("index.html")) as front:
        texts = {(await front.http.get(route)).text for route in APP_ROUTES.values()}

    assert texts == {"index.html"}


@pytest.mark.parametrize(("app_id", "route"), APP_ROUTES.items())
async def test_the_page_of_a_disabled_app_leads_home(tree, app_id, route):
    static_dir = tree(*OWN_TREE.values())
    async with open_front(static_dir=static_dir) as front:
        apps = front.gateway.apps
        apps.switch(apps.find(app_id), enabled=False)
        answer = await front.http.get(f"{route}?api_key=k")
        others = [
            (await front.http.get(other)).status_code
            for other in APP_ROUTES.values()
            if other != route
        ]

    # What the address says beside the path is the page's to keep.
    assert (answer.status_code, answer.headers["location"]) == (302, "./?api_key=k")
    assert answer.headers["cache-control"] == "no-store"
    assert others == [200] * 3


async def test_phones_are_led_to_their_pages(tree):
    static_dir = tree(*REFERENCE_TREE.values())
    async with open_front(static_dir=static_dir) as front:
        leads = {path: await front.http.get(path) for path in ("/mobile", "/mobile-omni")}
        front.gateway.apps.switch(front.gateway.apps.find("omni"), enabled=False)
        disabled = [await front.http.get(path) for path in ("/mobile-omni", "/mobile-omni/")]

    assert {path: answer.headers["location"] for path, answer in leads.items()} == {
        "/mobile": "mobile/",
        "/mobile-omni": "mobile-omni/",
    }
    assert [(answer.status_code, answer.headers["location"]) for answer in disabled] == [
        (302, "./"),
        (302, "../"),
    ]


async def test_a_tree_without_pages_for_phones_leads_them_home(tree):
    async with open_front(static_dir=tree("index.html")) as front:
        answer = await front.http.get("/mobile/")

    assert (answer.status_code, answer.headers["location"]) == (302, "../")


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("app/main.js", 200),
        ("nothing.js", 404),
        ("..%2findex.html", 400),
        ("%2e%2e/index.html", 400),
        ("%00", 404),
    ],
)
async def test_files_for_phones_are_served_and_nothing_beside_them(tree, path, status):
    static_dir = tree("index.html", "mobile/app/main.js")
    async with open_front(static_dir=static_dir) as front:
        answer = await front.http.get(f"/mobile/{path}")
        head = await front.http.head(f"/mobile/{path}")

    assert (answer.status_code, head.status_code) == (status, status)
    assert head.content == b""


@pytest.mark.parametrize("path", ["..%2f..%2fetc%2fpasswd", "%00", "nothing.js", "%2e%2e/x"])
async def test_static_serves_nothing_outside_its_tree(tree, path):
    async with open_front(static_dir=tree("index.html")) as front:
        assert (await front.http.get(f"/static/{path}")).status_code == 404


async def test_page_and_scripts_are_never_of_two_versions(tree):
    """Browsers kept scripts by their own guess while the page was asked for anew."""
    static_dir = tree("index.html", "app.js")
    async with open_front(static_dir=static_dir) as front:
        page = await front.http.get("/")
        script = await front.http.get("/static/app.js")
        head = await front.http.head("/static/app.js")
        again = await front.http.get(
            "/static/app.js", headers={"If-None-Match": script.headers["etag"]}
        )

    assert page.headers["cache-control"] == "no-cache"
    assert script.headers["cache-control"] == "no-cache"
    assert (head.status_code, head.headers["etag"]) == (200, script.headers["etag"])
    assert again.status_code == 304


async def test_an_installation_without_page_says_so(tmp_path):
    async with open_front(static_dir=tmp_path) as front:
        answers = [
            await front.http.get(path) for path in ("/", "/omni", "/admin", "/static/app.js")
        ]

    assert [answer.status_code for answer in answers] == [404] * 4


async def test_frontend_defaults_come_from_configuration_and_command_line():
    config = Config.model_validate({"audio": {"playback_delay_ms": 350}})
    async with open_front(config) as front:
        plain = (await front.http.get("/api/frontend_defaults")).json()
    async with open_front(config, default_lang="zh") as front:
        with_language = (await front.http.get("/api/frontend_defaults")).json()

    assert plain == {"playback_delay_ms": 350}
    assert with_language == {"playback_delay_ms": 350, "default_lang": "zh"}


def test_the_command_line_knows_two_languages():
    assert parse_arguments([]).lang is None
    assert parse_arguments(["--lang", "zh"]).lang == "zh"
    with pytest.raises(SystemExit):
        parse_arguments(["--lang", "fr"])
