"""The schema of all routes as pages. Their addresses are relative: a proxy may serve us below a
path of its own."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.openapi.docs import get_redoc_html, get_swagger_ui_html
from fastapi.responses import HTMLResponse

router = APIRouter(include_in_schema=False)

SCHEMA = "openapi.json"


@router.get("/docs")
async def docs(request: Request) -> HTMLResponse:
    return get_swagger_ui_html(openapi_url=SCHEMA, title=request.app.title)


@router.get("/redoc")
async def redoc(request: Request) -> HTMLResponse:
    return get_redoc_html(openapi_url=SCHEMA, title=request.app.title)
