"""Stages: functions of tensors in few shapes, run directly or by replaying a CUDA graph.

A stage is what one op does on the device, as a pure function of the tensors in a bucket's fixed
buffers (and of caches, which it writes in place). The host fills the buffers and runs the bucket;
whether that calls the function or replays its graph makes no other difference: inputs lie at fixed
addresses, random numbers are inputs, and whatever depends on the host is in the bucket.

What a run returns is valid until the same bucket runs again: copy what has to outlive that.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from worker.compile.report import StageCounts

Bucket = Hashable
Outputs = tuple[Tensor, ...]
Inputs = Mapping[str, Tensor]

ALIGNMENT = 16
"""Bytes: kernels read 16 at a time."""
N_SIDES = 2
"""Pinned copies of the host's inputs: one is filled while the other one may still be read."""


@dataclass(frozen=True, slots=True)
class Input:
    """One input of a bucket."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    is_from_host: bool = True
    """False: its content lies on the device already, and the caller copies it into the buffer."""


Layout = Mapping[str, Input]


class Buffers:
    """A bucket's inputs: arrays for the host to fill, and the tensors that the stage reads.

    All host inputs travel in one copy. On a CPU the arrays are the tensors' own memory.
    """

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self.device = device
        self.tensors: dict[str, Tensor] = {
            name: torch.zeros(one.shape, dtype=one.dtype, device=device)
            for name, one in layout.items()
            if not one.is_from_host
        }
        sent = {name: one for name, one in layout.items() if one.is_from_host}
        offsets, n_bytes = _offsets(sent)
        on_gpu = device.type == "cuda"
        self._target = torch.zeros(n_bytes, dtype=torch.uint8, device=device)
        self._sides = [
            torch.zeros(n_bytes, dtype=torch.uint8, pin_memory=n_bytes > 0)
            if on_gpu
            else self._target
            for _ in range(N_SIDES if on_gpu else 1)
        ]
        self._arrays = [
            {name: _view(side, one, offsets[name]).numpy() for name, one in sent.items()}
            for side in self._sides
        ]
        self._was_read: list[torch.cuda.Event | None] = [None for _ in self._sides]
        self._side = 0
        for name, one in sent.items():
            self.tensors[name] = _view(self._target, one, offsets[name])

    @property
    def n_bytes(self) -> int:
        """Of all inputs."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def begin(self) -> dict[str, NDArray[Any]]:
        """Return the arrays to fill for the next run; they hold what an earlier run left."""
        self._side = (self._side + 1) % len(self._sides)
        was_read = self._was_read[self._side]
        if was_read is not None:
            was_read.synchronize()
        return self._arrays[self._side]

    def send(self) -> None:
        """Copy what was filled in to the device."""
        if self.device.type != "cuda" or not self._target.numel():
            return
        self._target.copy_(self._sides[self._side], non_blocking=True)
        was_read = self._was_read[self._side]
        if was_read is None:
            was_read = self._was_read[self._side] = torch.cuda.Event()
        was_read.record()


