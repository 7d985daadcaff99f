"""The voice's stage against its eager path: the same samples, wherever rows are in their turns."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.fakes.graphs import FakeCapture
from worker.compile.compiler import Compiler
from worker.compile.regions import CompilePlan
from worker.compile.report import StageCounts
from worker.models.minicpmo45.speaking import (
    CHUNK_CODES,
    LOOK_AHEAD,
    MIN_CHUNK_CODES,
    CodeBuffer,
)
from worker.models.minicpmo45.token2wav import Token2Wav, read_token2wav
from worker.models.minicpmo45.voice import VoiceFeatures
from worker.models.minicpmo45.voice_stages import STEADY_CODES, VoiceBucket, VoiceStages
from worker.nn.flow import FlowVoice

ASSETS = Path(__file__).parents[2] / "golden" / "data" / "checkpoint"
FOLDERS = {"legacy": ASSETS / "assets", "causal": ASSETS / "assets_causal"}
N_ROWS = 5
N_STEPS = 2
Samples = list[NDArray[np.float32]]
FEW: tuple[VoiceBucket, ...] = (
    *((STEADY_CODES, False, n_rows) for n_rows in (2, 4, 5, 1)),
    (17, False, 1),
    (8, False, 1),
    (27, True, 1),
    (3, True, 1),
)
"""Of the plan: enough to compile everything, and to have captured runs and others."""


def quiet(share: float, note: str) -> None:
    pass


@pytest.fixture(autouse=True, scope="module")
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture(params=["legacy", "causal"], scope="module")
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


def opened(kind: str, compiler: Compiler | None = None) -> Token2Wav:
    """Rows of NaN; with a compiler its stages are captured."""
    token2wav = read_token2wav(FOLDERS[kind] / "token2wav", N_STEPS)
    token2wav.allocate(N_ROWS, max_prompt_frames=40)
    if compiler is not None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(VoiceStages, "_buckets", lambda self: iter(FEW))
            token2wav.declare(compiler)
        compiler.compile(quiet)
        compiler.capture(quiet)
    for row in range(N_ROWS):
        token2wav.poison(row)
    return token2wav


def make_compiler(*modules: str) -> Compiler:
    """Compiles nothing but these modules; everything is captured."""
    plan = CompilePlan(backend="eager", modules=frozenset(modules))
    return Compiler(plan, capture=FakeCapture())


@dataclass(frozen=True)
class Pair:
    """The same voice with stages and without."""

    staged: Token2Wav
    plain: Token2Wav
    counts: StageCounts

    def start(self, row: int, n_codes: int = 10) -> None:
        """Begin a turn in a voice of so many codes."""
        for token2wav in (self.staged, self.plain):
            token2wav.poison(row)
            token2wav.start_turn([row], voice(token2wav, n_codes))

    def stream(self, rows: list[int], codes: list[tuple[int, ...]], is_last: bool) -> Samples:
        """Return what both make of a call, which has to be the same."""
        ours = self.staged.stream(rows, codes, is_last)
        theirs = self.plain.stream(rows, codes, is_last)
        same(ours, theirs)
        return ours


@pytest.fixture(scope="module")
def pair(kind: str) -> Pair:
    compiler = make_compiler()
    return Pair(opened(kind, compiler), opened(kind), compiler.stages["voice.chunk"].counts)


def voice(token2wav: Token2Wav, n_codes: int) -> FlowVoice:
    generator = torch.Generator().manual_seed(n_codes)
    return token2wav.set_voice(
        VoiceFeatures(
            codes=torch.randint(6561, (n_codes,), generator=generator),
            mel24k=torch.randn((2 * n_codes, 80), generator=generator),
            speaker=torch.randn(192, generator=generator),
        )
    )


@dataclass
class Speaker:
    """One row's turns, as a session would speak them."""

    randoms: random.Random
    waiting: list[tuple[tuple[int, ...], bool]] = field(default_factory=list)
    is_fresh: bool = True

    @property
    def size(self) -> tuple[int, bool]:
        """Of the turn's next call; behind its last one a turn begins."""
        if not self.waiting:
            self.waiting, self.is_fresh = self.turn(), True
        codes, is_last = self.waiting[0]
        return len(codes), is_last

    def turn(self) -> list[tuple[tuple[int, ...], bool]]:
        buffer, calls = CodeBuffer(), []
        at_least = self.randoms.choice((MIN_CHUNK_CODES, CHUNK_CODES))
        n_units = self.randoms.choice((1, 1, 2, 4))
        for unit in range(n_units):
            n = self.randoms.choice((25, 25, self.randoms.randrange(26)))
            buffer.push([self.randoms.randrange(6561) for _ in range(n)])
            calls += list(buffer.take(unit == n_units - 1, at_least))
        return calls


def play(pair: Pair, n_calls: int, seed: int) -> None:
    """Let rows speak turns of all kinds; those that have come to calls of one size share them."""
    randoms = random.Random(seed)
    speakers = [Speaker(random.Random(seed + row + 1)) for row in range(N_ROWS)]
    for _ in range(n_calls):
        first = randoms.randrange(N_ROWS)
        size = speakers[first].size
        rows = [row for row, speaker in enumerate(speakers) if speaker.size == size]
        randoms.shuffle(rows)
        rows = [first, *(row for row in rows if row != first and randoms.random() < 0.8)]
        for row in rows:
            if speakers[row].is_fresh:
                pair.start(row, randoms.choice((4, 10, 20)))
                speakers[row].is_fresh = False
        given = [speakers[row].waiting.pop(0)[0] for row in rows]
        pair.stream(rows, given, size[1])


