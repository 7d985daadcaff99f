"""The worker's command line: what it refuses, and that nothing heavy is imported too early."""

import gc
import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

import worker.__main__ as command_line
from shared.config import Config
from shared.errors import ModelLoadError
from tests.fakes.worker import FakeWorker
from worker.__main__ import builder_of, compiling_of, main, settings_of

CHECKPOINT = Path(__file__).parents[2] / "golden/data/checkpoint"


def config(**sections) -> Config:
    return Config.model_validate(sections)


@pytest.fixture(autouse=True)
def restore_logging():
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def test_the_cascade_on_a_cpu_holds_two_sessions():
    assert settings_of(config(), None).n_slots == 2


def test_settings_come_from_the_configuration():
    settings = settings_of(
        config(
            service={"sessions_per_worker": 5, "stuck_after_s": 7, "drain_timeout_s": 8},
            duplex={"pause_timeout": 1, "idle_timeout_s": 2, "max_session_s": 3},
        ),
        4,
    )

    assert (settings.backend, settings.n_slots, settings.gpu_id) == ("cascade", 5, 4)
    assert (settings.stuck_after_s, settings.drain_timeout_s) == (7.0, 8.0)
    limits = settings.limits
    assert (limits.pause_timeout_s, limits.idle_timeout_s, limits.max_session_s) == (1, 2, 3)


def test_the_large_model_without_weights_is_refused_where_it_is_built():
    asked = config(model={"backend": "minicpmo45"})
    build = builder_of(asked, compiling_of(asked, n_slots=1))

    with pytest.raises(ModelLoadError, match="there are no weights"):
        build()


def test_a_bad_configuration_ends_with_two_and_names_the_key(tmp_path, capsys):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"service": {"gatway_port": 1}}))

    assert main(["--config", str(path), "--port", "0"]) == 2
    assert "service.gatway_port" in capsys.readouterr().err


def test_a_missing_warm_up_video_ends_with_two_before_anything_is_loaded(tmp_path, capsys):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"compile": {"warmup_video": "gone.mp4"}}))

    assert main(["--config", str(path), "--port", "0"]) == 2
    assert "compile.warmup_video: gone.mp4: no such file" in capsys.readouterr().err


def test_a_taken_port_ends_with_one(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["--port", str(port)]) == 1
    assert f"port {port} cannot be taken" in capsys.readouterr().err


def started(tmp_path, capsys, **model):
    """Exit code and log lines of a worker of the large model that cannot start."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model": {"backend": "minicpmo45", **model}}))
    code = main(["--config", str(path), "--port", "0"])
    return code, capsys.readouterr().err


def test_the_large_model_without_weights_ends_with_one_sentence(tmp_path, capsys):
    code, log = started(tmp_path, capsys)

    assert code == 1
    assert "set model.model_path" in log


def test_random_weights_without_a_gpu_end_with_one_sentence(tmp_path, capsys):
    code, log = started(tmp_path, capsys, random_weights=True)

    assert code == 1
    assert "needs a GPU" in log


def cut_short(folder):
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])


def another_model(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "llama"}))


def no_voice(folder):
    (folder / "assets/token2wav/hift.pt").unlink()


def no_weights(folder):
    (folder / "model.safetensors").unlink()


def another_shape(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 320}))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (cut_short, "model.safetensors"),
        (another_model, "llama"),
        (no_voice, "hift.pt"),
        (no_weights, "safetensors"),
        (another_shape, "llm.model.layers.0.mlp.down_proj.weight"),
    ],
)
def test_a_damaged_checkpoint_ends_with_one_and_says_what_is_wrong(damage, words, tmp_path, capsys):
    folder = tmp_path / "checkpoint"
    shutil.copytree(CHECKPOINT, folder)
    damage(folder)

    code, log = started(tmp_path, capsys, model_path=str(folder))

    assert code == 1
    assert words in log
    assert "Traceback" not in log


def test_the_port_answers_before_torch_is_imported():
    """The port has three seconds; importing torch alone may take longer."""
    code = "import sys, worker.__main__; print('torch' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert out.stdout.strip() == "False"


@pytest.mark.weights
def test_every_thread_of_the_cascade_computes_alone(tmp_path):
    """torch.set_num_threads holds for the thread that calls it; the senses lane used two cores."""
    code = """
