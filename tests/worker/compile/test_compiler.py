"""The detectors: what is compiled when, and that every compilation after the start is noticed."""

import threading

import pytest
import torch
from torch._inductor.codecache import CppCodeCache

from tests.fakes.graphs import FakeCapture
from worker.compile.compiler import Compiler
from worker.compile.graphs import Input
from worker.compile.regions import (
    CompilePlan,
    Dim,
    RecompileAfterStart,
    Region,
    compile_region,
    prepare_thread,
)
from worker.compile.report import CompileReport

CPU = torch.device("cpu")
ROWS = (Dim("x", 0, 2, 64),)
pytestmark = pytest.mark.usefixtures("compiling")


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(4, 4), requires_grad=False)

    def forward(self, x, bias=None):
        x = torch.tanh(x @ self.weight)
        return x if bias is None else x + bias


class Model:
    """A stack of layers, with stages over it."""

    def __init__(self, n_layers=3, sizes=(2, 5), dims=ROWS):
        self.layers = [Layer() for _ in range(n_layers)]
        self.calls = [layer.forward for layer in self.layers]
        self.sizes, self.dims = sizes, dims

    def declare(self, compiler):
        compiler.region(Region("stack", "llm", self.calls, self.dims))
        self.stage = compiler.stage(
            "stack.run", lambda n: {"x": Input((n, 4), torch.float32)}, self.run, self.sizes, CPU
        )

    def run(self, bucket, inputs):
        x = inputs["x"]
        for call in self.calls:
            x = call(x)
        return (x,)

    def __call__(self, x):
        call = self.stage.at(len(x))
        call.begin()["x"][:] = x.numpy()
        return call.run()[0]

    def eager(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def quiet(share, note):
    pass


def started(model, **plan):
    compiler = Compiler(CompilePlan(**{"backend": "eager", **plan}), capture=FakeCapture())
    compiler.prepare(CPU)
    model.declare(compiler)
    compiler.compile(quiet)
    compiler.capture(quiet)
    compiler.seal()
    return compiler


@torch.inference_mode()
def test_planned_buckets_replay_and_equal_eager():
    model = Model()
    compiler = started(model)
    for n in (5, 2, 5):
        x = torch.randn(n, 4)
        assert torch.allclose(model(x), model.eager(x))

    counts = compiler.report.counts()
    assert counts["stage_runs"] == counts["captured_replays"] == 3
    assert counts["recompiles_after_idle"] == counts["eager_fallbacks"] == 0
    assert counts["graph_breaks"] == 0


@pytest.mark.parametrize("n_layers", [2, 6])
def test_graphs_do_not_grow_with_depth(n_layers):
    compiler = started(Model(n_layers))

    assert compiler.report.counts()["graphs"] == 1
    assert compiler.report.counts()["regions"]["stack"]["graphs"] == 1


def test_without_dims_every_size_has_its_graph():
    assert started(Model(dims=())).report.counts()["graphs"] == 2


def test_dynamic_off_is_a_graph_per_size():
    assert started(Model(), dynamic=False).report.counts()["graphs"] == 2


@torch.inference_mode()
def test_a_size_of_a_dynamic_region_that_was_not_planned_needs_no_new_graph():
    model = Model()
    compiler = started(model)
    x = torch.randn(17, 4)

    assert torch.allclose(model(x), model.eager(x))
    counts = compiler.report.counts()
    assert (counts["stage_runs"], counts["captured_replays"]) == (1, 0)
    assert counts["recompiles_after_idle"] == 0


@torch.inference_mode()
def test_eager_on_recompile_answers_rightly_counts_and_logs_once(caplog):
    model = Model(dims=())
    compiler = started(model)
    x = torch.randn(9, 4)
    for _ in range(2):
        assert torch.allclose(model(x), model.eager(x))

    counts = compiler.report.counts()
    assert counts["eager_fallbacks"] == 6  # three layers, twice
    assert counts["recompiles_after_idle"] == 6
    assert counts["graphs"] == 2
    assert "size mismatch" in counts["fallback_reasons"]["stack"]
    lines = [r for r in caplog.records if "no compiled graph fits" in r.message]
    assert len(lines) == 1


@torch.inference_mode()
def test_fail_on_recompile_names_region_and_guard():
    model = Model(dims=())
    compiler = started(model, on_recompile="fail")

    with pytest.raises(RecompileAfterStart, match=r"^stack: .*size mismatch"):
        model(torch.randn(9, 4))
    assert compiler.report.n_fallbacks == 1


# Things that bring a new graph although no size has changed: each has to trip the detector.


@torch.inference_mode()
def test_a_size_of_one_trips_the_detector():
    model = Model()
    compiler = started(model)
    model(torch.randn(1, 4))

    assert compiler.report.n_fallbacks == 3


@torch.inference_mode()
def test_an_optional_argument_trips_the_detector():
    model = Model()
    compiler = started(model)
    model.calls[0](torch.randn(5, 4), torch.zeros(4))

    assert compiler.report.n_fallbacks == 1


@torch.inference_mode()
def test_another_thread_count_trips_the_detector():
    model = Model()
    compiler = started(model)
    torch.set_num_threads(2)
    try:
        model.calls[0](torch.randn(5, 4))
    finally:
        torch.set_num_threads(1)

    assert "num_threads" in compiler.report.reasons["stack"]


def test_a_thread_with_gradients_trips_the_detector():
    model = Model()
    compiler = started(model)
    thread = threading.Thread(target=lambda: model.calls[0](torch.randn(5, 4)))
    thread.start()
    thread.join()

    assert compiler.report.n_fallbacks == 1


@torch.inference_mode()
def test_a_list_whose_length_varies_trips_the_detector():
    calls = [lambda xs: torch.stack(xs).sum(0)]
    report = CompileReport()
    compile_region(Region("list", "llm", calls), CompilePlan(backend="eager"), report)
    calls[0]([torch.ones(2)] * 3)
    report.seal()
    torch.compiler.set_stance("fail_on_recompile")
    calls[0]([torch.ones(2)] * 4)

    assert report.n_fallbacks == 1


@torch.inference_mode()
def test_a_call_site_that_the_warm_up_forgot_is_found():
    model = Model(sizes=())
    compiler = started(model)
    model(torch.randn(5, 4))

    assert compiler.report.reasons["stack"] == "nothing was compiled at this call site"


@torch.inference_mode()
def test_what_cannot_be_compiled_is_an_error_in_the_start():
    def breaks(x):
        return x * 2 if x.sum().item() > 0 else x

    model = Model()
    model.calls[:] = [breaks]
    with pytest.raises((torch._dynamo.exc.Unsupported, torch._dynamo.exc.UserError)):
        started(model)


@torch.inference_mode()
def test_an_error_of_the_function_itself_is_no_fallback():
    calls = [lambda x, index: x.index_select(0, index) * 2]
    report = CompileReport()
    compile_region(Region("pick", "llm", calls), CompilePlan(backend="eager"), report)
    calls[0](torch.randn(5, 4), torch.tensor([1]))
    report.seal()
    torch.compiler.set_stance("fail_on_recompile")

    with pytest.raises((RuntimeError, IndexError), match="range"):
        calls[0](torch.randn(5, 4), torch.tensor([9]))
    assert report.n_fallbacks == 0


def test_modules_that_were_not_chosen_stay_eager():
    model = Model()
    started(model, modules=frozenset({"tts"}))

    assert model.calls == [layer.forward for layer in model.layers]


@torch.inference_mode()
def test_without_a_plan_stages_run_directly():
    model, compiler = Model(), Compiler()
    compiler.prepare(CPU)
    model.declare(compiler)

    assert compiler.compile(quiet) == "off"
    assert compiler.capture(quiet) == "no graphs"
    compiler.seal()
    x = torch.randn(5, 4)
    assert torch.allclose(model(x), model.eager(x))


def test_without_cuda_graphs_nothing_is_captured():
    compiler = started(Model(), cuda_graphs=False)

    assert compiler.report.counts()["captures"] == 0


@torch.inference_mode()
def test_recapture_follows_new_weights():
    model = Model()
    compiler = started(model)
    for layer in model.layers:
        layer.weight = torch.nn.Parameter(torch.randn(4, 4), requires_grad=False)
    compiler.recapture()
    x = torch.randn(5, 4)

    assert torch.allclose(model(x), model.eager(x))
    assert compiler.report.counts()["captures"] == 4


def test_largest_buckets_are_captured_first():
    order = []
    model = Model(sizes=(2, 5))

    class Recording(FakeCapture):
        def __call__(self, function):
            made = super().__call__(function)
            order.append(len(made[1][0]))
            return made

    compiler = Compiler(CompilePlan(backend="eager"), capture=Recording())
    model.declare(compiler)
    compiler.compile(quiet)
    compiler.capture(quiet)

    assert order == [5, 2]


def test_progress_names_every_bucket_and_only_grows():
    said = []
    compiler = Compiler(CompilePlan(backend="eager"), capture=FakeCapture())
    Model().declare(compiler)
    compiler.compile(lambda share, note: said.append((share, note)))

    assert [note for _, note in said[:2]] == [f"compiling stack.run {n}" for n in (2, 5)]
    assert [share for share, _ in said] == sorted(share for share, _ in said)
    assert said[-1][0] == 1.0


def test_the_thread_is_set_up_before_the_first_graph():
    prepare_thread(CPU)

    assert torch.get_num_threads() == 1
    assert not torch._dynamo.config.automatic_dynamic_shapes
    assert torch._dynamo.config.recompile_limit >= 64


def test_on_a_gpu_the_same_sound_comes_out_every_time():
    """Transposed convolutions of cuDNN are free to add up in any order."""
    prepare_thread(torch.device("cuda"))

    assert torch.backends.cudnn.deterministic
    assert torch.get_float32_matmul_precision() == "high"


def test_the_number_of_compile_processes_may_be_set_after_the_import(monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "3")
    with torch._inductor.config.patch():
        prepare_thread(CPU)
        assert torch._inductor.config.compile_threads == 3


# Back from a start that went wrong, and on from one that went well.


def test_undo_makes_the_compiler_forget_where_its_files_were():
    """Compiling again after a repair failed at files of a copy that was gone by then."""
    compiler = started(Model())
    CppCodeCache.cache["kernel"] = lambda: None

    compiler.undo()

    assert "kernel" not in CppCodeCache.cache


@torch.inference_mode()
def test_undo_brings_back_the_eager_callables_and_compiling_again_starts_anew():
    model = Model()
    compiler = Compiler(CompilePlan(backend="eager"), capture=FakeCapture())
    model.declare(compiler)
    compiler.compile(quiet)
    compiler.capture(quiet)
    compiler.undo()

    assert model.calls == [layer.forward for layer in model.layers]
    assert all(call.graph is None for call in map(model.stage.at, (2, 5)))
    compiler.compile(quiet)
    compiler.capture(quiet)
    compiler.seal()
    x = torch.randn(5, 4)
    assert torch.allclose(model(x), model.eager(x))
    counts = compiler.report.counts()
    assert (counts["captured_replays"], counts["eager_fallbacks"]) == (1, 0)


@torch.inference_mode()
def test_dropped_graphs_leave_the_compiled_code():
    model = Model()
    compiler = Compiler(CompilePlan(backend="eager"), capture=FakeCapture())
    model.declare(compiler)
    compiler.compile(quiet)
    compiler.capture(quiet)
    compiler.drop_graphs()
    compiler.add([("stack.run", 7)], quiet)
    compiler.seal()
    x = torch.randn(5, 4)

    assert torch.allclose(model(x), model.eager(x))
    assert model.stage.at(7).graph is None
    counts = compiler.report.counts()
    assert (counts["stage_runs"], counts["captured_replays"]) == (1, 0)
    assert counts["eager_fallbacks"] == 0


@torch.inference_mode()
def test_added_buckets_are_captured_like_planned_ones():
    model = Model(dims=())
    compiler = Compiler(CompilePlan(backend="eager"), capture=FakeCapture())
    model.declare(compiler)
    compiler.compile(quiet)
    compiler.capture(quiet)

    assert compiler.add([("stack.run", 7), ("stack.run", 5)], quiet) == "1 more shapes"
    compiler.seal()
    x = torch.randn(7, 4)
    assert torch.allclose(model(x), model.eager(x))
    counts = compiler.report.counts()
    assert (counts["captured_replays"], counts["eager_fallbacks"]) == (1, 0)
