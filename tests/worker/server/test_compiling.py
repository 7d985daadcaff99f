"""What a worker compiles while it starts: the order, the cache, and what happens if that fails."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import Counter

import pytest

from shared.errors import CompileCacheError
from shared.protocol import CompileStatus
from shared.states import WorkerState
from tests.fakes.model import FakeDuplexModel, as_model
from tests.fakes.patience import PATIENCE_S
from tests.fakes.session import eventually
from worker.compile.cache import CompileCache
from worker.compile.manifest import Key
from worker.compile.warmup import ShapeProfile
from worker.compiling import CompileParts, Compiling
from worker.lifecycle import Lifecycle, WorkerSettings

PLAN = {"fake": "plan"}
KERNEL = "inductor/ab/kernel.so"


class FakeStage:
    buckets = ((1, True), (2, False))
    on_shape = None


class FakeReport:
    def __init__(self):
        self.is_sealed = False
        self.graphs = 0

    def counts(self):
        return {"graphs": self.graphs, "fx_misses": self.graphs, "aot_hits": 3}


class FakeCompiler:
    """Writes what it compiles to the cache's copy, and counts what it is asked for."""

    def __init__(self, plan=PLAN, fail_from=None, fail_capture=False, builds_later=None):
        self.plan = plan
        self.report = FakeReport()
        self.stages = {"stage": FakeStage()}
        self.calls = []
        self.cache = None
        self.fail_from = fail_from
        """Content of a kernel that cannot be used."""
        self.fail_capture = fail_capture
        self.builds_later = builds_later
        """Path of a kernel that is only built when the other one comes from a cache."""
        self.added = []

    @property
    def can_capture(self):
        return self.plan is not None

    def compile(self, progress):
        self.calls.append("compile")
        if self.plan is None:
            return
        kernel = self.cache.copy / KERNEL
        if kernel.exists():
            if kernel.read_bytes() == self.fail_from:
                raise RuntimeError("BackendCompilerFailed: file too short\nand more")
            if self.builds_later:
                later = self.cache.copy / self.builds_later
                if not later.exists():
                    later.write_bytes(b"later")
            return
        if self.fail_from == b"any":
            raise ValueError("no compiler")
        kernel.parent.mkdir(parents=True)
        kernel.write_bytes(b"good")
        self.report.graphs += 1

    def capture(self, progress):
        self.calls.append("capture")
        if self.fail_capture:
            raise RuntimeError("operation not permitted when stream is capturing")

    def add(self, shapes, progress):
        self.added = list(shapes)

    def planned(self):
        return {"regions": {}, "stages": {"stage": ["(1, True)"]}}

    def undo(self):
        self.calls.append("undo")

    def drop_graphs(self):
        self.calls.append("drop_graphs")

    def seal(self):
        self.calls.append("seal")
        self.report.is_sealed = True


class Model(FakeDuplexModel):
    """Compiles through its compiler."""

    compiler = None

    def apply_torch_compile(self, progress):
        self._stage("apply_torch_compile", progress)
        return self.compiler.compile(progress)


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """The cache changes the process's own variables; afterwards they are as before."""
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TORCHINDUCTOR_COMPILE_THREADS"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.fixture
def root(tmp_path):
    return tmp_path / "shared"


class Start:
    """One worker's start: `await` its lifecycle through `ready`."""

    def __init__(
        self,
        root,
        name="a",
        *,
        key="1",
        on_cold="compile",
        profile=None,
        completes=False,
        **compiler,
    ):
        self.compiler = FakeCompiler(**compiler)
        private = root.parent / f"private-{name}"
        private.mkdir(exist_ok=True)
        cache = CompileCache(root, Key({"plan": key}), private) if self.compiler.plan else None
        self.cache = self.compiler.cache = cache
        self.model = Model()
        self.model.compiler = self.compiler
        versions = {"torch": "2.13", "triton": "3.6", "gpu": "a GPU", "driver": "1.2"}
        parts = CompileParts(self.compiler, cache, on_cold, profile, versions)
        self.compiling = Compiling(lambda: parts, completes=completes)
        self.warm_ups = []
        self.fail_warm_ups = 0

    def build(self):
        assert self.compiling.look() is self.compiler
        return as_model(self.model)

    async def warm_up(self, host, progress):
        self.warm_ups.append(list(self.compiler.calls))
        if len(self.warm_ups) <= self.fail_warm_ups:
            raise RuntimeError("a unit has failed")
        progress(1.0, "played")

    async def __aenter__(self):
        self.lifecycle = Lifecycle(
            WorkerSettings("fake", 2), self.build, self.warm_up, compiling=self.compiling
        )
        self.running = asyncio.create_task(self.lifecycle.run())
        return self

    async def __aexit__(self, *_):
        self.lifecycle.request_stop()
        await self.running

    async def ready(self):
        await eventually(lambda: self.lifecycle.state is WorkerState.READY)
        return self.lifecycle.compile_status()


