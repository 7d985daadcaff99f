"""The apps that are served, and their switches."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Depends, HTTPException, Request
from pydantic import BaseModel, StrictBool

from gateway.apps import App
from gateway.context import Gateway, gateway_of, require_admin

router = APIRouter()


class Switch(BaseModel):
    enabled: StrictBool


@router.get("/api/apps")
async def apps(request: Request) -> dict[str, Any]:
    """The enabled apps, in the order in which pages show them."""
    known = gateway_of(request).apps
    return {"apps": [_row(app) for app in known if known.is_enabled(app.app_id)]}


@router.get("/api/admin/apps")
async def all_apps(request: Request) -> dict[str, Any]:
    gateway = gateway_of(request)
    return {"apps": [_admin_row(gateway, app) for app in gateway.apps]}


@router.put("/api/admin/apps/{app_id}", dependencies=[Depends(require_admin)])
async def switch_app(request: Request, app_id: str, switch: Switch) -> dict[str, Any]:
    """Takes effect at once, for what begins from now on, and lasts until the gateway ends."""
    gateway = gateway_of(request)
    app = gateway.apps.find(app_id)
    if app is None:
        raise HTTPException(404, f"There is no app {app_id!r}")
    gateway.apps.switch(app, enabled=switch.enabled)
    return {"success": True, "app": _admin_row(gateway, app)}


def _row(app: App) -> dict[str, Any]:
    return {"app_id": app.app_id, "name": app.name, "route": app.route}


def _admin_row(gateway: Gateway, app: App) -> dict[str, Any]:
    return {**_row(app), "enabled": gateway.apps.is_enabled(app.app_id)}