def same(ours: Samples, theirs: Samples) -> None:
    """Phases are integrals of F0: what differs is the rounding of sums in another order."""
    for one, other in zip(ours, theirs, strict=True):
        assert one.shape == other.shape
        assert np.abs(one - other).max() <= 2e-3 * np.abs(other).max() + 1e-5


def spoken(n: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(0, 6561, n).tolist())


@pytest.mark.usefixtures("compiling")
def test_rows_of_any_progress_sound_as_without_stages_and_nothing_is_compiled_again(
    kind: str,
) -> None:
    compiler = make_compiler("flow", "vocoder")
    compiler.prepare(torch.device("cpu"))
    staged = opened(kind, compiler)
    counts = compiler.stages["voice.chunk"].counts
    # One row is a shape of its own to the compiler, but guidance makes two of it.
    assert compiler.report.region_graphs == {"flow.conformer": 2, "flow.dit": 1, "vocoder": 4}

    with torch.compiler.set_stance("fail_on_recompile"):
        play(Pair(staged, opened(kind), counts), 40, seed=1)

    assert 10 < counts.replays < counts.runs  # calls besides the plan's few are in it


def test_turns_of_few_codes(pair: Pair) -> None:
    """A turn of one call holds nothing back; the shortest one is the silence it begins with."""
    for row, n in enumerate((3, 4, 7, 27)):
        pair.start(row)
        (samples,) = pair.stream([row], [spoken(n, row)], True)
        assert len(samples) == n * 960


def test_rows_of_a_call_sound_as_alone(pair: Pair) -> None:
    """Five rows of which one is in its second second."""
    calls = [spoken(STEADY_CODES, row) for row in range(N_ROWS)]
    alone = []
    for row in range(N_ROWS):
        pair.start(0, 4 + row)
        alone += pair.stream([0], [calls[row]], False)

    for row in range(N_ROWS):
        pair.start(row, 4 + row)
    pair.stream([3], [calls[3]], False)
    pair.start(0, 4)
    second = pair.staged.stream([3, 1, 0, 4, 2], [calls[row] for row in (3, 1, 0, 4, 2)], False)

    same(second[1:], [alone[row] for row in (1, 0, 4, 2)])


def test_ends_of_the_same_length_run_one_after_the_other(pair: Pair) -> None:
    """All of them come out of one bucket, which the next run overwrites."""
    for row in range(3):
        pair.start(row)
        pair.stream([row], [spoken(STEADY_CODES, row)], False)
    runs = pair.counts.runs

    pair.stream([2, 0, 1], [spoken(3, 20), spoken(3, 21), spoken(3, 22)], True)

    assert pair.counts.runs == runs + 3


def test_samples_outlive_the_next_run(pair: Pair) -> None:
    pair.start(0)
    (samples,) = pair.stream([0], [spoken(STEADY_CODES)], False)
    kept = samples.copy()

    pair.stream([0], [spoken(STEADY_CODES, 1)], False)

    assert np.array_equal(samples, kept)


def test_a_restored_turn_goes_on_in_another_row(pair: Pair) -> None:
    calls = [(spoken(STEADY_CODES, 1), False), (spoken(17, 2), False), (spoken(27, 3), True)]
    pair.start(0)
    whole = [pair.stream([0], [codes], is_last)[0] for codes, is_last in calls]

    pair.start(0)
    pair.stream([0], [calls[0][0]], False)
    saved = pair.staged.save(0)
    pair.stream([0], [spoken(8)], False)
    pair.staged.poison(4)
    pair.staged.restore(4, saved)
    rest = [pair.staged.stream([4], [codes], is_last)[0] for codes, is_last in calls[1:]]

    same(rest, whole[1:])


def test_the_plan_is_what_turns_are_cut_into(kind: str) -> None:
    compiler, token2wav = Compiler(), opened(kind)
    stages = VoiceStages(token2wav.flow, token2wav.cache, token2wav.vocoder, compiler)
    planned = set(compiler.stages["voice.chunk"].buckets)
    assert planned == set(stages._buckets())

    speakers = [Speaker(random.Random(seed)) for seed in range(3000)]
    occurring = {(len(codes), is_last, 1) for one in speakers for codes, is_last in one.turn()}

    assert planned - occurring == {(STEADY_CODES, False, n_rows) for n_rows in (2, 4, 5)}
    # Ends of other modes, which wait for whole seconds.
    longer = {(n, True, 1) for n in range(LOOK_AHEAD + MIN_CHUNK_CODES, STEADY_CODES)}
    assert occurring - planned == longer


def test_without_a_plan_a_cpu_works_without_stages(kind: str) -> None:
    compiler, token2wav = Compiler(), opened(kind)

    token2wav.declare(compiler)

    assert not compiler.stages
    assert not compiler.regions
