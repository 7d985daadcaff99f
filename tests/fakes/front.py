"""The gateway's HTTP surface without sockets and workers, for routes that need neither."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from gateway.app import STATIC_DIR, create_app
from gateway.context import Gateway
from shared.config import Config


@dataclass(frozen=True)
class Front:
    gateway: Gateway
    http: httpx.AsyncClient


@asynccontextmanager
async def open_front(
    config: Config | None = None, static_dir: Path = STATIC_DIR, default_lang: str | None = None
) -> AsyncIterator[Front]:
    app = create_app(config or Config(), [], static_dir=static_dir, default_lang=default_lang)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
        yield Front(app.state.gateway, http)
