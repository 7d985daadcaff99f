"""The order of a rolling restart, and what the supervisor does about ends and failing starts."""

from __future__ import annotations

import errno
import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest

from scripts import processes, supervisor
from scripts.instance import read_notes, write_notes
from scripts.processes import Child, Command
from scripts.rolling import RETIRE_GRACE_S, SEEN_TIMEOUT_S, RollingRestart
from scripts.supervisor import Requests, Supervisor
from tests.fakes.launch import is_alive, wait_until

SLEEP = "import time; time.sleep(60)"
RETIRES = """
import signal, sys, time
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(0))
print("listening", flush=True)
time.sleep(60)
"""


class FakeChild(Child):
    """A worker without a process; its end and its start are what the test says."""

    def __init__(self, number: int) -> None:
        super().__init__(Command(f"worker_{number}", [], {}, ""), Path("none"))
        self.process = Mock(pid=None)
        self.is_ready = True
        self.signals: list[int] = []

    def retire(self) -> None:
        self.is_retiring = True
        self.is_ready = False

    def come_back(self, now: float = 0.0) -> None:
        self.started_at = now
        self.is_retiring = False
        self.is_ready = True

    def signal_group(self, number: int) -> None:
        self.signals.append(number)


class Roll:
    """Two workers, a restart of them, and a gateway."""

    def __init__(self) -> None:
        self.workers = [FakeChild(0), FakeChild(1)]
        self.gateway_sees = True
        self.restart = RollingRestart(
            self.workers,
            drain_timeout_s=300.0,
            start_timeout_s=60.0,
            is_ready=lambda child: child.is_ready,  # type: ignore[attr-defined]
            is_seen=lambda: self.gateway_sees,
        )

    def steps(self, now: float = 0.0, n: int = 4) -> bool:
        """Whether the restart is over after at most so many looks."""
        return any(self.restart.step(now) for _ in range(n))


def test_the_next_worker_retires_only_after_the_one_before_is_back() -> None:
    roll = Roll()
    first, second = roll.workers

    roll.steps()
    while_first_retires = second.is_retiring
    first.come_back()
    first.is_ready = False
    roll.steps()
    while_first_starts = second.is_retiring
    first.is_ready = True
    roll.steps()

    assert (while_first_retires, while_first_starts, second.is_retiring) == (False, False, True)


def test_the_restart_is_over_when_the_last_worker_is_back() -> None:
    roll = Roll()
    for worker in roll.workers:
        assert not roll.steps()
        worker.come_back()

    assert roll.steps()
    assert roll.restart.outcome == ""


def test_the_next_worker_stays_until_the_gateway_has_seen_the_one_before() -> None:
    roll = Roll()
    first, second = roll.workers
    roll.steps()
    first.come_back()
    roll.gateway_sees = False

    roll.steps(now=1.0)
    early = second.is_retiring
    roll.gateway_sees = True
    roll.steps(now=2.0)

    assert (early, second.is_retiring) == (False, True)


def test_a_gateway_that_does_not_answer_holds_nothing_up_for_ever() -> None:
    roll = Roll()
    roll.steps()
    roll.workers[0].come_back()
    roll.gateway_sees = False
    roll.steps(now=1.0)

    roll.steps(now=1.5 + SEEN_TIMEOUT_S)

    assert roll.workers[1].is_retiring


def test_a_worker_that_does_not_go_in_time_is_killed() -> None:
    roll = Roll()
    roll.steps(now=0.0)

    roll.steps(now=299.0 + RETIRE_GRACE_S)
    early = list(roll.workers[0].signals)
    roll.steps(now=301.0 + RETIRE_GRACE_S, n=1)

    assert (early, roll.workers[0].signals) == ([], [signal.SIGKILL])


def test_a_worker_that_waits_for_its_next_start_is_started_now() -> None:
    roll = Roll()
    dead = roll.workers[0]
    dead.process, dead.restart_at, dead.n_failures = None, 900.0, 5

    roll.steps(now=5.0, n=1)

    assert (dead.restart_at, dead.is_retiring, dead.n_failures) == (5.0, False, 0)


