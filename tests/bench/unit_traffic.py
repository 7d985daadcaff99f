"""Scripted duplex traffic for benchmarks: real sessions, whose decisions follow a script.

With random weights the model would decide at random. So the real sampler runs, and the ids that it
decides are then replaced: a unit listens, or says ten words, or ends its turn.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from shared.protocol import DuplexSettings
from worker.engine.contract import Program
from worker.engine.engine import Engine, Task
from worker.engine.gpu_thread import LaneThreads
from worker.models.contract import Prompt, Unit, UnitResult
from worker.models.minicpmo45.model import MiniCpmO45

N_WORDS = 10
UNIT_TIMEOUT_S = 120.0

SLICE_LIMITS = {"1": 1, "3": 2, "10": 9}
"""Slices of a large frame by `max_slice_nums`: the overview and two or nine tiles."""
FRAME_SIZES = {
    "1": ((448, 448), (640, 480), (480, 640), (1280, 720), (320, 240), (720, 1280), (400, 300)),
    "3": ((1280, 640), (640, 1280), (900, 500)),
    "10": ((1344, 1344), (1600, 1500), (1400, 1300)),
}


@dataclass(frozen=True, slots=True)
class Kind:
    """A shape class: what a unit does, and what it looks at."""

    act: str
    """`listen`; `first`, `speak`, `end` of a turn."""
    sees: str
    """`audio`, or the number of slices."""

    @property
    def name(self) -> str:
        return f"{self.act}-{self.sees}"


@dataclass(slots=True)
class Timed:
    kind: Kind
    took_ms: float
    result: UnitResult


@dataclass(slots=True)
class Traffic:
    """One session after the other through a real engine with its threads."""

    model: MiniCpmO45
    seed: int = 0
    threads: LaneThreads = field(default_factory=LaneThreads)
    engine: Engine = field(init=False)
    random: np.random.Generator = field(init=False)
    _state: Any = None
    _n_units: int = 0

    def __post_init__(self) -> None:
        self.engine = Engine(self.model)
        self.threads.serve(self.engine)
        self.random = np.random.default_rng(self.seed)

    def on_lane(self, function: Any) -> Any:
        """Run a function where the model computes."""
        return self.threads.call("language", function).result()

    def close(self) -> None:
        self.threads.stop()
        self.threads.join(5.0)

    def begin(self) -> None:
        """Start a session with a prompt of some length."""
        prompt = "Listen, look and answer. " * int(self.random.integers(1, 40))
        none = np.zeros(0, np.float32)
        self._state = self.model.new_state(0)
        self._state.draws = type(self._state.draws)(int(self.random.integers(2**31)))
        self._run(self.model.prepare(self._state, Prompt(prompt, DuplexSettings(), none, none)))
        torch.cuda.synchronize()  # the first unit comes a second later
        self._n_units = 0

    def end(self) -> None:
        """End the session and clean its slot."""
        state, self._state = self._state, None
        self.on_lane(lambda: self.model.end(state))

    def play(self, kind: Kind) -> Timed:
        """Run one unit; the time is from its being handed in to its result."""
        ids = self.model.tokenizer.ids
        words = self.random.integers(0, 100, N_WORDS).tolist()
        script = {
            "listen": [ids.listen],
            "first": [ids.speak, *words, ids.chunk_eos],
            "speak": [ids.speak, *words, ids.chunk_eos],
            "end": [ids.speak, *words[:-1], ids.turn_eos, ids.chunk_eos],
        }[kind.act]
        self._state.script = iter(script)
        frames: tuple[NDArray[np.uint8], ...] = ()
        limit = 1
        if kind.sees != "audio":
            sizes = FRAME_SIZES[kind.sees]
            width, height = sizes[self.random.integers(len(sizes))]
            shape = (height, width, 3)
            frames = (self.random.integers(0, 256, shape, dtype=np.uint8),)
            limit = SLICE_LIMITS[kind.sees]
        audio = self.random.normal(0, 0.05, self.model.unit_samples).astype(np.float32)
        unit = Unit(self._n_units, audio, frames, max_slice_nums=limit)
        self._n_units += 1
        took_ms, result = self._run(self.model.unit(self._state, unit))
        torch.cuda.synchronize()  # what follows a result is done before the next unit comes
        assert result is not None
        assert np.isfinite(result.audio).all()
        return Timed(kind, took_ms, result)

    def _run(self, program: Program) -> tuple[float, UnitResult | None]:
        """Play a program; time to what it emits (else to its end), and that."""
        done = threading.Event()
        emitted: list[tuple[float, UnitResult]] = []
        ended: list[Task] = []

        def on_emit(value: Any) -> None:
            emitted.append((time.perf_counter(), value))

        def on_done(task: Task) -> None:
            ended.append(task)
            done.set()

        began_at = time.perf_counter()
        self.engine.spawn("bench", program, on_emit, on_done)
        if not done.wait(UNIT_TIMEOUT_S):
            raise SystemExit("a unit did not end")
        if ended[0].error is not None:
            raise SystemExit(f"a unit failed: {ended[0].error!r}")
        at, result = emitted[0] if emitted else (time.perf_counter(), None)
        return 1000 * (at - began_at), result


def session_plan(random: np.random.Generator, sees: str, n_turns: int) -> Iterator[Kind]:
    """Yield the units of a session: some listening, then a turn of some seconds, and so on."""
    for _ in range(n_turns):
        for _ in range(int(random.integers(1, 4))):
            yield Kind("listen", sees)
        yield Kind("first", sees)
        for _ in range(int(random.integers(1, 4))):
            yield Kind("speak", sees)
        yield Kind("end", sees)
