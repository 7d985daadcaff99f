"""uvicorn as the gateway runs it: own connections and sockets, sessions told before exit."""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
import sys
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI

from gateway.client_socket import CLIENT_PING_INTERVAL_S, ClientProtocol
from gateway.connection import HttpConnection
from gateway.context import Gateway
from shared.limits import KEEP_ALIVE_S, MAX_FRAME_BYTES, REQUEST_HEAD_TIMEOUT_S

log = logging.getLogger(__name__)

GRACEFUL_SHUTDOWN_S = 10
STARTUP_FAILURE = 3
"""uvicorn's own exit code of a server that could not start."""

MAX_OPEN_FILES = 65_536


class GatewayServer(uvicorn.Server):
    """Serves one gateway; `drain` happens while the clients' sockets are still open."""

    def __init__(self, config: uvicorn.Config, gateway: Gateway) -> None:
        super().__init__(config)
        self._gateway = gateway

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen. uvicorn's own would let a TLS handshake take a minute."""
        config = self.config
        await self.lifespan.startup()
        if self.lifespan.should_exit:
            sys.exit(STARTUP_FAILURE)
        options: dict[str, Any] = {}
        if config.is_ssl:
            options = {"ssl": config.ssl, "ssl_handshake_timeout": REQUEST_HEAD_TIMEOUT_S}
        try:
            listener = await asyncio.get_running_loop().create_server(
                self._connection, config.host, config.port, backlog=config.backlog, **options
            )
        except OSError as error:
            log.error("cannot listen host=%s port=%d: %s", config.host, config.port, error)
            await self.lifespan.shutdown()
            sys.exit(STARTUP_FAILURE)
        self.servers = [listener]
        self.started = True
        scheme = "https" if config.is_ssl else "http"
        log.info("listening url=%s://%s:%d", scheme, config.host, self.port)

    def _connection(self) -> HttpConnection:
        return HttpConnection(self.config, self.server_state, self.lifespan.state)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()
        await self._gateway.drain()
        await super().shutdown(sockets)

    @property
    def port(self) -> int:
        """The port that is listened on, once started."""
        port: int = self.servers[0].sockets[0].getsockname()[1]
        return port


def build_server(
    app: FastAPI,
    host: str,
    port: int,
    ssl_certfile: Path | None = None,
    ssl_keyfile: Path | None = None,
) -> GatewayServer:
    """Return a server that is ready to `serve()`; port 0 = any free one."""
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        http=HttpConnection,
        timeout_keep_alive=KEEP_ALIVE_S,
        ws=ClientProtocol,
        ws_max_size=MAX_FRAME_BYTES,
        ws_ping_interval=CLIENT_PING_INTERVAL_S,
        # `ClientProtocol` judges by silence, not by one late pong.
        ws_ping_timeout=None,
        # Base64 audio hardly shrinks, and compressing it would cost a core.
        ws_per_message_deflate=False,
        ssl_certfile=ssl_certfile,
        ssl_keyfile=ssl_keyfile,
        access_log=False,
        log_config=None,
        server_header=False,
        timeout_graceful_shutdown=GRACEFUL_SHUTDOWN_S,
    )
    return GatewayServer(config, app.state.gateway)


def allow_open_files() -> None:
    """Let the process hold as many connections as the machine allows: two for a session."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
