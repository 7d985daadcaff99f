"""Begins the record of each session and passes what is said to the writer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gateway.clock import Clock
from gateway.recording import journal
from gateway.recording.store import new_id, title_of
from gateway.recording.writer import Target, Writer
from shared.protocol import Command, Event, RequestType

log = logging.getLogger(__name__)


class JournalRecorder:
    """The `Recorder` of a gateway (`contract.py`); for its event loop only.

    Args:
        has_room: whether the disk has room for another recording; does not ask it.
        on_closed: told the folder of each recording whose log is complete, on the loop.
    """

    def __init__(
        self,
        writer: Writer,
        clock: Clock,
        has_room: Callable[[], bool],
        on_closed: Callable[[Path], None],
    ) -> None:
        self._writer = writer
        self._has_room = has_room
        self._clock = clock
        self._on_closed = on_closed
        self._live: set[str] = set()

    @property
    def live(self) -> frozenset[str]:
        """Ids of the recordings whose session lives."""
        return frozenset(self._live)

    def begin(
        self,
        session_id: str,
        request_type: RequestType,
        worker_id: int,
        config: Mapping[str, Any],
    ) -> JournalRecording | None:
        if not self._has_room():
            # No id either: the client would be shown a recording that never exists.
            log.warning("not recorded, the disk has no room or cannot be written to")
            return None
        began_at = datetime.fromtimestamp(self._clock.wall(), tz=UTC)
        recording_id = new_id(began_at.astimezone(), session_id)
        meta = {
            "session_id": recording_id,
            "client_session_id": session_id,
            "app_type": request_type,
            "created_at": began_at.isoformat(),
            "ended_at": None,
            "duration_s": None,
            "worker_id": worker_id,
            "title": title_of(began_at),
            "config": dict(config),
        }
        loop = asyncio.get_running_loop()

        def tell(folder: Path) -> None:
            # The loop may have ended meanwhile: the next start finishes what is left.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(self._on_closed, folder)

        self._live.add(recording_id)
        target = Target(recording_id, meta, tell)
        self._writer.begin(target)
        return JournalRecording(self._writer, target, self._clock.monotonic(), self._live)


class JournalRecording:
    """The `SessionRecording` of one session (`contract.py`)."""

    def __init__(self, writer: Writer, target: Target, began_at: float, live: set[str]) -> None:
        self.recording_id = target.recording_id
        self._writer = writer
        self._target = target
        self._began_at = began_at
        self._ended_at = began_at
        self._live = live

    def took(self, command: Command, arrived_at: float) -> None:
        self._note(journal.TOOK, command, 0.0, arrived_at)

    def gave(self, event: Event, wall_clock_ms: float, at: float) -> None:
        self._note(journal.GAVE, event, wall_clock_ms, at)

    def end(self, reason: str) -> None:
        """Safe to call twice."""
        self._live.discard(self.recording_id)
        self._writer.end(self._target, self._ended_at - self._began_at, reason)

    def _note(self, kind: int, message: Command | Event, wall_clock_ms: float, at: float) -> None:
        self._ended_at = max(self._ended_at, at)
        # What came while the client was queued counts as come at the begin.
        since_s = max(0.0, at - self._began_at)
        self._writer.append(self._target, kind, since_s, message, wall_clock_ms)
