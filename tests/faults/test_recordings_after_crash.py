"""Whatever ends a gateway, every session that it recorded opens after the next start."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import random
import re
import wave
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from websockets.exceptions import WebSocketException

from gateway.recording import journal
from scripts.machine import fetch
from tests.fakes.scripted_worker import Script, ScriptedWorker, speak
from tests.faults.clients import Caller, Target
from tests.faults.processes import Process, gateway, running, wait_until

SEED = 7
ROUNDS = 4
SESSIONS = 5
PACE_S = 0.03
MAX_LOST = 3
"""Chunks that were still on their way to the disk."""


def frame() -> str:
    file = io.BytesIO()
    Image.new("RGB", (64, 48), "red").save(file, "JPEG")
    return base64.b64encode(file.getvalue()).decode()


FRAME = frame()


def recording_gateway(folder: Path, worker: ScriptedWorker) -> Process:
    config = {
        "recording": {"enabled": True},
        "service": {"data_dir": str(folder / "data")},
    }
    return gateway(folder, [worker.port], config)


async def ready(front: Process) -> None:
    await asyncio.to_thread(
        wait_until,
        lambda: (front.health() or {}).get("workers_ready", 0) >= 1,
        "the gateway sees its worker",
        front,
    )


async def talk(target: Target, session_id: str, answered: dict[str, int]) -> None:
    """Exchange chunks until the gateway is gone; counts the answers of each recording."""
    try:
        async with Caller.open(target, session_id) as caller:
            recording_id = (await caller.prepare())["recording_session_id"]
            answered[recording_id] = 0
            fields = {"frame_base64_list": [FRAME]} if session_id.startswith("omni") else {}
            while True:
                await caller.chunk(**fields)
                await caller.hear("result")
                answered[recording_id] += 1
                await asyncio.sleep(PACE_S)
    except (WebSocketException, OSError):
        return


def check(folder: Path, n_answered: int) -> None:
    """One recording opens, whole, with all of its files."""
    body: dict[str, Any] = json.loads((folder / "recording.json").read_text())
    meta = json.loads((folder / "meta.json").read_text())
    chunks = body["chunks"]
    assert len(chunks) >= n_answered - MAX_LOST
    assert body["end_reason"] == "interrupted"
    assert meta["ended_at"] is not None
    for chunk in chunks:
        sounds = [chunk["user_audio"], *filter(None, [chunk["result"].get("ai_audio")])]
        for name in sounds:
            with wave.open(str(folder / name)) as reader:
                assert reader.getnframes() > 0
        if "user_frame" in chunk:
            Image.open(folder / chunk["user_frame"]).verify()
    if chunks:
        with wave.open(str(folder / body["merged_replay"])) as reader:
            assert reader.getnframes() >= 16_000 * len(chunks)
    assert [path.name for path in folder.glob(".*")] == []


async def test_recordings_of_a_gateway_that_is_killed_again_and_again_all_open(
    tmp_path: Path,
) -> None:
    rng = random.Random(SEED)
    sessions = tmp_path / "data" / "sessions"
    answered: dict[str, int] = {}
    async with ScriptedWorker(slots=SESSIONS, script=Script(answer=speak)) as worker:
        front = recording_gateway(tmp_path, worker)
        with running(front):
            for turn in range(ROUNDS):
                if turn:
                    front.start()
                await ready(front)
                target = Target(front.ws_url, SESSIONS)
                names = [f"{'omni' if i % 2 else 'adx'}_{turn}_{i}" for i in range(SESSIONS)]
                talks = [asyncio.create_task(talk(target, n, answered)) for n in names]
                await asyncio.sleep(rng.uniform(0.15, 0.6))
                await asyncio.to_thread(front.kill)
                await asyncio.gather(*talks)
            assert len(answered) > ROUNDS
            front.start()

            await asyncio.to_thread(
                wait_until,
                lambda: not list(sessions.glob(f"*/{journal.NAME}")),
                "all logs are finished",
                front,
            )

    folders = [folder for folder in sessions.iterdir() if not folder.name.startswith(".")]
    # One that had hardly begun may not have come to the disk at all.
    assert {folder.name for folder in folders} >= {i for i, n in answered.items() if n > MAX_LOST}
    for folder in folders:
        check(folder, answered.get(folder.name, 0))


def metric(front: Process, name: str) -> int:
    body = (fetch(f"{front.url}/metrics", 5.0) or b"").decode()
    found = re.search(rf"^omni_gateway_{re.escape(name)} (\d+)", body, re.MULTILINE)
    return int(found.group(1)) if found else 0


def has_begun(sessions: Path) -> bool:
    """Whether a record of what was said has come to the disk."""
    sizes = [log.stat().st_size for log in sessions.glob(f"*/{journal.NAME}")]
    return any(size > len(journal.MAGIC) for size in sizes)


@pytest.mark.parametrize("n_before", [0, 2])
async def test_a_full_disk_ends_the_recording_and_not_the_session(
    tmp_path: Path, n_before: int
) -> None:
    sessions = tmp_path / "data" / "sessions"
    async with ScriptedWorker(slots=2, script=Script(answer=speak)) as worker:
        front = recording_gateway(tmp_path, worker)
        with running(front):
            await ready(front)
            target = Target(front.ws_url, 2)
            async with Caller.open(target) as caller:
                if not n_before:
                    front.fill_its_disk()
                await caller.prepare()
                await caller.exchange(n_before)
                if n_before:
                    # The thread that writes is behind the session by what the disk takes.
                    await asyncio.to_thread(
                        wait_until, lambda: has_begun(sessions), "the recording has begun", front
                    )
                front.fill_its_disk()
                await caller.exchange(5)
                await asyncio.to_thread(
                    wait_until,
                    lambda: metric(front, 'recordings_stopped_total{reason="disk"}') == 1,
                    "it is counted",
                    front,
                )
                assert len(await caller.exchange(5)) == 5
                assert await caller.stop() == 1000
            front.empty_its_disk()
            async with Caller.open(target) as caller:
                recording_id = (await caller.prepare())["recording_session_id"]
                await caller.exchange(3)
                await caller.stop()
            await asyncio.to_thread(
                wait_until,
                (sessions / recording_id / "recording.json").exists,
                "the next session is recorded",
                front,
            )
            # One that had begun is tried again later; until then it is counted.
            await asyncio.to_thread(
                wait_until,
                lambda: metric(front, "recordings_unfinished") == (n_before > 0),
                "what did not fit is counted",
                front,
            )

    body = json.loads((sessions / recording_id / "recording.json").read_text())
    assert len(body["chunks"]) == 3
    assert body["end_reason"] == "stopped"
