"""What the launcher decides before it starts a process."""

from __future__ import annotations

import json
import socket
import ssl
import subprocess
from pathlib import Path
from shutil import which

import msgspec
import pytest

from scripts import launch, machine
from scripts.launch import make_plan, parse_arguments, read_config, service_commands
from scripts.machine import StartError, ensure_certificate, fetch, visible_gpus
from scripts.processes import Child, Command, bound_log, rotate_log
from scripts.supervisor import Requests, Supervisor, read_progress
from shared.config import Config, LoadedConfig
from shared.protocol import CacheState, CompileSummary, StageReport, WorkerHealth
from tests.fakes.g0_server import Scenario, serving

needs_openssl = pytest.mark.skipif(which("openssl") is None, reason="openssl is not installed")
NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}
TWO_GPUS = {"CUDA_VISIBLE_DEVICES": "3,5"}


@pytest.fixture(autouse=True)
def _ports_are_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "check_port_is_free", lambda host, port, remedy: None)


def plan(config: dict[str, object], environment: dict[str, str], *arguments: str) -> launch.Plan:
    loaded = LoadedConfig(Config.model_validate(config), Path("/etc/omni.json"), ())
    return make_plan(loaded, parse_arguments(arguments), environment)


def test_each_gpu_gets_one_worker() -> None:
    planned = plan({"model": {"model_path": "org/model"}}, TWO_GPUS)

    _, *workers = service_commands(planned)
    assert [worker.env["CUDA_VISIBLE_DEVICES"] for worker in workers] == ["3", "5"]
    assert [list(worker.argv)[-4:] for worker in workers] == [
        ["--worker-index", "0", "--gpu-id", "3"],
        ["--worker-index", "1", "--gpu-id", "5"],
    ]


def test_language_and_page_tree_go_to_the_gateway(tmp_path: Path) -> None:
    planned = plan({}, NO_GPU, "--lang", "zh", "--static-dir", str(tmp_path))

    gateway, *workers = service_commands(planned)
    assert list(gateway.argv)[-4:] == ["--lang", "zh", "--static-dir", str(tmp_path)]
    assert all("--lang" not in worker.argv for worker in workers)


def test_a_page_tree_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="no folder .*/nothing"):
        plan({}, NO_GPU, "--static-dir", str(tmp_path / "nothing"))


def test_the_cascade_runs_on_the_cpu_even_beside_gpus() -> None:
    planned = plan({"service": {"cpu_workers": 2}}, TWO_GPUS)

    _, *workers = service_commands(planned)
    assert [worker.env["CUDA_VISIBLE_DEVICES"] for worker in workers] == ["", ""]
    assert {worker.env["OMP_NUM_THREADS"] for worker in workers} == {"1"}


def test_a_large_model_without_gpu_is_refused() -> None:
    with pytest.raises(StartError, match="org/model needs an NVIDIA GPU"):
        plan({"model": {"model_path": "org/model"}}, NO_GPU)


def test_random_weights_of_full_size_without_gpu_are_refused() -> None:
    with pytest.raises(StartError, match="with random weights needs an NVIDIA GPU"):
        plan({"model": {"random_weights": True}}, NO_GPU)


def test_a_tiny_model_runs_without_gpu(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 128}))

    planned = plan({"model": {"model_path": str(tmp_path)}}, NO_GPU)

    assert [worker.gpu for worker in planned.workers] == [None]


def test_a_worker_never_gets_the_gateways_port() -> None:
    with pytest.raises(StartError, match="the gateway has port 22401 already"):
        plan({"service": {"gateway_port": 22401, "cpu_workers": 2}}, NO_GPU)


def test_a_port_beyond_the_last_one_is_refused() -> None:
    """It ended in a traceback: OverflowError is no OSError."""
    with pytest.raises(StartError, match="no port 65536; set it"):
        machine.check_port_is_free("127.0.0.1", 65_536, "set it")


