"""`python -m scripts.container [OPTIONS OF THE LAUNCHER]`: the service inside a container.

Everything that outlives the container is in `/workspace`: `config.json`, `models/`, `certs/`,
`data/` and `torch_compile_cache/`, all optional. The environment overrides the configuration:

    GATEWAY_PORT, WORKER_BASE_PORT    ports
    GATEWAY_PROTO                     http (default) or https
    NUM_GPUS_OVERRIDE                 use that many of the visible GPUs
    CUDA_VISIBLE_DEVICES              which GPUs are visible
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from scripts import launch
from scripts.launch import EXIT_FAILED, EXIT_USAGE, RUN_DIR, Plan
from scripts.machine import StartError, visible_gpus
from scripts.processes import Command
from shared.config import load_config
from shared.errors import ConfigError

WORKSPACE = Path("/workspace")
MODEL = Path("models/MiniCPM-o-4_5")
"""Served if it is in the workspace and the configuration names no other model."""

PORTS = {
    "GATEWAY_PORT": "service.gateway_port",
    "WORKER_BASE_PORT": "service.worker_base_port",
}
PATHS = ("model.model_path", "model.pt_path", "audio.ref_audio_path", "compile.cache_dir")
"""Relative ones that exist in the workspace are meant there; a Hugging Face id does not."""

PROTOCOLS = {"http": ["--http"], "https": []}


def make_config(workspace: Path, environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the configuration's content: the workspace's file, seen from inside the container.

    Raises:
        ConfigError: the file or a value of the environment is invalid.
    """
    source = workspace / "config.json"
    raw: dict[str, Any] = {}
    if source.exists():
        load_config(source)
        raw = json.loads(source.read_text(encoding="utf-8"))
    model = raw.setdefault("model", {})
    if not model and (workspace / MODEL).is_dir():
        model["model_path"] = str(workspace / MODEL)
    for name in PATHS:
        section, _, key = name.partition(".")
        value = raw.get(section, {}).get(key)
        if value and (workspace / value).exists():
            raw[section][key] = str(workspace / value)
    service = raw.setdefault("service", {})
    service["data_dir"] = str(workspace / service.get("data_dir", "data"))
    for variable, name in PORTS.items():
        value = environment.get(variable)
        if value:
            if not value.isdecimal():
                raise ConfigError(f"{variable} is {value!r}, expected a port number")
            service[name.partition(".")[2]] = int(value)
    return raw


def launcher_options(environment: Mapping[str, str]) -> list[str]:
    """Return what the launcher is told besides the configuration.

    Raises:
        ConfigError: `GATEWAY_PROTO` is neither http nor https.
    """
    protocol = environment.get("GATEWAY_PROTO") or "http"
    if protocol not in PROTOCOLS:
        raise ConfigError(f"GATEWAY_PROTO is {protocol!r}, expected http or https")
    # Only what listens on all interfaces can be reached from outside the container.
    return ["--public", *PROTOCOLS[protocol]]


def chosen_gpus(environment: Mapping[str, str]) -> list[str] | None:
    """Return the GPUs that `NUM_GPUS_OVERRIDE` leaves; None = it is not set.

    Raises:
        ConfigError: it is no number above 0, or larger than the number of visible GPUs.
        StartError: the driver fails.
    """
    wanted = environment.get("NUM_GPUS_OVERRIDE")
    if not wanted:
        return None
    visible = visible_gpus(environment)
    if not wanted.isdecimal() or not 0 < int(wanted) <= len(visible):
        raise ConfigError(
            f"NUM_GPUS_OVERRIDE is {wanted!r}, expected 1 to the number of visible GPUs, "
            f"which is {len(visible)}"
        )
    return visible[: int(wanted)]


def main(
    argv: Sequence[str],
    workspace: Path = WORKSPACE,
    run_dir: Path = RUN_DIR,
    commands_of: Callable[[Plan], list[Command]] = launch.service_commands,
) -> int:
    """Start the service and stay with it; returns the exit status. Tests give other folders."""
    try:
        options = launcher_options(os.environ)
        content = make_config(workspace, os.environ)
        gpus = chosen_gpus(os.environ)
        for name in ("certs", "torch_compile_cache"):
            (workspace / name).mkdir(mode=0o700, parents=True, exist_ok=True)
        Path(content["service"]["data_dir"]).mkdir(parents=True, exist_ok=True)
        run_dir.mkdir(parents=True, exist_ok=True)
        # The keys are in it.
        config = run_dir / "config.json"
        config.touch(mode=0o600)
        config.write_text(json.dumps(content, indent=2), encoding="utf-8")
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USAGE
    except StartError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_FAILED
    except OSError as error:
        print(f"error: {error.filename} cannot be used: {error.strerror}", file=sys.stderr)
        return EXIT_FAILED
    if gpus is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(workspace / "torch_compile_cache"))
    return launch.main([*options, "--config", str(config), *argv], run_dir, commands_of)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
