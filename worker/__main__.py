"""`python -m worker`: one worker process on one loopback port."""

from __future__ import annotations

import argparse
import asyncio
import functools
import gc
import logging
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

from shared import logs
from shared.config import Config, load_config
from shared.errors import ConfigError
from worker.lifecycle import EXIT_START_FAILED, Lifecycle, WorkerSettings
from worker.models.contract import DuplexModel, Progress
from worker.server import bind, create_app, make_server
from worker.sessions.duplex import SessionHost, SessionLimits
from worker.sessions.rehearsal import rehearse, warm_up_chunks

log = logging.getLogger("worker")

EXIT_BAD_CONFIG = 2
WARM_UP_CLIP = Path(__file__).parents[1] / "assets" / "warmup.wav"
AUTO_SLOTS = 2
"""Two cores hold two conversations of the cascade in real time; the large model takes two as long
as nobody has measured how many its device holds."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a worker until it is stopped; returns the exit code."""
    args = _parser().parse_args(argv)
    logs.set_up(f"worker{args.worker_index}")
    try:
        loaded = load_config(args.config)
    except ConfigError as error:
        for line in str(error).splitlines():
            log.error("configuration refused: %s", line)
        return EXIT_BAD_CONFIG
    for notice in loaded.notices:
        log.warning("configuration: %s", notice)
    return asyncio.run(_serve(loaded.config, args.port, args.gpu_id))


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
        limits=SessionLimits(duplex.pause_timeout, duplex.idle_timeout_s, duplex.max_session_s),
    )


def builder_of(config: Config) -> Callable[[], DuplexModel]:
    """Return what makes the configured back end, to be called in the `load_model` stage."""
    if config.backend == "minicpmo45":
        return functools.partial(_build_minicpmo45, config)
    return functools.partial(
        _build_cascade,
        Path(config.service.data_dir),
        # The cascade computes on the CPU, where "auto" means eager.
        compile_regions=config.service.compile is True,
    )


async def _warm_up(host: SessionHost, progress: Progress) -> None:
    await rehearse(warm_up_chunks(WARM_UP_CLIP), host, progress)
    # What the start has made stays until the end: a full collection in the middle of a unit would
    # walk through all of it.
    gc.collect()
    gc.freeze()


def _build_cascade(data_dir: Path, compile_regions: bool) -> DuplexModel:
    # Read when torch is imported; what `torch.set_num_threads` says reaches no other thread's
    # first convolutions.
    os.environ["OMP_NUM_THREADS"] = "1"
    # Late: this imports torch, and the port has to answer within three seconds of the spawn.
    from worker.models.cascade.model import CascadeModel  # noqa: PLC0415

    return CascadeModel(data_dir=data_dir, compile_regions=compile_regions)


def _build_minicpmo45(config: Config) -> DuplexModel:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # Late, as above.
    from worker.models.minicpmo45.build import build  # noqa: PLC0415

    return build(config)


async def _serve(config: Config, port: int, gpu_id: int | None) -> int:
    settings = settings_of(config, gpu_id)
    try:
        listener = bind(port)
    except OSError as error:
        log.error("port %d cannot be taken: %s", port, error.strerror)
        return EXIT_START_FAILED
    lifecycle = Lifecycle(settings, builder_of(config), _warm_up)
    server = make_server(create_app(lifecycle))
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, lifecycle.request_stop)
    loop.add_signal_handler(signal.SIGUSR1, lifecycle.request_retirement)
    log.info("listening port=%d pid=%d", listener.getsockname()[1], os.getpid())
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        return await lifecycle.run()
    finally:
        server.should_exit = True
        await serving


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m worker", description=__doc__)
    parser.add_argument("--config", type=Path, help="JSON file; without it the defaults apply")
    parser.add_argument("--port", type=int, required=True, help="port on 127.0.0.1, 0 = any")
    parser.add_argument("--worker-index", type=int, default=0, help="for logs")
    parser.add_argument("--gpu-id", type=int, help="reported in /health")
    return parser


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    # A thread that is stuck in the device would keep the interpreter from ending.
    os._exit(code)
