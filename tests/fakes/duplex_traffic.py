"""Random duplex traffic on two models at once, which have to agree on every op and every result.

The clients of all slots act at the same time: they begin sessions with prompts, voices and settings
of all kinds, send units, interrupt, and leave in the middle. A seed decides everything.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shared.protocol import DuplexSettings
from worker.compile.graphs import Bucket
from worker.engine.contract import Program
from worker.engine.engine import Engine, Task
from worker.models.contract import Prompt, Unit, UnitResult
from worker.models.minicpmo45.draws import SeededDraws
from worker.models.minicpmo45.duplex import Duplex
from worker.models.minicpmo45.model import MiniCpmO45
from worker.models.minicpmo45.ops import Fed, Feed, Spoken, Step
from worker.models.minicpmo45.voice import VoiceFeatures
from worker.models.minicpmo45.window import MAX_UNIT_TOKENS, WindowSettings
from worker.nn.speech import SpeechRequest

CLOSE = {"rtol": 2e-4, "atol": 2e-5}
BORDERS = (1e-7, 3e-7, 1e-6, 3e-6, 1e-5)
"""How close to the border of two choices a draw has to be for rounding to decide."""

SIZES = ((320, 180), (448, 448), (700, 500), (1200, 900), (1000, 200), (60, 2000), (40, 30))
"""Of pictures, width and height: usual ones, two strips, a tiny one."""
NONE = np.zeros(0, np.float32)


class Voices:
    """Voices that clients bring, without the networks that would hear them."""

    def encode(self, samples: NDArray[np.float32]) -> VoiceFeatures:
        n = len(samples) // 1000
        generator = torch.Generator().manual_seed(n)
        return VoiceFeatures(
            codes=torch.randint(6561, (n,), generator=generator),
            mel24k=torch.randn((2 * n, 80), generator=generator),
            speaker=torch.randn(192, generator=generator),
        )


# ---- two models in step


@dataclass
class Ran:
    """One batch of ops."""

    kind: str
    bucket: Bucket
    results: list[Any]


class Side:
    """One model and the sessions on it."""

    def __init__(self, model: MiniCpmO45) -> None:
        self.model = model
        self.lanes, self.max_batch = model.lanes, model.max_batch
        self.states: dict[int, Duplex] = {}
        self.last: Ran | None = None
        self.emitted: list[tuple[int, UnitResult]] = []
        self.failure: Exception | None = None
        """Of a batch; the engine takes it for that of the batch's programs."""
        model.clock = lambda: 0.0
        self.engine = Engine(self, clock=lambda: 0.0)

    def run(self, kind: str, bucket: Bucket, payloads: Sequence[Any]) -> Sequence[Any]:
        try:
            return self.run_batch(kind, bucket, payloads)
        except Exception as error:
            self.failure = error
            raise

    def run_batch(self, kind: str, bucket: Bucket, payloads: Sequence[Any]) -> Sequence[Any]:
        self.last = Ran(kind, bucket, list(self.model.run(kind, bucket, payloads)))
        return self.last.results

    def begin(self, slot: int, seed: int) -> Duplex:
        """Return a session on a slot that holds nothing but NaN."""
        self.model.poison_slot(slot)
        state: Duplex = self.model.new_state(slot)
        state.draws = SeededDraws(seed)
        self.states[slot] = state
        return state

    def end(self, slot: int) -> None:
        """End a session, also in the middle of a unit."""
        quiet = self.engine.cancel_session(slot)
        self.engine.advance()
        assert quiet.done()
        self.model.end(self.states.pop(slot))

    def spawn(self, slot: int, program: Program) -> Task:
        return self.engine.spawn(slot, program, lambda made: self.emitted.append((slot, made)))

    def step(self) -> bool:
        """Run one batch; False if there is none."""
        has_run = any(self.engine.step(lane) for lane in self.engine.lanes)
        if self.failure is not None:
            raise self.failure
        return has_run


