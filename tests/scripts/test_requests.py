"""What a signal asks of the launcher is heard, whenever it comes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.processes import Child, Command
from scripts.supervisor import Requests, Supervisor
from tests.fakes.launch import PATIENCE_S, ROOT

EVERYWHERE = """
import signal, sys
from scripts.supervisor import Requests

def wait_with_a_signal_at(moment):
    requests = Requests()
    requests.install()
    moments = 0
    def look(frame, event, argument):
        nonlocal moments
        moments += 1
        if moments == moment:
            signal.raise_signal(signal.SIGTERM)
    sys.setprofile(look)
    requests.wait(0.01)
    sys.setprofile(None)
    assert requests.wait(0.01) == (moments >= moment)
    return moments >= moment

moment = 1
while wait_with_a_signal_at(moment):
    moment += 1
print(moment)
"""
"""Each call and return inside of the launcher's sleep gets a signal once."""


def test_a_stop_that_comes_at_any_moment_of_the_launchers_sleep_is_heard() -> None:
    """A signal while the sleep held its own lock blocked the launcher for ever: it heard nothing
    any more but SIGKILL."""
    process = subprocess.Popen(
        [sys.executable, "-c", EVERYWHERE], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    try:
        output, _ = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
        process.wait()

    assert process.returncode == 0
    assert int(output) > 2


UNDER_NOHUP = """
import signal
from scripts.supervisor import Requests

signal.signal(signal.SIGHUP, signal.SIG_IGN)
requests = Requests()
requests.install()
signal.raise_signal(signal.SIGHUP)
print(requests.wait(0.0))
"""


def test_the_end_of_the_terminal_is_no_request_under_nohup() -> None:
    done = subprocess.run(
        [sys.executable, "-c", UNDER_NOHUP],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=True,
    )

    assert done.stdout == "False\n"


def test_a_stop_during_the_last_look_of_a_start_is_heard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = Requests()
    sleeper = [sys.executable, "-c", "import time; time.sleep(60)"]
    command = Command("gateway", sleeper, dict(os.environ), "http://127.0.0.1:9/health")
    supervisor = Supervisor([command], tmp_path, lambda line: None, requests, 1.0)

    def look(self: Supervisor, child: Child) -> bool:
        requests.stop()
        return True

    monkeypatch.setattr(Supervisor, "_is_ready", look)
    try:
        assert not supervisor.start()
    finally:
        supervisor.close()
