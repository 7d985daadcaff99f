from __future__ import annotations

import functools
import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from fastapi import FastAPI
from PIL import Image

from gateway.app import create_app
from gateway.clock import Clock
from gateway.recording import journal
from gateway.recording.journal import END, GAVE, TOOK, Journal
from gateway.recording.service import Recordings
from gateway.recording.store import Store
from shared.config import Config, RecordingConfig, SecurityConfig, ServiceConfig
from shared.protocol import Command, Event, encode

PATIENCE_S = 60.0
"""For a recording to be finished: by a process of low priority, on a machine that may be busy."""

ID = "20260301_100000_omni_1_AbC-_123"

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
            "title": "2026-03-01 10:00",
            "config": {"x": 1},
        }

        def fill(folder: Path) -> None:
            log = Journal(folder)
            for at, kind, message in said:
                log.append(kind, at, 12.5 if kind == GAVE else 0.0, encode(message))
            if reason is not None:
                log.append(END, said[-1][0] if said else 0.0, 0.0, reason.encode())
            log.close()

        return store.create(recording_id, meta, fill)

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


@pytest.fixture
def folder(store: Store) -> Path:
    """A finished recording, by hand."""
    folder = store.create(
        ID,
        {
            "session_id": ID,
            "title": "2026-03-01 10:00",
            "app_type": "omni_duplex",
            "created_at": "2026-03-01T10:00:00+00:00",
            "duration_s": 4.5,
        },
    )
    (folder / "recording.json").write_text(json.dumps({"chunks": []}))
    (folder / "user_audio").mkdir()
    (folder / "user_audio/000.wav").write_bytes(bytes(range(100)))
    return folder


@functools.cache
def app_with(**keys: Any) -> FastAPI:
    """Making an application takes longer than most tests."""
    return create_app(Config(security=SecurityConfig(**keys)), [])


@pytest.fixture
def client(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., httpx.AsyncClient]:
    """A client of a gateway that has this recording."""
    config = Config(
        service=ServiceConfig(data_dir=str(tmp_path / "data")),
        recording=RecordingConfig(enabled=False),
    )

    def client(static: Path | None = None, **keys: Any) -> httpx.AsyncClient:
        app = app_with(**keys)
        monkeypatch.setattr(app.state.gateway, "recordings", Recordings(config, Clock()))
        if static is not None:
            monkeypatch.setattr(app.state.gateway, "static_dir", static)
        transport = httpx.ASGITransport(app)
        return httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8006")

    return client
