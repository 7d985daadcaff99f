"""The thread that brings live sessions to the disk, and the bounded queue before it.

The event loop hands over messages by reference; encoding, check sums and disk are the thread's.
A session whose log cannot be written is not recorded any further, the others go on.
"""

from __future__ import annotations

import errno
import logging
import queue
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec

from gateway.recording import journal
from gateway.recording.journal import Journal
from gateway.recording.store import Store
from shared.protocol import Ask, Command, Event, Prepare, PrepareTurns, TextPart, encode

log = logging.getLogger(__name__)

RECORD_BYTES: Final = 512
"""What a message takes besides its media."""

FLUSH_TIMEOUT_S: Final = 5.0
"""For what is queued when the gateway goes down."""

QUEUE_FULL: Final = "queue_full"
DISK: Final = "disk"
STOP_REASONS: Final = (QUEUE_FULL, DISK)

FULL: Final = (errno.ENOSPC, errno.EDQUOT)
"""What a disk says that takes no more: it would take no other recording either."""


@dataclass(slots=True, eq=False)
class Target:
    """One session's place on the disk. `journal` belongs to the thread, the rest is shared."""

    recording_id: str
    meta: Mapping[str, Any]
    on_closed: Callable[[Path], None]
    """Told the folder once the log is complete; called by the thread."""
    is_over: bool = False
    """Nothing more is queued."""
    is_stopped: bool = False
    """It ended before its session, and that has been said."""
    folder: Path | None = None
    journal: Journal | None = None


@dataclass(frozen=True, slots=True)
class _Item:
    target: Target
    kind: int | None
    """None: the session begins."""
    at: float = 0.0
    wall_clock_ms: float = 0.0
    message: Command | Event | None = None
    reason: str = ""
    n_bytes: int = 0


@dataclass
class Writer:
    """Call `start` once and `close` at the end; the other methods are for the event loop.

    Args:
        max_bytes: of messages that wait; beyond it a session's recording ends.
        on_full: told that the disk takes no more; called by the thread.
    """

    store: Store
    max_bytes: int
    on_full: Callable[[], None] = lambda: None
    n_stopped: Counter[str] = field(default_factory=Counter)
    """Recordings that ended before their session, by `STOP_REASONS`."""

    def __post_init__(self) -> None:
        self._items: queue.SimpleQueue[_Item | None] = queue.SimpleQueue()
        self._guard = threading.Lock()
        self._n_bytes = 0
        self._thread = threading.Thread(target=self._run, name="recording", daemon=True)

    @property
    def queued_bytes(self) -> int:
        return self._n_bytes

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Write what is queued, as far as the disk takes it in time; waits for that."""
        self._items.put(None)
        self._thread.join(FLUSH_TIMEOUT_S)
        if self._thread.is_alive():
            log.warning("recordings not written at the end queued_bytes=%d", self._n_bytes)

    def begin(self, target: Target) -> None:
        self._items.put(_Item(target, None))

    def append(
        self, target: Target, kind: int, at: float, message: Command | Event, wall_clock_ms: float
    ) -> None:
        """Queue one message, unless that is more than the queue holds: then the recording ends."""
        if target.is_over:
            return
        n_bytes = RECORD_BYTES + media_bytes(message)
        with self._guard:
            fits = self._n_bytes + n_bytes <= self.max_bytes
            if fits:
                self._n_bytes += n_bytes
        if not fits:
            self._stop(target, QUEUE_FULL, "the disk is slower than the sessions")
            self._items.put(_Item(target, journal.END, at, reason="truncated"))
            return
        self._items.put(_Item(target, kind, at, wall_clock_ms, message, n_bytes=n_bytes))

    def end(self, target: Target, at: float, reason: str) -> None:
        if not target.is_over:
            target.is_over = True
            self._items.put(_Item(target, journal.END, at, reason=reason))

    # ---- the thread

    def _run(self) -> None:
        while (item := self._items.get()) is not None:
            try:
                self._write(item)
            except (OSError, MemoryError, TypeError, ValueError) as error:
                # The latter two: a configuration that JSON cannot hold. It costs one recording.
                self._give_up(item.target, error)
            finally:
                with self._guard:
                    self._n_bytes -= item.n_bytes
                # Waiting must not keep the last message, which may have 100 MiB.
                del item

    def _write(self, item: _Item) -> None:
        target = item.target
        if item.kind is None:
            self._begin(target)
            return
        if target.journal is None:
            return
        if item.kind == journal.END:
            target.journal.append(item.kind, item.at, 0.0, item.reason.encode())
            self._close(target)
            return
        assert item.message is not None
        payload = encode(without_voices(item.message))
        target.journal.append(item.kind, item.at, item.wall_clock_ms, payload)

    def _begin(self, target: Target) -> None:
        def open_log(folder: Path) -> None:
            # Locked before the folder can be seen: nobody may finish or remove it from then on.
            target.journal = Journal(folder)

        target.folder = self.store.create(target.recording_id, target.meta, open_log)

    def _give_up(self, target: Target, error: Exception) -> None:
        self._refused(target, error)
        self._close(target)

    def _refused(self, target: Target, error: Exception) -> None:
        strerror = None
        if isinstance(error, OSError):
            strerror = error.strerror
            if error.errno in FULL:
                # First of all: whoever sees that it stopped may begin another one at once.
                self.on_full()
        self._stop(target, DISK, strerror or type(error).__name__)

    def _close(self, target: Target) -> None:
        closing, target.journal = target.journal, None
        if closing is not None:
            try:
                closing.close()
            except OSError as error:
                # A network disk may refuse only now; what has arrived there can still be read.
                self._refused(target, error)
        if target.folder is not None:
            target.on_closed(target.folder)

    def _stop(self, target: Target, reason: str, why: str) -> None:
        with self._guard:
            target.is_over = True
            if target.is_stopped:
                return
            target.is_stopped = True
            self.n_stopped[reason] += 1
        log.warning(
            "recording stopped, its session goes on recording=%s reason=%s: %s",
            target.recording_id,
            reason,
            why,
        )


def media_bytes(message: object) -> int:
    """Return the bytes of sound, pictures, files and text in a message."""
    if isinstance(message, bytes | str):
        return len(message)
    if isinstance(message, list):
        return sum(map(media_bytes, message))
    if isinstance(message, msgspec.Struct):
        return sum(media_bytes(getattr(message, name)) for name in message.__struct_fields__)
    return 0


def without_voices(message: Command | Event) -> Command | Event:
    """A voice is somebody's to speak with, no part of what was said: it is not kept."""
    if isinstance(message, Prepare):
        return msgspec.structs.replace(message, reference_voice=b"", tts_reference_voice=b"")
    if isinstance(message, PrepareTurns):
        texts = [part for part in message.system if isinstance(part, TextPart)]
        return msgspec.structs.replace(message, system=list(texts))
    if isinstance(message, Ask):
        return msgspec.structs.replace(message, voice=b"")
    return message
