"""The switches of the apps."""

from __future__ import annotations

import pytest

from gateway.apps import Apps
from gateway.faults import fault_of
from shared.config import Config
from shared.errors import AppDisabled
from tests.fakes.front import open_front

WITH_KEYS = Config.model_validate({"security": {"api_keys": ["k1"], "admin_keys": ["boss"]}})
ALL = [
    {"app_id": "turnbased", "name": "Turn-based Chat", "route": "/turnbased"},
    {"app_id": "half_duplex_audio", "name": "Half-Duplex Audio", "route": "/half_duplex"},
    {"app_id": "omni", "name": "Omni Full-Duplex", "route": "/omni"},
    {"app_id": "audio_duplex", "name": "Audio Full-Duplex", "route": "/audio_duplex"},
]


async def test_all_apps_are_enabled_at_the_start_and_in_one_order():
    async with open_front() as front:
        shown = (await front.http.get("/api/apps")).json()
        administered = (await front.http.get("/api/admin/apps")).json()

    assert shown == {"apps": ALL}
    assert administered == {"apps": [{**app, "enabled": True} for app in ALL]}


async def test_a_disabled_app_is_not_shown_until_it_is_enabled_again():
    async with open_front() as front:
        off = await front.http.put("/api/admin/apps/omni", json={"enabled": False})
        shown = (await front.http.get("/api/apps")).json()["apps"]
        administered = (await front.http.get("/api/admin/apps")).json()["apps"]
        on = await front.http.put("/api/admin/apps/omni", json={"enabled": True})
        again = (await front.http.get("/api/apps")).json()["apps"]

    assert off.json() == {"success": True, "app": {**ALL[2], "enabled": False}}
    assert shown == [app for app in ALL if app["app_id"] != "omni"]
    assert [app["enabled"] for app in administered] == [True, True, False, True]
    assert on.json()["app"]["enabled"] is True
    assert again == ALL


@pytest.mark.parametrize(
    ("path", "body", "status", "slug"),
    [
        ("nothing", {"enabled": False}, 404, "not_found"),
        ("omni", {}, 422, "bad_message"),
        ("omni", {"enabled": "no"}, 422, "bad_message"),
        ("omni", [], 422, "bad_message"),
    ],
)
async def test_a_wrong_switch_changes_nothing(path, body, status, slug):
    async with open_front() as front:
        answer = await front.http.put(f"/api/admin/apps/{path}", json=body)
        shown = (await front.http.get("/api/apps")).json()["apps"]

    assert (answer.status_code, answer.json()["slug"]) == (status, slug)
    assert shown == ALL


async def test_switching_needs_an_admin_key_where_there_are_any():
    async with open_front(WITH_KEYS) as front:
        path = "/api/admin/apps/omni"
        answers = [
            await front.http.put(f"{path}?api_key={key}", json={"enabled": False})
            for key in ("k1", "boss")
        ]

    assert [answer.status_code for answer in answers] == [403, 200]


def test_a_disabled_app_is_refused_by_its_name():
    apps = Apps()
    apps.switch(apps.find("turnbased"), enabled=False)

    apps.require("omni")
    with pytest.raises(AppDisabled, match=r"^Turn-based Chat is currently disabled$") as refused:
        apps.require("turnbased")

    fault = fault_of(refused.value)
    assert (fault.slug, fault.ws_close, fault.http_status) == ("app_disabled", 1008, 403)
