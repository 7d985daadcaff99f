"""The soak and the leak script tell what they are for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from client.duplex import ErrorEvent, Result
from client.journal import NO_SAMPLES, Sent
from tests.faults import leaks
from tests.faults.processes import fake_worker, gateway, running, wait_ready
from tests.faults.soak import PERIOD_S, Healthy, soak_at

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
    assert sum(report["faulty"].values()) > 0


def test_the_leak_script_reports_what_processes_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leaks, "SLOW_ENDINGS", ())

    report = leaks.measure(tmp_path, "fake", n_sessions=40, seed=1)

    assert report["leaks"] == []
    assert report["sessions"] == 40
    assert report["trace_lines"] == 0
    assert set(report["usage"]["gateway"]) == {"start", "early", "end"}
