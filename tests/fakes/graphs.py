"""Graphs for a CPU: what a capture would make of a function, without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from worker.compile.graphs import Outputs


@dataclass(slots=True)
class FakeGraph:
    """Replays by calling, and puts the results where the captured outputs lie."""

    function: Callable[[], Outputs]
    outputs: Outputs
    n_replays: int = 0

    def replay(self) -> None:
        self.n_replays += 1
        for place, made in zip(self.outputs, self.function(), strict=True):
            place.copy_(made)


class FakeCapture:
    """Like a CUDA capture it computes nothing: outputs hold NaN (or a large number) at first."""

    def __init__(self) -> None:
        self.graphs: list[FakeGraph] = []

    def warm(self, function: Callable[[], Outputs]) -> None:
        function()

    def __call__(self, function: Callable[[], Outputs]) -> tuple[FakeGraph, Outputs]:
        outputs = tuple(_emptied(one) for one in function())
        graph = FakeGraph(function, outputs)
        self.graphs.append(graph)
        return graph, outputs


def _emptied(made: torch.Tensor) -> torch.Tensor:
    bad = torch.nan if made.is_floating_point() else torch.iinfo(made.dtype).max
    return torch.full_like(made, bad) if made.dtype != torch.bool else torch.ones_like(made)
