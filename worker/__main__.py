"""`python -m worker`: one worker process on one loopback port."""

from __future__ import annotations

import argparse
import asyncio
import functools
import gc
import logging
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from shared import logs
from shared.config import Config, load_config
from shared.errors import ConfigError
from shared.protocol import Input
from worker.compiling import CompileParts, Compiling
from worker.lifecycle import EXIT_START_FAILED, Lifecycle, WorkerSettings
from worker.models.contract import Model, Progress
from worker.server import bind, create_app, make_server
from worker.sessions.host import SessionHost, SessionLimits
from worker.sessions.rehearsal import rehearse, rehearse_answers, warm_up_inputs

if TYPE_CHECKING:
    from worker.compile.compiler import Compiler

log = logging.getLogger("worker")

EXIT_BAD_CONFIG = 2
AUTO_SLOTS = 2
"""Two cores hold two conversations of the cascade in real time; the large model takes two as long
as nobody has measured how many its device holds."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a worker until it is stopped; returns the exit code."""
    args = _parser().parse_args(argv)
    logs.set_up(f"worker{args.worker_index}")
    try:
        loaded = load_config(args.config)
        video = loaded.config.compile.warmup_video
        played = warm_up_inputs(Path(video) if video else None)
    except ConfigError as error:
        for line in str(error).splitlines():
            log.error("configuration refused: %s", line)
        return EXIT_BAD_CONFIG
    for notice in loaded.notices:
        log.warning("configuration: %s", notice)
    return asyncio.run(_serve(loaded.config, args, played))


def settings_of(config: Config, gpu_id: int | None) -> WorkerSettings:
    """The part of the configuration that a worker's life depends on."""
    n_slots = config.service.sessions_per_worker
    if n_slots == "auto":
        n_slots = AUTO_SLOTS
    duplex = config.duplex
    return WorkerSettings(
        backend=config.backend,
        n_slots=n_slots,
        gpu_id=gpu_id,
        stuck_after_s=config.service.stuck_after_s,
        drain_timeout_s=config.service.drain_timeout_s,
        limits=SessionLimits(
            pause_timeout_s=duplex.pause_timeout,
            idle_timeout_s=duplex.idle_timeout_s,
            max_session_s=duplex.max_session_s,
            ask_timeout_s=config.service.request_timeout,
        ),
    )


def compiling_of(config: Config, n_slots: int, completes: bool = False) -> Compiling:
    """Return what the worker's start compiles; decided in the `load_model` stage."""
    # As it is now: to import torch may set its cache directory.
    make = functools.partial(_compile_parts, config, n_slots, dict(os.environ))
    return Compiling(make, completes=completes)


def builder_of(config: Config, compiling: Compiling) -> Callable[[], Model]:
    """Return what makes the configured back end, to be called in the `load_model` stage.

    Before anything else, this looks for the compile cache.
    """
    build = _build_minicpmo45 if config.backend == "minicpmo45" else _build_cascade
    return lambda: build(config, compiling.look())


async def _warm_up(played: Sequence[Input], host: SessionHost, progress: Progress) -> None:
    await rehearse(played, host, progress)
    await rehearse_answers(played, host, progress)
    # What the start has made stays until the end: a full collection in the middle of a unit would
    # walk through all of it.
    gc.collect()
    gc.freeze()


def _compile_parts(config: Config, n_slots: int, environment: Mapping[str, str]) -> CompileParts:
    # Read when torch is imported; what `torch.set_num_threads` says reaches no other thread's
    # first convolutions.
    if config.backend == "cascade":
        os.environ["OMP_NUM_THREADS"] = "1"
    else:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    # Late: this imports torch, and the port has to answer within three seconds of the spawn.
    from worker.plan import parts_of  # noqa: PLC0415

    return parts_of(config, n_slots, environment)


def _build_cascade(config: Config, compiler: Compiler) -> Model:
    # Late, as above.
    from worker.models.cascade.model import CascadeModel  # noqa: PLC0415

    return CascadeModel(Path(config.service.data_dir), compiler)


def _build_minicpmo45(config: Config, compiler: Compiler) -> Model:
    # Late, as above.
    from worker.models.minicpmo45.build import build  # noqa: PLC0415

    return build(config, compiler)


async def _serve(config: Config, args: argparse.Namespace, played: Sequence[Input]) -> int:
    settings = settings_of(config, args.gpu_id)
    try:
        listener = bind(args.port)
    except OSError as error:
        log.error("port %d cannot be taken: %s", args.port, error.strerror)
        return EXIT_START_FAILED
    compiling = compiling_of(config, settings.n_slots, completes=args.start_only is not None)
    lifecycle = Lifecycle(
        settings,
        builder_of(config, compiling),
        functools.partial(_warm_up, played),
        compiling=compiling,
    )
    server = make_server(create_app(lifecycle))
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, lifecycle.request_stop)
    loop.add_signal_handler(signal.SIGUSR1, lifecycle.request_retirement)
    log.info("listening port=%d pid=%d", listener.getsockname()[1], os.getpid())
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    reporting = asyncio.create_task(_report_start(lifecycle, args.start_only))
    try:
        code = await lifecycle.run()
        return code if await reporting else EXIT_START_FAILED
    finally:
        server.should_exit = True
        await serving


async def _report_start(lifecycle: Lifecycle, path: Path | None) -> bool:
    """With a path: write down how the start went once it is over, and have the worker end.

    Returns:
        False if that was asked for and cannot be done.
    """
    if path is None:
        return True
    await lifecycle.start_ended.wait()
    if not lifecycle.accepts_sessions:
        return False
    report = {
        **msgspec.to_builtins(lifecycle.compile_status()),
        "start_s": round(sum(lifecycle.stages.seconds().values()), 2),
        "versions": dict(lifecycle.compiling.versions),
    }
    lifecycle.request_stop()
    return await asyncio.to_thread(_write_report, path, report)


def _write_report(path: Path, report: dict[str, Any]) -> bool:
    try:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")
    except OSError as error:
        log.error("report cannot be written path=%s: %s", path, error.strerror)
        return False
    return True


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m worker", description=__doc__)
    parser.add_argument("--config", type=Path, help="JSON file; without it the defaults apply")
    parser.add_argument("--port", type=int, required=True, help="port on 127.0.0.1, 0 = any")
    parser.add_argument("--worker-index", type=int, default=0, help="for logs")
    parser.add_argument("--gpu-id", type=int, help="reported in /health")
    parser.add_argument(
        "--start-only",
        type=Path,
        metavar="REPORT.json",
        help="get ready, write what was compiled on the way, and end",
    )
    return parser


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    # A thread that is stuck in the device would keep the interpreter from ending.
    os._exit(code)