def test_a_free_port_is_found_on_an_ipv6_address() -> None:
    if not socket.has_ipv6:
        pytest.skip("no IPv6 here")

    assert machine.pick_free_port("::1") > 0


def test_public_without_keys_is_refused() -> None:
    with pytest.raises(StartError, match=r"set security\.api_keys"):
        plan({}, NO_GPU, "--public", "--http")


def test_a_public_address_in_the_configuration_counts_as_public() -> None:
    with pytest.raises(StartError, match=r"set security\.api_keys"):
        plan({"service": {"bind": "0.0.0.0"}}, NO_GPU)


@pytest.mark.parametrize("keys", [{"api_keys": ["k"]}, {}])
def test_public_with_keys_or_without_asking_listens_to_all(keys: dict[str, object]) -> None:
    arguments = ["--public", "--http", *([] if keys else ["--no-auth"])]

    planned = plan({"security": keys}, NO_GPU, *arguments)

    assert planned.host == "0.0.0.0"
    assert planned.certificate is None


@needs_openssl
def test_public_uses_a_certificate(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(launch, "ROOT", tmp_path)

    planned = plan({}, NO_GPU, "--public", "--no-auth")

    gateway = service_commands(planned)[0]
    assert planned.url.startswith("https://")
    assert "--ssl-certfile" in gateway.argv
    assert gateway.health_url == "https://127.0.0.1:8006/health"


@needs_openssl
def test_the_certificate_names_this_machine_and_is_kept(tmp_path: Path) -> None:
    certificate, key = ensure_certificate(tmp_path / "certs")
    text = subprocess.run(
        ["openssl", "x509", "-in", certificate, "-noout", "-ext", "subjectAltName"],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    first = certificate.read_bytes()

    ensure_certificate(tmp_path / "certs")

    ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(certificate, key)
    assert "DNS:localhost" in text
    assert "IP Address:127.0.0.1" in text
    assert key.stat().st_mode & 0o077 == 0
    assert certificate.read_bytes() == first


def test_without_openssl_the_ways_out_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "which", lambda name: None)

    with pytest.raises(StartError, match="install openssl, or put cert.pem"):
        ensure_certificate(tmp_path)


def test_the_configuration_is_found_by_option_then_environment(tmp_path: Path) -> None:
    for name, port in (("a", 1111), ("b", 2222)):
        (tmp_path / name).write_text(json.dumps({"service": {"gateway_port": port}}))
    environment = {"OMNI_CONFIG": str(tmp_path / "a")}

    by_environment = read_config(parse_arguments([]), environment)
    by_option = read_config(parse_arguments(["--config", str(tmp_path / "b")]), environment)
    overruled = read_config(parse_arguments(["--port", "3333"]), environment)

    ports = [
        loaded.config.service.gateway_port for loaded in (by_environment, by_option, overruled)
    ]
    assert ports == [1111, 2222, 3333]


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [("0,1", ["0", "1"]), ("", []), ("-1", []), ("2,-1,3", ["2"]), ("GPU-ab12", ["GPU-ab12"])],
)
def test_cuda_visible_devices_decides(chosen: str, expected: list[str]) -> None:
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": chosen}) == expected


def test_without_a_driver_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "which", lambda name: None)

    assert visible_gpus({}) == []


def test_the_health_probe_ignores_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)

    with serving(Scenario()) as service:
        body = fetch(f"{service.http_url}/api/frontend_defaults", 5.0)

    assert body is not None


def health(**changes: object) -> bytes:
    values: dict[str, object] = {
        "status": "initializing", "worker_status": "loading", "gpu_id": None,
        "model_loaded": False, "current_session_id": None, "total_requests": 0,
        "avg_inference_time_ms": 0.0, "kv_cache_length": 0, "slots_total": 0, "slots_free": 0,
        "backend": "cascade", "stage": "warmup_compile", "stage_progress": 0.4,
        "stage_elapsed_s": 3.2, "eta_s": 5.0, "stages": [StageReport("load_model", 2.5, True)],
    }  # fmt: skip
    return msgspec.json.encode(WorkerHealth(**{**values, **changes}))  # type: ignore[arg-type]


