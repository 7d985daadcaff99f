"""What the routes of one gateway share."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from starlette.requests import HTTPConnection, Request

from gateway.apps import Apps
from gateway.clock import Clock
from gateway.eta import Durations
from gateway.faults import FaultDesk
from gateway.inbox import HeldBytes
from gateway.link import Background
from gateway.metrics import GatewayMetrics
from gateway.offload import LargeFrames
from gateway.pool import Pool
from gateway.presets import Presets
from gateway.recording.contract import Recorder
from gateway.recording.service import Recordings
from gateway.security import Guard
from gateway.tickets import TicketQueue
from gateway.traces import TraceLog
from gateway.voice_files import VoiceFile
from gateway.voices import Voices
from shared.config import Config
from shared.errors import TooManyConnections
from shared.limits import MAX_SESSIONS

log = logging.getLogger(__name__)

TELL_TIMEOUT_S = 5.0
CLEANUP_TIMEOUT_S = 10.0


@dataclass
class Gateway:
    config: Config
    clock: Clock
    pool: Pool
    queue: TicketQueue
    guard: Guard
    desk: FaultDesk
    static_dir: Path
    durations: Durations
    default_voice: VoiceFile
    presets: Presets
    voices: Voices
    traces: TraceLog
    recordings: Recordings
    default_lang: str | None = None
    """Language of pages for browsers that have chosen none; None = the browser's own."""
    apps: Apps = field(default_factory=Apps)
    large: LargeFrames = field(default_factory=LargeFrames)
    held: HeldBytes = field(default_factory=HeldBytes)
    background: Background = field(default_factory=Background)
    metrics: GatewayMetrics = field(default_factory=GatewayMetrics)
    closing: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the gateway goes down: sessions end with `server_shutdown`."""
    recorder: Recorder | None = None
    """None = nothing is recorded."""
    n_diagnostics: int = 0
    sessions: set[asyncio.Task[object]] = field(default_factory=set)

    @contextmanager
    def session(self) -> Iterator[None]:
        """Count the running task as a session that `drain` waits for.

        Raises:
            TooManyConnections: as many run or wait as one process can hold.
        """
        if len(self.sessions) >= MAX_SESSIONS:
            raise TooManyConnections("The service holds too many sessions")
        task = asyncio.current_task()
        assert task is not None
        self.sessions.add(task)
        try:
            yield
        finally:
            self.sessions.discard(task)

    async def drain(self) -> None:
        """Tell every session that the gateway goes down, then wait until the workers are free."""
        self.closing.set()
        sessions = list(self.sessions)
        if sessions:
            log.info("draining sessions=%d", len(sessions))
            await asyncio.wait(sessions, timeout=TELL_TIMEOUT_S)
        await self.background.settle(CLEANUP_TIMEOUT_S)


def gateway_of(connection: HTTPConnection) -> Gateway:
    """The gateway that a request or a socket came to (a FastAPI dependency)."""
    gateway = connection.app.state.gateway
    assert isinstance(gateway, Gateway)
    return gateway


def require_admin(request: Request) -> None:
    """Raises Forbidden unless an admin's key came with the request (a FastAPI dependency)."""
    gateway_of(request).guard.check_admin(request)
