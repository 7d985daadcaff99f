"""The compile cache end to end: real processes and the real compiler, on a CPU.

Both back ends are compiled at the same time, once, by `precompile.py`; every test then works on a
copy of that cache. The tiny model compiles its vocoder alone, the part that takes the least time;
all of it is `tests/configs/tiny-compile.json`, some four minutes of one core.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from shared.protocol import CompileStatus
from tests.bench.bench_conversation import Heard, Track, converse
from tests.e2e.conftest import ROOT, RunningService, started
from worker.compile.master import Master

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile on a CPU needs g++"),
]

PRECOMPILE = """
import sys
from pathlib import Path
import precompile
sys.exit(precompile.main(sys.argv[2:], run_dir=Path(sys.argv[1])))
"""
QUESTION = Path(__file__).parents[1] / "assets" / "capital_france.wav"

TINY = json.loads((ROOT / "tests/configs/tiny-compile.json").read_text(encoding="utf-8"))
SETTINGS: dict[str, dict[str, Any]] = {
    "tiny": TINY | {"compile": {"modules": ["vocoder"]}},
    "cascade": {"service": {"compile": True}},
}
N_GRAPHS = {"tiny": 4, "cascade": 2}
"""For one row and for several: the vocoder's two stages, the cascade's decode step."""


def settings(backend: str, cache: Path, **compiling: Any) -> dict[str, Any]:
    """The configuration of a back end whose cache lies in a folder."""
    base = SETTINGS[backend]
    section = base.get("compile", {}) | {"cache_dir": str(cache)} | compiling
    return base | {"compile": section}


@dataclass(frozen=True)
class Precompiled:
    """What a `precompile.py` said."""

    status: int
    output: str

    @property
    def result(self) -> dict[str, Any]:
        made: dict[str, Any] = json.loads(self.output.splitlines()[-1])
        return made


@dataclass(frozen=True)
class Built:
    """Caches of both back ends, and what those that were to make them said."""

    folder: Path
    said: dict[str, list[Precompiled]]

    def master(self, backend: str) -> Master:
        result = self.said[backend][0].result
        return Master(self.folder / backend, result["fingerprint"])


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Two for the tiny model and one for the cascade, all at the same time."""
    folder = tmp_path_factory.mktemp("precompiled")
    running = []
    for index, backend in enumerate(("tiny", "tiny", "cascade")):
        run_dir = folder / f"run{index}"
        config = folder / f"{backend}.json"
        config.write_text(json.dumps(settings(backend, folder / backend)), encoding="utf-8")
        command = [sys.executable, "-c", PRECOMPILE, str(run_dir), "--config", str(config)]
        running.append((backend, _begun(command)))
    said: dict[str, list[Precompiled]] = {"tiny": [], "cascade": []}
    for backend, process in running:
        output, _ = process.communicate(timeout=500)
        said[backend].append(Precompiled(process.returncode, output))
    for one in (*said["tiny"], *said["cascade"]):
        assert one.status == 0, one.output
    return Built(folder, said)


def _begun(command: list[str]) -> subprocess.Popen[str]:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen(command, cwd=ROOT, text=True, **pipes)


@pytest.fixture
def cache(built: Built, tmp_path: Path) -> Path:
    """A copy of the tiny model's cache, to be damaged."""
    return Path(shutil.copytree(built.folder / "tiny", tmp_path / "cache"))


# ---- precompile.py


@pytest.mark.weights
@pytest.mark.parametrize("backend", ["tiny", "cascade"])
def test_a_second_process_compiles_nothing_and_writes_no_file(built: Built, backend: str) -> None:
    manifest = built.master(backend).check()

    assert manifest.verify is not None
    figures = {name: manifest.verify[name] for name in ("graphs", "fx_hits", "fx_misses")}
    n_graphs = N_GRAPHS[backend]
    assert figures == {"graphs": n_graphs, "fx_hits": n_graphs, "fx_misses": 0}
    assert (manifest.verify["new_files"], manifest.verify["recompiles"]) == (0, 0)


@pytest.mark.weights
def test_of_two_at_once_one_builds_and_the_other_one_waits(built: Built) -> None:
    maker, other = sorted(built.said["tiny"], key=lambda one: not one.result["built"])

    assert (maker.result["built"], other.result["built"]) == (True, False)
    assert "another worker compiles, waiting" in other.output
    assert "was there already" in other.output
    assert maker.result["fingerprint"] == other.result["fingerprint"]


# ---- a service on a cache


@pytest.fixture
def service(
    built: Built, request: pytest.FixtureRequest, tmp_path: Path
) -> Iterator[RunningService]:
    with started(tmp_path, settings(request.param, built.folder / request.param)) as running:
        yield running


