"""One omni session through the real worker process, full size with random weights.

    python -m tests.bench.bench_worker [--seconds 20] [--config FILE]

Prints a table; the last line is one JSON object. Without `--config` it needs a GPU.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from websockets.asyncio.client import ClientConnection, connect
from websockets.typing import Subprotocol

from scripts.machine import pick_free_port
from shared.limits import MAX_FRAME_BYTES
from shared.protocol import (
    SESSION_PATH,
    SUBPROTOCOL,
    Closed,
    DuplexSettings,
    Event,
    Failure,
    Input,
    Open,
    Prepare,
    Prepared,
    Result,
    Stop,
    decode_event,
    encode,
)
from tests.bench.provenance import provenance

ROOT = Path(__file__).parents[2]
START_TIMEOUT_S = 300
UNIT_TIMEOUT_S = 60


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=int, default=20)
    parser.add_argument("--config", type=Path)
    parser.add_argument("--commit", help="of this code, where there is no git")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        config = arguments.config or _full_size(Path(folder))
        port = pick_free_port("127.0.0.1")
        began_at = time.perf_counter()
        command = [sys.executable, "-m", "worker", "--config", str(config), "--port", str(port)]
        with subprocess.Popen(command, cwd=ROOT) as worker:
            try:
                health = _wait_until_idle(worker, port)
                report = {"bench": "worker", **provenance(arguments.commit)}
                report["start_s"] = round(time.perf_counter() - began_at, 1)
                report["stages"] = health["stages"]
                report |= asyncio.run(_session(port, arguments.seconds))
            finally:
                worker.terminate()
                report_code = worker.wait(60)
        report["exit_code"] = report_code
    for name, value in report.items():
        print(f"{name:16} {value}")
    print(json.dumps(report))
    return 0


def _full_size(folder: Path) -> Path:
    path = folder / "config.json"
    settings = {"model": {"random_weights": True}, "service": {"sessions_per_worker": 1}}
    path.write_text(json.dumps(settings), encoding="utf-8")
    return path


def _wait_until_idle(worker: subprocess.Popen[bytes], port: int) -> dict[str, Any]:
    until = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < until:
        if worker.poll() is not None:
            raise SystemExit(f"the worker ended with code {worker.returncode}")
        time.sleep(0.5)
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2) as answer:
                health: dict[str, Any] = json.load(answer)
        except OSError:
            continue
        if health["worker_status"] == "idle":
            return health
    raise SystemExit(f"the worker was not ready within {START_TIMEOUT_S} s")


async def _session(port: int, n_units: int) -> dict[str, Any]:
    random = np.random.default_rng(0)
    results: list[Result] = []
    times_ms: list[float] = []
    async with connect(
        f"ws://127.0.0.1:{port}{SESSION_PATH}",
        subprotocols=[Subprotocol(SUBPROTOCOL)],
        max_size=MAX_FRAME_BYTES,
        proxy=None,
    ) as connection:
        await connection.send(encode(Open("bench", "duplex", "omni_duplex")))
        settings = DuplexSettings(max_new_speak_tokens_per_chunk=12)
        await connection.send(encode(Prepare("You are a helpful assistant.", settings)))
        await _next(connection, Prepared)
        for seq in range(n_units):
            audio = random.normal(0, 0.05, 16_000).astype(np.float32).tobytes()
            began_at = time.perf_counter()
            await connection.send(encode(Input(seq, audio, [_frame(random)])))
            results.append(await _next(connection, Result))
            times_ms.append(1000 * (time.perf_counter() - began_at))
        await connection.send(encode(Stop("done")))
        closed = await _next(connection, Closed)
    spoken = [result for result in results if not result.is_listen]
    return {
        "units": len(results),
        "units_that_speak": len(spoken),
        "speech_tokens": sum(result.n_speech_tokens for result in spoken),
        "audio_s": round(sum(len(result.audio) for result in spoken) / 4 / 24_000, 2),
        "kv_tokens": results[-1].kv_tokens,
        "unit_ms_p50": round(statistics.median(times_ms), 1),
        "unit_ms_max": round(max(times_ms), 1),
        "closed": type(closed).__name__,
    }


async def _next(connection: ClientConnection, kind: type[Event]) -> Any:
    while True:
        async with asyncio.timeout(UNIT_TIMEOUT_S):
            frame = await connection.recv()
        assert isinstance(frame, bytes)
        event = decode_event(frame)
        if isinstance(event, Failure):
            raise SystemExit(f"the worker reported {event.slug}: {event.message}")
        if isinstance(event, kind):
            return event


def _frame(random: np.random.Generator) -> bytes:
    small = random.integers(0, 256, (30, 40, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(small).resize((640, 480)).save(file, "JPEG")
    return file.getvalue()


if __name__ == "__main__":
    sys.exit(main())
