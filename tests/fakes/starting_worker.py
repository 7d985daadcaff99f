"""A worker that only starts: it finds, makes and shares a cache for real, but compiles nothing.

    python -m tests.fakes.starting_worker --config FILE --port N --start-only REPORT [HABIT ...]

Habits: `misses` (a warm start compiles all the same), `empty` (there is nothing to compile),
`unshared` (what is made is not published), `adds` (a warm start adds a file once, and shares it),
`keeps-adding` (every one does), `disabled`, `dies`, `hangs`, `silent` (no report),
`slow` (answers `/health` for a while).
"""

from __future__ import annotations

import argparse
import http.server
import json
import os
import sys
import threading
import time
from pathlib import Path

import msgspec

from shared.protocol import CompileStatus, StageReport, StaleReason, WorkerHealth
from worker.compile.cache import CompileCache
from worker.compile.manifest import Key

SLOW_S = 1.0


def main() -> int:
    parser = argparse.ArgumentParser()
    for name in ("--config", "--start-only"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--port", type=int)
    parser.add_argument("habits", nargs="*")
    options = parser.parse_args()
    habits = set(options.habits)
    config = json.loads(options.config.read_text())
    with Path(os.environ["FAKE_LOG"]).open("a") as log:
        log.write(json.dumps(config) + "\n")
    if "dies" in habits:
        sys.exit("ERROR there is no GPU with enough memory")
    if "hangs" in habits:
        Path(os.environ["FAKE_LOG"]).with_suffix(".pid").write_text(str(os.getpid()))
        time.sleep(600)
    if "slow" in habits:
        serve_health(options.port)
    status = CompileStatus("disabled") if "disabled" in habits else start(config["compile"], habits)
    if "silent" not in habits:
        options.start_only.write_bytes(msgspec.json.encode(status))
    return 0


def start(section: dict, habits: set[str]) -> CompileStatus:
    key = Key({"modules": section["modules"], "mode": section["mode"]})
    private = Path(section["cache_dir"]).parent
    cache = CompileCache(Path(section["cache_dir"]), key, private)
    found, n_graphs, n_new = cache.open(), 0 if "empty" in habits else 5, 0
    with cache.lock():
        if not found.is_warm:
            found = cache.open()
        if found.is_warm:
            n_misses = 2 if "misses" in habits else 0
            later = cache.copy / "inductor" / "later"
            if "keeps-adding" in habits or ("adds" in habits and not later.exists()):
                later.with_suffix(f".{os.getpid()}" if later.exists() else "").write_text("added")
                n_new = len(cache.changes().new)
                cache.master.discard()
                cache.publish({})
        elif section["on_cold"] == "eager":
            n_misses = n_graphs = 0
        else:
            n_misses = n_graphs
            (cache.copy / "inductor" / "graph").write_text(str(time.time_ns()))
            if "unshared" not in habits:
                cache.publish({})
    n_new = n_new or len(cache.changes().new)
    cache.close()
    return CompileStatus(
        state=found.state.value,
        fingerprint=found.fingerprint,
        stale_fields=[StaleReason(f.name, f.here, f.there) for f in found.stale],
        graphs=n_graphs,
        fx_hits=n_graphs - n_misses,
        fx_misses=n_misses,
        new_files=n_new,
        stage_seconds={"load_model": 9.0, "apply_torch_compile": 2.0, "warmup_compile": 1.5},
    )


def serve_health(port: int) -> None:
    health = WorkerHealth(
        status="initializing",
        worker_status="loading",
        gpu_id=None,
        model_loaded=False,
        current_session_id=None,
        total_requests=0,
        avg_inference_time_ms=0.0,
        kv_cache_length=0,
        slots_total=1,
        slots_free=0,
        backend="fake",
        stage="apply_torch_compile",
        stage_progress=0.4,
        stage_elapsed_s=2.0,
        eta_s=3.0,
        stages=[StageReport("apply_torch_compile", 2.0, False, "llm.decode 4")],
    )

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(msgspec.json.encode(health))

    server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    time.sleep(SLOW_S)


if __name__ == "__main__":
    sys.exit(main())
