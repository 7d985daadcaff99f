"""`python -m scripts.launch`: starts gateway and workers, watches them, ends them.

python -m scripts.launch [--http] [--public] [--no-auth] [--detach] [--port N] [--config FILE]
                         [--lang zh|en] [--static-dir DIR]
python -m scripts.launch stop | status | restart
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from scripts.background import Background, go_to_background
from scripts.instance import (
    AlreadyRunning,
    Instance,
    acquire,
    ensure_not_running,
    read_notes,
    running,
    write_notes,
)
from scripts.instance import restart as restart_instance
from scripts.instance import stop as stop_instance
from scripts.machine import (
    StartError,
    check_port_is_free,
    ensure_certificate,
    fetch,
    outward_address,
    pick_free_port,
    visible_gpus,
)
from scripts.processes import Command, rotate_log
from scripts.supervisor import (
    HEALTH_TIMEOUT_S,
    RESTARTED_NOTE,
    RESTARTING_NOTE,
    Requests,
    Supervisor,
    n_workers_ready,
    read_progress,
)
from shared.cautions import cautions
from shared.config import Config, LoadedConfig, is_loopback, load_config
from shared.errors import ConfigError

ROOT = Path(__file__).resolve().parents[1]
RUN_DIR = ROOT / ".run"
LOOPBACK = "127.0.0.1"
TINY_HIDDEN_SIZE = 256
"""Models up to this width are test models, which a CPU runs in time."""

ACTIONS = ("start", "stop", "status", "restart")

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_NOT_RUNNING = 3
EXIT_INTERRUPTED = 130


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    """`gpu`: the name by which CUDA knows the worker's GPU; None = it computes on the CPU."""

    index: int
    port: int
    gpu: str | None


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that is decided before the first process starts."""

    config_path: Path | None
    host: str
    port: int
    certificate: tuple[Path, Path] | None
    asks_for_key: bool
    workers: tuple[WorkerPlan, ...]
    lang: str | None = None
    """Language that pages start in; None = the browser's."""
    static_dir: Path | None = None
    """Page tree in place of ours."""

    @property
    def url(self) -> str:
        """The address to open; under the outward one if the service listens to all."""
        return self._url(outward_address() or LOOPBACK if self._listens_to_all else self.host)

    @property
    def local_url(self) -> str:
        return self._url(LOOPBACK if self._listens_to_all else self.host)

    @property
    def _listens_to_all(self) -> bool:
        return self.host in {"0.0.0.0", "::"}

    def _url(self, host: str) -> str:
        scheme = "https" if self.certificate else "http"
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{self.port}"


def make_plan(
    loaded: LoadedConfig, arguments: argparse.Namespace, environment: Mapping[str, str]
) -> Plan:
    """Decide host, ports, certificate and workers.

    Raises:
        StartError: the service cannot be started like this on this machine.
    """
    config = loaded.config
    host = "0.0.0.0" if arguments.public else config.service.bind
    is_public = not is_loopback(host)
    if is_public and not config.security.api_keys and not arguments.no_auth:
        raise StartError(
            f"the service would be open to everybody who reaches {host}: set security.api_keys "
            "in the configuration, or say --no-auth if that is meant"
        )
    port = config.service.gateway_port or pick_free_port(host)
    workers = tuple(
        WorkerPlan(index, config.service.worker_base_port + index, gpu)
        for index, gpu in enumerate(worker_gpus(config, environment))
    )
    check_port_is_free(host, port, "choose another one with --port, or end what uses it")
    for worker in workers:
        remedy = f"set service.worker_base_port (worker {worker.index} takes it + {worker.index})"
        if worker.port == port:
            raise StartError(f"the gateway has port {port} already; {remedy}")
        check_port_is_free(LOOPBACK, worker.port, remedy)
    uses_tls = is_public and not arguments.http
    certificate = ensure_certificate(ROOT / "certs") if uses_tls else None
    static_dir = arguments.static_dir.resolve() if arguments.static_dir else None
    if static_dir is not None and not static_dir.is_dir():
        raise StartError(f"--static-dir: there is no folder {static_dir}")
    return Plan(
        config_path=loaded.source,
        host=host,
        port=port,
        certificate=certificate,
        asks_for_key=bool(config.security.api_keys),
        workers=workers,
        lang=arguments.lang,
        static_dir=static_dir,
    )


def worker_gpus(config: Config, environment: Mapping[str, str]) -> list[str | None]:
    """Return one entry per worker: its GPU, or None for the CPU.

    Raises:
        StartError: the model needs a GPU, and none is visible.
    """
    on_cpu: list[str | None] = [None] * config.service.cpu_workers
    if config.backend == "cascade":
        return on_cpu
    gpus = visible_gpus(environment)
    if gpus:
        return list(gpus)
    if _is_tiny(config.model.model_path):
        return on_cpu
    raise StartError(
        f"the model {config.model.model_path or 'with random weights'} needs an NVIDIA GPU and "
        "none is visible (see nvidia-smi and CUDA_VISIBLE_DEVICES); "
        'without GPU set model.backend: "cascade"'
    )


