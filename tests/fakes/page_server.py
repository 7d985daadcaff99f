"""Pages and their data out of dictionaries, on a free port, for tests of the browser's side."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import FileResponse, JSONResponse
from fastapi.staticfiles import StaticFiles

from scripts.machine import fetch
from tests.fakes.ports import free_port

STATIC = Path(__file__).parents[2] / "gateway" / "static"
START_TIMEOUT_S = 30.0


@dataclass
class Answers:
    """What the server says, by "METHOD /path"; tests change it while the page is open.

    A value is JSON, a `Path` (sent as a file, with ranges) or text. Whatever is not named here
    is a 404 in the gateway's shape.
    """

    by_request: dict[str, Any] = field(default_factory=dict)
    pages: dict[str, str] = field(default_factory=dict)
    """Path -> file name of the page tree."""
    admin_key: str | None = None
    """Asked for by every request but those for pages and files."""
    refused: dict[str, tuple[int, str]] = field(default_factory=dict)
    """Request -> status and slug that it is answered with."""
    asked: list[tuple[str, Any]] = field(default_factory=list, repr=False)
    """Every request for data with its JSON body."""

    def n_asked(self, request: str) -> int:
        return sum(name == request for name, _ in self.asked)


def make_app(answers: Answers) -> FastAPI:
    app = FastAPI()
    app.mount("/static", StaticFiles(directory=STATIC))

    @app.get("/favicon.ico")
    async def favicon() -> Response:
        return Response(status_code=204)

    @app.api_route("/{path:path}", methods=["GET", "HEAD", "POST", "PUT", "DELETE"])
    async def answer(request: Request, path: str) -> Response:
        if page := answers.pages.get(f"/{path}"):
            return FileResponse(STATIC / page)
        name = f"{request.method} /{path}"
        answers.asked.append((name, await request.json() if await request.body() else None))
        key = request.headers.get("authorization")
        if answers.admin_key is not None and key != f"Bearer {answers.admin_key}":
            return JSONResponse({"detail": "An admin key is needed", "slug": "unauthorized"}, 401)
        if refusal := answers.refused.get(name):
            status, slug = refusal
            return JSONResponse({"detail": f"Refused: {slug}", "slug": slug}, status)
        value = answers.by_request.get(name.replace("HEAD", "GET"))
        match value:
            case None:
                return JSONResponse({"detail": "Not Found", "slug": "not_found"}, 404)
            case Path():
                return FileResponse(value)
            case str():
                return Response(value, media_type="text/plain")
        return JSONResponse(value)

    return app


@contextlib.contextmanager
def serving_pages(answers: Answers) -> Iterator[str]:
    """A running server; its address without a slash at the end."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        config = uvicorn.Config(make_app(answers), log_level="warning", lifespan="off")
        server = uvicorn.Server(config)
        thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])), daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(timeout=10)


@contextlib.contextmanager
def gateway_alone(folder: Path, **settings: Any) -> Iterator[str]:
    """The gateway as a process, with no worker that answers; its address without a slash.

    Args:
        folder: of its configuration, and its `service.data_dir`.
        settings: the other sections of its configuration.
    """
    config = folder / "config.json"
    content = {"service": {"data_dir": str(folder)}, **settings}
    config.write_text(json.dumps(content), encoding="utf-8")
    port = free_port()
    argv = [sys.executable, "-m", "gateway", "--config", str(config), "--port", str(port)]
    argv += ["--workers", f"127.0.0.1:{free_port()}"]
    with subprocess.Popen(argv, cwd=STATIC.parents[1]) as gateway:
        try:
            deadline = time.monotonic() + START_TIMEOUT_S
            while fetch(f"http://127.0.0.1:{port}/health", 1.0) is None:
                assert time.monotonic() < deadline, "the gateway did not start"
                time.sleep(0.05)
            yield f"http://127.0.0.1:{port}"
        finally:
            gateway.terminate()
