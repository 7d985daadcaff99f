"""How long does a start take: cold, and from a warm cache? With one worker and with two.

    python -m tests.bench.bench_startup [--config FILE] [--workers 1 2] --out FILE

Fills an empty cache with `precompile.py`, then starts workers on it as the launcher does. Loading
weights is reported apart. Without `--config`: full size with random weights, which needs a GPU.
Prints a table; the last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

from scripts.machine import pick_free_port
from tests.bench.provenance import provenance

ROOT = Path(__file__).parents[2]
START_TIMEOUT_S = 400
BUILD_STAGES = ("apply_torch_compile", "warmup_compile")
"""What a cache makes faster."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--config", type=Path)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2], help="started at once")
    parser.add_argument("--gpus", type=int, default=1, help="workers are spread over as many")
    parser.add_argument("--slots", type=int, default=2)
    parser.add_argument(
        "--cache-is-there", action="store_true", help="in the configuration's place"
    )
    parser.add_argument("--commit", help="of this code, where there is no git")
    parser.add_argument("--out", type=Path, help="file for the JSON object")
    options = parser.parse_args()
    report: dict[str, Any] = {"bench": "startup", **provenance(options.commit)}
    with tempfile.TemporaryDirectory() as folder:
        config = _configured(options, Path(folder))
        if not options.cache_is_there:
            report["precompile"] = precompile(config)
        for n_workers in options.workers:
            report[f"{n_workers}_workers"] = start(config, n_workers, options.gpus)
    for name, value in report.items():
        print(f"{name:12} {json.dumps(value)}")
    text = json.dumps(report)
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(text)
    return 0


def _configured(options: argparse.Namespace, folder: Path) -> Path:
    """Write the configuration with an empty cache of its own; return its path."""
    settings: dict[str, Any] = {"model": {"random_weights": True}}
    if options.config:
        settings = json.loads(options.config.read_text(encoding="utf-8"))
    settings.setdefault("service", {})["sessions_per_worker"] = options.slots
    if not options.cache_is_there:
        settings.setdefault("compile", {})["cache_dir"] = str(folder / "cache")
    path = folder / "config.json"
    path.write_text(json.dumps(settings), encoding="utf-8")
    return path


def precompile(config: Path) -> dict[str, Any]:
    command = [sys.executable, "precompile.py", "--config", str(config)]
    began_at = time.perf_counter()
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    sys.stdout.write(done.stdout)
    if done.returncode:
        raise SystemExit(f"precompile ended with code {done.returncode}")
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return {"wall_s": round(time.perf_counter() - began_at, 1), **result}


def start(config: Path, n_workers: int, n_gpus: int) -> list[dict[str, Any]]:
    """Start workers at once, wait until all are ready, ask them, stop them."""
    ports = [pick_free_port("127.0.0.1") for _ in range(n_workers)]
    began_at = time.perf_counter()
    workers = []
    for index, port in enumerate(ports):
        command = [sys.executable, "-m", "worker", "--config", str(config), "--port", str(port)]
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": str(index % n_gpus)}
        workers.append(subprocess.Popen(command, cwd=ROOT, env=environment))
    try:
        return [_ready(*pair, began_at) for pair in zip(workers, ports, strict=True)]
    finally:
        for worker in workers:
            worker.terminate()
        for worker in workers:
            worker.wait(60)


def _ready(worker: subprocess.Popen[bytes], port: int, began_at: float) -> dict[str, Any]:
    until = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < until:
        if worker.poll() is not None:
            raise SystemExit(f"a worker ended with code {worker.returncode}")
        time.sleep(0.25)
        health = _get(port, "health")
        if health is None or health["worker_status"] != "idle":
            continue
        found = {"ready_s": round(time.perf_counter() - began_at, 1)}
        stages = {stage["name"]: stage["elapsed_s"] for stage in health["stages"]}
        found["warm_s"] = round(sum(stages[name] for name in BUILD_STAGES), 1)
        found["stages"] = stages
        compiled = _get(port, "api/compile") or {}
        for name in ("state", "degraded", "graphs", "fx_hits", "fx_misses", "new_files"):
            found[name] = compiled.get(name)
        for name in ("captures", "graph_pool_bytes", "regions"):
            found[name] = compiled.get(name)
        return found
    raise SystemExit(f"a worker was not ready within {START_TIMEOUT_S} s")


def _get(port: int, path: str) -> dict[str, Any] | None:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/{path}", timeout=2) as answer:
            found: dict[str, Any] = json.load(answer)
            return found
    except OSError:
        return None


if __name__ == "__main__":
    sys.exit(main())
