"""Compiled regions: which callables are compiled, in which shapes, and what happens to the rest.

A region is one layer, not a model: compiling a model whole takes ten times as long, grows with
its depth, and copies the caches. All layers of one kind share one graph per shape. A module opts
in by one declaration: a list of call sites (one callable per layer, replaced in place), the
dimensions that vary, and a switch.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, _dynamo
from torch._inductor import config as inductor_config

from shared.config import COMPILE_MODULES
from worker.compile.report import Compilation, CompileReport

GRAPHS_PER_FUNCTION = 64
"""Regions of one class share their code object, and with it the compiler's limit of graphs."""

GPU_MATMUL_PRECISION = "high"
"""TF32 for what is in float32 there: sums, and the voice."""

_RECOMPILE = "Detected recompile"
"""How the message of the stance `fail_on_recompile` begins."""


class RecompileAfterStart(RuntimeError):
    """A call met no compiled graph after the start, where that is forbidden."""


@dataclass(frozen=True, slots=True)
class Dim:
    """A dimension of an argument that varies between calls."""

    argument: str
    axis: int
    low: int
    high: int


@dataclass(slots=True)
class Region:
    """One declaration.

    Args:
        name: such as "llm.decode"; for reports.
        module: one of `COMPILE_MODULES`.
        calls: call sites, one per layer; compiled callables take their places.
        dims: what varies. With any, one graph serves all sizes (besides 1, which always has its
            own); without, every size that occurs gets a graph of its own.
        options: for the compiler, besides the mode's.
    """

    name: str
    module: str
    calls: list[Any]
    dims: Sequence[Dim] = ()
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CompilePlan:
    """What a configuration says about compiling."""

    mode: Literal["default", "max-autotune"] = "default"
    modules: frozenset[str] = frozenset(COMPILE_MODULES)
    dynamic: bool = True
    """False: no graph serves several sizes."""
    backend: str = "inductor"
    """Tests take "eager" or "aot_eager"."""
    on_recompile: Literal["eager", "fail"] = "eager"
    """What a call does that meets no graph after the start."""
    cuda_graphs: bool = True

    def wants(self, region: Region) -> bool:
        return region.module in self.modules


def compile_region(region: Region, plan: CompilePlan, report: CompileReport) -> None:
    """Replace the call sites of a region by compiled ones.

    The compiler itself runs at the first call of each shape, so a warm-up has to follow. A part
    that cannot be compiled is an error then, never a silent way back to eager.
    """
    options = dict(region.options)
    if plan.mode == "max-autotune":
        options |= {"max_autotune": True, "triton.cudagraphs": False}
    if plan.backend != "inductor":
        options = {}
    for index, function in enumerate(region.calls):
        compiled = torch.compile(
            function,
            fullgraph=True,
            dynamic=bool(region.dims) and plan.dynamic,
            backend=plan.backend,
            options=options or None,
        )
        region.calls[index] = CompiledCall(region.name, function, compiled, plan, report)


def restore_region(region: Region) -> None:
    """Put the eager callables back to the call sites of a region."""
    region.calls[:] = [
        call.eager if isinstance(call, CompiledCall) else call for call in region.calls
    ]


def fix_sizes(tensors: Iterable[Tensor]) -> None:
    """Make the sizes of caches constants of every graph that reads them.

    A region with `dims` would take them for sizes that vary, and those that are equal when it is
    compiled for one and the same: as many slots as rows, until the next batch.
    """
    for tensor in tensors:
        _dynamo.mark_static(tensor)


class CompiledCall:
    """A compiled callable that notices when the compiler has to work, and forbids it later."""

    __slots__ = ("_compiled", "_forbids", "_region", "_report", "eager")

    def __init__(
        self,
        region: str,
        eager: Callable[..., Any],
        compiled: Callable[..., Any],
        plan: CompilePlan,
        report: CompileReport,
    ) -> None:
        self._region = region
        self.eager = eager
        self._compiled = compiled
        self._forbids = plan.on_recompile == "fail"
        self._report = report

    def __call__(self, *arguments: Any) -> Any:
        if not self._report.is_sealed:
            return self._watched(arguments)
        try:
            return self._compiled(*arguments)
        except RuntimeError as error:
            if not str(error).startswith(_RECOMPILE):
                raise
            # Guards are checked before anything runs, so nothing has been written yet.
            reason = _failed_guard(str(error))
            self._report.fell_back(self._region, reason)
            if self._forbids:
                raise RecompileAfterStart(f"{self._region}: {reason}") from error
        return self.eager(*arguments)

    def _watched(self, arguments: tuple[Any, ...]) -> Any:
        """Call, and book what the compiler did meanwhile."""
        before, began_at = Compilation.now(), time.perf_counter()
        result = self._compiled(*arguments)
        now = Compilation.now()
        if now.graphs > before.graphs:
            self._report.region_graphs[self._region] += now.graphs - before.graphs
            self._report.region_hits[self._region] += now.fx_hits - before.fx_hits
            self._report.region_seconds[self._region] += time.perf_counter() - began_at
        return result


def _failed_guard(message: str) -> str:
    """Return the part of the compiler's message that says what did not fit."""
    lines = [line.strip(" -") for line in message.splitlines()[1:] if line.strip().startswith("-")]
    return "; ".join(lines) or "nothing was compiled at this call site"


def prepare_thread(device: torch.device) -> None:
    """Set what compiled graphs depend on, in the thread that compiles and serves.

    Several of these are settings of the thread, and all are guarded: changing one after the
    warm-up would compile everything again.
    """
    torch.set_num_threads(1)
    if device.type == "cuda":
        torch.set_float32_matmul_precision(GPU_MATMUL_PRECISION)
        # Else transposed convolutions add up in an order that varies from call to call.
        torch.backends.cudnn.deterministic = True
    n_processes = os.environ.get("TORCHINDUCTOR_COMPILE_THREADS")
    if n_processes:
        # The compiler has read it when it was imported; whoever opened a cache has set it since.
        inductor_config.compile_threads = int(n_processes)
    _dynamo.config.recompile_limit = GRAPHS_PER_FUNCTION
    _dynamo.config.accumulated_recompile_limit = 16 * GRAPHS_PER_FUNCTION
    _dynamo.config.fail_on_recompile_limit_hit = True
    # Numbers such as an epsilon are constants. Taken for variables at first, most dynamic regions
    # would be traced twice, and tracing is the longest part of a warm start.
    _dynamo.config.specialize_float = True
    # What one process saw must not change what the next one compiles.
    _dynamo.config.automatic_dynamic_shapes = False


forbid_compiling = functools.partial(torch.compiler.set_stance, "fail_on_recompile")
"""For the whole process; every compiled call then either has a graph or says that it has none."""
