"""A back end without weights, typed against the contract: `Model` for engine, session and server
tests. Importable without torch.

A unit whose samples are loud (peak >= 0.5) is answered with text and speech, a silent one with
listen. Every program touches the slot only through ops, and an op on a slot that has been
cleaned is an error, so a slot given away too early fails the test that did it.

Turns and chat requests are answered with `n_pieces` pieces, one `write` op each, and one `speak` op
each if they have sound. A window of 512 loud samples is speech. Words that make a question fail:
"fail" (an error of the model), "too long" (a refusal).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shared.errors import BadMessage, ContextFull, EngineFault, ModelLoadError
from worker.engine.contract import Emit, Op, Program
from worker.models.contract import (
    ChatQuestion,
    Model,
    Piece,
    PreparedInfo,
    Progress,
    Prompt,
    Taken,
    TurnPrompt,
    Unit,
    UnitResult,
    WholeAnswer,
)

UNIT_SAMPLES = 160
VAD_WINDOW = 512
LANGUAGE = "language"
SPEECH = "speech"


@dataclass
class FakeState:
    slot: int
    prompts: list[str] = field(default_factory=list)
    units: list[Unit] = field(default_factory=list)
    speaking: bool = False
    interrupted: bool = False
    finalized: int = 0
    questions: list[ChatQuestion] = field(default_factory=list)
    systems: list[TurnPrompt] = field(default_factory=list)
    turns: list[NDArray[np.float32]] = field(default_factory=list)
    """What was said to it, turn by turn."""
    said: list[str] = field(default_factory=list)
    """Its own pieces."""
    unheard: NDArray[np.float32] = field(default_factory=lambda: np.zeros(0, np.float32))
    """Less than a window of the voice detector."""
    ended: bool = False


@dataclass
class FakeDuplexModel:
    """Scripted through its fields; `calls` tells what was asked of it, in order."""

    n_slots: int = 0
    fail_stage: str | None = None
    fail_units: frozenset[int] = frozenset()
    """Unit programs with these indices end with an error before they emit."""
    fail_turns: frozenset[int] = frozenset()
    """Turns (from 0) that fail after their first piece."""
    n_pieces: int = 3
    full_from: int | None = None
    """From this unit on the context is full."""
    fail_end: bool = False
    fault_kinds: set[str] = field(default_factory=set)
    """Kinds whose next batch loses the device."""
    gates: dict[str, threading.Event] = field(default_factory=dict)
    """Kind -> event its batches wait for (a slow or stuck device)."""
    entered: dict[str, threading.Event] = field(default_factory=dict)
    """Kind -> event set when a batch of it has begun."""
    speech_samples: int = 240
    on_stage: Callable[[str], None] | None = None
    calls: list[tuple[Any, ...]] = field(default_factory=list)
    batches: list[tuple[str, int]] = field(default_factory=list)
    states: list[FakeState] = field(default_factory=list)
    name: str = "fake"
    unit_samples: int = UNIT_SAMPLES

    @property
    def lanes(self) -> Mapping[str, str]:
        return {
            "prefill": LANGUAGE,
            "think": LANGUAGE,
            "finalize": LANGUAGE,
            "speak": SPEECH,
            "read": LANGUAGE,
            "write": LANGUAGE,
            "hear": SPEECH,
        }

    @property
    def round_span_s(self) -> float:
        return 0.0

    @property
    def max_batch(self) -> Mapping[str, int]:
        return {"think": 4, "speak": 4}

    # ---- stages

    def load_model(self, progress: Progress) -> None:
        self._stage("load_model", progress)

    def init_unified(self, n_slots: int, progress: Progress) -> None:
        self.n_slots = n_slots
        self._stage("init_unified", progress)

    def apply_torch_compile(self, progress: Progress) -> str:
        self._stage("apply_torch_compile", progress)
        return "nothing to compile"

    def _stage(self, name: str, progress: Progress) -> None:
        self.calls.append((name, threading.current_thread().name))
        progress(0.5, f"half of {name}")
        if self.on_stage is not None:
            self.on_stage(name)
        if self.fail_stage == name:
            raise ModelLoadError(f"{name} was told to fail")

    # ---- ops

    def run(self, kind: str, bucket: Hashable, payloads: Sequence[Any]) -> Sequence[Any]:
        self.batches.append((kind, len(payloads)))
        if kind in self.entered:
            self.entered[kind].set()
        if kind in self.gates:
            assert self.gates[kind].wait(30), "a test left its gate shut"
        if kind in self.fault_kinds:
            self.fault_kinds.discard(kind)
            raise EngineFault("the device is gone")
        return [self._one(kind, state, value) for state, value in payloads]

    def _one(self, kind: str, state: FakeState, value: Any) -> Any:
        if state.ended:
            return AssertionError(f"{kind} on slot {state.slot} after it was cleaned")
        if kind == "think":
            return bool(np.abs(value.audio).max(initial=0.0) >= 0.5)
        if kind == "speak":
            return np.full(self.speech_samples, 0.25, np.float32)
        if kind == "finalize":
            state.finalized += 1
        if kind == "hear":
            windows = value.reshape(-1, VAD_WINDOW)
            return np.where(np.abs(windows).max(axis=1, initial=0.0) >= 0.5, 0.95, 0.0)
        return None

    # ---- sessions

    def new_state(self, slot: int) -> FakeState:
        self.calls.append(("new_state", slot))
        if not 0 <= slot < self.n_slots:
            raise ValueError(f"slot {slot} of {self.n_slots}")
        state = FakeState(slot)
        self.states.append(state)
        return state

    def prepare(self, state: FakeState, prompt: Prompt) -> Program:
        yield Op("prefill", (state, prompt))
        if prompt.system_prompt == "fail":
            raise ValueError("prompt says fail")
        state.prompts.append(prompt.system_prompt)
        return PreparedInfo(
            prompt_chars=len(prompt.system_prompt),
            prompt_tokens=len(prompt.system_prompt.split()),
            ignored=tuple(sorted(prompt.settings.said())),
            voice="fake",
            languages=("en",),
        )

    def unit(self, state: FakeState, unit: Unit) -> Program:
        assert state.finalized == len(state.units), "a unit began before the last was finalized"
        state.units.append(unit)
        try:
            loud = yield Op("think", (state, unit), deadline=unit.deadline)
            if unit.index in self.fail_units:
                raise ValueError(f"unit {unit.index} was told to fail")
            if self.full_from is not None and unit.index >= self.full_from:
                raise ContextFull("the context is full")
            speaks = loud and not unit.force_listen
            speech: NDArray[np.float32] = np.zeros(0, np.float32)
            if speaks:
                speech = yield Op("speak", (state, unit), deadline=unit.deadline)
            state.speaking = speaks
            interrupted, state.interrupted = state.interrupted and not speaks, False
            yield Emit(
                UnitResult(
                    is_listen=not speaks,
                    text=f"u{unit.index} " if speaks else "",
                    audio=speech,
                    interrupted=interrupted,
                    kv_tokens=10 * len(state.units),
                    n_tokens=3,
                )
            )
            yield Op("finalize", (state, unit))
        except ValueError:
            state.finalized = len(state.units)
            raise

    def interrupt(self, state: FakeState) -> None:
        self.calls.append(("interrupt", state.slot))
        state.interrupted = state.interrupted or state.speaking
        state.speaking = False

    # ---- turns and chat

    def chat_state(self, slot: int) -> FakeState:
        return self.new_state(slot)

    def turn_state(self, slot: int) -> FakeState:
        return self.new_state(slot)

    def chat(self, state: FakeState, question: ChatQuestion) -> Program:
        state.questions.append(question)
        yield Op("read", (state, question))
        text = " ".join(
            part for message in question.messages for part in message.parts if isinstance(part, str)
        )
        if text == "fail":
            raise ValueError("question says fail")
        if text == "too long":
            raise BadMessage("the question has 9000 tokens, at most 8000")
        yield Emit(Taken(len(text)))
        speaks, is_streaming = question.speaks, question.is_streaming
        del question
        return (yield from self._answer(state, len(text), speaks, is_streaming))

    def prepare_turns(self, state: FakeState, prompt: TurnPrompt) -> Program:
        yield Op("prefill", (state, prompt))
        if "fail" in prompt.system:
            raise ValueError("prompt says fail")
        state.systems.append(prompt)
        n_chars = sum(len(part) for part in prompt.system if isinstance(part, str))
        ignored = tuple(sorted(prompt.generation.said()))
        return PreparedInfo(n_chars, len(prompt.system), ignored, "fake", ("en",))

    def detect_speech(self, state: FakeState, samples: NDArray[np.float32]) -> Program:
        heard = np.concatenate((state.unheard, samples))
        n = len(heard) // VAD_WINDOW * VAD_WINDOW
        state.unheard = heard[n:]
        return (yield Op("hear", (state, heard[:n])))

    def turn(self, state: FakeState, samples: NDArray[np.float32]) -> Program:
        index = len(state.turns)
        state.turns.append(samples)
        yield Op("read", (state, samples))
        fails = index in self.fail_turns
        whole = yield from self._answer(state, len(samples), True, True, fails)
        return replace(whole, heard=f"heard {len(samples)}")

    def _answer(
        self, state: FakeState, n_input: int, speaks: bool, is_streaming: bool, fails: bool = False
    ) -> Program:
        texts: list[str] = []
        sounds = [np.zeros(0, np.float32)]
        for index in range(self.n_pieces):
            yield Op("write", (state, index))
            texts.append(f"w{index} ")
            state.said.append(texts[-1])
            sound = sounds[0]
            if speaks:
                sound = yield Op("speak", (state, index))
                sounds.append(sound)
            if is_streaming:
                yield Emit(Piece(texts[-1], sound))
            if fails:
                raise ValueError("the turn was told to fail")
        audio = sounds[0] if is_streaming else np.concatenate(sounds)
        ignored = ("length_penalty",)
        return WholeAnswer("".join(texts), n_input, self.n_pieces, audio, ignored=ignored)

    def end(self, state: FakeState) -> None:
        self.calls.append(("end", state.slot))
        if self.fail_end:
            raise RuntimeError("the slot cannot be cleaned")
        state.ended = True

    def named(self, name: str) -> list[tuple[Any, ...]]:
        """The calls of one name."""
        return [call for call in self.calls if call[0] == name]


def as_model(fake: FakeDuplexModel) -> Model:
    """The fake as the contract's type: the type checker proves that it fits."""
    return fake
