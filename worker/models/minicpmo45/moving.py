"""A part of a slot's cache changes its place: one graph for any block of any slot."""

from __future__ import annotations

import torch

from worker.compile.compiler import Compiler
from worker.compile.graphs import Input, Inputs, Outputs, Stage
from worker.models.minicpmo45.ops import MoveRequest
from worker.nn.decoder import KvCache


class Mover:
    """Runs move requests on one cache.

    As a stage it copies a slot's whole length, which an accelerator does in less time than the
    host needs to start an exact copy in every layer; a CPU makes exact copies.

    Args:
        name: of the stage.
        theta: of the rotation that the cached keys have.
    """

    def __init__(self, name: str, cache: KvCache, theta: float, compiler: Compiler) -> None:
        self._cache, self._theta = cache, theta
        self._stage: Stage | None = None
        device = cache.table.device
        if compiler.uses_stages(device):
            self._stage = compiler.stage(
                name,
                lambda bucket: {"block": Input((4,), torch.int64)},
                self._move,
                [()],
                device,
                (lambda: cache.keys[0], lambda: cache.values[-1]),
            )

    def move(self, request: MoveRequest) -> None:
        """Move a block that fits into its slot, here and there."""
        slot, start, end, target = request.slot, request.start, request.end, request.target
        if self._stage is None:
            self._cache.move(slot, start, end, target, self._theta)
            return
        self._cache.check_block(start, end - start, target)
        call = self._stage.at(())
        call.begin()["block"][:] = (slot, start, end - start, target)
        call.run()

    def _move(self, bucket: tuple[()], inputs: Inputs) -> Outputs:
        self._cache.move_block(inputs["block"], self._theta)
        return ()
