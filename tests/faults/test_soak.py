"""The soak and the leak script tell what they are for."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from websockets.asyncio.server import ServerConnection, serve

from client.duplex import ErrorEvent, Result
from client.journal import NO_SAMPLES, Sent
from tests.faults import leaks
from tests.faults.clients import Caller, Target
from tests.faults.endings import ENDINGS, by_mode
from tests.faults.healthy import PERIOD_S, Healthy
from tests.faults.processes import fake_worker, gateway, running, wait_ready
from tests.faults.service import mixed
from tests.faults.soak import soak_at

N_UNITS = 3 * PERIOD_S


def listen(heard: str = "") -> Result:
    return Result(True, "", NO_SAMPLES, False, heard, False, False, 0, 0.0, 0, 0, 0)


def conversation(late_unit: int = -1) -> Healthy:
    """Sixty units in which the two questions that have their time were understood."""
    healthy = Healthy("first", first_at_s=2)
    captions = {5: "What is the capital of France?", PERIOD_S + 7: "How many days has a week?"}
    for unit in range(N_UNITS):
        healthy.journal.send(Sent(float(unit), 0.0))
        took_s = 1.5 if unit == late_unit else 0.1
        healthy.journal.take(listen(captions.get(unit, "")), unit + took_s)
    return healthy


def test_a_conversation_in_time_with_its_captions_is_well() -> None:
    report = conversation().report(N_UNITS)

    assert conversation().is_well(N_UNITS)
    assert (report["units"], report["questions"], report["missed"]) == (N_UNITS, 2, 0)


def test_a_late_unit_is_a_missed_deadline() -> None:
    healthy = conversation(late_unit=30)

    assert healthy.report(N_UNITS)["missed"] == 1
    assert not healthy.is_well(N_UNITS)


def test_a_question_that_was_not_understood_is_not_well() -> None:
    healthy = conversation()
    healthy.journal.replies[5] = healthy.journal.replies[4]

    assert [wrong["unit"] for wrong in healthy.report(N_UNITS)["wrong_captions"]] == [2]
    assert not healthy.is_well(N_UNITS)


def test_a_session_that_was_told_an_error_is_not_well() -> None:
    healthy = conversation()
    healthy.journal.take(ErrorEvent("unit 60 failed", "model_fault"), 60.0)

    assert not healthy.is_well(N_UNITS)


def test_each_question_has_its_whole_period_and_the_rest_is_silent() -> None:
    loud = [
        unit
        for unit, (samples, _) in enumerate(Healthy("first", first_at_s=2)._chunks(N_UNITS))
        if np.abs(samples).max() > 0.01
    ]

    assert min(loud) == 2
    assert any(unit >= 2 + PERIOD_S for unit in loud)
    assert max(loud) < 2 + 2 * PERIOD_S


@pytest.mark.timeout(90)
def test_a_short_soak_of_a_running_service_finds_nothing_wrong(tmp_path: Path) -> None:
    worker = fake_worker(tmp_path, slots=4, unit_samples=16_000)
    front = gateway(tmp_path, [worker.port], client_ping_s=0.5)
    with running(front, worker):
        wait_ready(front, worker)

        report = soak_at(front.ws_url, minutes=0.07, seed=3)

    assert report["healthy_are_well"], report["healthy"]
    assert report["leaks"] == []
    assert sum(report["faulty_by_mode"].values()) == sum(report["faulty"].values()) > 0


async def test_a_service_that_hangs_up_without_a_word_cuts_an_ending_short() -> None:
    """It raised IndexError, which ended the soak."""

    async def hang_up(socket: ServerConnection) -> None:
        await socket.recv()

    async with serve(hang_up, "127.0.0.1", 0) as server:
        port = next(iter(server.sockets)).getsockname()[1]
        async with Caller.open(Target(f"ws://127.0.0.1:{port}", 1)) as caller:
            with pytest.raises(AssertionError):
                await caller.stop()


def test_sessions_are_counted_by_their_mode() -> None:
    ended = {"stopped": 2, "came_in_a_crowd": 1, "turns_stopped": 3, "chat_closed_while_queued": 4}

    assert by_mode(ended) == {"duplex": 3, "half_duplex": 3, "chat": 4}


def test_a_few_endings_are_taken_from_all_of_them() -> None:
    """It was the first few of the list, in random order."""
    seen = {ending for seed in range(40) for ending in mixed(ENDINGS, 5, random.Random(seed))}

    assert len(seen) > len(ENDINGS) / 2


def test_the_leak_script_reports_what_processes_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leaks, "SLOW_ENDINGS", ())

    report = leaks.measure(tmp_path, "fake", n_sessions=40, seed=1)

    assert report["leaks"] == []
    assert report["sessions"] == 40
    assert set(report["modes"]) == {"duplex", "half_duplex", "chat"}
    assert report["trace_lines"] == 0
    assert set(report["usage"]["gateway"]) == {"start", "early", "end"}