def _is_tiny(model_path: str | None) -> bool:
    file = Path(model_path or "") / "config.json"
    if not model_path or not file.is_file():
        return False
    try:
        hidden_size = json.loads(file.read_text(encoding="utf-8")).get("hidden_size")
    except (json.JSONDecodeError, UnicodeDecodeError, AttributeError) as error:
        raise StartError(f"{file}: no configuration of a model: {error}") from error
    return isinstance(hidden_size, int) and hidden_size <= TINY_HIDDEN_SIZE


def service_commands(plan: Plan) -> list[Command]:
    """The gateway's command line, then one per worker."""
    config = ["--config", str(plan.config_path)] if plan.config_path else []
    gateway = [sys.executable, "-m", "gateway", *config, "--host", plan.host]
    gateway += ["--port", str(plan.port), "--num-workers", str(len(plan.workers))]
    if plan.certificate:
        certificate, key = plan.certificate
        gateway += ["--ssl-certfile", str(certificate), "--ssl-keyfile", str(key)]
    if plan.lang:
        gateway += ["--lang", plan.lang]
    if plan.static_dir:
        gateway += ["--static-dir", str(plan.static_dir)]
    commands = [
        Command("gateway", gateway, _environment(None, {}), f"{plan.local_url}/health"),
    ]
    for worker in plan.workers:
        argv = [sys.executable, "-m", "worker", *config, "--port", str(worker.port)]
        argv += ["--worker-index", str(worker.index)]
        if worker.gpu is not None:
            # CUDA names may be UUIDs; then the place among the visible GPUs is the number.
            number = worker.gpu if worker.gpu.isdigit() else str(worker.index)
            argv += ["--gpu-id", number]
        health = f"http://{LOOPBACK}:{worker.port}/health"
        commands.append(Command(f"worker_{worker.index}", argv, worker_environment(worker), health))
    return commands


def worker_environment(worker: WorkerPlan) -> dict[str, str]:
    """Return the whole environment of a worker; what it compiles depends on it."""
    if worker.gpu is not None:
        return _environment(worker.gpu, {})
    # Spinning OpenMP threads of several processes slow each other down by a factor of ten.
    return _environment("", {"OMP_NUM_THREADS": "1"})


def _environment(visible_gpus: str | None, changes: Mapping[str, str]) -> dict[str, str]:
    chosen = {} if visible_gpus is None else {"CUDA_VISIBLE_DEVICES": visible_gpus}
    return {**os.environ, "PYTHONUNBUFFERED": "1", **chosen, **changes}


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="start_all.sh", description="Start the whole service.")
    parser.add_argument("action", nargs="?", choices=ACTIONS, default="start")
    parser.add_argument("--http", action="store_true", help="no TLS, also with --public")
    parser.add_argument(
        "--public", action="store_true", help="listen on all interfaces, with HTTPS and API keys"
    )
    parser.add_argument(
        "--no-auth", action="store_true", help="allow --public without security.api_keys"
    )
    parser.add_argument(
        "--detach", action="store_true", help="return when ready, leave the service running"
    )
    parser.add_argument("--port", type=int, help="port of the gateway (service.gateway_port)")
    parser.add_argument("--config", type=Path, help="configuration file (config.json)")
    parser.add_argument("--lang", choices=("zh", "en"), help="language that pages start in")
    parser.add_argument("--static-dir", type=Path, help="another page tree in place of ours")
    return parser.parse_args(argv)


def read_config(arguments: argparse.Namespace, environment: Mapping[str, str]) -> LoadedConfig:
    """Load `--config`, else `OMNI_CONFIG`, else `config.json` of the checkout if it is there.

    Raises:
        ConfigError: see `load_config`.
    """
    path = config_path(arguments.config, environment)
    return load_config(path, {"service.gateway_port": arguments.port})


def config_path(named: Path | None, environment: Mapping[str, str]) -> Path | None:
    """Return the configuration file: as named, else of the environment, else the checkout's."""
    if named is None and environment.get("OMNI_CONFIG"):
        named = Path(environment["OMNI_CONFIG"])
    default = ROOT / "config.json"
    path = named or (default if default.exists() else None)
    return path.resolve() if path else None


