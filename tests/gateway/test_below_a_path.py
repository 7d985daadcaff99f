"""A proxy may serve the gateway below a path, which it cuts off: no address names the root."""

from __future__ import annotations

from urllib.parse import urljoin, urlsplit

import httpx
import pytest

from gateway.routes import docs
from tests.fakes.front import open_front


@pytest.mark.parametrize(
    ("path", "location"),
    [
        ("/omni/", "../omni"),
        ("/omni/?lang=zh", "../omni?lang=zh"),
        ("/omni//", "../../omni"),
        ("/api/queue/", "../queue"),
        ("/nothing/", "../nothing"),
        ("/a%23b%e4/", "../a%23b%e4"),
        ("//other.example/", "../other.example"),
    ],
)
async def test_a_slash_too_many_is_taken_away(path, location):
    async with open_front() as front:
        target = httpx.URL("http://127.0.0.1").copy_with(raw_path=path.encode())
        answer = await front.http.get(target)

    assert (answer.status_code, answer.headers["location"]) == (307, location)


@pytest.mark.parametrize(
    "path",
    [
        "//other.example/",
        "///other.example//",
        "/%2f%2fother.example/",
        "/%5c%5cother.example/",
        "/\\other.example/",
        "/x/\\\\other.example/",
        "/https:%2f%2fother.example/",
        "/https:///other.example//",
        "/@other.example/",
        "/..//other.example/",
        "/x%0d%0aLocation:%20https:%2f%2fother.example/",
        "/?//other.example/",
        "/omni/?//other.example/",
    ],
)
async def test_no_address_leads_to_another_host(path):
    async with open_front() as front:
        target = httpx.URL("http://127.0.0.1").copy_with(raw_path=path.encode())
        answer = await front.http.get(target, headers={"Host": "other.example"})
    location = answer.headers.get("location", "../")

    assert location.startswith("../")
    # A browser reads a backslash as a slash.
    asked, way = (text.replace("\\", "/") for text in (path, location))
    assert urlsplit(urljoin(f"http://own.example{asked}", way)).netloc == "own.example"
    assert "\n" not in location


@pytest.mark.parametrize("path", ["/nothing", "//", "/static/nothing/", "/api/sessions/x/assets/"])
async def test_what_is_not_there_is_not_found(path):
    async with open_front() as front:
        target = httpx.URL("http://127.0.0.1").copy_with(raw_path=path.encode())
        answer = await front.http.get(target)

    assert (answer.status_code, answer.json()["slug"]) == (404, "not_found")


@pytest.mark.parametrize("path", ["/docs", "/redoc"])
async def test_the_schemas_pages_name_it_by_a_relative_address(path):
    async with open_front() as front:
        page = await front.http.get(path)
        schema = await front.http.get(f"/{docs.SCHEMA}")

    assert docs.SCHEMA in page.text
    assert f"/{docs.SCHEMA}" not in page.text
    assert schema.json()["paths"]
