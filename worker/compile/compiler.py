"""From declarations to a warm worker: compile the regions, run the plan, capture, seal.

One per worker. A model declares its regions and stages while it is set up; the lifecycle then
calls `compile`, `capture` and `seal`, all on the thread that serves the language lane afterwards.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, _dynamo
from torch._inductor.utils import clear_caches

from worker.compile.graphs import Bucket, Call, Capture, CudaCapture, Inputs, Layout, Outputs, Stage
from worker.compile.regions import (
    CompilePlan,
    Region,
    compile_region,
    forbid_compiling,
    prepare_thread,
    restore_region,
)
from worker.compile.report import Compilation, CompileReport

log = logging.getLogger(__name__)

Progress = Callable[[float, str], None]


class Compiler:
    """Keeps what was declared and brings it from eager to captured.

    Args:
        plan: None = nothing is compiled or captured; stages run directly.
        capture: for tests; None = CUDA graphs where there is CUDA.
    """

    def __init__(self, plan: CompilePlan | None = None, capture: Capture | None = None) -> None:
        self.plan = plan
        self.report = CompileReport()
        self.regions: list[Region] = []
        self.stages: dict[str, Stage] = {}
        self._capture = capture
        self._captures = False

    @property
    def can_capture(self) -> bool:
        """Whether there is anything that `capture` would capture."""
        if self.plan is None or not self.plan.cuda_graphs:
            return False
        on_gpu = any(stage.device.type == "cuda" for stage in self.stages.values())
        return on_gpu or self._capture is not None

    def uses_stages(self, device: torch.device) -> bool:
        """Whether work goes through stages, in few shapes; else in exact ones, as a CPU prefers."""
        return device.type == "cuda" or self.plan is not None

    def prepare(self, device: torch.device) -> None:
        """Set up the calling thread; before anything is compiled on it."""
        if self.plan is not None:
            prepare_thread(device)

    # ---- declaring

    def region(self, region: Region) -> None:
        """Declare a region; nothing happens to it yet."""
        self.regions.append(region)

    def stage(
        self,
        name: str,
        layout: Callable[[Any], Layout],
        function: Callable[[Any, Inputs], Outputs],
        buckets: Sequence[Bucket],
        device: torch.device,
        sentinels: Sequence[Callable[[], Tensor]] = (),
    ) -> Stage:
        """Declare a stage and return it; arguments as of `Stage`."""
        stage = Stage(name, layout, function, buckets, device, sentinels)
        self.stages[name] = stage
        self.report.stages[name] = stage.counts
        return stage

    # ---- the start

    @torch.inference_mode()
    def compile(self, progress: Progress) -> str:
        """Compile the regions, by running every planned bucket once; returns a note."""
        if self.plan is None:
            progress(1.0, "off")
            return "off"
        began_at, before = time.perf_counter(), Compilation.now()
        self._capture = self._capture or self._cuda_capture()
        wanted = [region for region in self.regions if self.plan.wants(region)]
        for region in wanted:
            compile_region(region, self.plan, self.report)
        for call in _reporting(list(self._planned()), progress, "compiling"):
            self._warm(call)
        now = Compilation.now()
        note = (
            f"{len(wanted)} regions, {now.graphs - before.graphs} graphs in "
            f"{time.perf_counter() - began_at:.1f} s, "
            f"{now.fx_hits - before.fx_hits} from the cache"
        )
        progress(1.0, note)
        return note

    @torch.inference_mode()
    def capture(self, progress: Progress) -> str:
        """Capture every planned bucket, the largest ones first; returns a note."""
        capture = self._capture
        if capture is None or not self.can_capture:
            progress(1.0, "no graphs")
            return "no graphs"
        began_at = time.perf_counter()
        self._captures = True
        # The memory of a large graph serves the smaller ones after it.
        calls = sorted(self._planned(), key=lambda call: -call.buffers.n_bytes)
        for call in _reporting(calls, progress, "capturing"):
            call.capture(capture)
        if isinstance(capture, CudaCapture):
            self.report.graph_pool_bytes = capture.n_bytes
        note = f"{len(calls)} graphs captured in {time.perf_counter() - began_at:.1f} s"
        progress(1.0, note)
        return note

    @torch.inference_mode()
    def recapture(self) -> None:
        """Capture everything anew, after weights or caches have moved."""
        assert self._capture is not None, "nothing was captured before"
        for stage in self.stages.values():
            for call in list(stage.captured):
                call.drop_graph()
                self._warm(call)
                call.capture(self._capture)

    @torch.inference_mode()
    def add(self, shapes: Iterable[tuple[str, Bucket]], progress: Progress) -> str:
        """Compile and capture buckets that are in no plan; returns a note.

        Args:
            shapes: pairs of a stage's name and one of its buckets.
        """
        calls = [self.stages[name].at(bucket) for name, bucket in shapes]
        calls = [call for call in calls if call.bucket not in call.stage.buckets]
        for call in _reporting(calls, progress, "adding"):
            self._warm(call)
            if self._captures and self._capture is not None:
                call.capture(self._capture)
        note = f"{len(calls)} more shapes"
        progress(1.0, note)
        return note

    def drop_graphs(self) -> None:
        """Run all stages uncaptured from now on."""
        self._captures = False
        for stage in self.stages.values():
            for call in list(stage.captured):
                call.drop_graph()
        self.report.graph_pool_bytes = 0

    def undo(self) -> None:
        """Have everything eager again, as if nothing had been compiled; `compile` may follow."""
        self.drop_graphs()
        for region in self.regions:
            restore_region(region)
        _dynamo.reset()
        # They remember files of a cache that may be in another place when compiling goes on.
        clear_caches()

    def seal(self) -> None:
        """The start is over: nothing is compiled from now on, and every attempt is counted."""
        for stage in self.stages.values():
            stage.counts.runs = stage.counts.replays = 0
        self.report.seal()
        if self.plan is not None:
            forbid_compiling()

    def planned(self) -> dict[str, Any]:
        """What was declared, as JSON values: call sites by region, buckets by stage."""
        return {
            "regions": {
                region.name: {"module": region.module, "calls": len(region.calls)}
                for region in self.regions
            },
            "stages": {
                name: [str(bucket) for bucket in stage.buckets]
                for name, stage in self.stages.items()
            },
        }

    def _warm(self, call: Call) -> None:
        """Run a bucket where its capture will run, if there is to be one."""
        if self._capture is not None and self.can_capture:
            self._capture.warm(call.compute)
        else:
            call.compute()

    def _planned(self) -> Iterator[Call]:
        for stage in self.stages.values():
            for bucket in stage.buckets:
                yield stage.at(bucket)

    def _cuda_capture(self) -> Capture | None:
        devices = {stage.device for stage in self.stages.values() if stage.device.type == "cuda"}
        return CudaCapture(devices.pop()) if devices else None


def _reporting(calls: Iterable[Call], progress: Progress, what: str) -> Iterator[Call]:
    calls = list(calls)
    for index, call in enumerate(calls):
        progress(index / len(calls), f"{what} {call.stage.name} {call.bucket}")
        yield call
