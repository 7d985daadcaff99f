"""The real launcher over fake processes: `python -m tests.fakes.fake_launch RUN_DIR BEHAVIOUR …`.

The rest of the command line is the launcher's own; BEHAVIOUR goes to the last worker. With
`serves SLOTS` the gateway is the real one and the workers are real around the fake model.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

from scripts.launch import Plan, main, service_commands
from scripts.processes import Command

GATEWAY_LOOKS_AFTER_S = "1.0"
"""Later than the workers are ready: a gateway looks at them only now and then."""

WEIGHTS = "weights"
"""File beside the configuration without which serving workers do not start."""


def fake_commands(plan: Plan, behaviour: str) -> list[Command]:
    gateway, *workers = service_commands(plan)
    if behaviour.startswith("serves"):
        return [gateway, *_serving_workers(plan, workers, behaviour.split()[1])]
    fake = [sys.executable, "-m", "tests.fakes.fake_process"]
    argv = [*fake, "gateway", str(plan.port), "--load-s", GATEWAY_LOOKS_AFTER_S]
    commands = [dataclasses.replace(gateway, argv=argv)]
    for worker, planned in zip(workers, plan.workers, strict=True):
        is_last = planned is plan.workers[-1]
        options = ["--load-s", "0.5", "--behaviour", behaviour if is_last else ""]
        argv = [*fake, "worker", str(planned.port), *options]
        commands.append(dataclasses.replace(worker, argv=argv))
    return commands


def _serving_workers(plan: Plan, workers: list[Command], slots: str) -> list[Command]:
    assert plan.config_path is not None
    fake = [sys.executable, "-m", "tests.fakes.worker_process", "--slots", slots]
    fake += ["--needs", str(plan.config_path.parent / WEIGHTS)]
    return [
        dataclasses.replace(worker, argv=[*fake, "--port", str(planned.port)])
        for worker, planned in zip(workers, plan.workers, strict=True)
    ]


if __name__ == "__main__":
    run_dir, behaviour, *rest = sys.argv[1:]
    sys.exit(main(rest, Path(run_dir), lambda plan: fake_commands(plan, behaviour)))
