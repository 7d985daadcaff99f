"""The launcher as a process of its own, over fake gateway and workers."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from scripts import supervisor
from scripts.machine import fetch
from scripts.processes import Command
from scripts.supervisor import Requests, Supervisor
from tests.fakes.launch import PATIENCE_S, Launch, is_alive, wait_until
from tests.fakes.ports import free_port


def test_stages_are_shown_and_the_url_is_printed_when_all_are_ready(launch: Launch) -> None:
    process = launch.start()
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line.rstrip())
        if line.startswith("ready"):
            break

    assert f"ready: http://127.0.0.1:{launch.port}" in lines
    assert any(re.fullmatch(r"worker_1: load_model .*left\)", line) for line in lines)
    assert any(line.startswith("worker_1: ready after") for line in lines)
    assert len(launch.pids()) == 3


def test_ready_means_that_the_gateway_has_seen_the_workers(launch: Launch) -> None:
    launch.start_and_wait()

    body = fetch(f"http://127.0.0.1:{launch.port}/health", 5.0)

    assert body is not None
    assert json.loads(body)["workers_ready"] == 2


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_all_processes(launch: Launch, number: signal.Signals) -> None:
    process = launch.start_and_wait()

    process.send_signal(number)

    assert process.wait(PATIENCE_S) == 0
    assert launch.pids() == {}


def test_what_a_worker_has_started_ends_with_it(launch: Launch) -> None:
    process = launch.start_and_wait(behaviour="parent")
    log = (launch.run_dir / "worker_1.log").read_text()
    grandchild = int(log.split("grandchild ")[1].split()[0])
    assert is_alive(grandchild)

    process.send_signal(signal.SIGTERM)
    process.wait(PATIENCE_S)

    wait_until(lambda: not is_alive(grandchild), "the grandchild has ended")


def test_a_second_signal_ends_a_process_that_does_not_listen(launch: Launch) -> None:
    process = launch.start_and_wait(behaviour="stubborn")

    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)

    assert process.wait(5) == 0
    assert launch.pids() == {}


def test_a_worker_that_dies_in_its_start_ends_the_start_with_its_last_words(
    launch: Launch,
) -> None:
    status, output = launch.run(behaviour="dies")

    assert status == 1
    assert "worker_1 ended during its start with status 1" in output
    assert "RuntimeError: the model file is missing" in output
    assert launch.pids() == {}


def test_a_worker_that_reports_an_error_ends_the_start(launch: Launch) -> None:
    status, output = launch.run(behaviour="errs")

    assert status == 1
    assert "worker_1 reports an error: the weights are damaged" in output
    assert launch.pids() == {}


def test_a_worker_that_dies_later_is_restarted(launch: Launch) -> None:
    launch.start_and_wait()
    before = launch.pids()
    port, pid = next((port, pid) for port, pid in before.items() if int(port) != launch.port)

    os.kill(pid, signal.SIGKILL)

    wait_until(lambda: launch.pids().get(port) not in {None, pid}, "the worker runs again")
    assert {p: i for p, i in launch.pids().items() if p != port}.items() <= before.items()


def test_a_worker_that_hangs_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only deaths were seen: a worker that hung was out of service until somebody looked."""
    monkeypatch.setattr(supervisor, "LOOK_INTERVAL_S", 0.2)
    monkeypatch.setattr(supervisor, "SILENT_LOOKS", 2)
    monkeypatch.setattr(supervisor, "HEALTH_TIMEOUT_S", 0.3)
    fake = [sys.executable, "-m", "tests.fakes.fake_process"]
    ports = {"gateway": free_port(), "worker": free_port()}
    commands = [
        Command(role, [*fake, role, str(port)], {**os.environ}, f"http://127.0.0.1:{port}/health")
        for role, port in ports.items()
    ]
    requests = Requests()
    service = Supervisor(commands, tmp_path, lambda line: None, requests, drain_timeout_s=5.0)
    worker = service._workers[0]
    try:
        assert service.start()
        hung = worker.pid
        assert hung is not None
        os.kill(hung, signal.SIGSTOP)
        watching = threading.Thread(target=service.watch)
        watching.start()

        wait_until(lambda: worker.pid not in {None, hung}, "another worker runs")

        assert not is_alive(hung)
        requests.stop()
        watching.join()
    finally:
        service.close()


