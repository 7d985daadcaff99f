"""`python -m gateway`: the front process."""

from __future__ import annotations

import argparse
import gc
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from gateway.app import STATIC_DIR, create_app
from gateway.pool import Address
from gateway.server import allow_open_files, build_server
from shared import logs
from shared.cautions import cautions
from shared.config import Config, load_config
from shared.errors import ConfigError

log = logging.getLogger(__name__)

EXIT_BAD_CONFIG = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until a signal ends it; returns the exit code."""
    arguments = parse_arguments(argv)
    logs.set_up("gateway")
    try:
        loaded = load_config(
            arguments.config,
            {
                "service.gateway_port": arguments.port,
                "service.bind": arguments.bind,
                "service.max_queue_size": arguments.max_queue_size,
            },
        )
        workers = worker_addresses(loaded.config, arguments.workers, arguments.num_workers)
        check_certificate(arguments.ssl_certfile, arguments.ssl_keyfile)
    except ConfigError as error:
        for line in str(error).splitlines():
            log.error("cannot start: %s", line)
        return EXIT_BAD_CONFIG
    for notice in loaded.notices:
        log.warning("configuration notice: %s", notice)
    service = loaded.config.service
    for caution in cautions(loaded.config, service.bind):
        log.warning("configuration warning: %s", caution)
    allow_open_files()
    app = create_app(
        loaded.config, workers, static_dir=arguments.static_dir, default_lang=arguments.lang
    )
    server = build_server(
        app, service.bind, service.gateway_port, arguments.ssl_certfile, arguments.ssl_keyfile
    )
    log.info("starting workers=%s", ",".join(str(worker) for worker in workers))
    # What has been imported stays; a full collection over it would stop every session for 20 ms.
    gc.collect()
    gc.freeze()
    try:
        server.run()
    except KeyboardInterrupt:
        log.info("interrupted")
    return 0


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m gateway", description=__doc__)
    parser.add_argument("--config", type=Path, help="configuration file (default: none)")
    parser.add_argument("--port", type=int, help="port to listen on (0 = any free one)")
    parser.add_argument("--bind", "--host", help="address to listen on")
    parser.add_argument("--workers", help="host:port,... of the workers")
    parser.add_argument(
        "--num-workers", type=int, help="workers on this machine from the base port"
    )
    parser.add_argument("--max-queue-size", type=int, help="clients that may wait")
    parser.add_argument("--static-dir", type=Path, default=STATIC_DIR, help="another page tree")
    parser.add_argument("--lang", choices=("zh", "en"), help="language that pages start in")
    parser.add_argument("--ssl-certfile", type=Path, help="serve HTTPS with this certificate")
    parser.add_argument("--ssl-keyfile", type=Path, help="private key of the certificate")
    return parser.parse_args(argv)


def worker_addresses(config: Config, listed: str | None, count: int | None) -> list[Address]:
    """Return the workers' addresses: the listed ones, or `count` (1) local ones.

    Raises:
        ConfigError: an address that is not host:port, or a count below 1.
    """
    base = config.service.worker_base_port
    if not listed:
        count = 1 if count is None else count
        if count < 1:
            raise ConfigError(f"--num-workers is {count}, must be at least 1")
        return [Address("127.0.0.1", base + i) for i in range(count)]
    addresses = []
    for item in listed.split(","):
        host, _, port = item.strip().rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 65536:
            raise ConfigError(f"--workers: {item!r} is no host:port")
        addresses.append(Address(host.strip("[]"), int(port)))
    return addresses


def check_certificate(certfile: Path | None, keyfile: Path | None) -> None:
    """Raises ConfigError unless both files are there, or neither is asked for."""
    if (certfile is None) != (keyfile is None):
        raise ConfigError("--ssl-certfile and --ssl-keyfile belong together")
    for path in (certfile, keyfile):
        if path is not None and not path.is_file():
            raise ConfigError(f"{path}: no such file")


if __name__ == "__main__":
    sys.exit(main())
