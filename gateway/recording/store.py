"""The folder of recordings: names, what is in it, and what of it may be shown.

    <data_dir>/sessions/<recording_id>/
        meta.json        from the first moment on
        log.msgpack      while the session lives and until it is finished (`journal.py`)
        recording.json   from then on, beside the files it names (`docs/recordings.md`)

A name that begins with a dot is work in progress and is shown to nobody.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from gateway.recording import journal
from shared.errors import RecordingInUse

log = logging.getLogger(__name__)

META: Final = "meta.json"
RECORDING: Final = "recording.json"
COMMENT: Final = "comment.txt"

MAKING: Final = ".making-"
DELETING: Final = ".deleting-"

ID: Final = re.compile(r"[A-Za-z0-9_-]{1,200}")
MAX_SESSION_PART: Final = 64
"""Characters of the client's session id in a recording's id."""

STALE_S: Final = 3600.0
"""Age of a half-made file that nobody works on any more."""

TOKEN_BYTES: Final = 12
"""Of chance in an id: whoever knows an id may see the recording."""


MIN_FREE_BYTES: Final = 64 * 2**20
"""A minute of full duplex with a camera. What is smaller is left to those that live already."""


@dataclass(frozen=True, slots=True)
class Summary:
    """A line in the list of recordings."""

    recording_id: str
    title: str
    app_type: str
    created_at: datetime
    duration_s: float | None
    n_bytes: int


class Store:
    """All recordings of one data folder. Its methods wait for the disk.

    Args:
        data_dir: `service.data_dir`; the folder `sessions` in it is made when it is needed.
    """

    def __init__(self, data_dir: Path) -> None:
        self.root = data_dir.resolve() / "sessions"
        self._summaries: dict[str, tuple[object, Summary]] = {}

    def has_room(self) -> bool:
        """Whether another recording may begin; True where nobody can tell."""
        folder = next(path for path in (self.root, *self.root.parents) if os.path.isdir(path))
        if not os.access(folder, os.W_OK | os.X_OK):
            return False
        try:
            return shutil.disk_usage(folder).free >= MIN_FREE_BYTES
        except OSError:
            return True

    def create(
        self,
        recording_id: str,
        meta: Mapping[str, Any],
        fill: Callable[[Path], None] = lambda _: None,
    ) -> Path:
        """Make the folder of a new recording and return it.

        Args:
            fill: writes into the folder, wherever it is then, before anybody can see it.

        Raises:
            OSError: the disk refuses; nothing is left.
            TypeError, ValueError: JSON cannot hold `meta`; the same.
        """
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        making = self.root / f"{MAKING}{recording_id}"
        making.mkdir(mode=0o700)
        try:
            # Not forced to the disk: the log is not either, and live sessions wait for this thread.
            with open(making / META, "xb", opener=_private) as file:
                file.write(_json(meta))
            fill(making)
            return making.rename(self.root / recording_id)
        except (OSError, TypeError, ValueError):
            shutil.rmtree(making, ignore_errors=True)
            raise

    def find(self, recording_id: str) -> Path | None:
        """Return the folder of a recording; None: there is none of this name, or it is a link."""
        if not ID.fullmatch(recording_id):
            return None
        folder = self.root / recording_id
        return folder if is_own_file(folder / META) and not os.path.islink(folder) else None

    def folders(self) -> Iterator[Path]:
        """Yield the folder of everything that is a recording."""
        try:
            names = sorted(os.listdir(self.root))
        except FileNotFoundError:
            return
        for name in names:
            folder = self.find(name)
            if folder is not None:
                yield folder

    def unfinished(self) -> list[Path]:
        """Return the folders whose log has not been turned into a recording."""
        return [folder for folder in self.folders() if is_own_file(folder / journal.NAME)]

    def summaries(self) -> list[Summary]:
        """Return all recordings with a valid `meta.json`, the newest first."""
        # One snapshot: the list of an administrator and the daily removal may run side by side.
        cached = self._summaries
        found = [s for folder in self.folders() if (s := self._summary(folder, cached)) is not None]
        ids = {summary.recording_id for summary in found}
        self._summaries = {name: one for name, one in list(cached.items()) if name in ids}
        return sorted(found, key=lambda summary: summary.created_at, reverse=True)

    def delete(self, recording_id: str) -> bool:
        """Remove a recording; False: there is none of this name.

        Raises:
            RecordingInUse: its session lives, it is being finished, or somebody is at all of it.
            OSError: it cannot be removed.
        """
        folder = self.find(recording_id)
        if folder is None:
            return False
        doomed = self.root / f"{DELETING}{recording_id}-{secrets.token_hex(4)}"
        try:
            with _alone(folder), journal.locked(folder) as is_ours:
                if not is_ours:
                    raise RecordingInUse("This recording is still being made")
                # First out of sight as a whole, so that nobody sees a half of it.
                folder.rename(doomed)
        except FileNotFoundError:
            return False  # somebody else was faster
        shutil.rmtree(doomed)
        return True

    def sweep(self) -> None:
        """Remove what an earlier process was about to remove, to make, to receive or to write.

        What was half made in the last hour stays: somebody may be at it.

        Raises:
            OSError: the folder cannot be read. What cannot be removed stays.
        """
        if not self.root.is_dir():
            return
        for doomed in self.root.glob(f"{DELETING}*"):
            shutil.rmtree(doomed, ignore_errors=True)
        for made in filter(_is_stale, self.root.glob(f"{MAKING}*")):
            shutil.rmtree(made, ignore_errors=True)
        for folder in self.folders():
            for part in filter(_is_stale, folder.glob(".*-*")):
                with suppress(OSError):
                    part.unlink()

    def _summary(self, folder: Path, known: dict[str, tuple[object, Summary]]) -> Summary | None:
        try:
            # A file that is added or replaced changes the folder's time; a live log does not.
            seen = (folder.stat().st_mtime_ns, (folder / META).stat().st_mtime_ns)
            cached = known.get(folder.name)
            if cached is not None and cached[0] == seen:
                return cached[1]
            summary = summary_of(folder)
            if summary is not None and not (folder / journal.NAME).exists():
                known[folder.name] = (seen, summary)
        except OSError:
            return None  # removed meanwhile, or the disk fails there: the others are shown
        return summary


def summary_of(folder: Path) -> Summary | None:
    """Return what a recording's `meta.json` and its files say; None: it is none of ours."""
    meta = read_json(folder / META)
    try:
        created_at = datetime.fromisoformat(meta["created_at"])
        if created_at.tzinfo is None:
            created_at = created_at.astimezone()
        duration_s = meta.get("duration_s")
        return Summary(
            recording_id=folder.name,
            title=str(meta.get("title", "")),
            app_type=str(meta.get("app_type", "")),
            created_at=created_at,
            duration_s=duration_s if isinstance(duration_s, int | float) else None,
            n_bytes=size_of(folder),
        )
    except (KeyError, TypeError, ValueError, OverflowError):
        return None


