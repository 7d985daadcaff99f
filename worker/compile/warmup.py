"""The shapes of real traffic, kept from start to start so that warm-up can play them.

What a plan cannot know (how clients cut their pictures, how many speak at once) a worker's own
past can tell. `ShapeProfile` counts every stage's buckets; several workers, and one after the
other, add up in one file, so a count says how common a shape is with these clients.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from filelock import FileLock

log = logging.getLogger(__name__)

Bucket = bool | int | str | tuple[Any, ...]
"""What JSON can hold, with tuples for its lists."""
Shape = tuple[str, Bucket]
"""A stage's name and one of its buckets."""

SCHEMA = 1
SAVE_EVERY_S = 60.0
LOCK_TIMEOUT_S = 5.0


class ShapeProfile:
    """Counts shapes and, while it is open, adds the counts to a file now and then.

        with ShapeProfile(path) as profile:
            stage.on_shape = profile.record

    Counting begins after the warm-up, whose shapes are nobody's traffic. A file that cannot be
    read or written is a warning: no traffic depends on it.

    Args:
        path: the JSON file; its folder is made if need be.
        every_s: seconds between two writes.
    """

    def __init__(self, path: Path, every_s: float = SAVE_EVERY_S) -> None:
        self.path = path
        self._every_s = every_s
        self._lock = threading.Lock()
        self._unsaved: Counter[Shape] = Counter()
        self._closing = threading.Event()
        self._writer: threading.Thread | None = None

    def __enter__(self) -> ShapeProfile:
        self.open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def open(self) -> None:
        """Begin to write what is recorded, on a thread of its own."""
        self._writer = threading.Thread(target=self._write, name="omni-shapes", daemon=True)
        self._writer.start()

    def close(self) -> None:
        """Write what is left. A process that ends by `os._exit` has to call this before."""
        self._closing.set()
        if self._writer is not None:
            self._writer.join()
            self._writer = None
        self.save()

    def record(self, stage: str, bucket: Any) -> None:
        """Count one run; from any thread."""
        with self._lock:
            self._unsaved[stage, bucket] += 1

    def save(self) -> None:
        """Add what was counted since the last time to the file."""
        with self._lock:
            unsaved, self._unsaved = self._unsaved, Counter()
        if not unsaved:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(f"{self.path}.lock", timeout=LOCK_TIMEOUT_S):
                _replace(self.path, _kept(self.path) + unsaved)
        except OSError as error:
            log.warning("shape profile not written path=%s: %s", self.path, error)
            with self._lock:
                self._unsaved += unsaved

    def _write(self) -> None:
        while not self._closing.wait(self._every_s):
            self.save()


def replay(shapes: Mapping[Shape, int], accepts: Callable[[str, Bucket], bool]) -> list[Shape]:
    """Return the shapes of a profile, the most frequent first.

    Args:
        shapes: of `load_shapes`.
        accepts: whether a stage of this name exists and takes this bucket; the others, of an older
            version or other settings, are left out and the log says how many.
    """
    by_count = sorted(shapes, key=lambda shape: (-shapes[shape], repr(shape)))
    known = [shape for shape in by_count if accepts(*shape)]
    if len(known) < len(by_count):
        left_out = sorted({stage for stage, _ in set(by_count) - set(known)})
        log.info(
            "shape profile shapes=%d left_out=%d of stages=%s",
            len(by_count),
            len(by_count) - len(known),
            ",".join(left_out),
        )
    return known


def load_shapes(path: Path) -> Counter[Shape]:
    """Return the counts of a profile; none, with a warning, where the file is damaged."""
    try:
        return _read(path)
    except (OSError, ValueError) as error:
        log.warning("shape profile ignored path=%s: %s", path, error)
        return Counter()


def _kept(path: Path) -> Counter[Shape]:
    """Return the counts of a profile; a file that is none is put aside, it may be precious.

    Raises OSError.
    """
    try:
        return _read(path)
    except ValueError as error:
        aside = path.with_name(f"{path.name}.damaged")
        log.warning("shape profile begins anew path=%s kept_as=%s: %s", path, aside.name, error)
        os.replace(path, aside)
        return Counter()


def _read(path: Path) -> Counter[Shape]:
    """Return the counts of a profile, none if there is no file. Raises OSError, ValueError."""
    try:
        raw = json.loads(path.read_bytes())
    except FileNotFoundError:
        return Counter()
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if not isinstance(raw, dict) or raw.get("schema") != SCHEMA:
        raise ValueError(f"expected a JSON object with schema {SCHEMA}")
    rows = raw.get("shapes")
    if not isinstance(rows, list):
        raise ValueError("expected a list of shapes")
    shapes: Counter[Shape] = Counter()
    for row in rows:
        match row:
            case [str(stage), bucket, int(count)] if count > 0:
                shapes[stage, _from_json(bucket)] += count
            case _:
                raise ValueError(f"expected [stage, bucket, count], got {row!r:.100}")
    return shapes


def _from_json(value: Any) -> Bucket:
    """Raises ValueError: a bucket that no stage has."""
    if isinstance(value, list):
        return tuple(_from_json(one) for one in value)
    if isinstance(value, bool | int | str):
        return value
    raise ValueError(f"{value!r:.100} is no bucket")


def _replace(path: Path, shapes: Counter[Shape]) -> None:
    """Write a file in one step: a reader sees the old one or the new one."""
    rows = [[stage, bucket, count] for (stage, bucket), count in shapes.most_common()]
    # One shape a line, so that people can read it.
    lines = ",\n".join(json.dumps(row) for row in rows)
    beside = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        beside.write_text(f'{{"schema": {SCHEMA}, "shapes": [\n{lines}\n]}}\n', encoding="utf-8")
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)
