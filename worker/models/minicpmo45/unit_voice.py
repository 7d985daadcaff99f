"""A duplex unit's words as sound: 25 speech tokens, then what the vocoder makes of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
import torch
from numpy.typing import NDArray

from shared.limits import OUTPUT_SAMPLE_RATE_HZ
from worker.engine.contract import Op, Program
from worker.models.minicpmo45 import ops
from worker.models.minicpmo45.speaking import NO_SAMPLES, through_int16
from worker.nn.speech import SpeechRequest

if TYPE_CHECKING:
    from worker.models.minicpmo45.costs import Costs
    from worker.models.minicpmo45.duplex import Decision, Duplex
    from worker.models.minicpmo45.model import MiniCpmO45

SPEECH_STEPS: Final = 26
"""Draws of speech tokens in a unit; the last one's token is never used, so 25 = one second."""


def speak(
    model: MiniCpmO45, state: Duplex, decision: Decision, deadline: float, costs: Costs
) -> Program:
    """Say the words of a unit; the value is its samples (24 kHz) and the number of codes."""
    n_rows_needed = len(decision.words) + 1 + SPEECH_STEPS
    if state.speech_position + n_rows_needed > model.n_speech_positions:
        yield from _make_room(model, state, deadline)
    may_end = decision.ends_turn or state.speech_position == 0
    request = SpeechRequest(
        slot=state.slot,
        start=state.speech_position,
        text_ids=decision.words,
        hidden=torch.stack(decision.states) if decision.states else None,
        max_new=SPEECH_STEPS,
        min_new=0 if may_end else SPEECH_STEPS,
        draws=tuple(state.draws.codes(SPEECH_STEPS)),
        sampling=state.code_sampling,
        drops_last=True,
        normalize=True,
    )
    spoken: ops.Spoken = yield Op(ops.SPEAK, request, deadline=deadline)
    state.speech_position += len(decision.words) + 1 + len(spoken.codes)
    costs.add("speech_tokens_ms")
    parts: list[NDArray[np.float32]] = []
    state.codes.push(spoken.codes)
    for codes, is_last in state.codes.take(decision.ends_turn):
        if state.interrupt_asked:
            break
        if state.turn_is_fresh:
            yield Op(ops.START_TURN, ops.TurnRequest(state.slot, state.voice), deadline=deadline)
            state.turn_is_fresh = False
        vocode = ops.VocodeRequest(state.slot, codes, is_last)
        parts.append((yield Op(ops.VOCODE, vocode, (len(codes), is_last), deadline)))
    if decision.ends_turn:
        state.reset_speech()
    samples = np.concatenate(parts) if parts else NO_SAMPLES
    costs.add("vocode_ms")
    return _as_played(model, samples, decision.ends_turn), len(spoken.codes)


def _make_room(model: MiniCpmO45, state: Duplex, deadline: float) -> Program:
    """A turn has outgrown the speech head's cache: its newer half moves to the front."""
    n_kept = model.n_speech_positions // 2
    move = ops.MoveRequest(
        state.slot, state.speech_position - n_kept, state.speech_position, 0, "speech"
    )
    yield Op(ops.MOVE, move, deadline=deadline)
    state.speech_position = n_kept


def _as_played(
    model: MiniCpmO45, samples: NDArray[np.float32], ends_turn: bool
) -> NDArray[np.float32]:
    n_missing = OUTPUT_SAMPLE_RATE_HZ - len(samples)
    if model.compat.voice_through_int16:
        samples = through_int16(samples)
    if n_missing > 0 and not ends_turn and model.compat.short_chunks_start_with_silence:
        samples = np.concatenate([np.zeros(n_missing, np.float32), samples])
    return samples
