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
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
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
    pytest.mark.weights,
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
    backends = ("tiny", "tiny", "cascade")
    commands = []
    for index, backend in enumerate(backends):
        config = folder / f"{backend}.json"
        config.write_text(json.dumps(settings(backend, folder / backend)), encoding="utf-8")
        run_dir = str(folder / f"run{index}")
        commands.append([sys.executable, "-c", PRECOMPILE, run_dir, "--config", str(config)])
    said: dict[str, list[Precompiled]] = {"tiny": [], "cascade": []}
    for backend, output in zip(backends, outputs(commands), strict=True):
        said[backend].append(Precompiled(output))
    return Built(folder, said)


def outputs(commands: Sequence[list[str]]) -> list[str]:
    """Run commands at the same time; return what each of them printed, in their order."""
    with ExitStack() as stack:
        running = []
        for command in commands:
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
            process = subprocess.Popen(command, cwd=ROOT, text=True, **pipes)
            stack.enter_context(process)
            stack.callback(process.terminate)
            running.append(process)
        printed = [process.communicate()[0] for process in running]
        for process, text in zip(running, printed, strict=True):
            assert process.returncode == 0, text
    return printed


# ---- precompile.py


@pytest.mark.parametrize("backend", ["tiny", "cascade"])
def test_a_second_process_compiles_nothing_and_writes_no_file(built: Built, backend: str) -> None:
    manifest = built.master(backend).check()

    assert manifest.verify is not None
    figures = {name: manifest.verify[name] for name in ("graphs", "fx_hits", "fx_misses")}
    n_graphs = N_GRAPHS[backend]
    assert figures == {"graphs": n_graphs, "fx_hits": n_graphs, "fx_misses": 0}
    assert (manifest.verify["new_files"], manifest.verify["recompiles"]) == (0, 0)


def test_of_two_at_once_one_builds_and_the_other_one_waits(built: Built) -> None:
    maker, other = sorted(built.said["tiny"], key=lambda one: not one.result["built"])

    assert (maker.result["built"], other.result["built"]) == (True, False)
    assert "another worker compiles, waiting" in other.output
    assert "was there already" in other.output
    assert maker.result["fingerprint"] == other.result["fingerprint"]


# ---- a service on a cache


@pytest.fixture(scope="module")
def services(
    built: Built, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, RunningService]]:
    """Both back ends, started at the same time."""

    def begin(backend: str) -> RunningService:
        config = settings(backend, built.folder / backend)
        return stack.enter_context(started(tmp_path_factory.mktemp(backend), config))

    with ExitStack() as stack:
        with ThreadPoolExecutor() as pool:
            running = list(pool.map(begin, SETTINGS))
        yield dict(zip(SETTINGS, running, strict=True))


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


def test_a_warm_service_serves_two_at_once_with_nothing_compiled_again(
    services: dict[str, RunningService], built: Built
) -> None:
    service = services["tiny"]

    async def both() -> list[Heard]:
        tracks = (Track.silence(6.0).say("long_story.wav", 0.4) for _ in range(2))
        return await asyncio.gather(*(converse(service.ws_url, track) for track in tracks))

    for heard in asyncio.run(both()):
        assert len(heard.replies) >= 6
    assert is_served_from_the_cache(service, "tiny")
    built.master("tiny").check()


def test_a_warm_cascade_answers_a_question_with_nothing_compiled_again(
    services: dict[str, RunningService], tmp_path: Path
) -> None:
    service = services["cascade"]
    command = [sys.executable, "-m", "client.talk", str(QUESTION)]
    command += ["--url", service.ws_url, "--out", str(tmp_path / "answer.wav")]

    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr + done.stdout
    assert "Paris" in done.stdout
    assert is_served_from_the_cache(service, "cascade")


# ---- caches of no use


@dataclass(frozen=True)
class Start:
    """A worker's start: the shared cache that it left, what it reported at its end, and its log."""

    cache: Path
    report: CompileStatus
    log: str


def kernels(cache: Path) -> list[Path]:
    """Libraries with compiled loops, of a cache that holds one fingerprint."""
    found = sorted(cache.glob("*/inductor/*/*.main.so"))
    assert found
    return found


@pytest.fixture(scope="module")
def starts(built: Built, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Start]:
    """Workers of the tiny model that start on caches of no use, all at the same time.

    `stale` has a slot more than the cache was made for; `incomplete` lost a kernel; the kernels of
    `unloadable` have the right size.
    """
    caches = {
        name: Path(shutil.copytree(built.folder / "tiny", tmp_path_factory.mktemp(name) / "cache"))
        for name in ("stale", "incomplete", "unloadable")
    }
    kernels(caches["incomplete"])[0].unlink()
    for kernel in kernels(caches["unloadable"]):
        kernel.write_bytes(bytes(kernel.stat().st_size))
    configs = {
        "stale": settings("tiny", caches["stale"], on_cold="eager")
        | {"service": TINY["service"] | {"sessions_per_worker": 3}},
        "incomplete": settings("tiny", caches["incomplete"], on_cold="eager"),
        "unloadable": settings("tiny", caches["unloadable"]),
    }
    logs = outputs([start_only(caches[name].parent, configs[name]) for name in configs])
    made = {}
    for name, log in zip(configs, logs, strict=True):
        report = (caches[name].parent / "report.json").read_bytes()
        made[name] = Start(caches[name], msgspec.json.decode(report, type=CompileStatus), log)
    return made


def start_only(folder: Path, config: dict[str, Any]) -> list[str]:
    """The command of a worker that starts, plays its rehearsal and ends."""
    config_file = folder / "worker.json"
    config_file.write_text(json.dumps(config), encoding="utf-8")
    command = [sys.executable, "-m", "worker", "--config", str(config_file), "--port", "0"]
    return [*command, "--start-only", str(folder / "report.json")]


def test_a_stale_cache_is_told_with_its_field_before_the_weights_are_read(
    starts: dict[str, Start],
) -> None:
    report = starts["stale"].report

    assert (report.state, report.degraded, report.graphs) == ("stale", True, 0)
    fields = [(one.name, one.here, one.there) for one in report.stale_fields]
    assert fields == [("shape_plan.n_slots", 3, 2)]
    lines = starts["stale"].log.splitlines()
    told = next(n for n, line in enumerate(lines) if "shape_plan.n_slots" in line)
    read = next(n for n, line in enumerate(lines) if "stage done name=load_model" in line)
    assert "state=stale" in lines[told]
    assert told < read


def test_a_cache_that_lost_a_file_is_damaged_and_a_worker_may_do_without(
    starts: dict[str, Start],
) -> None:
    report = starts["incomplete"].report

    assert (report.state, report.degraded, report.graphs) == ("damaged", True, 0)
    assert report.stale_fields == []
    assert "is not whole" in starts["incomplete"].log


def test_kernels_that_cannot_be_loaded_are_made_anew_and_shared(
    starts: dict[str, Start], built: Built
) -> None:
    """The new cache has all that the old one had: a part that is missing would be made by every
    later start."""
    report, cache = starts["unloadable"].report, starts["unloadable"].cache

    assert (report.state, report.degraded, report.graphs) == ("damaged", False, N_GRAPHS["tiny"])
    assert (report.fx_misses, report.recompiles_after_idle) == (N_GRAPHS["tiny"], 0)
    master = built.master("tiny")
    remade = Master(cache, master.fingerprint).check()
    assert remade.files.count == master.check().files.count
    assert all(any(kernel.read_bytes()) for kernel in kernels(cache))
