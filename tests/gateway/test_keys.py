"""Which key a route asks for: what is said of it and what it does."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
import pytest

from gateway.app import create_app
from shared.config import Config

USER, ADMIN = "user-key", "admin-key"
KEYS = Config.model_validate({"security": {"api_keys": [USER], "admin_keys": [ADMIN]}})
DOCUMENT = Path(__file__).parents[2] / "docs" / "http.md"
ROWS = re.findall(r"^\| (`[A-Z]+ /.*?) \| (\w+) \| (.*) \|$", DOCUMENT.read_text(), re.MULTILINE)
ROUTES = [
    (method.upper(), path)
    for path, methods in create_app(Config(), []).openapi()["paths"].items()
    for method in methods
]


def documented_key(method: str, path: str) -> str:
    name = f"`{method} {path}`"
    found = {key for route, key, text in ROWS if name == route}
    found = found or {key for _, key, text in ROWS if name in text}
    (key,) = found
    return key


async def statuses(http: httpx.AsyncClient, method: str, path: str) -> list[int]:
    """Without a key, with a user's and with an administrator's."""
    url = re.sub(r"\{\w+\}", "x", path)
    headers = [{}, *({"Authorization": f"Bearer {key}"} for key in (USER, ADMIN))]
    return [(await http.request(method, url, headers=one)).status_code for one in headers]


async def test_every_route_asks_for_the_key_that_its_row_names(serve):
    wrong = {}
    async with (
        serve([], KEYS, ready=False) as running,
        running.client() as http,
    ):
        for method, path in ROUTES:
            nobody, user, admin = await statuses(http, method, path)
            asks = "admin" if user == 403 else "any" if nobody == 401 else "none"
            is_consistent = (asks == "none" or nobody == 401) and admin not in (401, 403)
            if asks != documented_key(method, path) or not is_consistent or user == 401:
                wrong[f"{method} {path}"] = (nobody, user, admin)

    assert wrong == {}
    assert {key for _, key, _ in ROWS} == {"none", "any", "admin"}


@pytest.mark.parametrize(
    ("key", "status", "slug"),
    [(None, 401, "unauthorized"), ("wrong", 401, "unauthorized"), (USER, 403, "forbidden")],
)
async def test_a_users_key_is_known_but_not_enough(serve, key, status, slug):
    """It was answered as if it were none, and pages asked for it again and again."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with (
        serve([], KEYS, ready=False) as running,
        running.client() as http,
    ):
        answer = await http.delete("/api/queue/q_0", headers=headers)

    assert (answer.status_code, answer.json()["slug"]) == (status, slug)
    assert ("www-authenticate" in answer.headers) == (status == 401)