async def started(*arguments, **options):
    """Start a worker, end it, and return what it told and the start."""
    async with Start(*arguments, **options) as start:
        return await start.ready(), start


# ---- order


async def test_ready_comes_after_the_warm_up_and_the_seal(root):
    status, start = await started(root)

    assert start.warm_ups == [["compile", "capture"]]
    assert start.compiler.calls == ["compile", "capture", "seal"]
    assert list(status.stage_seconds) == [
        *("load_model", "init_unified", "apply_torch_compile", "warmup_compile")
    ]


async def test_the_cache_is_looked_at_before_the_weights_and_told_at_once(root):
    gate, inside = threading.Event(), threading.Event()

    def hold(name):
        inside.set()
        gate.wait(PATIENCE_S)

    start = Start(root)
    start.model.on_stage = hold
    async with start:
        assert await asyncio.to_thread(inside.wait, PATIENCE_S)
        health = start.lifecycle.health()
        status = start.lifecycle.compile_status()
        gate.set()
        await start.ready()

    assert health.stage == "load_model"
    assert (health.compile.state, health.compile.degraded) == ("cold", False)
    assert health.compile.fingerprint == status.fingerprint == start.cache.key.fingerprint


async def test_slots_that_compiling_has_written_to_are_cleaned(root):
    _, start = await started(root)

    ended = [call[1] for call in start.model.named("end")]
    assert ended == [0, 1]


async def test_without_a_compiler_nothing_is_known_and_nothing_done():
    lifecycle = Lifecycle(WorkerSettings("fake", 2), lambda: as_model(FakeDuplexModel()), _nothing)
    running = asyncio.create_task(lifecycle.run())
    await eventually(lambda: lifecycle.state is WorkerState.READY)
    status = lifecycle.compile_status()
    lifecycle.request_stop()
    await running

    assert (status.state, status.degraded, status.fingerprint) == (None, False, "")


async def _nothing(host, progress):
    pass


async def test_a_start_that_compiles_nothing_says_disabled(root):
    status, start = await started(root, plan=None)

    assert (status.state, status.degraded) == ("disabled", False)
    assert start.model.named("end") == []
    assert not root.exists()


# ---- the cache


async def test_a_cold_start_fills_the_cache_and_the_next_one_is_warm(root):
    cold, first = await started(root, "a")
    warm, second = await started(root, "b")

    assert (cold.state, cold.graphs, cold.new_files) == ("cold", 1, 1)
    assert (warm.state, warm.graphs, warm.new_files, warm.fx_misses) == ("warm", 0, 0, 0)
    assert cold.fingerprint == warm.fingerprint
    info = first.cache.master.manifest().info
    assert info["driver"] == "1.2"
    assert info["build_s"] >= 0
    assert "apply_torch_compile" in info["stage_seconds"]
    assert info["plan"]["stages"] == {"stage": ["(1, True)"]}
    assert info["compiled"]["graphs"] == 1


@pytest.mark.parametrize("completes", [True, False])
async def test_what_a_warm_start_had_to_add_is_shared_if_that_is_asked_for(root, caplog, completes):
    later = {"builds_later": "inductor/ab/later.so"}
    await started(root, "a", **later)
    second, start = await started(root, "b", completes=completes, **later)
    third, _ = await started(root, "c", **later)

    assert (second.state, second.new_files) == ("warm", 1)
    assert "later.so" in caplog.text
    assert (third.state, third.new_files) == ("warm", 0 if completes else 1)
    assert start.cache.master.check().files.count == (2 if completes else 1)


async def test_the_private_copy_goes_with_the_worker(root):
    _, start = await started(root)

    assert list(root.parent.glob("private-a/*/*")) == []
    assert start.cache.copy is None


async def test_a_stale_cache_says_in_which_fields_it_differs(root):
    await started(root, "a", key="1")
    status, _ = await started(root, "b", key="2")

    assert status.state == "stale"
    assert [(s.name, s.here, s.there) for s in status.stale_fields] == [("plan", "2", "1")]


