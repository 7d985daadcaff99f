"""Ports for processes that tests start, and start again."""

from __future__ import annotations

import random
import socket
from contextlib import ExitStack

LOWEST = 15_000
HIGHEST = 32_000
"""Below what the kernel gives to outgoing connections: one of these would otherwise take the port
of a process while that is being restarted, or the one beside it."""

_any = random.SystemRandom()


def free_port(n_in_a_row: int = 1) -> int:
    """Return a loopback port that nobody uses, the first of so many."""
    for _ in range(1000):
        first = _any.randrange(LOWEST, HIGHEST)
        try:
            with ExitStack() as probes:
                for port in range(first, first + n_in_a_row):
                    probes.enter_context(socket.create_server(("127.0.0.1", port)))
        except OSError:
            continue
        return first
    raise AssertionError("no port is free")
