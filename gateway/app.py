"""The gateway as an ASGI application."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import RedirectResponse, Response
from starlette.exceptions import HTTPException

from gateway import relative
from gateway.clock import Clock
from gateway.context import Gateway
from gateway.eta import Durations
from gateway.faults import Fault, FaultDesk
from gateway.pool import Address, Pool
from gateway.presets import Presets
from gateway.recording.service import Recordings
from gateway.requests import Problem, RequestLimits
from gateway.routes import (
    apps,
    chat,
    docs,
    health,
    metrics,
    pages,
    presets,
    queue,
    sessions,
    sockets,
    traces,
)
from gateway.routes import compile as compile_routes
from gateway.routes import config as config_routes
from gateway.routes import recordings as recording_routes
from gateway.routes import voices as voice_routes
from gateway.security import Guard, GuardMiddleware
from gateway.tickets import TicketQueue
from gateway.traces import TraceLog
from gateway.voice_files import VoiceFile
from gateway.voices import Voices
from shared.config import Config, is_loopback
from shared.errors import BadMessage, OmniError

ROUTE_SLUGS = {400: "bad_request", 404: "not_found", 405: "method_not_allowed"}
"""Slugs of what the framework refuses before a route is asked."""

ROUTES = (
    health,
    docs,
    metrics,
    queue,
    config_routes,
    compile_routes,
    sessions,
    sockets,
    chat,
    apps,
    presets,
    voice_routes,
    traces,
    recording_routes,
    pages,
)

STATIC_DIR = Path(__file__).parent / "static"
ASSETS_DIR = Path(__file__).parents[1] / "assets"
DEFAULT_VOICE = "ref_audio/default.wav"


def create_app(
    config: Config,
    workers: Sequence[Address],
    clock: Clock | None = None,
    static_dir: Path = STATIC_DIR,
    default_lang: str | None = None,
) -> FastAPI:
    """Return the application; its workers are polled from its start-up to its shutdown.

    Args:
        config: the validated configuration.
        workers: where the workers listen; none of them has to be up.
        clock: replaced by tests.
        static_dir: the page tree, with an `index.html`.
        default_lang: "zh" or "en", what pages are told to start in; None = nothing.
    """
    clock = clock or Clock()
    # The legs to the workers are local: a proxy named in the environment must not get them.
    client = httpx.AsyncClient(trust_env=False)
    pool = Pool(workers, client, clock)
    durations = Durations(config.service)
    data_dir = Path(config.service.data_dir)
    default_voice = default_voice_file(config.audio.ref_audio_path)
    recordings = Recordings(config, clock)
    gateway = Gateway(
        config=config,
        clock=clock,
        pool=pool,
        queue=TicketQueue(pool, config.service.max_queue_size, durations, clock),
        guard=Guard(config.security, is_local=is_loopback(config.service.bind)),
        desk=FaultDesk(default_lang),
        static_dir=static_dir,
        durations=durations,
        default_voice=default_voice,
        presets=Presets(ASSETS_DIR, default_voice),
        voices=Voices(data_dir / "assets" / "ref_audio", clock),
        traces=TraceLog(data_dir / "traces" / "record_trace.jsonl", clock),
        default_lang=default_lang,
        recordings=recordings,
        recorder=recordings.recorder,
    )

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        polling = asyncio.create_task(pool.run())
        recordings.start()
        try:
            yield
        finally:
            await gateway.drain()
            await recordings.stop()
            polling.cancel()
            with suppress(asyncio.CancelledError):
                await polling
            await client.aclose()

    problems: dict[int | str, dict[str, Any]] = {
        "4XX": {"model": Problem},
        "5XX": {"model": Problem},
    }
    app = FastAPI(
        title="Omni Duplex Gateway",
        lifespan=lifespan,
        responses=problems,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.gateway = gateway
    gateway.metrics.watch(gateway)
    for module in ROUTES:
        app.include_router(module.router)
    app.add_middleware(GuardMiddleware, guard=gateway.guard, desk=gateway.desk)
    app.add_middleware(RequestLimits, desk=gateway.desk)
    _add_error_handlers(app, gateway.desk)
    return app


def default_voice_file(configured: str | None) -> VoiceFile:
    """Return the voice of sessions that bring none; clients are not told where the file lies."""
    if configured:
        return VoiceFile(Path(configured), Path(configured).name)
    return VoiceFile(ASSETS_DIR / DEFAULT_VOICE, DEFAULT_VOICE)


def _add_error_handlers(app: FastAPI, desk: FaultDesk) -> None:
    """Give every HTTP error the one shape `{"detail": str, "slug": str}`, or a page."""

    async def fail(request: Request, error: Exception) -> Response:
        return desk.answer(error, request)

    async def fail_validation(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        return await fail(request, BadMessage(f"{where}: {first['msg']}"))

    async def fail_route(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        way = relative.without_slash(request.scope)
        if error.status_code == 404 and way and "endpoint" not in request.scope:
            # No route has taken it. The framework's own redirect would name our host and path.
            return RedirectResponse(way + relative.query(request.scope))
        slug = ROUTE_SLUGS.get(error.status_code, "http_error")
        fault = Fault(slug, str(error.detail), None, error.status_code)
        return desk.reply(fault, request, error.headers or {})

    app.add_exception_handler(OmniError, fail)
    app.add_exception_handler(RequestValidationError, fail_validation)
    app.add_exception_handler(HTTPException, fail_route)
    app.add_exception_handler(Exception, fail)
