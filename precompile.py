"""`python precompile.py`: fills the shared compile cache and proves that a start finds it.

    python precompile.py [--config FILE] [--modules all|NAME ...] [--mode MODE]
                         [--force] [--verify-only]

It starts a worker like any other, which goes through its own stages: that one compiles, and shares
what it made. A second one has to find everything: nothing is compiled, and no file is written. (It
may add kernels that are only built when their code comes from a cache; then a third one proves it.)
Otherwise the cache is removed again and the exit status is not 0. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from scripts.launch import WorkerPlan, config_path, worker_environment, worker_gpus
from scripts.machine import StartError, fetch, pick_free_port
from scripts.processes import Child, Command, last_lines, rotate_log, stop_children
from scripts.supervisor import (
    HEALTH_TIMEOUT_S,
    N_SHOWN_LOG_LINES,
    PROGRESS_INTERVAL_S,
    START_TIMEOUT_S,
    STEP_S,
    WORKER_GRACE_S,
    read_progress,
)
from shared.config import COMPILE_MODULES, Config, load_config
from shared.errors import CompileCacheError, ConfigError
from shared.protocol import CompileStatus, WorkerHealth
from worker.compile.manifest import DamagedCache
from worker.compile.master import Master, cache_root
from worker.compiling import ON_COLD_EAGER

ROOT = Path(__file__).resolve().parent
RUN_DIR = ROOT / ".run"
LOOPBACK = "127.0.0.1"

WEIGHTS_STAGE = "load_model"
BUILD_STAGES = ("apply_torch_compile", "warmup_compile")
"""What a cache makes faster."""

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130

CommandOf = Callable[[Path, int, Path], list[str]]
"""Command line of a worker that only starts: of its configuration, port, and report."""


class Failed(Exception):
    """There is no verified cache; the text says why and what to do."""


@dataclass(frozen=True, slots=True)
class Run:
    """What a worker that only started has reported."""

    status: CompileStatus
    wall_s: float

    @property
    def build_s(self) -> float:
        """Seconds of the stages that compile, capture and warm up."""
        return round(sum(self.status.stage_seconds.get(name, 0.0) for name in BUILD_STAGES), 2)

    @property
    def is_warm(self) -> bool:
        return self.status.state == "warm"

    def figures(self) -> dict[str, Any]:
        status = self.status
        return {
            "warm_s": self.build_s,
            "weights_s": status.stage_seconds.get(WEIGHTS_STAGE, 0.0),
            "graphs": status.graphs,
            "fx_hits": status.fx_hits,
            "fx_misses": status.fx_misses,
            "new_files": status.new_files,
            "recompiles": status.recompiles_after_idle,
            "stages": dict(status.stage_seconds),
        }


class Starter:
    """Starts workers one after the other, and says how far each is."""

    def __init__(
        self, config: Config, environment: Mapping[str, str], command_of: CommandOf, run_dir: Path
    ) -> None:
        self._environment = dict(environment)
        self._command_of = command_of
        self._log_path = run_dir / "precompile.log"
        self._config = config.model_dump(mode="json")
        self._config["service"]["compile"] = True

    def start(self, title: str, on_cold: str) -> Run:
        """Start a worker, wait until it has reported, and return its report.

        Raises:
            Failed: it ended without one.
        """
        print(title, flush=True)
        began_at = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="precompile-") as folder:
            config, report = Path(folder) / "config.json", Path(folder) / "report.json"
            section = {**self._config["compile"], "on_cold": on_cold}
            config.write_text(json.dumps({**self._config, "compile": section}), encoding="utf-8")
            port = pick_free_port(LOOPBACK)
            health_url = f"http://{LOOPBACK}:{port}/health"
            argv = self._command_of(config, port, report)
            # Another precompile may run at the same time: each has a log of its own until the end.
            command = Command("worker", argv, self._environment, health_url)
            child = Child(command, Path(folder) / "worker.log")
            try:
                child.start(time.monotonic())
                self._wait(child)
            finally:
                stop_children([child], WORKER_GRACE_S)
                self._keep_log(child.log_path)
            try:
                status = msgspec.json.decode(report.read_bytes(), type=CompileStatus)
            except (OSError, msgspec.MsgspecError) as error:
                raise Failed(f"the worker left no report: {error}") from error
        return Run(status, round(time.monotonic() - began_at, 2))

    def _wait(self, child: Child) -> None:
        said, said_at = "", 0.0
        while (status := child.exit_status()) is None:
            now = time.monotonic()
            if now - child.started_at > START_TIMEOUT_S:
                raise Failed(
                    self._told(child, f"the worker is not ready after {START_TIMEOUT_S:.0f} s")
                )
            stage, text = _progress(fetch(child.command.health_url, HEALTH_TIMEOUT_S))
            if text and (stage != said or now - said_at >= PROGRESS_INTERVAL_S):
                print(f"  {text}", flush=True)
                said, said_at = stage, now
            time.sleep(STEP_S)
        if status:
            raise Failed(self._told(child, f"the worker ended with status {status}"))

    def _keep_log(self, log_path: Path) -> None:
        if log_path.exists():
            self._log_path.parent.mkdir(parents=True, exist_ok=True)
            rotate_log(self._log_path)
            shutil.move(log_path, self._log_path)

    def _told(self, child: Child, problem: str) -> str:
        lines = last_lines(child.log_path, N_SHOWN_LOG_LINES)
        return "\n".join([f"{problem}; the end of its log, {self._log_path}:", *lines])


def _progress(health: bytes | None) -> tuple[str, str]:
    """Return the stage of a worker's start and a line about it; empty without an answer."""
    progress = read_progress(health) if health is not None else None
    if progress is None or health is None:
        return "", ""
    stages = msgspec.json.decode(health, type=WorkerHealth).stages
    note = stages[-1].note if stages and not progress.ready else ""
    return progress.stage, f"{progress.text}{'; ' if note else ''}{note}"