@pytest.mark.parametrize("how", ["dies", "does not get ready"])
def test_a_worker_that_does_not_come_back_ends_the_restart(how: str) -> None:
    roll = Roll()
    first, second = roll.workers
    roll.steps()
    first.come_back()
    first.is_ready = False
    first.n_failures = how == "dies"

    over = roll.steps(now=61.0)

    assert over
    assert "given up: worker_0" in roll.restart.outcome
    assert "1 of 2 workers not restarted" in roll.restart.outcome
    assert not second.is_retiring


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Supervisor]:
    """A supervisor whose processes sleep; nothing answers on their ports."""
    monkeypatch.setattr(supervisor, "fetch", lambda url, timeout_s: None)
    commands = [
        Command(name, [sys.executable, "-c", program], {}, "http://127.0.0.1:9/health")
        for name, program in (("gateway", SLEEP), ("worker_0", RETIRES), ("worker_1", RETIRES))
    ]
    service = Supervisor(commands, tmp_path, lambda line: None, Requests(), drain_timeout_s=5.0)
    for child in service._children:
        child.start(0.0)
    yield service
    for child in service._children:
        child.signal_group(signal.SIGKILL)
        if child.process:
            child.process.wait()


def test_a_worker_that_ends_because_it_was_asked_is_started_again_without_delay(
    service: Supervisor,
) -> None:
    worker = service._workers[0]
    wait_until(lambda: "listening" in worker.log_path.read_text(), "it hears signals")
    before = worker.pid
    worker.retire()
    wait_until(lambda: worker.exit_status() is not None, "it has ended")

    service._revive(worker)

    assert worker.pid not in {None, before}
    assert (worker.n_failures, worker.restart_at, worker.is_retiring) == (0, None, False)


def test_a_worker_that_ends_without_being_asked_waits_even_if_it_says_zero(
    service: Supervisor,
) -> None:
    worker = service._workers[0]
    wait_until(lambda: "listening" in worker.log_path.read_text(), "it hears signals")
    assert worker.process is not None
    worker.process.send_signal(signal.SIGUSR1)
    wait_until(lambda: worker.exit_status() is not None, "it has ended")

    service._revive(worker)

    assert worker.pid is None
    assert worker.n_failures == 1


def test_a_second_request_during_a_restart_changes_nothing(service: Supervisor) -> None:
    service._requests._note_restart(signal.SIGUSR1, None)
    service._roll()
    service._roll()
    first = service._rolling

    service._requests._note_restart(signal.SIGUSR1, None)
    service._roll()

    assert service._rolling is first
    assert [worker.is_retiring for worker in service._workers] == [True, False]


def test_a_start_that_the_machine_refuses_is_tried_again_and_ends_nothing(
    service: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk at the moment of a restart took the launcher, and with it the service, down."""
    worker = service._workers[0]
    worker.signal_group(signal.SIGKILL)
    wait_until(lambda: worker.exit_status() is not None, "it has ended")
    service._revive(worker)
    worker.restart_at = 0.0

    def refuse(*arguments: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(processes.subprocess, "Popen", refuse)
        service._revive(worker)
    service._leave_notes()

    assert worker.n_failures == 2
    assert worker.restart_at is not None
    note = read_notes(service._run_dir)["worker_0"]
    assert "2 x in a row, last with no start: No space left on device, starts again at" in note
    assert is_alive(service._gateway.pid or 0)


def test_a_log_that_cannot_be_rotated_ends_nothing(
    service: Supervisor, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(path: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(supervisor, "bound_log", refuse)

    service._bound_log(service._gateway)

    assert "log cannot be rotated" in caplog.text


def test_notes_that_cannot_be_read_are_none(tmp_path: Path) -> None:
    missing = read_notes(tmp_path)
    write_notes(tmp_path, {"worker_0": "note"})
    written = read_notes(tmp_path)
    (tmp_path / "notes.json").write_text(json.dumps(["no", "mapping"]))

    assert (missing, written, read_notes(tmp_path)) == ({}, {"worker_0": "note"}, {})
