"""The large model's back end as a whole service: its tiny checkpoint on a CPU, with voice."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from pathlib import Path

import httpx
import numpy as np
import pytest

from shared.audio import read_wav
from tests.bench.bench_conversation import Heard, Track, converse
from tests.e2e.conftest import ROOT, RunningService
from tests.media import write_clip

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


def test_a_video_gets_text_and_a_voice(tiny_service: RunningService, tmp_path: Path) -> None:
    write_clip(tmp_path / "clip.mp4", seconds=3)
    command = [sys.executable, "-m", "client.talk", str(tmp_path / "clip.mp4")]
    command += ["--video", str(tmp_path / "clip.mp4")]
    command += ["--url", tiny_service.ws_url, "--out", str(tmp_path / "answer.wav")]

    for _ in range(3):
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr + done.stdout
        # Its words are drawn from random weights: a short turn may have none to be printed.
        if re.search(r"says: \S", done.stdout):
            break

    assert re.search(r"says: \S", done.stdout)
    samples, rate_hz = read_wav(tmp_path / "answer.wav")
    assert rate_hz == 24_000
    assert len(samples) >= 24_000
    assert np.abs(samples).max() > 0.001


def test_two_sessions_at_once_are_both_served(tiny_service: RunningService) -> None:
    async def both() -> list[Heard]:
        tracks = (Track.silence(6.0).say("long_story.wav", 0.4) for _ in range(2))
        return await asyncio.gather(*(converse(tiny_service.ws_url, track) for track in tracks))

    for heard in asyncio.run(both()):
        assert len(heard.replies) >= 6
        assert all(reply.result.kv_cache_length for reply in heard.replies)


def test_its_worker_names_the_back_end_and_its_stages(tiny_service: RunningService) -> None:
    config = json.loads((tiny_service.run_dir / "config.json").read_text(encoding="utf-8"))
    port = config["service"]["worker_base_port"]

    health = httpx.get(f"http://127.0.0.1:{port}/health").json()

    assert health["backend"] == "minicpmo45"
    assert {stage["name"] for stage in health["stages"]} >= {"load_model", "init_unified"}
