"""A gateway's recordings: who makes them, who finishes their logs, who removes old ones."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from gateway.clock import Clock
from gateway.recording import journal, retention
from gateway.recording.recorder import JournalRecorder
from gateway.recording.store import Store
from gateway.recording.upload import MAX_UPLOADS
from gateway.recording.writer import Writer
from gateway.uploads import Uploads
from shared.config import Config

log = logging.getLogger(__name__)

ROOT: Final = Path(__file__).parents[2]
MIB: Final = 2**20
BATCH: Final = 16
"""Folders for one process: half a second of its start is shared by them."""

FINISH_TIMEOUT_S: Final = 1800.0
"""For one folder; an hour with a camera takes about 90 s of one core."""

MAX_FAILURES: Final = 5
"""Processes that may fail at one folder. They count for themselves and give it up earlier
(`finish.py`), unless they fail before they come to it."""

END_GRACE_S: Final = 2.0
FIRST_CLEAN_S: Final = 60.0
CLEAN_EVERY_S: Final = 86_400.0
LOOK_EVERY_S: Final = 5.0
"""For room on the disk. Asking may take as long as the disk likes: no session waits for it."""


class Recordings:
    """Call `start` on the loop that serves, and `stop` once its sessions have ended."""

    def __init__(self, config: Config, clock: Clock) -> None:
        self._config = config.recording
        self._clock = clock
        self.store = Store(Path(config.service.data_dir))
        self.writer = Writer(self.store, self._config.max_queue_mb * MIB)
        self.uploads = Uploads(MAX_UPLOADS)
        self.recorder: JournalRecorder | None = None
        if self._config.enabled:
            self.recorder = JournalRecorder(
                self.writer, clock, lambda: self._has_room, self._finish_later
            )
        self._has_room = True
        self._to_finish: deque[Path] = deque()
        self._n_failures: Counter[Path] = Counter()
        self._added = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def live(self) -> frozenset[str]:
        """Ids of the recordings whose session lives."""
        return self.recorder.live if self.recorder is not None else frozenset()

    @property
    def n_unfinished(self) -> int:
        """Recordings that wait to be finished."""
        return len(self._to_finish)

    def start(self) -> None:
        self.writer.start()
        self._tasks = [asyncio.create_task(self._finish_all())]
        if self._config.enabled:
            self._tasks.append(asyncio.create_task(self._look_for_room()))
        if retention.is_on(self._config):
            self._tasks.append(asyncio.create_task(self._clean_daily()))

    async def stop(self) -> None:
        """What is not finished yet is finished by the next start."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.to_thread(self.writer.close)

    def _finish_later(self, folder: Path) -> None:
        self._to_finish.append(folder)
        self._added.set()

    async def _finish_all(self) -> None:
        self._to_finish.extend(await asyncio.to_thread(self._left_behind))
        while True:
            while self._to_finish:
                batch = [self._to_finish.popleft() for _ in range(min(BATCH, self.n_unfinished))]
                await self._finish(batch)
            self._added.clear()
            await self._added.wait()

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

    async def _finish(self, folders: Sequence[Path]) -> None:
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "gateway.recording.finish",
                *map(str, folders),
                cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                stdin=asyncio.subprocess.DEVNULL,
            )
        except OSError as error:
            log.warning("recordings not finished now count=%d: %s", len(folders), error.strerror)
            return
        try:
            async with asyncio.timeout(FINISH_TIMEOUT_S * len(folders)):
                code = await process.wait()
        except TimeoutError:
            code = None
            # Told to end, it would take its attempt back and hang again.
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
        finally:
            if process.returncode is None:
                await _end(process)
        if code != 0:
            log.warning("finishing recordings ended with code=%s count=%d", code, len(folders))
            self._try_again(await asyncio.to_thread(_with_log, folders))

    def _try_again(self, left: list[Path]) -> None:
        """Line the folders up once more that a process has not come to the end of."""
        if not left:
            return
        # They are taken in their order: it was at the first one.
        self._n_failures[left[0]] += 1
        if self._n_failures[left[0]] > MAX_FAILURES:
            log.error("not finished until the next start recording=%s", left[0].name)
            del self._n_failures[left[0]], left[0]
        self._to_finish.extendleft(reversed(left))

    async def _look_for_room(self) -> None:
        while True:
            self._has_room = await asyncio.to_thread(self.store.has_room)
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


def _with_log(folders: Sequence[Path]) -> list[Path]:
    """Return those that are not finished; one that cannot be looked at is left out."""
    return [folder for folder in folders if os.path.exists(folder / journal.NAME)]


async def _end(process: asyncio.subprocess.Process) -> None:
    with suppress(ProcessLookupError):
        process.terminate()
    with suppress(TimeoutError):
        async with asyncio.timeout(END_GRACE_S):
            await process.wait()
    if process.returncode is None:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()
