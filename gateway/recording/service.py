"""A gateway's recordings: who makes them, who finishes their logs, who removes old ones."""

from __future__ import annotations

import asyncio
import logging
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from gateway.clock import Clock
from gateway.recording import retention
from gateway.recording.backlog import Backlog, processes_for
from gateway.recording.recorder import JournalRecorder
from gateway.recording.store import Store
from gateway.recording.upload import MAX_UPLOADS
from gateway.recording.writer import Writer
from gateway.uploads import Uploads
from shared.config import Config

log = logging.getLogger(__name__)

MIB: Final = 2**20
FIRST_CLEAN_S: Final = 60.0
CLEAN_EVERY_S: Final = 86_400.0
LOOK_EVERY_S: Final = 1.0
"""For room on the disk. Asking may take as long as the disk likes: no session waits for it."""


class Recordings:
    """Call `start` on the loop that serves, and `stop` once its sessions have ended."""

    def __init__(self, config: Config, clock: Clock) -> None:
        self._config = config.recording
        self._clock = clock
        self.store = Store(Path(config.service.data_dir))
        self.writer = Writer(self.store, self._config.max_queue_mb * MIB, self._note_full)
        self.uploads = Uploads(MAX_UPLOADS)
        self._has_room = True
        self._backlog = Backlog(lambda: self._has_room)
        self.recorder: JournalRecorder | None = None
        if self._config.enabled:
            self.recorder = JournalRecorder(
                self.writer,
                clock,
                lambda: self._has_room,
                lambda folder: self._backlog.add([folder]),
            )
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def live(self) -> frozenset[str]:
        """Ids of the recordings whose session lives."""
        return self.recorder.live if self.recorder is not None else frozenset()

    @property
    def n_unfinished(self) -> int:
        """Recordings whose session has ended and that are not finished yet."""
        return len(self._backlog)

    def start(self) -> None:
        self.writer.start()
        self._tasks = [
            asyncio.create_task(self._look_for_earlier_ones()),
            asyncio.create_task(self._look_for_room()),
        ]
        for _ in range(processes_for(os.cpu_count() or 1)):
            self._tasks.append(asyncio.create_task(self._backlog.finish_all()))
        if retention.is_on(self._config):
            self._tasks.append(asyncio.create_task(self._clean_daily()))

    async def stop(self) -> None:
        """What is not finished yet is finished by the next start."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.to_thread(self.writer.close)

    async def _look_for_earlier_ones(self) -> None:
        self._backlog.add(await asyncio.to_thread(self._left_behind))

    def _left_behind(self) -> list[Path]:
        """Return what an earlier process has not finished, and remove its half-made files."""
        try:
            self.store.sweep()
            folders = self.store.unfinished()
        except OSError as error:
            log.warning("recordings of earlier starts cannot be looked at: %s", error.strerror)
            return []
        # Those of this process are announced by the writer.
        left = [folder for folder in folders if folder.name not in self.live]
        if left:
            log.info("unfinished recordings=%d", len(left))
        return left

    def _note_full(self) -> None:
        """Called by the writer's thread: no session may be promised more before the next look."""
        self._has_room = False

    async def _look_for_room(self) -> None:
        while True:
            self._has_room = await asyncio.to_thread(self.store.has_room)
            self._backlog.retry_due()
            await asyncio.sleep(LOOK_EVERY_S)

    async def _clean_daily(self) -> None:
        wait_s = FIRST_CLEAN_S
        while True:
            await asyncio.sleep(wait_s)
            wait_s = CLEAN_EVERY_S
            now = datetime.fromtimestamp(self._clock.wall(), tz=UTC)
            try:
                await asyncio.to_thread(retention.clean, self.store, self._config, now)
            except OSError as error:
                log.warning("recordings cannot be cleaned up: %s", error.strerror)