def _offsets(inputs: Layout) -> tuple[dict[str, int], int]:
    offsets, end = {}, 0
    for name, one in inputs.items():
        offsets[name] = end
        end += -(-math.prod(one.shape) * one.dtype.itemsize // ALIGNMENT) * ALIGNMENT
    return offsets, end


def _view(side: Tensor, one: Input, offset: int) -> Tensor:
    n_bytes = math.prod(one.shape) * one.dtype.itemsize
    return side[offset : offset + n_bytes].view(one.dtype).view(one.shape)


class Replay(Protocol):
    """A captured graph."""

    def replay(self) -> None: ...


class Capture(Protocol):
    """How functions of fixed buffers become graphs."""

    def warm(self, function: Callable[[], Outputs]) -> None:
        """Run a function as its capture will: compilers, autotuning and the libraries' workspaces,
        of which every stream has its own, have to be finished before."""

    def __call__(self, function: Callable[[], Outputs]) -> tuple[Replay, Outputs]:
        """Capture a warm function: what replays it, and its outputs, which stay in place."""


class Call:
    """A stage in one bucket: fill the inputs, then run it."""

    def __init__(self, stage: Stage, bucket: Bucket) -> None:
        self.stage, self.bucket = stage, bucket
        self.buffers = Buffers(stage.layout(bucket), stage.device)
        self.graph: Replay | None = None
        self._outputs: Outputs = ()
        self._places: tuple[int, ...] = ()

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Inputs on the device; the caller fills those that are not from the host."""
        return self.buffers.tensors

    def begin(self) -> dict[str, NDArray[Any]]:
        """Return the host's inputs, to be filled before `run`."""
        return self.buffers.begin()

    def run(self) -> Outputs:
        """Send the inputs and run; the outputs are valid until the next run of this bucket.

        Raises:
            StaleGraph: something that the graph reads or writes has moved.
        """
        self.buffers.send()
        counts = self.stage.counts
        counts.runs += 1
        self.stage.note_shape(self.bucket)
        if self.graph is None:
            return self.compute()
        if self.stage.places() != self._places:
            raise StaleGraph(
                f"{self.stage.name} {self.bucket}: a tensor has moved since the capture; "
                "recapture() first"
            )
        counts.replays += 1
        self.graph.replay()
        return self._outputs

    def again(self) -> Outputs:
        """Run once more on the inputs that are there: nothing is sent."""
        counts = self.stage.counts
        counts.runs += 1
        if self.graph is None:
            return self.compute()
        counts.replays += 1
        self.graph.replay()
        return self._outputs

    def compute(self) -> Outputs:
        """Call the function itself."""
        return self.stage.function(self.bucket, self.tensors)

    def capture(self, capture: Capture) -> None:
        """Replace the function, which is warm, by its graph."""
        self.drop_graph()
        self.graph, self._outputs = capture(self.compute)
        self._places = self.stage.places()
        self.stage.counts.captures += 1

    def drop_graph(self) -> None:
        """Call the function itself from now on."""
        self.graph, self._outputs = None, ()


class StaleGraph(RuntimeError):
    """A graph would read or write memory that belongs to something else by now."""


class Stage:
    """One function and its buckets.

    Args:
        name: such as "llm.decode"; for reports.
        layout: inputs of a bucket.
        function: computes a bucket's outputs from its inputs. What it calls may be compiled.
        buckets: those to be compiled and captured ahead; others run directly and are counted.
        sentinels: a few tensors that stand for all that the function reads besides its inputs:
            if weights are loaded anew or caches change their size, these move as well.
    """

    def __init__(
        self,
        name: str,
        layout: Callable[[Any], Layout],
        function: Callable[[Any, Inputs], Outputs],
        buckets: Sequence[Bucket],
        device: torch.device,
        sentinels: Sequence[Callable[[], Tensor]] = (),
    ) -> None:
        self.name = name
        self.layout = layout
        self.function = function
        self.buckets = tuple(buckets)
        self.device = device
        self.counts = StageCounts()
        self.on_shape: Callable[[str, Bucket], None] | None = None
        """Told of every run: the record of real traffic's shapes."""
        self._sentinels = tuple(sentinels)
        self._calls: dict[Bucket, Call] = {}

    def at(self, bucket: Bucket) -> Call:
        """Return the stage in a bucket, planned or not."""
        call = self._calls.get(bucket)
        if call is None:
            call = self._calls[bucket] = Call(self, bucket)
        return call

    def note_shape(self, bucket: Bucket) -> None:
        if self.on_shape is not None:
            self.on_shape(self.name, bucket)

    def places(self) -> tuple[int, ...]:
        """Where the sentinels are."""
        return tuple(tensor().data_ptr() for tensor in self._sentinels)

    @property
    def captured(self) -> Iterator[Call]:
        return (call for call in self._calls.values() if call.graph is not None)


@dataclass(slots=True)
class CudaCapture:
    """Captures on one stream's memory pool; graphs of a pool never run at the same time."""

    device: torch.device
    stream: Any = field(init=False)
    pool: Any = field(init=False)

    def __post_init__(self) -> None:
        self.stream = torch.cuda.Stream(self.device)
        self.pool = torch.cuda.graph_pool_handle()

    def warm(self, function: Callable[[], Outputs]) -> None:
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            function()
        torch.cuda.current_stream(self.device).wait_stream(self.stream)

    def __call__(self, function: Callable[[], Outputs]) -> tuple[Replay, Outputs]:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self.device)
        with (
            _no_collection(),
            torch.compiler.set_stance("fail_on_recompile"),
            # Another thread's calls are none of this graph's business.
            torch.cuda.graph(
                graph,
                pool=self.pool,
                stream=self.stream,
                capture_error_mode="thread_local",
            ),
        ):
            outputs = function()
        return graph, outputs

    @property
    def n_bytes(self) -> int:
        """Memory of the pool."""
        segments = torch.cuda.memory_snapshot()
        return sum(s["total_size"] for s in segments if s["segment_pool_id"] == self.pool)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Without garbage collection: freeing a tensor of another pool would break a capture."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def fill(array: NDArray[Any], values: Sequence[Any], rest: Any = 0) -> None:
    """Write values to the begin of an array's first axis, and `rest` behind them."""
    array[: len(values)] = np.asarray(values, dtype=array.dtype)
    array[len(values) :] = rest