def is_served_from_the_cache(service: RunningService, backend: str) -> bool:
    """Whether its only worker found everything, and still does after what it has been asked."""
    (worker,) = httpx.get(f"{service.http_url}/api/compile").json()["workers"]
    found = {name: worker[name] for name in ("state", "degraded", "graphs", "fx_misses")}
    assert found == {
        "state": "warm",
        "degraded": False,
        "graphs": N_GRAPHS[backend],
        "fx_misses": 0,
    }
    counts = ("new_files", "recompiles_after_idle", "eager_fallbacks", "graph_breaks")
    assert {name: worker[name] for name in counts} == dict.fromkeys(counts, 0)
    return bool(worker["stage_runs"])


@pytest.mark.weights
@pytest.mark.parametrize("service", ["tiny"], indirect=True)
def test_a_warm_service_serves_two_at_once_with_nothing_compiled_again(
    service: RunningService, built: Built
) -> None:
    async def both() -> list[Heard]:
        tracks = (Track.silence(6.0).say("long_story.wav", 0.4) for _ in range(2))
        return await asyncio.gather(*(converse(service.ws_url, track) for track in tracks))

    for heard in asyncio.run(both()):
        assert len(heard.replies) >= 6
    assert is_served_from_the_cache(service, "tiny")
    built.master("tiny").check()


@pytest.mark.weights
@pytest.mark.parametrize("service", ["cascade"], indirect=True)
def test_a_warm_cascade_answers_a_question_with_nothing_compiled_again(
    service: RunningService, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "client.talk", str(QUESTION)]
    command += ["--url", service.ws_url, "--out", str(tmp_path / "answer.wav")]

    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr + done.stdout
    assert "Paris" in done.stdout
    assert is_served_from_the_cache(service, "cascade")


# ---- caches of no use


@dataclass(frozen=True)
class Start:
    """A worker's start: what it reported at its end, and its log."""

    report: CompileStatus
    log: str


def start(folder: Path, config: dict[str, Any]) -> Start:
    """Have a worker start, play its rehearsal and end."""
    config_file, report = folder / "worker.json", folder / "report.json"
    config_file.write_text(json.dumps(config), encoding="utf-8")
    command = [sys.executable, "-m", "worker", "--config", str(config_file), "--port", "0"]
    command += ["--start-only", str(report)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return Start(msgspec.json.decode(report.read_bytes(), type=CompileStatus), done.stderr)


@pytest.mark.weights
def test_a_stale_cache_is_told_with_its_field_before_the_weights_are_read(
    cache: Path, tmp_path: Path
) -> None:
    config = settings("tiny", cache, on_cold="eager")
    begun = start(tmp_path, config | {"service": TINY["service"] | {"sessions_per_worker": 3}})

    report = begun.report
    assert (report.state, report.degraded) == ("stale", True)
    fields = [(one.name, one.here, one.there) for one in report.stale_fields]
    assert fields == [("shape_plan.n_slots", 3, 2)]
    lines = begun.log.splitlines()
    told = next(n for n, line in enumerate(lines) if "shape_plan.n_slots" in line)
    read = next(n for n, line in enumerate(lines) if "stage done name=load_model" in line)
    assert "state=stale" in lines[told]
    assert told < read
    assert report.graphs == 0


def kernels(cache: Path) -> list[Path]:
    """Libraries with compiled loops, of a cache that holds one fingerprint."""
    found = sorted(cache.glob("*/inductor/*/*.main.so"))
    assert found
    return found


@pytest.mark.weights
def test_a_cache_that_lost_a_file_is_damaged_and_a_worker_may_do_without(
    cache: Path, tmp_path: Path
) -> None:
    kernels(cache)[0].unlink()

    report = start(tmp_path, settings("tiny", cache, on_cold="eager")).report

    assert (report.state, report.degraded, report.graphs) == ("damaged", True, 0)
    assert report.stale_fields == []


@pytest.mark.weights
def test_kernels_that_cannot_be_loaded_are_made_anew_and_shared(
    built: Built, cache: Path, tmp_path: Path
) -> None:
    """Number and size of the files are right, so the damage shows when the compiler loads them."""
    for kernel in kernels(cache):
        kernel.write_bytes(bytes(kernel.stat().st_size))

    report = start(tmp_path, settings("tiny", cache)).report

    assert (report.state, report.degraded) == ("damaged", False)
    assert report.recompiles_after_idle == 0
    Master(cache, built.master("tiny").fingerprint).check()
    assert all(any(kernel.read_bytes()) for kernel in kernels(cache))