class Exact(Side):
    """The model that tells what is right; each of its batches follows the same one of `other`.

    A number that was drawn so close to the border of two choices that rounding decides is moved a
    little, to the side where the other model's is, so that both go on from there.
    """

    def __init__(self, model: MiniCpmO45, other: Side) -> None:
        super().__init__(model)
        self.other = other
        self.forget()

    def forget(self) -> None:
        """Count anew."""
        self.n_draws = self.n_moved = 0
        self.sizes: dict[str, set[int]] = {}
        """Of the batches, by kind."""

    def run_batch(self, kind: str, bucket: Bucket, payloads: Sequence[Any]) -> Sequence[Any]:
        theirs = self.other.last
        assert theirs is not None
        assert (theirs.kind, theirs.bucket) == (kind, bucket)
        ours = super().run_batch(kind, bucket, payloads)
        self.sizes.setdefault(kind, set()).add(len(payloads))
        return [
            self._settled(kind, bucket, payload, one, other)
            for payload, one, other in zip(payloads, ours, theirs.results, strict=True)
        ]

    def _settled(self, kind: str, bucket: Bucket, payload: Any, ours: Any, theirs: Any) -> Any:
        """Return `ours`, or what the op gives after numbers were moved; both are the same then."""
        self.n_draws += len(chosen_of(ours))
        while (at := first_difference(chosen_of(ours), chosen_of(theirs))) is not None:
            for moved in moved_draws(payload, at):
                # It writes to the same places once more.
                (again,) = self.model.run(kind, bucket, [moved])
                if first_difference(chosen_of(again), chosen_of(theirs)) != at:
                    payload, ours = moved, again
                    self.n_moved += 1
                    break
            else:
                raise AssertionError(f"{kind}: choice {at}: {theirs} instead of {ours}")
        assert_same(theirs, ours)
        return ours


def chosen_of(result: Any) -> tuple[Any, ...]:
    """Return what was chosen by drawn numbers."""
    if isinstance(result, Spoken):
        return (*result.codes, "end") if result.has_ended else result.codes
    if isinstance(result, Fed) and result.token is not None:
        return ((result.token, result.is_direct),)
    return ()


def first_difference(ours: tuple[Any, ...], theirs: tuple[Any, ...]) -> int | None:
    if ours == theirs:
        return None
    pairs = zip(ours, theirs, strict=False)
    return next((at for at, (one, two) in enumerate(pairs) if one != two), len(ours))


def moved_draws(payload: Any, at: int) -> Iterator[Any]:
    """Yield the request with a draw moved a little: that of choice `at`, or of the only one."""
    for step in (sign * border for border in BORDERS for sign in (1, -1)):
        if isinstance(payload, SpeechRequest):
            draws = list(payload.draws)
            draws[at] += step
            yield replace(payload, draws=tuple(draws))
        elif isinstance(payload, Feed | Step) and payload.choice is not None:
            raw, filtered = payload.choice.draws
            for moved in ((raw + step, filtered), (raw, filtered + step)):
                yield replace(payload, choice=replace(payload.choice, draws=moved))


def assert_same(ours: Any, theirs: Any) -> None:
    assert type(ours) is type(theirs)
    if isinstance(theirs, Fed):
        torch.testing.assert_close(ours.hidden, theirs.hidden, **CLOSE)
    elif isinstance(theirs, Tensor):
        torch.testing.assert_close(ours, theirs, **CLOSE)
    elif isinstance(theirs, np.ndarray):
        assert_same_sound(ours, theirs)


def assert_same_sound(ours: NDArray[np.float32], theirs: NDArray[np.float32]) -> None:
    """Phases are integrals of F0: what differs is the rounding of sums in another order."""
    assert ours.shape == theirs.shape
    assert np.isfinite(ours).all()
    if theirs.size:
        assert np.abs(ours - theirs).max() <= 2e-3 * np.abs(theirs).max() + 1e-5


def assert_same_result(ours: UnitResult, theirs: UnitResult) -> None:
    for name in ("is_listen", "text", "end_of_turn", "interrupted", "n_tokens", "n_speech_tokens"):
        assert getattr(ours, name) == getattr(theirs, name), name
    for name in ("kv_tokens", "vision_slices", "vision_tokens"):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert_same_sound(ours.audio, theirs.audio)


# ---- what clients do


