"""A worker process around the fake model: real lifecycle, real server, real socket.

    python -m tests.fakes.worker_process --port 0 --slots 4 [--unit-ms 5] [--speech-s 0.1]

It also obeys system prompts, so that a test can time what happens inside it:

    "block 3"   the prompt's op sleeps for 3 s on the language thread (which also thinks)
    "hold 0.5"  the same while holding the interpreter: nothing else runs in the process
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import functools
import logging
import os
import signal
import sys
import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shared import logs
from tests.fakes.model import FakeDuplexModel, FakeState, as_model
from tests.fakes.session import chunk
from worker import server
from worker.lifecycle import Lifecycle, WorkerSettings
from worker.models.contract import Prompt, TurnPrompt
from worker.sessions.rehearsal import rehearse

log = logging.getLogger("worker")

SPEECH_RATE_HZ = 24_000
N_PIECES = 20
"""Of an answer in turns or in chat: enough for a client to leave in the middle."""

_libc = ctypes.PyDLL(None)
"""Calls through it keep the interpreter's lock, as a badly behaved extension does."""


@dataclass
class ProcessModel(FakeDuplexModel):
    """The fake model with a unit time, and without its memory of past sessions."""

    unit_s: float = 0.0
    n_pieces: int = N_PIECES

    def run(self, kind: str, bucket: Hashable, payloads: Sequence[Any]) -> Sequence[Any]:
        if kind in {"think", "write"}:
            time.sleep(self.unit_s)
        if kind == "prefill":
            for _, prompt in payloads:
                _obey(_words(prompt))
        return super().run(kind, bucket, payloads)

    def end(self, state: FakeState) -> None:
        super().end(state)
        # What the fake remembers for tests in its own process would look like a leak here.
        self.states.remove(state)
        self.calls.clear()
        self.batches.clear()


def _words(prompt: Prompt | TurnPrompt) -> str:
    if isinstance(prompt, Prompt):
        return prompt.system_prompt
    return " ".join(part for part in prompt.system if isinstance(part, str))


def _obey(prompt: str) -> None:
    word, _, seconds = prompt.partition(" ")
    if word == "block":
        time.sleep(float(seconds))
    if word == "hold":
        _libc.usleep(int(float(seconds) * 1e6))


async def serve(arguments: argparse.Namespace) -> int:
    model = ProcessModel(
        unit_s=arguments.unit_ms / 1000,
        speech_samples=int(arguments.speech_s * SPEECH_RATE_HZ),
        unit_samples=arguments.unit_samples,
    )
    played = [chunk(seq, np.full(model.unit_samples, seq, np.float32)) for seq in range(2)]
    settings = WorkerSettings("fake", arguments.slots, stuck_after_s=arguments.stuck_after_s)
    lifecycle = Lifecycle(settings, lambda: as_model(model), functools.partial(rehearse, played))
    listener = server.bind(arguments.port)
    serving = server.make_server(server.create_app(lifecycle))
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, lifecycle.request_stop)
    loop.add_signal_handler(signal.SIGUSR1, lifecycle.request_retirement)
    log.info("listening port=%d pid=%d", listener.getsockname()[1], os.getpid())
    server_task = asyncio.create_task(serving.serve(sockets=[listener]))
    try:
        return await lifecycle.run()
    finally:
        serving.should_exit = True
        await server_task


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--slots", type=int, default=2)
    parser.add_argument("--needs", type=Path, help="file without which it does not start")
    parser.add_argument("--unit-ms", type=float, default=0.0, help="what a unit takes to think")
    parser.add_argument("--unit-samples", type=int, default=160, help="16 kHz samples of a unit")
    parser.add_argument("--speech-s", type=float, default=0.01, help="speech of a spoken unit")
    parser.add_argument("--stuck-after-s", type=float, default=30.0)
    parser.add_argument("--ping-interval-s", type=float, default=server.WS_PING_INTERVAL_S)
    parser.add_argument("--ping-timeout-s", type=float, default=server.WS_PING_TIMEOUT_S)
    arguments = parser.parse_args()
    if arguments.needs is not None and not arguments.needs.exists():
        sys.exit("the model file is missing")
    logs.set_up("worker")
    # The real pings are tens of seconds apart, longer than a test may take.
    server.WS_PING_INTERVAL_S = arguments.ping_interval_s  # type: ignore[misc]
    server.WS_PING_TIMEOUT_S = arguments.ping_timeout_s  # type: ignore[misc]
    return asyncio.run(serve(arguments))


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    # As the real worker: a stuck compute thread must not keep the process alive.
    os._exit(code)
