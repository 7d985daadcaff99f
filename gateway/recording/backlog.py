"""Recordings whose session has ended, and the processes that finish their logs (`finish.py`)."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from operator import itemgetter
from pathlib import Path
from typing import Final

from gateway.recording import journal

log = logging.getLogger(__name__)

ROOT: Final = Path(__file__).parents[2]
MIB: Final = 2**20
BATCH: Final = 16
"""Folders for one process: half a second of its start is shared by them."""

BATCH_BYTES: Final = 64 * MIB
"""Of logs for one process, unless one alone is larger: four minutes with a camera, 10 s of a core.
What ends meanwhile waits for that."""

FINISH_TIMEOUT_S: Final = 600.0
FINISH_S_PER_MIB: Final = 3.0
"""More for each MiB of its logs: twenty times what one with a camera takes of a free core (0.15 s),
since live sessions come first. A process that takes longer hangs."""

MAX_FAILURES: Final = 5
"""Processes that may fail at one folder in a row. They count for themselves and give it up earlier
(`finish.py`), unless they fail before they come to it."""

RETRY_FIRST_S: Final = 30.0
RETRY_MOST_S: Final = 600.0
"""What cannot be finished now is tried again after so long, twice as long each time."""

END_GRACE_S: Final = 2.0


def processes_for(n_cores: int) -> int:
    """Return how many processes may run beside live sessions; one keeps up with 25 cameras."""
    return max(1, min(8, n_cores // 4))


class Backlog:
    """For the event loop only. Whoever owns it runs `finish_all` in tasks of its own.

    Args:
        has_room: whether the disk has room; does not ask it.
    """

    def __init__(self, has_room: Callable[[], bool]) -> None:
        self._has_room = has_room
        self._waiting: dict[Path, int | None] = {}
        """Bytes of each log, once they are known."""
        self._n_running = 0
        self._postponed: dict[Path, float] = {}
        """When each is tried again, on the loop's clock."""
        self._n_failures: Counter[Path] = Counter()
        self._n_postponed: Counter[Path] = Counter()
        self._added = asyncio.Event()

    def __len__(self) -> int:
        """Recordings that wait, are being finished or are tried again later."""
        return len(self._waiting) + self._n_running + len(self._postponed)

    def add(self, folders: Iterable[Path]) -> None:
        for folder in folders:
            self._waiting.setdefault(folder, None)
        self._added.set()

    def retry_due(self) -> None:
        """Line up what was postponed for long enough, if there is room on the disk now."""
        now = asyncio.get_running_loop().time()
        due = [folder for folder, at in self._postponed.items() if at <= now]
        if due and self._has_room():
            for folder in due:
                del self._postponed[folder]
            self.add(due)

    async def finish_all(self) -> None:
        """Finish what there is and what is added, one process at a time, until cancelled."""
        while True:
            while self._waiting:
                batch, n_bytes = await self._take_batch()
                self._n_running += len(batch)
                try:
                    if batch:
                        await self._finish(batch, n_bytes)
                finally:
                    self._n_running -= len(batch)
            self._added.clear()
            await self._added.wait()

    async def _take_batch(self) -> tuple[list[Path], int]:
        """Return folders and the bytes of their logs.

        The smallest are first: a short talk does not wait for all the long ones.
        """
        unknown = [folder for folder, n_bytes in self._waiting.items() if n_bytes is None]
        found = await asyncio.to_thread(_log_sizes, unknown)
        # Another task may have taken some meanwhile; what has been added since comes next time.
        self._waiting |= {folder: n for folder, n in found.items() if folder in self._waiting}
        known = [(n, folder) for folder, n in self._waiting.items() if n is not None]
        batch: list[Path] = []
        n_bytes = 0
        for n, folder in sorted(known, key=itemgetter(0))[:BATCH]:
            if batch and n_bytes + n > BATCH_BYTES:
                break
            batch.append(folder)
            n_bytes += n
            del self._waiting[folder]
        return batch, n_bytes

    async def _finish(self, folders: Sequence[Path], n_bytes: int) -> None:
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
            self._postpone(folders)
            return
        try:
            async with asyncio.timeout(FINISH_TIMEOUT_S + FINISH_S_PER_MIB * n_bytes / MIB):
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
        left = await asyncio.to_thread(_unfinished, folders)
        for folder in set(folders).difference(left):
            self._n_failures.pop(folder, None)
            self._n_postponed.pop(folder, None)
        if code == 0:
            # The program has said why; most likely the disk is full.
            self._postpone(left)
        elif left:
            log.warning("finishing recordings ended with code=%s count=%d", code, len(left))
            self._try_again(left)

    def _try_again(self, left: list[Path]) -> None:
        """Line the folders up once more that a process has not come to the end of."""
        # They are taken in their order: it was at the first one.
        first = left[0]
        self._n_failures[first] += 1
        if self._n_failures[first] > MAX_FAILURES:
            log.error("not finished now, processes fail at it recording=%s", first.name)
            del self._n_failures[first], left[0]
            self._postpone([first])
        self.add(left)

    def _postpone(self, folders: Sequence[Path]) -> None:
        now = asyncio.get_running_loop().time()
        for folder in folders:
            wait_s = min(RETRY_MOST_S, RETRY_FIRST_S * 2 ** min(self._n_postponed[folder], 10))
            self._n_postponed[folder] += 1
            self._postponed[folder] = now + wait_s


def _log_sizes(folders: Sequence[Path]) -> dict[Path, int]:
    """Return the bytes of each log; 0 for one that cannot be looked at."""
    sizes = dict.fromkeys(folders, 0)
    for folder in folders:
        with suppress(OSError):
            sizes[folder] = os.stat(folder / journal.NAME).st_size
    return sizes


def _unfinished(folders: Sequence[Path]) -> list[Path]:
    """Return those that nobody has finished and nobody is at, in their order."""
    return [
        folder
        for folder in folders
        if os.path.exists(folder / journal.NAME) and not _is_in_use(folder)
    ]


def _is_in_use(folder: Path) -> bool:
    try:
        with journal.locked(folder) as is_ours:
            return not is_ours
    except OSError:
        return False  # what cannot be looked at may be finished later


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