def start(
    arguments: argparse.Namespace,
    run_dir: Path = RUN_DIR,
    commands_of: Callable[[Plan], list[Command]] = service_commands,
) -> int:
    """Start the service and stay with it; returns the exit status."""
    ensure_not_running(run_dir)
    loaded = read_config(arguments, os.environ)
    plan = make_plan(loaded, arguments, os.environ)
    background: Background | None = None
    if arguments.detach:
        run_dir.mkdir(parents=True, exist_ok=True)
        rotate_log(run_dir / "launch.log")
        background = go_to_background(run_dir / "launch.log")
    say = background.say if background else _say
    for notice in loaded.notices:
        say(f"note: {notice}")
    for caution in cautions(loaded.config, plan.host):
        say(f"warning: {caution}")
    commands = commands_of(plan)
    health_urls = {command.name: command.health_url for command in commands}
    status = EXIT_FAILED
    # Before anybody can read our pid and ask for something.
    requests = Requests()
    requests.install()
    supervisor = Supervisor(commands, run_dir, say, requests, loaded.config.service.drain_timeout_s)
    try:
        with acquire(run_dir, Instance(os.getpid(), plan.url, health_urls)):
            write_notes(run_dir, {})
            status = _supervise(plan, supervisor, run_dir, say, background)
    except (StartError, AlreadyRunning) as error:
        say(f"error: {error}")
    except OSError as error:
        # Of the folder with pid and logs: a full disk, or one that cannot be written to.
        say(f"error: {run_dir} cannot be used: {error.strerror}")
    if background:
        background.report(status)
    return status


def _supervise(
    plan: Plan,
    supervisor: Supervisor,
    run_dir: Path,
    say: Callable[[str], None],
    background: Background | None,
) -> int:
    count = len(plan.workers)
    say(f"starting the gateway and {count} worker{'s' if count > 1 else ''}, logs in {run_dir}")
    try:
        if not supervisor.start():
            say("stopped before it was ready")
            return EXIT_INTERRUPTED
        say(f"ready: {plan.url}")
        if plan.certificate:
            say("the certificate is self-signed; browsers ask once whether to trust it")
        if plan.asks_for_key:
            say(f"browsers open it once as {plan.url}/?api_key=KEY (one of security.api_keys)")
        if background:
            background.report(0)
            say("end it with: bash start_all.sh stop")
        else:
            say("Ctrl-C stops it")
        supervisor.watch()
        say("stopping")
        return 0
    finally:
        supervisor.close()


def show_status(run_dir: Path = RUN_DIR) -> int:
    """Print what runs; 0 when all is ready, 1 when not all, 3 when nothing runs.

    While workers are restarted one by one, 0 means that the gateway has one to send sessions to.
    """
    instance = running(run_dir)
    if instance is None:
        _say("not running")
        return EXIT_NOT_RUNNING
    _say(f"running: {instance.url} (process {instance.pid})")
    notes = read_notes(run_dir)
    all_ready, n_seen = True, 0
    for name, url in instance.health_urls.items():
        body = fetch(url, HEALTH_TIMEOUT_S)
        progress = read_progress(body) if body is not None else None
        text = "no answer" if body is None else progress.text if progress else "up"
        _say("; ".join([f"{name}: {text}", *filter(None, [notes.get(name)])]))
        all_ready &= body is not None and (progress is None or progress.ready)
        n_seen += (n_workers_ready(body) or 0) if body is not None else 0
    for subject in (RESTARTING_NOTE, RESTARTED_NOTE):
        if subject in notes:
            _say(f"{subject}: {notes[subject]}")
    is_well = n_seen > 0 if RESTARTING_NOTE in notes else all_ready
    return 0 if is_well else EXIT_FAILED


def restart(run_dir: Path = RUN_DIR) -> int:
    if not restart_instance(run_dir):
        _say("not running")
        return EXIT_NOT_RUNNING
    _say("the workers are restarted one by one; bash start_all.sh status shows how far that is")
    return 0


def stop(run_dir: Path = RUN_DIR) -> int:
    _say("stopped" if stop_instance(run_dir) else "not running")
    return 0


def _say(line: str) -> None:
    print(line, flush=True)


def main(
    argv: Sequence[str] | None = None,
    run_dir: Path = RUN_DIR,
    commands_of: Callable[[Plan], list[Command]] = service_commands,
) -> int:
    """Entry point; tests give another folder and other command lines."""
    arguments = parse_arguments(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    try:
        if arguments.action == "stop":
            return stop(run_dir)
        if arguments.action == "status":
            return show_status(run_dir)
        if arguments.action == "restart":
            return restart(run_dir)
        return start(arguments, run_dir, commands_of)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USAGE
    except (StartError, AlreadyRunning) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_FAILED
    except OSError as error:
        print(
            f"error: {error.filename or run_dir} cannot be used: {error.strerror}", file=sys.stderr
        )
        return EXIT_FAILED
    except KeyboardInterrupt:
        # Before the first process was started; from then on signals are noted.
        return EXIT_INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
