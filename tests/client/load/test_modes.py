"""A load run of half duplex and of chat, alone and beside full duplex."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fastapi import FastAPI

from client.load import talker, visits
from client.load.__main__ import main, sessions_of
from shared.audio import write_wav
from tests.fakes import g0_server
from tests.fakes.g0_server import Scenario, Service

CHUNK_S = 0.05


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch, scenario: Scenario) -> None:
    monkeypatch.setattr(talker, "SETTLE_S", CHUNK_S)
    monkeypatch.setattr(talker, "ECHO_S", CHUNK_S)
    scenario.turns.piece_audio_s = CHUNK_S


@pytest.fixture
def question(tmp_path: Path) -> str:
    path = tmp_path / "question.wav"
    write_wav(path, np.full(round(2 * CHUNK_S * 16_000), 0.1, np.float32), 16_000)
    return str(path)


class Run:
    """One run of the command."""

    def __init__(self, capsys: pytest.CaptureFixture[str], url: str, *options: str) -> None:
        base = ["--url", url, "--chunk-s", str(CHUNK_S), "--pause-s", "0.05", "--buffer-ms", "20"]
        self.status = main([*base, *options])
        *self.table, last = capsys.readouterr().out.splitlines()
        self.whole: dict[str, Any] = json.loads(last)
        self.modes: dict[str, Any] = self.whole["modes"]


def turns(run: Run) -> dict[str, Any]:
    figures: dict[str, Any] = run.modes["half_duplex"]
    return figures


def test_half_duplex_is_measured_from_the_end_of_the_speech(
    service: Service, scenario: Scenario, capsys: pytest.CaptureFixture[str], question: str
) -> None:
    run = Run(
        capsys, service.ws_url, "--mode", "half_duplex:2", "--seconds", "0", "--audio", question
    )

    assert run.status == 0
    assert (turns(run)["questions"], turns(run)["missing"]) == (2, 0)
    for name in ("first_text_ms", "first_audio_ms", "done_ms"):
        assert turns(run)[name]["n"] == 2
        # The quiet chunk behind the speech is what ends the turn.
        assert turns(run)[name]["p50"] >= 1000 * CHUNK_S
    assert turns(run)["close_codes"] == {"1000": 2}
    assert any(line.startswith("question to first text") for line in run.table)


def test_half_duplex_asks_again_until_its_time_is_over(
    service: Service, capsys: pytest.CaptureFixture[str], question: str
) -> None:
    options = ("--mode", "half_duplex", "--seconds", "1", "--audio", question)

    assert turns(Run(capsys, service.ws_url, *options))["questions"] >= 2


def test_an_answer_that_does_not_come_is_a_loss(
    service: Service,
    scenario: Scenario,
    capsys: pytest.CaptureFixture[str],
    question: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(talker, "ANSWER_LIMIT_S", 0.15)
    scenario.turns.waits_before_piece = 0

    run = Run(
        capsys, service.ws_url, "--mode", "half_duplex", "--seconds", "0.1", "--audio", question
    )

    assert run.status == 1
    assert turns(run)["missing"] == turns(run)["questions"] == 1
    assert turns(run)["sessions"]["lost"] == {}


def test_a_half_duplex_session_that_is_refused_is_lost_with_its_slug(
    service: Service, scenario: Scenario, capsys: pytest.CaptureFixture[str], question: str
) -> None:
    scenario.turns.prepare_error = "no"

    run = Run(
        capsys, service.ws_url, "--mode", "half_duplex:2", "--seconds", "0", "--audio", question
    )

    assert run.status == 1
    assert turns(run)["sessions"]["refused"] == 2
    assert turns(run)["sessions"]["lost"] == {"bad_message": 2}


def test_chat_asks_one_question_after_the_other(
    service: Service, scenario: Scenario, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(capsys, service.ws_url, "--mode", "chat:2", "--seconds", "0.5", "--speech")

    figures = run.modes["chat"]
    asked = [each["messages"][0]["content"] for each in scenario.turns.questions]
    assert run.status == 0
    assert figures["questions"] == len(asked) > 2
    assert set(asked) <= set(visits.QUESTIONS)
    assert len(set(asked)) > 1
    for name in ("first_text_ms", "first_audio_ms", "done_ms"):
        assert figures[name]["n"] == len(asked)
    assert figures["close_codes"] == {"1000": len(asked)}


def test_chat_is_silent_unless_speech_is_asked_for(
    service: Service, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(capsys, service.ws_url, "--mode", "chat", "--seconds", "0")

    assert run.modes["chat"]["questions"] == 1
    assert run.modes["chat"]["first_audio_ms"] == {"n": 0}


def test_a_refused_question_is_lost_with_its_slug(
    service: Service, scenario: Scenario, capsys: pytest.CaptureFixture[str]
) -> None:
    scenario.turns.chat_error = "The queue is full"

    run = Run(capsys, service.ws_url, "--mode", "chat", "--seconds", "0")

    assert run.status == 1
    assert run.modes["chat"]["sessions"]["refused"] == 1
    assert run.modes["chat"]["sessions"]["lost"] == {"queue_full": 1}


def test_a_question_that_waits_too_long_gives_up(
    service: Service, scenario: Scenario, capsys: pytest.CaptureFixture[str]
) -> None:
    scenario.turns.chat_queue = [{"type": "queued", "position": 1, "ticket_id": "q_1"}]

    run = Run(capsys, service.ws_url, "--mode", "chat", "--seconds", "0", "--max-wait-s", "0.1")

    assert run.modes["chat"]["sessions"]["lost"] == {"gave_up_waiting": 1}


def test_a_chat_answer_that_stops_in_the_middle_is_a_loss(
    service: Service,
    scenario: Scenario,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(visits, "CHAT_ANSWER_LIMIT_S", 0.3)
    scenario.turns.waits_before_piece = 1

    run = Run(capsys, service.ws_url, "--mode", "chat", "--seconds", "0")

    assert run.status == 1
    assert run.modes["chat"]["sessions"]["lost"] == {"no_answer": 1}
    assert run.modes["chat"]["missing"] == 1
    assert run.modes["chat"]["first_text_ms"]["n"] == 1


def test_one_run_may_mix_the_modes(
    service: Service, scenario: Scenario, capsys: pytest.CaptureFixture[str], question: str
) -> None:
    options = ("--mode", "audio:2", "--mode", "half_duplex", "--mode", "chat", "--seconds", "0.2")

    run = Run(capsys, service.ws_url, *options, "--audio", question)

    assert run.status == 0
    served = {mode: figures["sessions"]["served"] for mode, figures in run.modes.items()}
    assert served == {"audio": 2, "half_duplex": 1, "chat": 1}
    assert [line.split()[1] for line in run.table if line.startswith("mode ")] == [*served]


def test_all_modes_find_a_service_below_a_path_of_its_site(
    scenario: Scenario,
    capsys: pytest.CaptureFixture[str],
    question: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    site = FastAPI()
    site.mount("/talk", g0_server.make_app(scenario))
    monkeypatch.setattr(g0_server, "make_app", lambda _: site)
    options = ("--mode", "audio", "--mode", "half_duplex", "--mode", "chat", "--seconds", "0.2")

    with g0_server.serving(scenario) as service:
        run = Run(capsys, f"{service.http_url}/talk/", *options, "--audio", question)

    assert run.status == 0


def test_a_mode_without_a_number_has_as_many_sessions_as_were_asked_for() -> None:
    assert sessions_of(["half_duplex", "chat:2"], 5, "audio") == {"half_duplex": 5, "chat": 2}
    assert sessions_of([], 5, "omni") == {"omni": 5}
