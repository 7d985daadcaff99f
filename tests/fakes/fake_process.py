"""Stands in for the gateway or a worker under the launcher: a port, a `/health`, a way to die.

    python -m tests.fakes.fake_process ROLE PORT [--load-s S] [--behaviour B]

Behaviours: `loads` never gets ready, `dies` ends during its start, `errs` reports an error,
`stubborn` ignores SIGTERM, `parent` starts a child of its own and writes its pid to the log.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

STARTED_AT = time.monotonic()


def worker_health(load_s: float, behaviour: str) -> dict[str, object]:
    elapsed_s = time.monotonic() - STARTED_AT
    loaded = elapsed_s >= load_s and behaviour != "loads"
    failed = behaviour == "errs" and loaded
    return {
        "status": "error" if failed else "healthy" if loaded else "initializing",
        "worker_status": "error" if failed else "idle" if loaded else "loading",
        "gpu_id": None,
        "model_loaded": loaded and not failed,
        "current_session_id": None,
        "total_requests": 0,
        "avg_inference_time_ms": 0.0,
        "kv_cache_length": 0,
        "slots_total": 1,
        "slots_free": 1,
        "backend": "cascade",
        "stage": None if loaded else "load_model",
        "stage_progress": min(1.0, elapsed_s / load_s) if load_s else 1.0,
        "stage_elapsed_s": elapsed_s,
        "eta_s": max(0.0, load_s - elapsed_s),
        "stages": [{"name": "load_model", "elapsed_s": elapsed_s, "done": loaded}],
        "reason": "the weights are damaged" if failed else "",
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("role", choices=["gateway", "worker"])
    parser.add_argument("port", type=int)
    parser.add_argument("--load-s", type=float, default=0.0)
    parser.add_argument("--behaviour", default="")
    arguments = parser.parse_args()
    if arguments.behaviour == "dies":
        sys.exit("RuntimeError: the model file is missing")
    if arguments.behaviour == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if arguments.behaviour == "parent":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        sys.stderr.write(f"grandchild {child.pid}\n")

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            is_worker = arguments.role == "worker"
            # A real gateway counts the workers it has seen ready; the tests start two.
            has_looked = time.monotonic() - STARTED_AT >= arguments.load_s
            gateway_health = {"status": "healthy", "workers_ready": 2 if has_looked else 0}
            health = worker_health(arguments.load_s, arguments.behaviour)
            body = json.dumps(health if is_worker else gateway_health).encode()
            # As the real worker does, for those who look at the status alone.
            is_failed = is_worker and health["status"] == "error"
            self.send_response(503 if is_failed else 200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    ThreadingHTTPServer.allow_reuse_address = True
    ThreadingHTTPServer(("127.0.0.1", arguments.port), Handler).serve_forever()


if __name__ == "__main__":
    main()
