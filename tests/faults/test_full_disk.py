"""A full disk costs log lines and new files, never a session."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.processes import bound_log
from tests.fakes.launch import ROOT, Launch, launching
from tests.fakes.launch import wait_until as launch_wait_until
from tests.faults.clients import (
    Caller,
    Target,
    closed,
    reset_in_mid_frame,
    sent_garbage_text,
    stopped,
)
from tests.faults.processes import (
    cascade_worker,
    fake_worker,
    gateway,
    limit_file_size,
    running,
    wait_ready,
)

FULL = Path("/dev/full")
"""Every write to it fails with "no space left on device"."""

MIB = 1024 * 1024
EXIT_START_FAILED = 1


async def use(target: Target) -> None:
    """Sessions of every kind of log line."""
    async with Caller.live(target) as caller:
        for ending in (stopped, closed, reset_in_mid_frame, sent_garbage_text) * 3:
            await ending(target)
        await caller.exchange(2)


def test_a_disk_that_fills_up_ends_no_session_and_floods_no_log(tmp_path: Path) -> None:
    worker = fake_worker(tmp_path)
    front = gateway(tmp_path, [worker.port])
    target = Target(front.ws_url, 2)
    with running(front, worker):
        wait_ready(front, worker)
        for process in (front, worker):
            process.fill_its_disk()
        before = [len(process.log) for process in (front, worker)]

        asyncio.run(use(target))

        assert [len(process.log) for process in (front, worker)] == before
        for process in (front, worker):
            process.empty_its_disk()
        asyncio.run(stopped(target))
        # What could not be written is lost, and said to nobody again and again.
        for process, n_before in zip((front, worker), before, strict=True):
            assert 0 < len(process.log) - n_before < 20_000
            assert process.is_alive()


def test_a_service_starts_and_ends_where_nothing_can_be_logged(tmp_path: Path) -> None:
    worker = fake_worker(tmp_path, log_path=FULL)
    front = gateway(tmp_path, [worker.port], log_path=FULL)
    with running(front, worker):
        wait_ready(front, worker)

        asyncio.run(use(Target(front.ws_url, 2)))

        front.terminate()
        assert front.wait() == -signal.SIGTERM, "uvicorn ends by the signal once it has drained"
        worker.terminate()
        assert worker.wait() == 0


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    with launching(tmp_path) as launch:
        yield launch


def test_a_launcher_on_a_full_disk_still_restarts_and_ends_its_processes(launch: Launch) -> None:
    launcher = launch.start_and_wait()
    limit_file_size(launcher.pid, 0)
    port, pid = next((p, i) for p, i in launch.pids().items() if int(p) != launch.port)

    os.kill(pid, signal.SIGKILL)

    launch_wait_until(lambda: launch.pids().get(port) not in {None, pid}, "the worker runs again")
    assert launcher.poll() is None
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(30) == 0
    assert launch.pids() == {}


def test_a_start_on_a_full_disk_is_refused_in_one_sentence(launch: Launch) -> None:
    argv = [sys.executable, "-m", "tests.fakes.fake_launch", str(launch.run_dir), ""]

    done = subprocess.run(
        ["sh", "-c", 'ulimit -f 0; exec "$@"', "sh", *argv],
        cwd=ROOT,
        env={**os.environ, "OMNI_CONFIG": str(launch.config)},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )

    said = done.stdout + done.stderr
    assert done.returncode == 1
    assert "error:" in said
    assert str(launch.run_dir) in said
    assert "Traceback" not in said
    assert launch.pids() == {}


def test_a_log_that_cannot_be_kept_is_cut_all_the_same(tmp_path: Path) -> None:
    """Keeping the old lines would need a second place for them on a disk that is full; the disk
    stayed full, and the error ended the launcher with everything it watches."""
    log = tmp_path / "gateway.log"
    log.write_bytes(bytes(3 * MIB))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, hard))
    try:
        bound_log(log, max_bytes=2 * MIB)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    assert log.stat().st_size == 0
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) == 0


@pytest.mark.weights
def test_weights_that_do_not_fit_the_disk_are_a_start_error_and_leave_no_half_file(
    tmp_path: Path,
) -> None:
    data_dir = tmp_path / "data"
    worker = cascade_worker(tmp_path, data_dir=str(data_dir))
    with running(worker):
        limit_file_size(worker.pid, 8 * MIB)

        assert worker.wait(90) == EXIT_START_FAILED

        assert "start failed stage=load_model: weight cache" in worker.log
        assert worker.trace_lines() == []
    left = [path for path in data_dir.rglob("*") if path.is_file() and path.name != "lock"]
    assert left == []
