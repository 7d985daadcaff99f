from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from client.load import __main__ as load
from client.load.__main__ import main, parse_arguments
from client.load.figures import client_figures
from client.load.plan import Mode, Plan, Track
from client.load.visits import Visit, visit
from client.paced import LoopProbe
from shared.audio import write_wav
from shared.clips import Clip
from tests.fakes.g0_server import Scenario, Service

CHUNK_S = 0.1


@pytest.fixture
def question(tmp_path: Path) -> Path:
    """Two loud chunks; the fake server answers after them."""
    path = tmp_path / "question.wav"
    write_wav(path, np.full(round(2 * CHUNK_S * 16_000), 0.1, np.float32), 16_000)
    return path


class Run:
    """One run of the command."""

    def __init__(self, capsys: pytest.CaptureFixture[str], url: str, *options: str) -> None:
        base = ["--url", url, "--chunk-s", str(CHUNK_S), "--seconds", "0.5"]
        self.status = main([*base, *options])
        *self.table, last = capsys.readouterr().out.splitlines()
        self.whole: dict[str, Any] = json.loads(last)
        (self.figures,) = self.whole["modes"].values()


def test_sessions_that_are_served_to_their_end_lose_nothing(
    service: Service, scenario: Scenario, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(capsys, service.ws_url, "--sessions", "4")

    assert run.status == 0
    assert run.figures["sessions"]["served"] == 4
    assert run.figures["chunks"] == run.figures["latency_ms"]["n"] == 20
    assert run.figures["close_codes"] == {"1000": 4}
    assert len(scenario.of_type("audio_chunk")) == 20
    assert not run.whole["lost"]
    assert run.whole["settings"]["sessions"] == {"audio": 4}


def test_the_api_key_goes_along(
    service: Service, scenario: Scenario, capsys: pytest.CaptureFixture[str]
) -> None:
    Run(capsys, service.ws_url, "--api-key", "k1")

    assert scenario.authorization == ["Bearer k1"]


def test_a_refused_session_is_lost_with_its_slug(
    service: Service, scenario: Scenario, capsys: pytest.CaptureFixture[str]
) -> None:
    scenario.refuse_with = "No worker available"
    run = Run(capsys, service.ws_url, "--sessions", "2")

    assert run.status == 1
    assert run.figures["sessions"]["refused"] == 2
    assert run.figures["sessions"]["lost"] == {"no_worker": 2}
    assert run.figures["close_codes"] == {"1013": 2}


def test_a_server_that_is_not_there_is_a_loss(capsys: pytest.CaptureFixture[str]) -> None:
    run = Run(capsys, "ws://127.0.0.1:9")

    assert run.status == 1
    assert run.figures["sessions"]["lost"] == {"no_connection": 1}


def test_the_wait_in_the_queue_is_told(
    service: Service, scenario: Scenario, capsys: pytest.CaptureFixture[str]
) -> None:
    scenario.queue = [{"type": "queued", "position": 1, "ticket_id": "q_1"}]
    run = Run(capsys, service.ws_url, "--sessions", "2")

    assert run.status == 0
    assert run.figures["sessions"]["queued"] == 2
    assert run.figures["queue_wait_s"]["n"] == 2


def test_a_session_that_waits_too_long_gives_up(
    service: Service, scenario: Scenario, capsys: pytest.CaptureFixture[str]
) -> None:
    scenario.queue = [{"type": "queued", "position": 1, "ticket_id": "q_1"}]
    scenario.stays_queued = True
    run = Run(capsys, service.ws_url, "--max-wait-s", "0.1")

    assert run.status == 1
    assert run.figures["sessions"]["lost"] == {"gave_up_waiting": 1}


def test_a_session_that_ends_early_is_lost_with_its_reason(
    service: Service, scenario: Scenario, capsys: pytest.CaptureFixture[str]
) -> None:
    scenario.close_after_chunks = 2
    run = Run(capsys, service.ws_url)

    assert run.status == 1
    assert run.figures["sessions"]["lost"] == {"worker_lost": 1}
    assert run.figures["sessions"]["refused"] == 0
    assert run.figures["close_codes"] == {"1011": 1}


def test_a_connection_that_breaks_without_a_word_is_lost_by_its_code(
    service: Service, scenario: Scenario, capsys: pytest.CaptureFixture[str]
) -> None:
    scenario.close_after_chunks = 2
    scenario.says_why = False
    run = Run(capsys, service.ws_url)

    assert run.figures["sessions"]["lost"] == {"closed_1011": 1}


def test_an_error_in_a_session_that_goes_on_is_a_loss(
    service: Service, scenario: Scenario, capsys: pytest.CaptureFixture[str]
) -> None:
    scenario.bad_chunk = 2
    run = Run(capsys, service.ws_url)

    assert run.status == 1
    assert run.figures["sessions"]["served"] == 1
    assert run.figures["errors"] == {"bad_audio": 1}
    assert run.figures["missing"] == 0
    assert run.figures["latency_ms"]["n"] == 4


def test_a_spoken_answer_is_measured_from_the_end_of_speech(
    service: Service, capsys: pytest.CaptureFixture[str], question: Path
) -> None:
    run = Run(
        capsys, service.ws_url, "--audio", str(question), "--pause-s", "0.3", "--buffer-ms", "500"
    )

    assert run.figures["first_audio_ms"]["n"] == 1
    # The chunk after the speech is the one that is answered with sound.
    assert run.figures["answer_s"]["p50"] >= CHUNK_S
    assert run.figures["unanswered_turns"] == 0
    assert run.figures["gaps_ms"] == {"n": 0}


def test_speech_that_comes_too_slowly_makes_gaps(
    service: Service, scenario: Scenario, capsys: pytest.CaptureFixture[str], question: Path
) -> None:
    scenario.unit_audio_s = CHUNK_S / 10
    run = Run(
        capsys, service.ws_url, "--audio", str(question), "--pause-s", "0.3", "--buffer-ms", "0"
    )

    assert run.status == 0
    assert run.figures["gaps_ms"]["n"] == 2


def test_speech_without_an_answer_is_counted(
    service: Service, scenario: Scenario, capsys: pytest.CaptureFixture[str], question: Path
) -> None:
    scenario.unit_audio_s = 0.0
    run = Run(capsys, service.ws_url, "--audio", str(question), "--pause-s", "0.3")

    assert run.figures["unanswered_turns"] == 1


def test_the_json_line_goes_to_a_file_too(
    service: Service, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run = Run(capsys, service.ws_url, "--json", str(tmp_path / "out.json"))

    assert json.loads((tmp_path / "out.json").read_text()) == run.whole


def test_a_missing_file_is_a_wrong_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--audio", "nowhere.wav"]) == 2
    assert "nowhere.wav" in capsys.readouterr().err


@pytest.mark.parametrize(
    "options",
    [
        ["--sessions", "0"],
        ["--url", "ftp://host"],
        ["--url", "127.0.0.1:8006"],
        ["--chunk-s", "99"],
        ["--seconds", "-1"],
        ["--json", "no_such_folder/out.json"],
        ["--mode", "omni"],
        ["--mode", "video"],
        ["--mode", "chat:"],
        ["--mode", "chat:0"],
        ["--mode", "chat", "--mode", "chat:2"],
    ],
)
def test_impossible_options_are_refused(options: list[str]) -> None:
    with pytest.raises(SystemExit) as refusal:
        main(options)

    assert refusal.value.code == 2


@pytest.mark.parametrize("number", ["nan", "inf", "-inf", "-1"])
@pytest.mark.parametrize(
    "option", ["--seconds", "--pause-s", "--chunk-s", "--buffer-ms", "--max-wait-s"]
)
def test_a_number_that_is_no_length_is_refused_by_its_option(
    option: str, number: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as refusal:
        parse_arguments([f"{option}={number}"])

    assert refusal.value.code == 2
    assert f"error: {option} is {float(number)}, must be" in capsys.readouterr().err


def test_half_duplex_without_speech_is_refused_for_it_would_measure_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as refusal:
        parse_arguments(["--mode", "audio:2", "--mode", "half_duplex:2"])

    assert refusal.value.code == 2
    assert "name a file with --audio" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("is_together", "phases"), [(False, [0.0, 0.25, 0.5, 0.75]), (True, [0.0] * 4)]
)
async def test_each_session_has_its_own_phase_within_the_chunk_unless_together(
    monkeypatch: pytest.MonkeyPatch, is_together: bool, phases: list[float]
) -> None:
    seen = []

    async def visit(
        plan: Plan, mode: Mode, track: Track, start_at: float, index: int, phase_s: float
    ) -> Visit:
        seen.append(phase_s)
        return Visit(close_codes=[1000])

    monkeypatch.setattr(load, "visit", visit)
    plan = Plan("ws://nowhere", {"audio": 4}, 1.0, is_together=is_together)
    await load.load(plan, Clip(np.zeros(0, np.float32), ()))

    assert seen == phases


async def test_sessions_keep_to_one_grid_however_long_they_waited(
    service: Service, scenario: Scenario
) -> None:
    track = Track(Clip(np.zeros(0, np.float32), ()), 1.0)
    plan = Plan(service.ws_url, {"audio": 2}, 0.1, chunk_s=CHUNK_S, is_together=True)
    start_at = asyncio.get_running_loop().time()

    first = await visit(plan, "audio", track, start_at, 0, 0.0)
    second = await visit(plan, "audio", track, start_at, 0, 0.0)

    steps = (second.begin_at - first.begin_at) / CHUNK_S
    assert steps == pytest.approx(round(steps))
    assert steps >= 1


def test_a_track_repeats_its_clip_with_pictures_and_pauses() -> None:
    clip = Clip(np.full(16_000, 0.5, np.float32), (b"one", b"two"))
    track = Track(clip, pause_s=1.0)

    chunks = list(track.chunks(5, 1.0, has_frames=True))

    assert [bool(samples.any()) for samples, _ in chunks] == [True, False, True, False, True]
    assert [list(frames) for _, frames in chunks] == [[b"one"], [b"two"]] * 2 + [[b"one"]]
    assert track.speech_ends_s(5.0) == [1.0, 3.0]


def test_a_client_that_is_late_itself_says_so() -> None:
    probe = LoopProbe()
    probe.late_s = [0.001] * 90 + [0.05] * 10

    assert client_figures([], probe, 0.5)["is_late"]
