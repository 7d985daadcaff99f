"""Whatever a half-duplex client does, and whenever: what it is told keeps its form.

Every op of the model is held until the script lets it pass, so that commands meet a session in the
middle of a prompt, of hearing, of an answer. What always holds (`Told` and `Puppet` check the most
of it):

- `Opened` is first and `Closed` last. Behind `Stopped`, or a `Failure` with a close code, there is
  `Closed` alone.
- Each command that cannot be done gets one `Failure` of the right kind, in the order of the
  commands, with the number of its chunk, and ends nothing. A chunk that can be heard gets none.
- Each prompt that was taken gets one `Prepared` or one `Failure`, never within an answer.
- `Speaking` alternates and begins with True; `Generating` follows `Speaking(False)` at once. While
  a prompt is read there is neither.
- Each `Generating` has one end, `TurnDone` or a `Failure`, unless the session ends first. Turns are
  numbered without a gap. `Delta`s are within their answer, numbered from 0, and make up its text.
- Each `Interrupt` gets one `Interrupted`, behind the end of the answer. That end needs no op more,
  nor does the end that a new prompt makes.
- Sound that waits is bounded, and none waits during an answer; no op of the voice detector takes
  more than its share.
- However a session ends, no further op of it runs; then its slot is clean and free, no program, no
  task and no media are left.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass

import msgspec
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shared.protocol import (
    Ask,
    AudioPart,
    ChatMessage,
    Command,
    Input,
    Interrupt,
    Interrupted,
    Open,
    Pause,
    Prepare,
    PrepareTurns,
    Resume,
    TextPart,
    VadSettings,
)
from tests.fakes.model import VAD_WINDOW, FakeDuplexModel
from tests.fakes.puppet import ENDINGS, Go, Puppet, Told, puppet_on, weighted
from tests.fakes.session import chunk
from worker.sessions import half_duplex
from worker.sessions.half_duplex import HalfDuplexSession
from worker.sessions.session import MAX_PREPARES

WAITING = 12 * VAD_WINDOW
"""Samples that may wait for the detector."""

SHARE = 3 * VAD_WINDOW
"""Samples of one op of the detector."""


class Model(FakeDuplexModel):
    """Every sixth piece of sound meets a voice detector that fails."""

    n_heard = 0
    most_samples = 0
    """Of one op of the detector."""

    def detect_speech(self, state, samples):
        self.most_samples = max(self.most_samples, len(samples))
        self.n_heard += 1
        if self.n_heard % 6 == 0:
            raise ValueError("the detector was told to fail")
        return (yield from super().detect_speech(state, samples))


@dataclass(frozen=True)
class Sound:
    """A chunk: so many windows of speech, then of silence, then single loud samples."""

    n_speech: int
    n_silent: int = 0
    n_more: int = 0

    def chunk(self, seq: int) -> Input:
        windows = np.repeat([1.0, 0.0], (self.n_speech * VAD_WINDOW, self.n_silent * VAD_WINDOW))
        return chunk(seq, np.append(windows, np.ones(self.n_more)))


VAD = VadSettings(0.7, min_speech_ms=64.0, min_silence_ms=64.0, speech_pad_ms=32.0)
TURN = Sound(3, 2)
PREPARE = PrepareTurns([TextPart("be brief")], VAD)
SOUND = st.sampled_from(
    [TURN, TURN, TURN, Sound(1), Sound(2, 0, 1), Sound(0, 1), Sound(0, 3), Sound(0, 0, 1)]
    + [Sound(WAITING // VAD_WINDOW, 1)]
)
ODD_SOUND = st.sampled_from(
    [Input(0, b""), Input(0, b"abc"), chunk(0, [np.nan]), chunk(0, [1.0], frames=[b"jpeg"])]
)
PROMPT = st.sampled_from(
    [PREPARE, PrepareTurns([TextPart("fail")], VAD), PrepareTurns([AudioPart(b"abc")], VAD)]
    + [PrepareTurns([], VadSettings(threshold=0.0)), PrepareTurns([], timeout_s=float("nan"))]
)
FOREIGN = st.sampled_from(
    [Pause(), Resume(), Prepare("x"), Ask([ChatMessage("user", [TextPart("x")])])]
    + [Open("x", "half_duplex", "half_duplex_audio")]
)
GO = st.sampled_from([1, 1, 2, 3, 5, 9]).map(Go)
INTERRUPT = st.just(Interrupt())
OTHERS = [PROMPT, ODD_SOUND, FOREIGN]
STEP = weighted([SOUND] * 5 + [GO] * 7 + [INTERRUPT] * 2 + OTHERS)
HEARD = [PREPARE, Go(1), TURN, Go(2)]
"""A turn that is about to be answered."""

OPENING = st.sampled_from(
    [[], [PREPARE], [PREPARE, Go(1)], HEARD, [*HEARD, Go(3)], [*HEARD, Go(9), TURN, Go(4)]]
    + [[PREPARE, Go(1), TURN, TURN, Go(2)], [PREPARE, Go(1), Sound(3), Go(1), PREPARE]]
    + [[*HEARD, Go(3), PREPARE]]
)


class Expected:
    """What commands have to be refused, by the state that the client knows of."""

    def __init__(self) -> None:
        self.refusals: list[tuple[str, int | None]] = []
        self.n_prepares = 0
        """That were taken."""
        self.n_interrupts = 0
        self._n_admitted = 0

    def note(self, command: Command, told: Told) -> None:
        is_preparing = self.n_prepares > told.n_prepares
        match command:
            case Input():
                self._note_input(command, is_open=is_preparing or told.is_live)
            case PrepareTurns():
                self._note_prepare(command, is_preparing)
            case Interrupt():
                self.n_interrupts += 1
            case _:
                self.refusals.append(("bad_message", None))

    def _note_input(self, message: Input, *, is_open: bool) -> None:
        if not is_open:
            self.refusals.append(("not_prepared", message.seq))
        elif message.frames:
            self.refusals.append(("bad_image", message.seq))
        elif len(message.audio) % 4 or not message.audio or message.audio == b"\0\0\xc0\x7f":
            self.refusals.append(("bad_audio", message.seq))

    def _note_prepare(self, prepare: PrepareTurns, is_preparing: bool) -> None:
        is_wrong = not prepare.vad.threshold or math.isnan(prepare.timeout_s)
        if is_wrong or is_preparing or self._n_admitted == MAX_PREPARES:
            self.refusals.append(("bad_message", None))
            return
        self._n_admitted += 1
        if prepare.system and isinstance(prepare.system[0], AudioPart):
            self.refusals.append(("bad_audio", None))
        else:
            self.n_prepares += 1


def numbered(step: Command | Sound, seq: int) -> Command:
    if isinstance(step, Sound):
        return step.chunk(seq)
    return msgspec.structs.replace(step, seq=seq) if isinstance(step, Input) else step


async def converse(
    puppet: Puppet, steps: list[Command | Sound | Go], ending: str, is_done: bool
) -> None:
    """Play the steps; then end the session, `is_done`: not before everything has been answered."""
    told, expected = puppet.told, Expected()
    for seq, step in enumerate(steps):
        if isinstance(step, Go):
            await puppet.go(step.n_ops)
        else:
            command = numbered(step, seq)
            expected.note(command, told)
            await puppet.send(command)
            await puppet.until(lambda: told.n(Interrupted) == expected.n_interrupts)
            if expected.n_prepares > told.n_prepares:
                await puppet.until(lambda: told.answer is None)
                told.is_live = False
        assert len(puppet.session._waiting) <= (4 * WAITING if told.answer is None else 0)
    assert told.refusals == expected.refusals
    assert told.n_prepares in (expected.n_prepares - 1, expected.n_prepares)
    if is_done:
        await puppet.release()
        assert told.answer is None
        assert told.n_prepares == expected.n_prepares
    await puppet.end(ending)
    assert told.refusals == expected.refusals


async def play(
    steps: list[Command | Sound | Go], ending: str, is_done: bool, failing: set[int]
) -> None:
    model = Model(fail_turns=frozenset(failing))
    async with puppet_on(model, HalfDuplexSession) as puppet:
        await converse(puppet, steps, ending, is_done)
        assert model.most_samples <= SHARE


@settings(max_examples=60, derandomize=True, deadline=None, database=None)
@given(
    st.builds(list.__add__, OPENING, st.lists(STEP, max_size=16)),
    st.sampled_from(ENDINGS),
    st.booleans(),
    st.sampled_from([set(), {0}, {1}]),
)
@example([*HEARD, Go(2)], "stop too late", False, set())
@example([*HEARD, Go(6)], "stop too late", False, set())
@example([PREPARE, Go(1), Sound(3), PREPARE, Go(2)], "stop", True, set())
@example([*HEARD, Go(3), TURN, TURN], "stop", True, set())
def test_whatever_a_half_duplex_client_does_what_it_is_told_keeps_its_form(
    steps, ending, is_done, failing
):
    with pytest.MonkeyPatch.context() as patch:
        # Bounds that a few chunks reach.
        patch.setattr(half_duplex, "SETTLE_S", 0.0)
        patch.setattr(half_duplex, "MAX_WAITING_S", WAITING / 16_000)
        patch.setattr(half_duplex, "MAX_DETECT_S", SHARE / 16_000)
        asyncio.run(play(steps, ending, is_done, failing))
