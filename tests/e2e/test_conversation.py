"""Spoken conversations with the real service in real time."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import numpy as np
import pytest

from client.duplex import Closed, DuplexClient, ErrorEvent, Result
from client.media import read_audio
from tests.bench.bench_conversation import Track, converse
from tests.e2e.conftest import ROOT, RunningService
from tests.fakes.patience import PATIENCE_S

ASSETS = Path(__file__).parents[1] / "assets"

pytestmark = [pytest.mark.weights, pytest.mark.slow, pytest.mark.realtime, pytest.mark.timeout(180)]


def talk(service: RunningService, question: Path, answer: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "client.talk", str(question)]
    command += ["--url", service.ws_url, "--out", str(answer)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_a_spoken_question_gets_a_spoken_answer(running_service, tmp_path):
    """The answer is checked twice: as text, and as the service hears it when played back."""
    done = talk(running_service, ASSETS / "capital_france.wav", tmp_path / "answer.wav")

    assert done.returncode == 0, done.stderr
    units = [line for line in done.stdout.splitlines() if re.match(r" *\d+  ", line)]
    assert "listen" in units[0]
    assert "heard: What is the capital of France" in done.stdout
    assert "Paris" in done.stdout

    back = Track.silence(10.0).say_samples(read_audio(tmp_path / "answer.wav"), 0.5)
    heard = asyncio.run(converse(running_service.ws_url, back))
    assert "Paris" in " ".join(reply.result.heard for reply in heard.replies)


def test_a_spoken_interruption_stops_the_answer_and_is_answered(running_service):
    track = Track.silence(24.0).say("long_story.wav", 0.4).say("stop_talking.wav", 10.45)

    heard = asyncio.run(converse(running_service.ws_url, track))

    assert heard.replies[9].n_samples, "the story should be told by now"
    assert [i for i, r in enumerate(heard.replies) if r.result.interrupted] == [10]
    assert heard.replies[10].result.is_listen
    captions = [r.result.heard for r in heard.replies[11:] if r.result.heard]
    assert captions, "the interruption should be answered"
    assert any(r.n_samples for r in heard.replies[13:])


def test_loud_noise_does_not_interrupt(running_service):
    track = Track.silence(15.0).say("long_story.wav", 0.4).hiss(9.0, 15.0, -20.0)

    heard = asyncio.run(converse(running_service.ws_url, track))

    assert heard.replies[8].n_samples
    assert not any(r.result.interrupted for r in heard.replies)
    assert all(r.n_samples for r in heard.replies[9:15])


def test_small_chunks_get_one_result_each_and_the_same_answer(running_service):
    question = np.concatenate(
        [read_audio(ASSETS / "capital_france.wav"), np.zeros(5 * 16_000, np.float32)]
    )
    pieces = [question[i : i + 3200] for i in range(0, len(question), 3200)]

    async def stream() -> list[Result]:
        results: list[Result] = []
        async with DuplexClient(running_service.ws_url, mode="audio") as session:
            await session.prepare()

            async def listen() -> None:
                async for event in session:
                    if isinstance(event, Result):
                        results.append(event)
                        if len(results) == len(pieces):
                            return

            reader = asyncio.create_task(listen())
            begun = time.monotonic()
            for index, piece in enumerate(pieces):
                await asyncio.sleep(max(0.0, begun + index * 0.2 - time.monotonic()))
                await session.send_audio(piece)
            await asyncio.wait_for(reader, PATIENCE_S)
        return results

    results = asyncio.run(stream())

    assert len(results) == len(pieces)
    assert "Paris" in "".join(r.text for r in results)
    assert [r.unit_index for r in results] == [(i + 1) // 5 for i in range(len(pieces))]


def test_two_sessions_at_once_both_get_their_answers(running_service):
    first = Track.silence(12.0).say("capital_france.wav", 0.5)
    second = Track.silence(12.0).say("days_in_week.wav", 0.9)

    async def both():
        url = running_service.ws_url
        return await asyncio.gather(converse(url, first), converse(url, second))

    answers = asyncio.run(both())

    captions = [" ".join(r.result.heard for r in heard.replies) for heard in answers]
    assert "France" in captions[0]
    assert "week" in captions[1]
    assert all(any(r.n_samples for r in heard.replies) for heard in answers)


def test_a_third_session_waits_for_a_free_slot(running_service):
    async def scenario() -> list[str]:
        order: list[str] = []
        waits = asyncio.Event()

        def on_wait(place):
            order.append(f"waits {place.position}")
            waits.set()

        url = running_service.ws_url
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(2):
                session = await stack.enter_async_context(DuplexClient(url))
                await session.prepare()
            waiting = await stack.enter_async_context(DuplexClient(url))
            ready = asyncio.create_task(waiting.prepare(on_wait=on_wait))
            await asyncio.wait_for(waits.wait(), PATIENCE_S)
            await session.stop()
            await asyncio.wait_for(ready, PATIENCE_S)
            order.append("ready")
        return order

    order = asyncio.run(scenario())

    assert order[0] == "waits 1"
    assert order[-1] == "ready"


def test_a_killed_worker_ends_its_session_and_comes_back(running_service):
    async def lose() -> tuple[float, list[object]]:
        async with DuplexClient(running_service.ws_url) as session:
            await session.prepare()
            async with httpx.AsyncClient(trust_env=False) as http:
                workers = (await http.get(f"{running_service.http_url}/workers")).json()["workers"]
                health = (await http.get(f"http://127.0.0.1:{workers[0]['port']}/health")).json()
            os.kill(health["pid"], signal.SIGKILL)
            killed = time.monotonic()
            events = [event async for event in session]
            return time.monotonic() - killed, events

    seconds, events = asyncio.run(lose())

    assert seconds < 2.0
    assert [type(event) for event in events] == [ErrorEvent, Closed]
    assert events[0].slug == "worker_lost"
    assert events[1].code == 1011

    async def again() -> None:
        async with DuplexClient(running_service.ws_url) as session:
            await session.prepare()

    asyncio.run(asyncio.wait_for(again(), 90))