async def test_a_damaged_cache_is_made_anew(root):
    _, first = await started(root, "a")
    (first.cache.master.directory / KERNEL).unlink()
    damaged, _ = await started(root, "b")
    after, _ = await started(root, "c")

    assert (damaged.state, damaged.graphs) == ("damaged", 1)
    assert "not whole" in damaged.reason
    assert after.state == "warm"


async def test_on_cold_eager_a_worker_serves_at_once_and_is_degraded(root, caplog):
    status, start = await started(root, on_cold="eager")

    assert (status.state, status.degraded) == ("cold", True)
    assert "on_cold is eager" in status.reason
    assert start.compiler.plan is None
    assert not (root / status.fingerprint).exists()
    assert "worker is degraded" in caplog.text


async def test_on_cold_eager_a_warm_cache_is_used(root):
    await started(root, "a")
    status, start = await started(root, "b", on_cold="eager")

    assert (status.state, status.degraded) == ("warm", False)
    assert start.compiler.calls == ["compile", "capture", "seal"]


async def test_two_cold_workers_one_compiles_and_the_other_waits_and_is_warm(root):
    gate, inside = threading.Event(), threading.Event()

    def hold(name):
        if name == "apply_torch_compile":
            inside.set()
            gate.wait(PATIENCE_S)

    first = Start(root, "a")
    first.model.on_stage = hold
    async with first:
        assert await asyncio.to_thread(inside.wait, PATIENCE_S)
        async with Start(root, "b") as second:
            await eventually(lambda: "another worker compiles" in _note(second))
            assert second.lifecycle.health().compile.state == "cold"
            assert second.compiler.calls == []
            gate.set()
            told = [await first.ready(), await second.ready()]

    assert [(status.state, status.graphs) for status in told] == [("cold", 1), ("warm", 0)]


async def test_a_worker_that_waits_for_another_one_can_be_stopped(root, caplog):
    with Start(root, "a").cache.lock():
        async with Start(root, "b") as start:
            await eventually(lambda: "another worker compiles" in _note(start))
            start.lifecycle.request_stop()
            with caplog.at_level(logging.INFO):
                code = await start.running

    assert code == 0
    assert "threads_ended=True" in caplog.text
    assert start.cache.copy is None


def _note(start):
    stage = start.lifecycle.stages.last
    return stage.note if stage else ""


async def test_a_root_that_everybody_may_write_to_ends_the_start(root):
    root.mkdir(mode=0o777)
    root.chmod(0o777)
    start = Start(root)
    async with start:
        code = await start.running

    assert code == 1
    assert "may be written to by everybody" in start.lifecycle.health().reason


async def test_a_cache_that_cannot_be_shared_is_no_reason_not_to_serve(root, monkeypatch, caplog):
    def full(self, info):
        raise CompileCacheError("no room")

    monkeypatch.setattr(CompileCache, "publish", full)
    status, _ = await started(root)

    assert (status.state, status.degraded) == ("cold", False)
    assert "no room" in caplog.text


# ---- what goes wrong


async def test_kernels_that_were_damaged_in_the_copy_are_copied_again(root, monkeypatch):
    await started(root, "a")
    spoiled = Counter()
    open_cache = CompileCache.open

    def spoil(self):
        status = open_cache(self)
        if not spoiled["once"]:
            spoiled["once"] += 1
            (self.copy / KERNEL).write_bytes(b"half")
        return status

    monkeypatch.setattr(CompileCache, "open", spoil)
    status, start = await started(root, "b", fail_from=b"half")

    assert start.compiler.calls == ["compile", "undo", "compile", "capture", "seal"]
    assert (status.state, status.degraded, status.graphs) == ("warm", False, 0)


async def test_a_cache_whose_content_is_wrong_is_made_again_for_everybody(root):
    _, first = await started(root, "a")
    (first.cache.master.directory / KERNEL).write_bytes(b"evil")
    status, start = await started(root, "b", fail_from=b"evil")
    after, last = await started(root, "c", fail_from=b"evil")

    assert start.compiler.calls == ["compile", "capture", "seal"]
    assert (status.state, status.degraded, status.graphs) == ("damaged", False, 1)
    assert (after.state, last.compiler.calls) == ("warm", ["compile", "capture", "seal"])