def test_progress_tells_stage_share_and_time_left() -> None:
    progress = read_progress(health())

    assert progress is not None
    assert progress.text == "warmup_compile  40% (3.2 s, about 5 s left)"
    assert not progress.ready


def test_a_loaded_healthy_worker_is_ready() -> None:
    progress = read_progress(health(status="healthy", model_loaded=True, worker_status="idle"))

    assert progress is not None
    assert progress.ready
    assert progress.text == "ready after 2.5 s"


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (CompileSummary("stale", False), ", compile cache stale"),
        (CompileSummary("warm", True), ", compile cache warm (degraded: runs slower)"),
        (CompileSummary("disabled", False), ""),
        (CompileSummary(None, False), ""),
    ],
)
def test_progress_tells_how_the_compile_cache_was_found(found: CompileSummary, text: str) -> None:
    loading = read_progress(health(compile=found))
    ready = read_progress(health(compile=found, status="healthy", model_loaded=True))

    assert loading is not None
    assert loading.text == f"warmup_compile  40% (3.2 s, about 5 s left){text}"
    assert ready is not None
    assert ready.text == f"ready after 2.5 s{text}"


@pytest.mark.parametrize(
    ("found", "gpu_id", "is_given"),
    [("cold", 0, True), ("damaged", 0, True), ("warm", 0, False), ("cold", None, False)],
)
def test_without_a_cache_on_a_gpu_there_is_a_hint(
    found: CacheState, gpu_id: int | None, is_given: bool
) -> None:
    progress = read_progress(health(compile=CompileSummary(found, False), gpu_id=gpu_id))

    assert progress is not None
    assert ("python precompile.py" in progress.hint) == is_given


def test_the_hint_is_given_once_for_all_workers(tmp_path: Path) -> None:
    said: list[str] = []
    commands = [Command(name, [], {}, "") for name in ("gateway", "worker_0", "worker_1")]
    service = Supervisor(commands, tmp_path, said.append, Requests(), drain_timeout_s=1.0)
    progress = read_progress(health(compile=CompileSummary("cold", False), gpu_id=0))
    assert progress is not None
    for name in ("worker_0", "worker_1"):
        service._report(name, progress)

    assert [line.partition(":")[0] for line in said] == ["worker_0", "hint", "worker_1"]


def test_the_health_of_something_else_is_no_progress() -> None:
    assert read_progress(b'{"status": "ok"}') is None


def test_restarts_back_off_and_begin_anew_after_a_stable_run() -> None:
    child = Child(Command("worker_0", [], {}, ""), Path("worker_0.log"))

    delays = [child.plan_restart(now=1.0) for _ in range(7)]
    after_stable_run = child.plan_restart(now=61.0)

    assert delays == [1, 2, 4, 8, 16, 30, 30]
    assert after_stable_run == 1


def test_logs_of_the_last_three_starts_are_kept(tmp_path: Path) -> None:
    log = tmp_path / "worker.log"
    for number in range(6):
        rotate_log(log)
        log.write_text(str(number))

    kept = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert kept == {
        "worker.log": "5", "worker.log.1": "4", "worker.log.2": "3", "worker.log.3": "2"
    }  # fmt: skip


def test_a_log_that_grows_too_long_is_rotated_under_its_process(tmp_path: Path) -> None:
    """A service that ran for months filled the disk: logs were rotated at starts only."""
    path = tmp_path / "worker.log"
    with path.open("ab", buffering=0) as log:
        for line in (b"first\n", b"second\n", b"third\n"):
            log.write(line)
            bound_log(path, max_bytes=4)
        log.write(b"last\n")

    kept = {file.name: file.read_text() for file in tmp_path.iterdir()}
    assert kept == {
        "worker.log": "last\n", "worker.log.1": "third\n",
        "worker.log.2": "second\n", "worker.log.3": "first\n",
    }  # fmt: skip