@dataclass
class Traffic:
    """One client a slot."""

    ours: Side
    exact: Exact
    n_slots: int
    random: random.Random
    seen: Counter[str] = field(default_factory=Counter)
    """What has happened, to be sure that it did."""

    @property
    def sides(self) -> tuple[Side, Side]:
        return self.ours, self.exact

    def play(self, n_rounds: int) -> None:
        """Let every client do one thing in each round; all sessions have ended afterwards."""
        for _ in range(n_rounds):
            tasks = [
                self._unit(slot) if slot in self.exact.states else self._prepare(slot)
                for slot in range(self.n_slots)
                if self.random.random() < 0.9
            ]
            self._run(tasks)
        for slot in list(self.exact.states):
            self._each(lambda side, slot=slot: side.end(slot))

    def _each(self, act: Callable[[Side], Any]) -> tuple[Any, Any]:
        return act(self.ours), act(self.exact)

    def _run(self, tasks: Sequence[tuple[Task, Task]]) -> None:
        """Run what was begun; somebody may interrupt or leave meanwhile, or right after it."""
        event, at = self._event(), self.random.randrange(1, 30)
        for n in range(1_000_000):
            is_running, other_is_running = self._each(Side.step)
            assert is_running == other_is_running
            self._compare_emitted()
            if event is not None and (n == at or not is_running):
                self._each(event)
                event = None
            elif not is_running:
                break
        for ours, theirs in tasks:
            assert ours.done
            assert theirs.done
            assert repr(ours.error) == repr(theirs.error)
            self.seen[f"ended with {type(ours.error).__name__}"] += 1

    def _compare_emitted(self) -> None:
        for (slot, ours), (other_slot, theirs) in zip(
            self.ours.emitted, self.exact.emitted, strict=True
        ):
            assert slot == other_slot
            assert_same_result(ours, theirs)
            self.seen["speaking units"] += not ours.is_listen
            self.seen["seconds of sound"] += ours.audio.size > 0
            self.seen["ends of turns"] += ours.end_of_turn
            self.seen["interruptions"] += ours.interrupted
            self.seen["units of many slices"] += ours.vision_slices > 2
        for side in self.sides:
            side.emitted.clear()

    def _event(self) -> Callable[[Side], None] | None:
        slot, draw = self.random.randrange(self.n_slots), self.random.random()
        if slot not in self.exact.states or draw > 0.35:
            return None
        if draw < 0.1:
            self.seen["leavings"] += 1
            return lambda side: side.end(slot)
        return lambda side: side.model.interrupt(side.states[slot])

    def _prepare(self, slot: int) -> tuple[Task, Task]:
        choose, seed = self.random.choice, self.random.randrange(1 << 30)
        heard, voice = self._sound(choose((0, 0, 8000))), self._sound(choose((0, 0, 9000, 16_000)))
        prompt = Prompt("ab " * choose((0, 3, 20, 50, 100)), self._settings(), heard, voice)
        keeps_words = self.random.random() < 0.3
        script = choose((None, *(self._script() for _ in range(2))))
        self.seen["sessions"] += 1
        self.seen["voices of clients"] += bool(heard.size or voice.size)

        def program(side: Side) -> Program:
            state = side.begin(slot, seed)
            yield from side.model.prepare(state, prompt)
            if keeps_words:
                most = side.model.n_positions - MAX_UNIT_TOKENS
                state.window.settings = WindowSettings("context", max_units=3, max_tokens=most)
            state.script = None if script is None else iter(script)

        return self._each(lambda side: side.spawn(slot, program(side)))

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

    def _script(self) -> list[int]:
        """Return decisions for a while: turns of one to seven units, and units that listen."""
        tokenizer = self.exact.model.tokenizer
        ids, decisions = tokenizer.ids, []
        for _ in range(12):
            n_units = self.random.choice((1, 1, 2, 3, 7))
            for index in range(n_units):
                if self.random.random() < 0.9:
                    words = " hello world the answer"[: self.random.randrange(1, 24)]
                    decisions += [ids.speak, *tokenizer.encode(words)]
                if index == n_units - 1:
                    decisions.append(ids.turn_eos)
                decisions.append(ids.chunk_eos)
            decisions += [ids.listen] * self.random.randrange(3)
        return decisions

    def _unit(self, slot: int) -> tuple[Task, Task]:
        choose = self.random.choice
        frames = tuple(
            self._picture(*choose(SIZES)) for _ in range(choose((0, 0, 0, 0, 1, 1, 2, 3)))
        )
        is_muted = bool(frames) and self.random.random() < 0.1
        unit = Unit(
            index=0,
            audio=NONE if is_muted else self._sound(16_000),
            frames=frames,
            force_listen=self.random.random() < 0.1,
            max_slice_nums=choose((None, None, 1, 2, 3, 6, 9)),
            deadline=choose((0.5, 1.0, 1.0, 1.0)),
        )
        self.seen["units"] += 1
        return self._each(lambda side: side.spawn(slot, side.model.unit(side.states[slot], unit)))

    def _sound(self, n_samples: int) -> NDArray[np.float32]:
        loudness = self.random.choice((0.0, 0.02, 0.1))
        seeded = np.random.default_rng(self.random.randrange(1 << 30))
        return seeded.normal(0, loudness, n_samples).astype(np.float32)

    def _picture(self, width: int, height: int) -> NDArray[np.uint8]:
        seeded = np.random.default_rng(self.random.randrange(1 << 30))
        return seeded.integers(0, 256, (height, width, 3), dtype=np.uint8)