def open_and_spoil(cache, open_cache=CompileCache.open):
    """A warm cache is damaged after it was looked at, and so is the copy of it."""
    status = open_cache(cache)
    for directory in (cache.copy, cache.master.directory):
        if status.is_warm:
            (directory / KERNEL).write_bytes(b"evil")
    return status


async def test_what_is_compiled_after_damaged_code_was_loaded_is_not_shared(root, monkeypatch):
    """What the process had in memory by then was not in the cache that it made, so that every later
    start compiled that part again."""
    await started(root, "a")
    with monkeypatch.context() as patch:
        patch.setattr(CompileCache, "open", open_and_spoil)
        status, start = await started(root, "b", fail_from=b"evil")
    after, _ = await started(root, "c")

    assert start.compiler.calls == ["compile", "undo", "compile", "capture", "seal"]
    assert (status.state, status.degraded, status.graphs) == ("damaged", False, 1)
    assert (after.state, after.graphs) == ("damaged", 1)
    assert (await started(root, "d"))[0].state == "warm"


async def test_damaged_code_that_cannot_be_replaced_means_eager_if_so_configured(root, monkeypatch):
    await started(root, "a")
    monkeypatch.setattr(CompileCache, "open", open_and_spoil)
    status, start = await started(root, "b", fail_from=b"evil", on_cold="eager")

    assert start.compiler.plan is None
    assert (status.state, status.degraded, status.graphs) == ("damaged", True, 0)


async def test_a_second_failure_means_eager_degraded_and_an_error(root, caplog):
    await started(root, "a")
    with caplog.at_level(logging.ERROR):
        status, start = await started(root, "b", fail_from=b"good")

    assert start.compiler.calls == ["compile", "undo", "compile", "undo", "seal"]
    assert start.compiler.plan is None
    assert status.degraded
    assert "RuntimeError: BackendCompilerFailed: file too short" in status.reason
    assert "runs eagerly" in caplog.text


async def test_a_compiler_that_does_not_work_leaves_the_lock_to_the_next_one(root):
    status, start = await started(root, "a", fail_from=b"any")
    after, _ = await started(root, "b")

    assert (status.state, status.degraded) == ("cold", True)
    assert "ValueError: no compiler" in status.reason
    assert (after.state, after.degraded) == ("cold", False)


async def test_a_capture_that_fails_leaves_the_compiled_code(root):
    status, start = await started(root, fail_capture=True)

    assert start.compiler.calls == ["compile", "capture", "drop_graphs", "seal"]
    assert start.compiler.plan is not None
    assert (status.degraded, status.reason) == (
        True,
        "nothing is captured: RuntimeError: operation not permitted when stream is capturing",
    )


async def test_a_rehearsal_that_fails_is_played_again_eagerly(root):
    start = Start(root)
    start.fail_warm_ups = 1
    async with start:
        status = await start.ready()

    assert start.warm_ups == [["compile", "capture"], ["compile", "capture", "undo"]]
    assert status.degraded
    assert "a unit has failed" in status.reason


async def test_a_rehearsal_that_fails_eagerly_as_well_ends_the_start(root):
    start = Start(root)
    start.fail_warm_ups = 2
    async with start:
        assert await start.running == 1


# ---- afterwards


async def test_files_that_are_written_after_the_start_are_found_and_told(root, caplog):
    async with Start(root) as start:
        await start.ready()
        (start.cache.copy / "triton" / "late.cubin").write_bytes(b"x")
        start.compiling.check_files()
        status = start.lifecycle.compile_status()

    assert status.new_files == 2
    assert "triton/late.cubin" in caplog.text


async def test_shapes_of_earlier_traffic_are_added_where_they_fit(root, tmp_path):
    path = tmp_path / "shapes.json"
    before = ShapeProfile(path)
    for shape in (("stage", (7, True)), ("stage", (1, 2, 3)), ("gone", (1, True))):
        before.record(*shape)
    before.save()
    async with Start(root, profile=ShapeProfile(path)) as start:
        await start.ready()
        start.compiler.stages["stage"].on_shape("stage", (9, False))

    assert start.compiler.added == [("stage", (7, True))]
    assert "[9" in path.read_text().replace("\n", "").replace(" ", "")


def test_a_status_of_a_start_that_has_not_looked_yet():
    status = Compiling(lambda: pytest.fail("nobody asked")).status({"load_model": 0.5})

    assert status == CompileStatus(stage_seconds={"load_model": 0.5})
