"""The launcher as a process of its own, over fake processes, in a folder of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.fakes.fake_launch import WEIGHTS
from tests.fakes.ports import free_port

ROOT = Path(__file__).parents[2]
PATIENCE_S = 30.0
N_WORKERS = 2


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"still not so: {what}"
        time.sleep(0.05)


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def hear_signals() -> None:
    """For a process that is to be told to end: whoever runs the tests may ignore these, as a shell
    has its background jobs ignore Ctrl-C."""
    for number in (signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)


@dataclass
class Launch:
    """One folder with its configuration, in which the launcher is run."""

    folder: Path
    port: int = field(default_factory=free_port)
    processes: list[subprocess.Popen[str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        base_port = free_port(N_WORKERS)
        service = {
            "gateway_port": self.port,
            "worker_base_port": base_port,
            "cpu_workers": N_WORKERS,
        }
        # Its gateway would record in the working directory.
        config = {"service": service, "recording": {"enabled": False}}
        self.config.write_text(json.dumps(config))
        self.weights.touch()

    @property
    def config(self) -> Path:
        return self.folder / "config.json"

    @property
    def weights(self) -> Path:
        """The file without which workers that serve do not start."""
        return self.folder / WEIGHTS

    @property
    def run_dir(self) -> Path:
        return self.folder / "run"

    def start(self, *arguments: str, behaviour: str = "") -> subprocess.Popen[str]:
        argv = [sys.executable, "-m", "tests.fakes.fake_launch", str(self.run_dir), behaviour]
        process = subprocess.Popen(
            [*argv, *arguments],
            cwd=ROOT,
            env={**os.environ, "OMNI_CONFIG": str(self.config)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            # The launcher respects a SIGHUP that is ignored, as under nohup; so may this test run.
            preexec_fn=hear_signals,
        )
        self.processes.append(process)
        return process

    def run(self, *arguments: str, behaviour: str = "") -> tuple[int, str]:
        """Run a command that ends by itself."""
        process = self.start(*arguments, behaviour=behaviour)
        output, _ = process.communicate(timeout=PATIENCE_S)
        return process.returncode, output

    def start_and_wait(self, behaviour: str = "") -> subprocess.Popen[str]:
        process = self.start(behaviour=behaviour)
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("ready"):
                return process
        raise AssertionError("the launcher ended before it was ready")

    def pids(self) -> dict[str, int]:
        """Process ids of the launcher's children by the port they were given."""
        found = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    words = (entry / "cmdline").read_text().split("\0")
                except (FileNotFoundError, ProcessLookupError):
                    continue
                if "tests.fakes.fake_process" in words and str(self.folder) in _environ(entry):
                    found[words[words.index("tests.fakes.fake_process") + 2]] = int(entry.name)
        return {port: pid for port, pid in found.items() if is_alive(pid)}


@contextmanager
def launching(folder: Path) -> Iterator[Launch]:
    """A folder to launch in; what runs there at the end is ended."""
    launch = Launch(folder)
    try:
        yield launch
    finally:
        try:
            launch.run("stop")
        finally:
            for process in launch.processes:
                # Its children die with it.
                process.kill()
                process.communicate()


def _environ(entry: Path) -> str:
    try:
        return (entry / "environ").read_text()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return ""