def fault_of(run: Run, n_graphs: int, may_add: bool = False) -> str:
    """Return why a start was not a warm one, in a few words; "" if it was.

    Hits alone prove nothing: a kernel that is compiled again counts as one, but leaves a file.

    Args:
        may_add: such files are no fault this time.
    """
    status = run.status
    if not run.is_warm:
        changed = [f"{f.name} is {f.here!r}, was {f.there!r}" for f in status.stale_fields]
        # That it may not make one is our own doing here.
        reason = "" if changed else status.reason.removesuffix(ON_COLD_EAGER)
        return "; ".join(filter(None, [f"it is {status.state}", *changed, reason]))
    found = [
        (not status.graphs, "nothing is compiled"),
        (status.degraded, f"the worker is degraded ({status.reason})"),
        (status.fx_misses, f"{status.fx_misses} graphs were not in it"),
        (status.graphs != n_graphs, f"there are {status.graphs} graphs, not {n_graphs}"),
        (status.new_files and not may_add, f"{status.new_files} files were written"),
        (status.recompiles_after_idle, f"{status.recompiles_after_idle} calls had no graph"),
    ]
    return ", ".join(text for is_wrong, text in found if is_wrong)


def precompile(starter: Starter, root: Path, force: bool, verify_only: bool) -> dict[str, Any]:
    """Build the cache if there is none, verify it, and return what to tell.

    Raises:
        Failed: there is no verified cache now.
        CompileCacheError: the root cannot be used.
    """
    first = starter.start("starting a worker", "eager" if verify_only else "compile")
    if first.status.state in (None, "disabled"):
        raise Failed("the worker compiles nothing: this back end has no regions to compile")
    master = Master(root, first.status.fingerprint)
    if verify_only or (first.is_warm and not force):
        fault = fault_of(first, first.status.graphs)
        if not fault:
            return _verified(master, None, first)
        if verify_only:
            raise Failed(f"the cache does not hold: {fault}; python precompile.py makes it anew")
        print(f"the cache does not hold: {fault}; it is made anew", flush=True)
        with master.lock():
            master.discard()
    elif not first.is_warm:
        return _verify_build(starter, master, first)
    with master.lock():
        aside = master.set_aside() if master.exists() else None
    try:
        first = starter.start("starting a worker that compiles", "compile")
        return _verify_build(starter, master, first)
    finally:
        if aside is not None:
            # If there is none now, the older one is better.
            master.put_back(aside)


