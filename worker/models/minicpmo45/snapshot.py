"""A duplex session put aside and gone on with later, in the same slot or another one.

State and caches are copied, so that what happens in between leaves no trace: the session that is
restored says and hears exactly what the uninterrupted one would.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from worker.models.minicpmo45.duplex import Duplex

if TYPE_CHECKING:
    from worker.models.minicpmo45.model import MiniCpmO45


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything of one session; it may be restored any number of times."""

    state: Duplex
    context: Any
    audio: Any
    speech: Any = None
    token2wav: Any = None


@torch.inference_mode()
def save(model: MiniCpmO45, state: Duplex) -> Snapshot:
    """Copy a session between two of its programs."""
    slot = state.slot
    speech = token2wav = None
    if model.token2wav is not None:
        speech = model.speech_cache.save(slot, state.speech_position)
        token2wav = model.token2wav.save(slot)
    return Snapshot(
        _copied(state),
        model.language.cache.save(slot, state.n_tokens),
        model.audio_cache.save(slot, state.audio_past),
        speech,
        token2wav,
    )


@torch.inference_mode()
def restore(model: MiniCpmO45, snapshot: Snapshot, slot: int) -> Duplex:
    """Write a session into a slot, whatever that held; returns its state."""
    state = _copied(snapshot.state)
    state.slot = slot
    model.language.cache.restore(slot, snapshot.context)
    model.audio_cache.restore(slot, snapshot.audio)
    if model.token2wav is not None:
        model.speech_cache.restore(slot, snapshot.speech)
        model.token2wav.restore(slot, snapshot.token2wav)
    return state


def _copied(state: Duplex) -> Duplex:
    # A voice is shared by all who use it.
    return copy.deepcopy(state, {id(state.voice): state.voice})
