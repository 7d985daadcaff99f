"""What is exported of a real compiler in a whole worker, and `/api/compile` of its port."""

from __future__ import annotations

import asyncio
import threading
import time

import msgspec
import pytest
import torch

from shared.protocol import CompileStatus
from tests.fakes.graphs import FakeCapture
from tests.fakes.model import FakeDuplexModel
from tests.fakes.patience import PATIENCE_S
from tests.fakes.worker import FakeWorker
from tests.worker.server.test_metrics import Samples
from worker.compile.cache import CompileCache
from worker.compile.compiler import Compiler
from worker.compile.graphs import Input
from worker.compile.manifest import Key
from worker.compile.regions import CompilePlan, Region
from worker.compiling import CompileParts, Compiling

CPU = torch.device("cpu")


class CompiledModel(FakeDuplexModel):
    """The fake with one region and one stage over it, captured for one and two rows."""

    def __init__(self, compiler: Compiler, **fields) -> None:
        super().__init__(**fields)
        self.compiler = compiler

    def init_unified(self, n_slots, progress):
        super().init_unified(n_slots, progress)
        self.compiler.prepare(CPU)
        self.layers = [torch.tanh]
        self.compiler.region(Region("fake.layer", "llm", self.layers))
        self.stage = self.compiler.stage(
            "fake.step",
            lambda n: {"x": Input((n, 4), torch.float32)},
            lambda n, inputs: (self.layers[0](inputs["x"]),),
            (1, 2),
            CPU,
        )

    def apply_torch_compile(self, progress):
        super().apply_torch_compile(progress)
        return self.compiler.compile(progress)


@pytest.fixture
def compiler(compiling):
    return Compiler(CompilePlan(backend="eager"), capture=FakeCapture())


@pytest.fixture
def worker_of(tmp_path, compiler, make, monkeypatch):
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TORCHINDUCTOR_COMPILE_THREADS"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)

    async def worker_of(ready: bool = True, **fields) -> FakeWorker:
        cache = CompileCache(tmp_path / "cache", Key({"a": 1}), tmp_path)
        versions = {"torch": "2.13", "triton": "3.6", "gpu": "a GPU", "driver": "1"}
        parts = CompileParts(compiler, cache, versions=versions)
        model = CompiledModel(compiler, **fields)
        return await make(ready, model=model, compiling=Compiling(lambda: parts))

    return worker_of


async def run(worker, n_rows):
    """Run the stage on the thread that serves."""

    @torch.inference_mode()
    def step():
        worker.model.stage.at(n_rows).run()

    await asyncio.wrap_future(worker.lifecycle.host.call(step))


async def scraped(worker):
    return Samples((await worker.get("/metrics")).text)


async def status_of(worker):
    return msgspec.json.decode((await worker.get("/api/compile")).content, type=CompileStatus)


async def test_what_was_compiled_and_captured_is_exported(worker_of):
    worker = await worker_of()
    await run(worker, 2)
    await run(worker, 2)
    await run(worker, 1)
    metrics, status = await scraped(worker), await status_of(worker)

    assert metrics("compile_cache_state", state="cold") == 1
    assert metrics("compile_cache_state", state="warm") == 0
    assert metrics("compile_degraded") == 0
    assert metrics("compile_graphs") == status.graphs == 2
    assert metrics("compile_seconds", region="fake.layer") > 0
    assert metrics("cudagraph_captures_total") == status.captures == 2
    assert metrics("cudagraph_replays_total", stage="fake.step") == 3
    assert metrics("cudagraph_misses_total", stage="fake.step") == 0
    assert metrics("compile_recompiles_total") == 0
    assert (status.stage_runs, status.captured_replays) == (3, 3)
    assert (
        metrics(
            "compile_build_info",
            fingerprint=status.fingerprint,
            torch="2.13",
            triton="3.6",
            gpu="a GPU",
        )
        == 1
    )


async def test_a_call_that_fits_no_graph_is_served_eagerly_and_counted(worker_of):
    worker = await worker_of()
    await run(worker, 3)
    metrics, status = await scraped(worker), await status_of(worker)

    assert metrics("compile_eager_fallbacks_total", region="fake.layer") == 1
    assert metrics("compile_recompiles_total") == 1
    assert metrics("cudagraph_misses_total", stage="fake.step") == 1
    assert status.regions["fake.layer"].fallbacks == status.eager_fallbacks == 1
    assert status.recompiles_after_idle == 1
    assert "size mismatch" in status.fallback_reasons["fake.layer"]


@pytest.mark.realtime
async def test_the_status_is_answered_while_the_worker_loads(worker_of):
    gate, inside = threading.Event(), threading.Event()

    def hold(name):
        if name == "init_unified":
            inside.set()
            gate.wait(PATIENCE_S)

    worker = await worker_of(ready=False, on_stage=hold)
    assert await asyncio.to_thread(inside.wait, PATIENCE_S)
    began_at = time.monotonic()
    status = await status_of(worker)
    took_s = time.monotonic() - began_at
    health = await worker.health()
    gate.set()

    assert took_s < 0.5
    assert (status.state, status.graphs) == ("cold", 0)
    assert list(status.stage_seconds) == ["load_model", "init_unified"]
    assert (health.compile.state, health.compile.degraded) == ("cold", False)


async def test_before_the_cache_was_looked_at_the_state_is_not_known(make):
    worker = await make()
    metrics, status = await scraped(worker), await status_of(worker)

    assert status.state is None
    assert metrics("compile_cache_state", state="disabled") == 0
    with pytest.raises(KeyError):
        metrics("compile_build_info", fingerprint="", torch="", triton="", gpu="")