def _verify_build(starter: Starter, master: Master, cold: Run) -> dict[str, Any]:
    """Start a second worker on what the first one has made; if it does not hold, remove it."""
    if cold.status.degraded:
        print(f"the worker is degraded: {cold.status.reason}", flush=True)
    warm = starter.start("starting a worker that has to find everything", "eager")
    if warm.status.new_files and not fault_of(warm, cold.status.graphs, may_add=True):
        # It has shared them as well.
        print(f"  that one has added {warm.status.new_files} files", flush=True)
        warm = starter.start("starting another one that has to find everything", "eager")
    fault = fault_of(warm, cold.status.graphs)
    if not fault:
        return _verified(master, cold, warm)
    with master.lock():
        master.discard()
    raise Failed(f"the second start was not warm, and the cache is removed: {fault}")


def _verified(master: Master, cold: Run | None, warm: Run) -> dict[str, Any]:
    try:
        with master.lock():
            master.record(warm.figures())
            manifest = master.manifest()
    except DamagedCache as error:
        raise Failed(f"the cache is not there any more: {error}") from error
    return {
        "fingerprint": master.fingerprint,
        "directory": str(master.directory),
        "built": cold is not None,
        "cold_s": cold.build_s if cold else None,
        "verify_s": warm.build_s,
        "weights_s": warm.status.stage_seconds.get(WEIGHTS_STAGE, 0.0),
        "graphs": warm.status.graphs,
        "files": manifest.files.count,
        "bytes": manifest.files.bytes,
        "wall_s": round((cold.wall_s if cold else 0.0) + warm.wall_s, 2),
        "stages": {
            "cold": dict(cold.status.stage_seconds) if cold else None,
            "verify": dict(warm.status.stage_seconds),
        },
    }


def worker_command(config: Path, port: int, report: Path) -> list[str]:
    """The command line of a worker that starts, reports and ends."""
    argv = [sys.executable, "-m", "worker", "--config", str(config), "--port", str(port)]
    return [*argv, "--start-only", str(report)]


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="precompile.py", description=__doc__.split("\n")[0])
    parser.add_argument("--config", type=Path, help="configuration file (config.json)")
    names = ", ".join(COMPILE_MODULES)
    parser.add_argument("--modules", nargs="+", help=f"compile.modules: all, or some of {names}")
    parser.add_argument("--mode", help="compile.mode: default or max-autotune")
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--force", action="store_true", help="make it anew although there is one")
    only.add_argument("--verify-only", action="store_true", help="build nothing")
    return parser.parse_args(argv)


def read_config(arguments: argparse.Namespace, environment: Mapping[str, str]) -> Config:
    """Return the configuration that the workers get. Raises ConfigError."""
    modules: Any = arguments.modules
    if modules == ["all"]:
        modules = "all"
    changes = {"compile.modules": modules, "compile.mode": arguments.mode}
    loaded = load_config(config_path(arguments.config, environment), changes)
    if loaded.config.service.compile is False:
        raise ConfigError("service.compile is false: no worker would use what is compiled here")
    if any(value is not None for value in changes.values()):
        print("note: workers find this cache if their configuration says the same", flush=True)
    return loaded.config


def main(
    argv: Sequence[str] | None = None,
    command_of: CommandOf = worker_command,
    run_dir: Path = RUN_DIR,
) -> int:
    """Entry point; tests give another command line of a worker and another folder."""
    arguments = parse_arguments(argv)
    # Ended by somebody else it ends its worker as well.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        config = read_config(arguments, os.environ)
        plan = WorkerPlan(0, 0, worker_gpus(config, os.environ)[0])
        if plan.gpu is None and config.service.compile == "auto":
            print("note: without GPU, workers use this if you set service.compile to true")
        starter = Starter(config, worker_environment(plan), command_of, run_dir)
        root = cache_root(config.compile.cache_dir, os.environ)
        if not arguments.verify_only:
            # Known now, not after minutes of compiling.
            Master(root, "").ensure_writable()
        result = precompile(starter, root, arguments.force, arguments.verify_only)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USAGE
    except (StartError, Failed, CompileCacheError) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_FAILED
    except OSError as error:
        print(
            f"error: {error.filename or run_dir} cannot be used: {error.strerror}", file=sys.stderr
        )
        return EXIT_FAILED
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return EXIT_INTERRUPTED
    if result["built"]:
        print(f"built in {result['cold_s']} s, a warm start takes {result['verify_s']} s")
    else:
        print(f"was there already: a warm start takes {result['verify_s']} s")
    print(json.dumps(result), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
