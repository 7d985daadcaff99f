"""The whole model compiled and captured against the exact one, under random traffic.

Regions go through the compiler's front end and stages through a capture that is not a GPU's: a call
that finds no graph is an error, a run that is no replay is counted. The same sessions run on a
model without any of that, in the same batches and with the same random numbers.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import pytest
import torch

from shared.config import Config, DuplexConfig, ModelConfig
from tests.fakes.duplex_traffic import Exact, Side, Traffic, Voices
from tests.fakes.graphs import FakeCapture
from tests.worker.conftest import compiler_as_before
from tests.worker.minicpmo45.conftest import CHECKPOINT
from worker.compile.compiler import Compiler
from worker.compile.graphs import Bucket
from worker.compile.regions import CompilePlan
from worker.models.minicpmo45 import ops
from worker.models.minicpmo45.build import build
from worker.models.minicpmo45.model import MiniCpmO45

N_SLOTS = 2
N_ROUNDS = 28
N_SPEECH_POSITIONS = 160
"""Of the speech head: a turn of five units has to move in it."""
SMALL_WINDOW = DuplexConfig(basic_window_high_tokens=700, basic_window_low_tokens=450)

EVENTS = (
    *("sessions", "leavings", "units", "units of many slices", "voices of clients"),
    *("speaking units", "seconds of sound", "ends of turns", "interruptions"),
)
MERGED = (ops.ENCODE_AUDIO, ops.PREFILL, ops.DECODE, ops.SPEAK)

on_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def quiet(share: float, note: str) -> None:
    pass


def started(compiler: Compiler | None) -> MiniCpmO45:
    checkpoint = ModelConfig(model_path=str(CHECKPOINT))
    model = build(Config(model=checkpoint, duplex=SMALL_WINDOW), compiler)
    model.n_speech_positions = N_SPEECH_POSITIONS
    model.load_model(quiet)
    model.voice_encoder = Voices()
    model.init_unified(N_SLOTS, quiet)
    model.apply_torch_compile(quiet)
    return model


@dataclass
class Both:
    """The compiled model and the exact one."""

    ours: Side
    exact: Exact
    compiler: Compiler
    buckets: dict[str, Counter[Bucket]] = field(default_factory=dict)
    """What traffic ran in, by stage."""

    def note(self, stage: str, bucket: Bucket) -> None:
        self.buckets.setdefault(stage, Counter())[bucket] += 1


@pytest.fixture(scope="module", params=["eager", pytest.param("inductor", marks=on_gpu)])
def both(request: pytest.FixtureRequest) -> Iterator[Both]:
    """On a GPU graphs are real ones, and the other model runs the same code uncaptured."""
    is_gpu = torch.cuda.is_available()
    plan = CompilePlan(backend=request.param, on_recompile="fail")
    with compiler_as_before():
        compiler = Compiler(plan, capture=None if is_gpu else FakeCapture())
        ours = Side(started(compiler))
        compiler.capture(quiet)
        uncaptured = Compiler(replace(plan, cuda_graphs=False)) if is_gpu else None
        exact = Exact(started(uncaptured), ours)
        compiler.seal()
        pair = Both(ours, exact, compiler)
        for stage in compiler.stages.values():
            stage.on_shape = pair.note
        yield pair


# In each of these rows of both slots meet in every kind of batch, and a long turn moves.
@pytest.mark.parametrize("seed", [2, 4])
@pytest.mark.timeout(300)
def test_random_traffic_is_served_by_replays_alone_and_as_by_the_exact_model(
    both: Both, seed: int
) -> None:
    both.buckets.clear()
    both.exact.forget()
    traffic = Traffic(both.ours, both.exact, N_SLOTS, random.Random(seed))

    traffic.play(N_ROUNDS)

    counts = both.compiler.report.counts()
    for name in ("recompiles_after_idle", "eager_fallbacks", "graph_breaks"):
        assert counts[name] == 0, counts["fallback_reasons"]
    for name, stage in both.compiler.stages.items():
        assert stage.counts.runs == stage.counts.replays, (name, both.buckets[name])
    assert both.exact.n_moved <= 2 + both.exact.n_draws // 500
    # It has been traffic worth the name.
    assert [event for event in EVENTS if not traffic.seen[event]] == []
    assert [kind for kind in MERGED if both.exact.sizes[kind] != {1, 2}] == []
    assert both.buckets.keys() == both.compiler.stages.keys()
