from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from gateway.recording import journal
from gateway.recording.journal import END, GAVE, TOOK, Journal
from gateway.recording.store import Store
from shared.protocol import Command, Event, encode

Say = tuple[float, int, Command | Event]
"""Seconds since the begin, kind of the record, message."""

WriteLog = Callable[..., Path]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "data")


@pytest.fixture
def write_log(store: Store) -> WriteLog:
    """Make a recording as the writer leaves it: `meta.json` and a log of messages."""

    def write(
        recording_id: str,
        app_type: str,
        said: list[Say],
        reason: str | None = "stopped",
        created_at: str = "2026-03-01T10:00:00+00:00",
    ) -> Path:
        meta: dict[str, Any] = {
            "session_id": recording_id,
            "app_type": app_type,
            "created_at": created_at,
            "ended_at": None,
            "duration_s": None,
            "worker_id": 0,
            "title": "对话 03-01 10:00",
            "config": {"x": 1},
        }
        folder = store.create(recording_id, meta)
        log = Journal(folder)
        for at, kind, message in said:
            log.append(kind, at, 12.5 if kind == GAVE else 0.0, encode(message))
        if reason is not None:
            log.append(END, said[-1][0] if said else 0.0, 0.0, reason.encode())
        log.close()
        return folder

    return write


@pytest.fixture
def took() -> Callable[[float, Command], Say]:
    return lambda at, command: (at, TOOK, command)


@pytest.fixture
def gave() -> Callable[[float, Event], Say]:
    return lambda at, event: (at, GAVE, event)


@pytest.fixture
def tone() -> Callable[..., bytes]:
    """Float32 bytes of so many seconds of one value."""

    def make(seconds: float, rate: int = 16_000, value: float = 0.25) -> bytes:
        return np.full(round(seconds * rate), value, "<f4").tobytes()

    return make


@pytest.fixture
def jpeg() -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (65, 49), "red").save(file, "JPEG")
    return file.getvalue()


@pytest.fixture
def records() -> Callable[[Path], Iterator[journal.Record]]:
    return lambda folder: journal.read(folder / journal.NAME)