import threading, worker.__main__ as main
from shared.config import Config
main.builder_of(Config(), main.compiling_of(Config(), 1))()
import torch
threading.Thread(target=lambda: print(torch.__config__.parallel_info())).start()
"""
    env = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env
    )

    assert "omp_get_max_threads() : 1\n" in out.stdout


@pytest.mark.weights
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_worker_process_answers_at_once_and_ends_with_zero_when_asked_to(number):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, "-m", "worker", "--port", str(port)],
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        line = process.stderr.readline()
        assert f"listening port={port}" in line
        transport = httpx.HTTPTransport(retries=5)
        with httpx.Client(transport=transport, trust_env=False, timeout=3) as client:
            health = client.get(f"http://127.0.0.1:{port}/health").json()
    finally:
        process.send_signal(number)
        process.communicate(timeout=30)

    assert health["status"] in ("initializing", "healthy")
    assert process.returncode == 0


def start_only(tmp_path, **sections):
    """Exit code and report of a tiny model's worker that only starts."""
    report, path = tmp_path / "report.json", tmp_path / "config.json"
    path.write_text(
        json.dumps({"model": {"backend": "minicpmo45"}, "audio": {"enabled": False}, **sections})
    )
    code = main(["--config", str(path), "--port", "0", "--start-only", str(report)])
    gc.unfreeze()
    return code, report


def test_a_start_alone_writes_its_report_and_ends_with_zero(tmp_path):
    code, report = start_only(
        tmp_path, model={"backend": "minicpmo45", "model_path": str(CHECKPOINT)}
    )
    told = json.loads(report.read_text())

    assert code == 0
    assert (told["state"], told["degraded"]) == ("disabled", False)
    assert set(told["stage_seconds"]) == {
        *("load_model", "init_unified", "apply_torch_compile", "warmup_compile")
    }
    assert told["start_s"] == pytest.approx(sum(told["stage_seconds"].values()), abs=0.05)
    assert told["versions"]["torch"]


def test_a_start_that_fails_writes_no_report_and_ends_with_one(tmp_path):
    code, report = start_only(tmp_path)

    assert code == 1
    assert not report.exists()


async def report_of_a_ready_worker(path):
    worker = await FakeWorker().start()
    written = await command_line._report_start(worker.lifecycle, path)
    await worker.close()
    return written, await worker.code()


async def test_the_report_is_written_when_the_worker_is_ready_and_ends_it(tmp_path):
    assert await report_of_a_ready_worker(tmp_path / "report.json") == (True, 0)
    assert json.loads((tmp_path / "report.json").read_text())["stage_seconds"]


async def test_a_report_that_cannot_be_written_is_told(tmp_path, caplog):
    written, _ = await report_of_a_ready_worker(tmp_path / "no" / "report.json")

    assert not written
    assert "report cannot be written" in caplog.text


async def test_what_the_start_has_made_is_out_of_the_collectors_way_after_the_warm_up(monkeypatch):
    done = []

    for name in ("rehearse", "rehearse_answers"):

        async def play(*_, name=name):
            done.append(name)

        monkeypatch.setattr(command_line, name, play)
    monkeypatch.setattr(command_line.gc, "collect", lambda: done.append("collect"))
    monkeypatch.setattr(command_line.gc, "freeze", lambda: done.append("freeze"))
    await command_line._warm_up([], host=None, progress=None)
    assert done == ["rehearse", "rehearse_answers", "collect", "freeze"]
