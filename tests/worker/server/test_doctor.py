"""The doctor's table and verdict."""

import asyncio
import json
import sys

import msgspec
import pytest

from shared.config import Config
from shared.protocol import CompileStatus, RegionReport
from tests.fakes.ports import free_port
from tests.fakes.scripted_worker import Script, ScriptedWorker
from worker import compile_findings, doctor, plan
from worker.compile_findings import expected_rate
from worker.doctor import Finding, main, verdict

INFO = {
    "built_at": "2026-01-01T00:00:00Z",
    "build_s": 99.0,
    "compiled": {"graph_breaks": 0, "regions": {"llm.decode": {"graphs": 2, "seconds": 8.1}}},
    "plan": {
        "regions": {"llm.decode": {"module": "llm", "calls": 30}},
        "stages": {"llm.decode": [f"({n}, True)" for n in range(10)]},
    },
}


def compiling_config(tmp_path, **compile_settings):
    settings = {"cache_dir": str(tmp_path / "cache"), **compile_settings}
    service = {"compile": True, "worker_base_port": free_port()}
    return Config.model_validate({"service": service, "compile": settings})


def fill_cache(config, info=INFO):
    """Leave a cache of one file, as a worker of this configuration would."""
    cache = plan.cache_of(config, plan.plan_of(config), 2, {})
    cache.open()
    (cache.copy / "inductor" / "entry").write_bytes(b"x")
    with cache.lock():
        cache.publish(info)
    cache.close()
    return cache


@pytest.fixture(autouse=True)
def private(tmp_path, monkeypatch):
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(plan.tempfile, "gettempdir", lambda: str(tmp_path / "tmp"))


def told(config, explain=False):
    findings = compile_findings.examine_compiling(config, {}, explain)
    return {finding.what.strip(): finding for finding in findings}


def test_everything_there_is_a_clean_exit():
    assert verdict([Finding("a", "1"), Finding("b", "2")]) == 0


def test_something_essential_missing_is_exit_one():
    assert verdict([Finding("a", "1"), Finding("b", "gone", is_ok=False)]) == 1


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr(doctor, "PACKAGES", ("no-such-package",))

    first = [f for _, f in zip(range(3), doctor.examine(Config()), strict=False)]

    assert first[2] == Finding("no-such-package", "not installed", is_ok=False)


def test_without_torch_the_table_still_says_what_is_wrong(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "torch", None)

    assert main([]) == 1
    assert "BAD  torch" in capsys.readouterr().out


def test_a_bad_configuration_is_told(tmp_path, capsys):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"compile": {"mod": "default"}}))

    assert main(["--config", str(path)]) == 1
    assert "compile.mode" in capsys.readouterr().out


@pytest.mark.weights
def test_a_machine_with_everything_is_measured(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "MIN_MEASURE_S", 0.01)

    assert main([]) == 0
    out = capsys.readouterr().out
    assert "TFLOP/s" in out
    assert "GB/s" in out
    assert "weights silero-vad" in out
    assert "compile cache                disabled" in out


# ---- the compile cache


@pytest.mark.weights
def test_the_cache_of_this_configuration_is_looked_at(tmp_path):
    config = compiling_config(tmp_path)
    before = told(config)
    fill_cache(config)
    after = told(config)

    assert before["compile cache in"].value == f"{tmp_path / 'cache'}, not made yet"
    assert before["compile cache"].value.startswith("cold, fingerprint ")
    assert after["compile cache in"].value == f"{tmp_path / 'cache'}, may be written to"
    assert after["compile cache"].value.startswith("warm, fingerprint ")


@pytest.mark.weights
def test_a_stale_cache_says_field_by_field_why(tmp_path):
    fill_cache(compiling_config(tmp_path))
    found = told(compiling_config(tmp_path, dynamic=False))

    assert found["compile cache"].value.startswith("stale, ")
    assert found["stale"].value == "compile_plan.dynamic is false here, true there"


@pytest.mark.weights
def test_a_directory_that_everybody_may_write_to_is_bad(tmp_path):
    config = compiling_config(tmp_path)
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o777)
    found = told(config)

    assert not found["compile cache in"].is_ok
    assert "may be written to by everybody" in found["compile cache in"].value


def test_a_checkpoint_is_not_downloaded_to_be_looked_at():
    config = Config.model_validate(
        {"model": {"model_path": "some/model"}, "service": {"compile": True}}
    )

    assert told(config)["compile cache"].value == (
        "not known: the checkpoint some/model is no folder here"
    )


@pytest.mark.weights
def test_explained_are_the_regions_shapes_and_the_start_that_built_them(tmp_path):
    config = compiling_config(tmp_path)
    cache = fill_cache(config)
    with cache.lock():
        cache.master.record({"warm_s": 12.5, "fx_hits": 2, "fx_misses": 0, "recompiles": 0})
    found = told(config, explain=True)

    assert found["region llm.decode"].value == "llm, 30 calls, 2 graphs, 8.1 s"
    assert found["stage llm.decode"].value.startswith("10 shapes: (0, True) (1, True)")
    assert found["stage llm.decode"].value.endswith(" and 2 more")
    assert found["built"].value == "2026-01-01T00:00:00Z, in 99.0 s"
    assert found["graph breaks then"].value == "0"
    assert found["verified"].value == "12.5 s, 2 hits, 0 misses, 0 recompiles"


@pytest.mark.weights
def test_a_manifest_of_somebody_else_has_gaps_and_no_traceback(tmp_path):
    config = compiling_config(tmp_path)
    fill_cache(config, info={})
    found = told(config, explain=True)

    assert found["graph breaks then"].value == "?"


def running(config):
    return {f.what.strip(): f for f in compile_findings._running(config)}


async def test_running_workers_say_what_they_compiled():
    regions = {"llm.decode": RegionReport(graphs=2, hits=1, seconds=3.0, fallbacks=4)}
    status = CompileStatus(
        "warm", graphs=2, fx_hits=1, fx_misses=1, recompiles_after_idle=4, regions=regions,
        fallback_reasons={"llm.decode": "size mismatch"},
    )  # fmt: skip
    async with ScriptedWorker(
        script=Script(compile_status=msgspec.json.encode(status).decode())
    ) as worker:
        config = Config.model_validate({"service": {"worker_base_port": worker.port}})
        found = await asyncio.to_thread(running, config)

    assert found[f"worker on port {worker.port}"].value == (
        "warm, 2 graphs (1 hits, 1 misses), 0 graph breaks, 4 recompiles after its start"
    )
    assert found["region llm.decode"].value == "2 graphs, 1 hits, 4 eager calls: size mismatch"


def test_a_worker_that_does_not_run_is_told():
    port = free_port()
    config = Config.model_validate({"service": {"worker_base_port": port}})

    assert running(config)[f"worker on port {port}"].value == "does not run"


@pytest.mark.parametrize(
    ("name", "tflops", "source"),
    [
        ("NVIDIA H200", 790.0, "measured"),
        ("NVIDIA A100-SXM4-80GB", 312.0, "vendor's sheet, peak"),
        ("NVIDIA GeForce RTX 4090", 165.0, "vendor's sheet, peak"),
    ],
)
def test_what_a_gpu_should_reach_is_known_with_its_source(name, tflops, source):
    rate = expected_rate(name)

    assert (rate.tflops, rate.source) == (tflops, source)


def test_of_another_gpu_nothing_is_expected():
    assert expected_rate("NVIDIA Tesla K80") is None
