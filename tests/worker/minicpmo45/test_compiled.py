"""The whole model compiled and captured against the exact one, under random traffic.

Regions go through the compiler's front end and stages through a capture that is not a GPU's: a call
that finds no graph is an error, a run that is no replay is counted. The same sessions run on a
model without any of that, op by op in the same batches with the same random numbers.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from shared.config import Config, DuplexConfig, ModelConfig
from shared.protocol import DuplexSettings
from tests.fakes.graphs import FakeCapture
from tests.worker.conftest import compiler_as_before
from tests.worker.minicpmo45.conftest import CHECKPOINT, picture, sound
from worker.compile.compiler import Compiler
from worker.compile.graphs import Bucket
from worker.compile.regions import CompilePlan
from worker.engine.engine import Engine, Task
from worker.models.contract import Prompt, Unit, UnitResult
from worker.models.minicpmo45 import ops
from worker.models.minicpmo45.build import build
from worker.models.minicpmo45.draws import SeededDraws
from worker.models.minicpmo45.duplex import Duplex
from worker.models.minicpmo45.model import MiniCpmO45
from worker.models.minicpmo45.voice import VoiceFeatures
from worker.models.minicpmo45.window import WindowSettings

N_SLOTS = 2
N_SPEECH_POSITIONS = 160
"""Of the speech head: a turn of five units has to move in it."""
SMALL_WINDOW = DuplexConfig(basic_window_high_tokens=700, basic_window_low_tokens=450)
NONE = np.zeros(0, np.float32)
CLOSE = {"rtol": 2e-4, "atol": 2e-5}

SIZES = ((320, 180), (448, 448), (700, 500), (1200, 900), (1000, 200), (60, 2000), (40, 30))
"""Of pictures, width and height: usual ones, two strips, a tiny one."""


class Encoder:
    """Voices that clients bring, without the networks that would hear them."""

    def encode(self, samples: np.ndarray) -> VoiceFeatures:
        n = len(samples) // 1000
        generator = torch.Generator().manual_seed(n)
        return VoiceFeatures(
            codes=torch.randint(6561, (n,), generator=generator),
            mel24k=torch.randn((2 * n, 80), generator=generator),
            speaker=torch.randn(192, generator=generator),
        )


@dataclass
class Side:
    """One model and the sessions on it; keeps what each batch of ops gave."""

    model: MiniCpmO45
    ran: list[tuple[str, Bucket, Sequence[Any]]] = field(default_factory=list)
    results: list[tuple[int, UnitResult]] = field(default_factory=list)
    states: dict[int, Duplex] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.lanes, self.max_batch = self.model.lanes, self.model.max_batch
        self.model.clock = lambda: 0.0
        self.engine = Engine(self, clock=lambda: 0.0)

    def run(self, kind: str, bucket: Any, payloads: Sequence[Any]) -> Sequence[Any]:
        results = self.model.run(kind, bucket, payloads)
        self.ran.append((kind, bucket, results))
        return results

    def begin(self, slot: int, seed: int) -> None:
        """A session begins on a slot that holds nothing but NaN."""
        self.model.poison_slot(slot)
        self.states[slot] = self.model.new_state(slot)
        self.states[slot].draws = SeededDraws(seed)

    def end(self, slot: int) -> None:
        """A session ends, also in the middle of a unit."""
        assert self.engine.cancel_session(slot).done() or self._is_quiet(slot)
        self.model.end(self.states.pop(slot))

    def _is_quiet(self, slot: int) -> bool:
        self.engine.advance()
        return self.engine.cancel_session(slot).done()

    def spawn(self, slot: int, program: Any) -> Task:
        return self.engine.spawn(slot, program, lambda made: self.results.append((slot, made)))

    def step(self) -> bool:
        return any(self.engine.step(lane) for lane in self.engine.lanes)


def quiet(share: float, note: str) -> None:
    pass


def started(compiler: Compiler | None) -> MiniCpmO45:
    model = build(
        Config(model=ModelConfig(model_path=str(CHECKPOINT)), duplex=SMALL_WINDOW), compiler
    )
    model.n_speech_positions = N_SPEECH_POSITIONS
    model.load_model(quiet)
    model.voice_encoder = Encoder()
    model.init_unified(N_SLOTS, quiet)
    model.apply_torch_compile(quiet)
    return model


@dataclass
class Both:
    """The compiled model and the exact one."""

    compiled: Side
    exact: Side
    compiler: Compiler
    buckets: dict[str, Counter[Bucket]] = field(default_factory=dict)
    """What traffic ran in, by stage."""

    @property
    def sides(self) -> tuple[Side, Side]:
        return self.compiled, self.exact

    def note(self, stage: str, bucket: Bucket) -> None:
        self.buckets.setdefault(stage, Counter())[bucket] += 1


@pytest.fixture(scope="module")
def both() -> Iterator[Both]:
    with compiler_as_before():
        plan = CompilePlan(backend="eager", on_recompile="fail")
        compiler = Compiler(plan, capture=FakeCapture())
        model = started(compiler)
        compiler.capture(quiet)
        compiler.seal()
        pair = Both(Side(model), Side(started(None)), compiler)
        for stage in compiler.stages.values():
            stage.on_shape = pair.note
        yield pair


# ---- traffic


@dataclass
class Traffic:
    """Two slots and what their clients do, decided by a seed alone."""

    both: Both
    random: random.Random
    seen: Counter[str] = field(default_factory=Counter)
    k: int = 0

    def round(self) -> None:
        """Every client does one thing at the same time; then both models have to agree."""
        tasks: list[tuple[Task, Task]] = []
        for slot in range(N_SLOTS):
            if slot not in self.both.exact.states:
                tasks.append(self._prepare(slot))
            elif self.random.random() < 0.9:
                tasks.append(self._unit(slot))
        self._run(tasks)
        for side in self.both.sides:
            side.ran.clear()
            side.results.clear()

    def _prepare(self, slot: int) -> tuple[Task, Task]:
        choose, seed = self.random.choice, self.random.randrange(1 << 30)
        voice, heard = (
            sound(seed)[:n] if n else NONE for n in (choose((0, 0, 9000, 16_000)), choose((0, 8000)))
        )
        prompt = Prompt("ab " * choose((0, 3, 20, 50, 100)), self._settings(), heard, voice)
        mode = choose(("basic", "basic", "context"))
        turns = choose((None, self._turns(), self._turns()))
        self.seen["sessions"] += 1
        self.seen[f"window {mode}"] += 1
        self.seen["voices"] += bool(voice.size or heard.size)

        def begin(side: Side) -> Task:
            side.begin(slot, seed)
            state = side.states[slot]

            def program() -> Any:
                yield from side.model.prepare(state, prompt)
                if mode == "context":
                    state.window.settings = WindowSettings(
                        mode, max_units=3, max_tokens=side.model.n_positions - 1024
                    )
                state.script = iter(turns) if turns is not None else None

            return side.spawn(slot, program())

        first, second = map(begin, self.both.sides)
        return first, second

    def _settings(self) -> DuplexSettings:
        choose = self.random.choice
        return DuplexSettings(
            temperature=choose((None, None, 0.0, 1.3)),
            top_k=choose((None, None, 5, 0, 400)),
            top_p=choose((None, 0.5)),
            text_repetition_penalty=choose((None, 1.3)),
            text_repetition_window_size=choose((None, 4, 2000)),
            length_penalty=choose((None, 1.5)),
            listen_prob_scale=choose((None, None, 0.2)),
            listen_top_k=choose((None, None, 1)),
            generate_audio=choose((None, None, None, None, False)),
            force_listen_count=choose((None, None, 2)),
            max_new_speak_tokens_per_chunk=choose((None, None, 5, 64)),
            tts_temperature=choose((None, None, 0.3)),
            max_slice_nums=choose((None, 2, 4)),
        )

    def _turns(self) -> list[int]:
        """Decisions of a session: what is said, and when it listens, for a while."""
        ids, encode = (
            self.both.exact.model.tokenizer.ids,
            self.both.exact.model.tokenizer.encode,
        )
        tokens: list[int] = []
        for _ in range(12):
            units = self.random.choice((1, 1, 2, 3, 7))
            for unit in range(units):
                words = " hello world the answer"[: self.random.randrange(1, 24)]
                tokens += [ids.speak, *encode(words)] if self.random.random() < 0.9 else []
                tokens += [ids.turn_eos] if unit == units - 1 else []
                tokens += [ids.chunk_eos]
            tokens += [ids.listen] * self.random.randrange(3)
        return tokens

    def _unit(self, slot: int) -> tuple[Task, Task]:
        choose = self.random.choice
        self.k += 1
        frames = tuple(
            picture(self.k + index, *choose(SIZES)) for index in range(choose((0, 0, 0, 1, 1, 2)))
        )
        unit = Unit(
            index=self.k,
            # Sometimes pictures come without a microphone.
            audio=NONE if frames and self.random.random() < 0.1 else sound(self.k),
            frames=frames,
            force_listen=self.random.random() < 0.1,
            max_slice_nums=choose((None, None, 1, 2, 3, 6, 9)),
            deadline=choose((0.5, 1.0, 1.0, 1.5)),
        )
        self.seen["units"] += 1

        def begin(side: Side) -> Task:
            return side.spawn(slot, side.model.unit(side.states[slot], unit))

        first, second = map(begin, self.both.sides)
        return first, second

    def _run(self, tasks: Sequence[tuple[Task, Task]]) -> None:
        """Run what was begun, with a client that interrupts or leaves in the middle."""
        event, slot = self._event()
        at, n = self.random.randrange(1, 30), 0
        while True:
            stepped = [side.step() for side in self.both.sides]
            assert stepped[0] == stepped[1]
            n += 1
            is_over = not stepped[0]
            if event is not None and (n == at or is_over):
                for side in self.both.sides:
                    event(side, slot)
                event, is_over = None, False
            self._compare()
            if is_over:
                break
        for ours, theirs in tasks:
            assert ours.done
            assert theirs.done
            assert repr(ours.error) == repr(theirs.error)
            self.seen[type(ours.error).__name__] += 1

    def _event(self) -> tuple[Callable[[Side, int], None] | None, int]:
        slot, draw = self.random.randrange(N_SLOTS), self.random.random()
        if slot not in self.both.exact.states or draw > 0.35:
            return None, slot
        if draw < 0.08:
            self.seen["leavings"] += 1
            return Side.end, slot
        return lambda side, slot: side.model.interrupt(side.states[slot]), slot

    # ---- what both made of it

    def _compare(self) -> None:
        ours, theirs = self.both.sides
        assert [one[:2] for one in ours.ran] == [one[:2] for one in theirs.ran]
        for (kind, _, mine), (_, _, other) in zip(ours.ran, theirs.ran, strict=True):
            assert len(mine) == len(other)
            self.seen[f"{kind} of {len(mine)}"] += 1
            for one, two in zip(mine, other, strict=True):
                _same(kind, one, two)
        assert [slot for slot, _ in ours.results] == [slot for slot, _ in theirs.results]
        for (_, mine), (_, other) in zip(ours.results, theirs.results, strict=True):
            self._same_result(mine, other)
        for side in self.both.sides:
            side.ran.clear()
            side.results.clear()

    def _same_result(self, ours: UnitResult, theirs: UnitResult) -> None:
        for name in UnitResult.__slots__:
            if name not in ("audio", "timings"):
                assert getattr(ours, name) == getattr(theirs, name), name
        _same_sound(ours.audio, theirs.audio)
        self.seen["spoken"] += not ours.is_listen
        self.seen["turns"] += ours.end_of_turn
        self.seen["interrupts"] += ours.interrupted
        self.seen["tiled"] += ours.vision_slices > 2


def _same(kind: str, ours: Any, theirs: Any) -> None:
    assert type(ours) is type(theirs)
    if isinstance(theirs, ops.Fed):
        assert (ours.token, ours.is_direct) == (theirs.token, theirs.is_direct)
        torch.testing.assert_close(ours.hidden, theirs.hidden, **CLOSE)
    elif isinstance(theirs, Tensor):
        torch.testing.assert_close(ours, theirs, **CLOSE)
    elif isinstance(theirs, np.ndarray):
        _same_sound(ours, theirs)
    elif kind == ops.SPEAK:
        assert ours == theirs


def _same_sound(ours: np.ndarray, theirs: np.ndarray) -> None:
    """Phases are integrals of F0: what differs is the rounding of sums in another order."""
    assert ours.shape == theirs.shape
    assert np.isfinite(ours).all()
    if theirs.size:
        assert np.abs(ours - theirs).max() <= 2e-3 * np.abs(theirs).max() + 1e-5


# ---- the tests


@pytest.mark.parametrize("seed", range(3))
def test_random_traffic_is_served_by_replays_alone_and_as_by_the_exact_model(
    both: Both, seed: int
) -> None:
    traffic = Traffic(both, random.Random(seed))
    for _ in range(60):
        traffic.round()
    for side in both.sides:
        for slot in list(side.states):
            side.end(slot)

    print(traffic.seen)
    counts = both.compiler.report.counts()
    for name in ("recompiles_after_idle", "eager_fallbacks", "graph_breaks"):
        assert counts[name] == 0, counts["fallback_reasons"]
    for name, stage in counts["stages"].items():
        assert stage["runs"] == stage["replays"], name
    print({n: (len(c), len(both.compiler.stages[n].buckets), sum(c.values())) for n, c in both.buckets.items()})
    print(counts)
