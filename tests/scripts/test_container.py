"""The container's entry point, without a container: its folders, its environment, its signals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from scripts.container import chosen_gpus, launcher_options, make_config
from shared.errors import ConfigError
from tests.fakes.launch import N_WORKERS, PATIENCE_S
from tests.fakes.ports import free_port

ROOT = Path(__file__).parents[2]

ENTRY = """
import sys
from pathlib import Path
from scripts.container import main
from tests.fakes.fake_launch import fake_commands
workspace, run_dir, *rest = sys.argv[1:]
sys.exit(main(rest, Path(workspace), Path(run_dir), lambda plan: fake_commands(plan, "")))
"""


@dataclass
class Container:
    folder: Path

    @property
    def workspace(self) -> Path:
        return self.folder / "workspace"

    def configure(self, content: dict[str, Any]) -> None:
        self.workspace.mkdir(exist_ok=True)
        (self.workspace / "config.json").write_text(json.dumps(content))

    def start(self, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        known = {k: v for k, v in os.environ.items() if k not in ("OMNI_CONFIG", "GATEWAY_PROTO")}
        return subprocess.Popen(
            [
                sys.executable,
                "-c",
                ENTRY,
                str(self.workspace),
                str(self.folder / "run"),
                *arguments,
            ],
            cwd=ROOT,
            env={**known, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )


@pytest.fixture
def container(tmp_path: Path) -> Container:
    return Container(tmp_path)


def test_it_serves_on_the_port_of_the_environment_and_sigterm_ends_everything(
    container: Container,
) -> None:
    container.configure({"service": {"cpu_workers": N_WORKERS, "gateway_port": 1}})
    ports = {"GATEWAY_PORT": str(free_port()), "WORKER_BASE_PORT": str(free_port(N_WORKERS))}
    with container.start("--no-auth", **ports) as process:
        try:
            assert process.stdout is not None
            said = []
            for line in process.stdout:
                said.append(line)
                if line.startswith("ready: http://"):
                    break
            assert said[-1].strip().endswith(f":{ports['GATEWAY_PORT']}"), said
            children = children_of(process.pid)
            process.send_signal(signal.SIGTERM)

            assert process.wait(PATIENCE_S) == 0
        finally:
            process.kill()
    assert len(children) == 1 + N_WORKERS
    assert not any(Path(f"/proc/{pid}").exists() for pid in children)
    assert {path.name for path in container.workspace.iterdir()} == {
        "config.json",
        "certs",
        "data",
        "torch_compile_cache",
    }


def children_of(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_it_does_not_open_itself_to_the_network_without_a_key(container: Container) -> None:
    process = container.start(GATEWAY_PORT=str(free_port()))
    output, _ = process.communicate(timeout=PATIENCE_S)

    assert process.returncode == 1
    assert "--no-auth" in output


def test_a_bad_environment_is_told_in_its_own_words(container: Container) -> None:
    process = container.start("--no-auth", GATEWAY_PORT="eight")
    output, _ = process.communicate(timeout=PATIENCE_S)

    assert process.returncode == 2
    assert "GATEWAY_PORT is 'eight', expected a port number" in output


def test_an_empty_workspace_serves_the_embedded_model(tmp_path: Path) -> None:
    config = make_config(tmp_path, {"GATEWAY_PORT": ""})

    assert config == {"model": {}, "service": {"data_dir": str(tmp_path / "data")}}


def test_a_checkpoint_in_the_workspace_is_served(tmp_path: Path) -> None:
    (tmp_path / "models/MiniCPM-o-4_5").mkdir(parents=True)

    config = make_config(tmp_path, {})

    assert config["model"] == {"model_path": str(tmp_path / "models/MiniCPM-o-4_5")}


def test_the_configuration_of_the_workspace_wins_and_its_paths_are_there(
    container: Container,
) -> None:
    workspace = container.workspace
    container.configure(
        {
            "model": {"model_path": "models/mine", "pt_path": "openbmb/other"},
            "service": {"data_dir": "records", "max_queue_size": 5},
            "compile": {"cache_dir": "/elsewhere"},
        }
    )
    for name in ("models/mine", "models/MiniCPM-o-4_5"):
        (workspace / name).mkdir(parents=True)

    config = make_config(workspace, {"WORKER_BASE_PORT": "23000"})

    assert config == {
        "model": {"model_path": str(workspace / "models/mine"), "pt_path": "openbmb/other"},
        "service": {
            "data_dir": str(workspace / "records"),
            "max_queue_size": 5,
            "worker_base_port": 23000,
        },
        "compile": {"cache_dir": "/elsewhere"},
    }


def test_a_bad_configuration_is_refused_with_its_key(container: Container) -> None:
    container.configure({"service": {"gateway_prt": 1}})

    with pytest.raises(ConfigError, match="gateway_prt"):
        make_config(container.workspace, {})


def test_http_is_the_default_and_https_can_be_asked_for() -> None:
    assert launcher_options({}) == ["--public", "--http"]
    assert launcher_options({"GATEWAY_PROTO": "https"}) == ["--public"]
    with pytest.raises(ConfigError, match="GATEWAY_PROTO is 'ftp'"):
        launcher_options({"GATEWAY_PROTO": "ftp"})


def test_fewer_gpus_than_there_are_can_be_asked_for() -> None:
    visible = {"CUDA_VISIBLE_DEVICES": "4,GPU-1a,2"}

    assert chosen_gpus(visible) is None
    assert chosen_gpus({**visible, "NUM_GPUS_OVERRIDE": "2"}) == ["4", "GPU-1a"]
    for wrong in ("4", "0", "two"):
        with pytest.raises(ConfigError, match="NUM_GPUS_OVERRIDE"):
            chosen_gpus({**visible, "NUM_GPUS_OVERRIDE": wrong})


def test_compose_publishes_to_this_machine_and_reserves_the_gpus() -> None:
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]

    for service in services.values():
        assert service["ports"] == ["127.0.0.1:${GATEWAY_PORT:-8006}:${GATEWAY_PORT:-8006}"]
        assert service["volumes"] == ["./workspace:/workspace"]
        assert service["environment"]["GATEWAY_PROTO"] == "${GATEWAY_PROTO:-http}"
    devices = services["gpu"]["deploy"]["resources"]["reservations"]["devices"]
    assert devices == [{"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}]
