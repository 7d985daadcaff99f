"""The whole service on this machine's CPU, started as a user starts it, once for all tests here."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from scripts.machine import pick_free_port

ROOT = Path(__file__).parents[2]
LAUNCH = """
import sys
from pathlib import Path
from scripts.launch import main
sys.exit(main(sys.argv[2:], run_dir=Path(sys.argv[1])))
"""


@dataclass(frozen=True)
class RunningService:
    """`run_dir` holds its logs."""

    http_url: str
    run_dir: Path

    @property
    def ws_url(self) -> str:
        return self.http_url.replace("http", "ws", 1)

    def log(self, name: str) -> str:
        return (self.run_dir / f"{name}.log").read_text(encoding="utf-8")


@pytest.fixture(scope="session")
def running_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    """The embedded back end."""
    with started(tmp_path_factory.mktemp("service"), {}) as service:
        yield service


@pytest.fixture(scope="session")
def tiny_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    """The large model's back end on its tiny checkpoint."""
    settings = json.loads((ROOT / "tests/configs/tiny.json").read_text(encoding="utf-8"))
    with started(tmp_path_factory.mktemp("tiny"), settings) as service:
        yield service


@contextmanager
def started(folder: Path, settings: dict[str, Any]) -> Iterator[RunningService]:
    """Start the service with a configuration; stop it afterwards.

    It records nothing unless the configuration says so: it would do so in the working directory,
    whose `data` has the converted weights that it needs.
    """
    config = folder / "config.json"
    ports = {"worker_base_port": pick_free_port("127.0.0.1")}
    settings = {"recording": {"enabled": False}} | settings
    settings["service"] = settings.get("service", {}) | ports
    config.write_text(json.dumps(settings), encoding="utf-8")
    port = pick_free_port("127.0.0.1")
    command = [sys.executable, "-c", LAUNCH, str(folder), "--http"]
    command += ["--config", str(config), "--port", str(port)]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as launcher:
        try:
            assert launcher.stdout is not None
            said = []
            for line in launcher.stdout:
                said.append(line)
                if match := re.search(r"ready: (http\S+)", line):
                    yield RunningService(match.group(1), folder)
                    break
            else:
                pytest.fail("the service did not start:\n" + "".join(said))
        finally:
            launcher.terminate()
            launcher.wait(timeout=40)