def test_children_die_with_a_killed_launcher(launch: Launch) -> None:
    process = launch.start_and_wait()

    process.kill()
    process.wait()

    wait_until(lambda: launch.pids() == {}, "the children have ended")


def test_detached_it_returns_when_ready_and_goes_on_until_stop(launch: Launch) -> None:
    started, output = launch.run("--detach")
    alive = len(launch.pids())
    shown = launch.run("status")
    stopped = launch.run("stop")

    assert (started, alive) == (0, 3)
    assert f"ready: http://127.0.0.1:{launch.port}" in output
    assert shown[0] == 0
    assert "worker_0: ready" in shown[1]
    assert stopped == (0, "stopped\n")
    assert launch.pids() == {}
    assert launch.run("status") == (3, "not running\n")


def test_the_status_is_1_while_a_worker_is_not_ready(launch: Launch) -> None:
    launch.start_and_wait()
    worker = next(pid for port, pid in launch.pids().items() if int(port) != launch.port)
    os.kill(worker, signal.SIGSTOP)

    status, output = launch.run("status")
    os.kill(worker, signal.SIGCONT)

    assert status == 1
    assert re.search(r"worker_\d: no answer", output)


def test_detached_it_fails_with_the_cause_when_a_worker_dies(launch: Launch) -> None:
    status, output = launch.run("--detach", behaviour="dies")

    assert status == 1
    assert "RuntimeError: the model file is missing" in output
    assert launch.pids() == {}


def test_ctrl_c_during_a_detached_start_ends_it(launch: Launch) -> None:
    process = launch.start("--detach", behaviour="loads")
    assert process.stdout is not None
    assert process.stdout.readline().startswith("starting")

    process.send_signal(signal.SIGINT)

    assert process.wait(PATIENCE_S) == 130
    assert launch.pids() == {}
    assert launch.run("status")[0] == 3


def test_a_second_start_is_refused(launch: Launch) -> None:
    first = launch.start_and_wait()

    status, output = launch.run()

    assert status == 1
    assert f"runs already at http://127.0.0.1:{launch.port} (process {first.pid})" in output
    assert len(launch.pids()) == 3


def test_a_port_in_use_is_named_with_the_remedy(launch: Launch) -> None:
    with socket.create_server(("127.0.0.1", launch.port)):
        status, output = launch.run()

    assert status == 1
    assert f"port {launch.port} is in use; choose another one with --port" in output


def test_stop_leaves_a_stranger_with_the_pid_of_a_stale_file_alone(launch: Launch) -> None:
    stranger = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    launch.run_dir.mkdir()
    stale = {"pid": stranger.pid, "url": "", "health_urls": {}}
    (launch.run_dir / "launch.pid").write_text(json.dumps(stale))

    outcome = launch.run("stop")
    is_unharmed = stranger.poll() is None
    stranger.kill()
    stranger.wait()

    assert outcome == (0, "not running\n")
    assert is_unharmed


def test_what_a_gateway_would_warn_of_is_said_where_it_is_started(launch: Launch) -> None:
    config = json.loads(launch.config.read_text())
    config["security"] = {"api_keys": ["two words"]}
    launch.config.write_text(json.dumps(config))

    process = launch.start()
    assert process.stdout is not None
    said = next(line for line in process.stdout if line.startswith("warning: "))

    assert "security.api_keys: key 1 " in said
    assert "two words" not in said


def test_a_wrong_configuration_is_explained_and_exits_with_2(launch: Launch) -> None:
    launch.config.write_text('{"service": {"gateway_prt": 1}}')

    status, output = launch.run()

    assert status == 2
    assert "did you mean service.gateway_port?" in output


@pytest.mark.parametrize("arguments", [(), ("--detach",), ("status",), ("stop",), ("restart",)])
def test_a_run_folder_that_is_none_is_named_without_a_traceback(
    launch: Launch, arguments: tuple[str, ...]
) -> None:
    launch.run_dir.write_text("a file where a folder should be")

    status, output = launch.run(*arguments)

    assert status == 1
    assert str(launch.run_dir) in output
    assert "cannot be used" in output
    assert "Traceback" not in output