def new_id(began_at: datetime, session_id: str) -> str:
    """Return the id of a new recording: readable, and not to be guessed."""
    said = re.sub(r"[^A-Za-z0-9_-]", "_", session_id)[:MAX_SESSION_PART]
    return f"{began_at:%Y%m%d_%H%M%S}_{said}_{secrets.token_urlsafe(TOKEN_BYTES)}"


def title_of(began_at: datetime) -> str:
    """Return the title of a new recording: the gateway's local time, in no language."""
    return f"{began_at.astimezone():%Y-%m-%d %H:%M}"


def files_of(folder: Path) -> Iterator[Path]:
    """Yield the files of a recording that are for its readers."""
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            if not is_private(name) and is_own_file(Path(parent, name)):
                yield Path(parent, name)


def is_private(name: str) -> bool:
    """Whether a file of this name is the recorder's own: its log, or half-made."""
    return name.startswith(".") or name == journal.NAME


def is_own_file(path: Path) -> bool:
    """Whether a file is there, and not a link, which may lead out of its recording."""
    return os.path.isfile(path) and not os.path.islink(path)


def is_unfinished(folder: Path) -> bool:
    """Whether there is a log and nothing that has been made of it."""
    # The log first: it goes once the other one is there.
    return is_own_file(folder / journal.NAME) and not os.path.exists(folder / RECORDING)


@contextmanager
def kept(folder: Path) -> Iterator[None]:
    """Keep a recording from being removed while somebody is at all of its files.

    Several may at a time, in several processes too.

    Raises:
        OSError: the folder cannot be opened.
    """
    with _open_folder(folder) as opened:
        # Nobody holds it alone for longer than a rename takes.
        with suppress(OSError):
            fcntl.flock(opened, fcntl.LOCK_SH)
        yield


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Raises RecordingInUse: it is `kept`. OSError: the folder cannot be opened."""
    with _open_folder(folder) as opened:
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise RecordingInUse("Somebody is at the files of this recording") from error
        except OSError:
            pass  # a network disk that has no locks for folders: `kept` could not be told either
        yield


@contextmanager
def _open_folder(folder: Path) -> Iterator[int]:
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield opened
    finally:
        os.close(opened)


def _is_stale(path: Path) -> bool:
    try:
        return path.lstat().st_mtime < time.time() - STALE_S
    except OSError:
        return False


def size_of(folder: Path) -> int:
    """Return the bytes of all files; one that vanishes or cannot be seen counts as nothing."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(parent, name)).st_size
            except OSError:
                continue
    return total


def read_json(path: Path) -> dict[str, Any]:
    """Return a JSON object; an empty one for a file that is missing or holds none."""
    try:
        body = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return body if isinstance(body, dict) else {}


def write_json(path: Path, body: Mapping[str, Any]) -> None:
    """Replace a file in one step, and not before its content is on the disk. Raises OSError."""
    write_atomically(path, _json(body))


def write_atomically(path: Path, content: bytes) -> None:
    """Raises OSError; the old content stays, and nothing of the new one is left."""
    part = path.with_name(f".{path.name}-{secrets.token_hex(4)}")
    try:
        with open(part, "xb", opener=_private) as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        # Whatever it was; a signal may end a process here.
        part.unlink(missing_ok=True)


def _json(body: Mapping[str, Any]) -> bytes:
    return json.dumps(body, ensure_ascii=False, indent=1).encode(errors="replace")


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
