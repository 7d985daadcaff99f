"""The whole model compiled and captured against the exact one, under random traffic.

Regions go through the compiler's front end and stages through a capture that is not a GPU's: a call
that finds no graph is an error, a run that is no replay is counted. The same sessions run on a
model without any of that, in the same batches and with the same random numbers.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from shared.config import Config, DuplexConfig, ModelConfig
from tests.fakes.duplex_traffic import Exact, Side, Traffic, Voices
from tests.fakes.graphs import FakeCapture
from tests.worker.conftest import compiler_as_before
from tests.worker.minicpmo45.conftest import CHECKPOINT
from worker.compile.compiler import Compiler
from worker.compile.graphs import Bucket
from worker.compile.regions import CompilePlan
from worker.models.minicpmo45.build import build
from worker.models.minicpmo45.model import MiniCpmO45

N_SLOTS = 2
N_SPEECH_POSITIONS = 160
"""Of the speech head: a turn of five units has to move in it."""
SMALL_WINDOW = DuplexConfig(basic_window_high_tokens=700, basic_window_low_tokens=450)


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


@pytest.fixture(scope="module")
def both() -> Iterator[Both]:
    with compiler_as_before():
        plan = CompilePlan(backend="eager", on_recompile="fail")
        compiler = Compiler(plan, capture=FakeCapture())
        ours = Side(started(compiler))
        compiler.capture(quiet)
        compiler.seal()
        pair = Both(ours, Exact(started(None), ours), compiler)
        for stage in compiler.stages.values():
            stage.on_shape = pair.note
        yield pair


@pytest.mark.parametrize("seed", range(3))
def test_random_traffic_is_served_by_replays_alone_and_as_by_the_exact_model(
    both: Both, seed: int
) -> None:
    traffic = Traffic(both.ours, both.exact, N_SLOTS, random.Random(seed))
    traffic.play(50)

    print(traffic.seen)
    counts = both.compiler.report.counts()
    for name in ("recompiles_after_idle", "eager_fallbacks", "graph_breaks"):
        assert counts[name] == 0, counts["fallback_reasons"]
    for name, stage in counts["stages"].items():
        assert stage["runs"] == stage["replays"], name
    print({n: (len(c), len(both.compiler.stages[n].buckets), sum(c.values())) for n, c in both.buckets.items()})
    print(counts['stages'], both.exact.sizes, both.exact.n_draws, both.exact.n_moved)
