"""Runs a program without an engine and keeps every op with its result."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from worker.engine.contract import Emit, Op, Program
from worker.models.minicpmo45.model import MiniCpmO45
from worker.models.minicpmo45.ops import DECODE, PREFILL, Fed


@dataclass
class Ran:
    """One op, its result, and the raw logits `[V]` behind a feed's last row."""

    op: Op
    result: Any
    logits: Tensor | None


@dataclass
class Played:
    value: Any = None
    emitted: list[Any] = field(default_factory=list)
    ops: list[Ran] = field(default_factory=list)

    def of(self, kind: str) -> list[Ran]:
        return [ran for ran in self.ops if ran.op.kind == kind]


@torch.inference_mode()
def logits_of(model: MiniCpmO45, fed: Fed) -> Tensor:
    return model.language.llm.head(fed.hidden).float()


def run_program(model: MiniCpmO45, program: Program) -> Played:
    """Play a program to its end, one op at a time."""
    played = Played()
    reply: Any = None
    error: BaseException | None = None
    while True:
        try:
            request = program.throw(error) if error is not None else program.send(reply)
        except StopIteration as stop:
            played.value = stop.value
            return played
        reply, error = None, None
        match request:
            case Emit():
                played.emitted.append(request.value)
            case Op():
                reply = model.run(request.kind, request.bucket, [request.payload])[0]
                logits = None
                if request.kind in (PREFILL, DECODE) and not isinstance(reply, Exception):
                    logits = logits_of(model, reply)
                played.ops.append(Ran(request, reply, logits))
                if isinstance(reply, Exception):
                    error = reply
            case _:
                raise TypeError(f"unexpected request {request!r}")
