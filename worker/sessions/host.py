"""What the sessions of a worker share, and the limits they live under."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from shared.errors import EngineFault
from shared.limits import IDLE_TIMEOUT_S
from worker.engine.engine import Engine
from worker.engine.slots import SlotTable
from worker.metrics import WorkerMetrics
from worker.models.contract import Model
from worker.sessions.media import MediaDecoder

if TYPE_CHECKING:
    from worker.sessions.session import Session


PREPARE_TIMEOUT_S = 30.0
"""A place that nobody prepares is somebody else's; clients prepare as soon as they have one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionLimits:
    """Time limits of a session, in seconds."""

    pause_timeout_s: float = 60.0
    idle_timeout_s: float = IDLE_TIMEOUT_S
    prepare_timeout_s: float = PREPARE_TIMEOUT_S
    max_session_s: float = 0.0
    """0 = none."""
    ask_timeout_s: float = 300.0
    """From a chat request to the end of its answer."""


@dataclass(slots=True)
class SessionHost:
    """What all sessions of a worker share; made on the event loop they run on."""

    model: Model
    engine: Engine
    slots: SlotTable
    media: MediaDecoder
    call: Callable[[Callable[[], Any]], Future[Any]]
    """Runs a function on the thread that owns the caches."""
    on_broken: Callable[[EngineFault], None]
    """Told when a slot could not be cleaned."""
    fault: asyncio.Future[EngineFault]
    """Done as soon as the device is lost."""
    limits: SessionLimits = SessionLimits()
    metrics: WorkerMetrics = field(default_factory=WorkerMetrics)
    sessions: dict[int, Session] = field(default_factory=dict)
    """Slot -> session, newest last."""
