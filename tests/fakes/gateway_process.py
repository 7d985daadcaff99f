"""The real gateway with its keepalive shortened, for tests that cannot wait for real pings.

    python -m tests.fakes.gateway_process --client-ping-s 0.5 --worker-ping-s 0.5 GATEWAY OPTIONS

A silent client is given up after `PINGS_BEFORE_DEAD` pings, as in the real one; the worker leg's
ping timeout keeps its ratio to the interval.
"""

from __future__ import annotations

import argparse
import sys

from gateway import link, server
from gateway.__main__ import main

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--client-ping-s", type=float, default=server.CLIENT_PING_INTERVAL_S)
    parser.add_argument("--worker-ping-s", type=float, default=link.WS_PING_INTERVAL_S)
    arguments, rest = parser.parse_known_args()
    ratio = link.WS_PING_TIMEOUT_S / link.WS_PING_INTERVAL_S
    server.CLIENT_PING_INTERVAL_S = arguments.client_ping_s
    link.WS_PING_INTERVAL_S = arguments.worker_ping_s  # type: ignore[misc]
    link.WS_PING_TIMEOUT_S = ratio * arguments.worker_ping_s  # type: ignore[misc]
    sys.exit(main(rest))
