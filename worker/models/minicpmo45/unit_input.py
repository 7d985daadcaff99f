"""A duplex unit's frames and its second of audio, as rows for the language model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from torch import Tensor

from shared.errors import BadImage
from shared.protocol import DuplexSettings
from worker.engine.contract import Op, Program
from worker.models.contract import Unit
from worker.models.minicpmo45 import ops
from worker.models.minicpmo45.images import plan_slices
from worker.models.minicpmo45.ops import Piece, PreparedInput
from worker.nn.mel import FRAMES_PER_S

if TYPE_CHECKING:
    from worker.models.minicpmo45.costs import Costs
    from worker.models.minicpmo45.duplex import Duplex
    from worker.models.minicpmo45.model import MiniCpmO45

MAX_PICTURE_ROWS: Final = 14 * 66
"""Of all frames of a unit, so that it stays below `MAX_UNIT_TOKENS`: 14 slices of 64 embeddings
and their two marks."""


@dataclass(frozen=True, slots=True)
class TakenIn:
    """A unit's input as the language model sees it."""

    pieces: tuple[Piece, ...]
    n_slices: int


def take_in(model: MiniCpmO45, state: Duplex, unit: Unit, costs: Costs) -> Program:
    """Encode frames and audio; nothing is fed yet."""
    ids = model.tokenizer.ids
    limits = _slice_limits(unit, state.settings)
    _check_slices(unit, limits, model)
    samples = unit.audio if unit.audio.size else None
    request = ops.InputRequest(state.mel, samples, unit.frames, limits)
    prepared: PreparedInput = yield Op(ops.PREPARE_INPUT, request, deadline=unit.deadline)
    slices = [piece for frame in prepared.slices for piece in frame]
    pieces: list[Piece] = []
    if slices:
        encoded: Tensor = yield Op(ops.ENCODE_IMAGES, tuple(slices), deadline=unit.deadline)
        index = 0
        for frame in prepared.slices:
            for position in range(len(frame)):
                begin = ids.image_start if position == 0 else ids.slice_start
                end = ids.image_end if position == 0 else ids.slice_end
                pieces += [(begin,), encoded[index], (end,)]
                index += 1
    costs.add("vision_ms")
    if prepared.mel is not None:
        n_frames = prepared.mel.shape[-1]
        if model.config.audio.reset_due(state.audio_past, n_frames):
            state.audio_past = 0
        is_first = state.mel.emitted_frames <= FRAMES_PER_S
        heard = ops.AudioRequest(state.slot, state.audio_past, prepared.mel, is_first)
        pieces.append((yield Op(ops.ENCODE_AUDIO, heard, (n_frames, is_first), unit.deadline)))
        state.audio_past += model.config.audio.stream_frames(n_frames, is_first)
    costs.add("listen_ms")
    return TakenIn(tuple(pieces), len(slices))


def _slice_limits(unit: Unit, settings: DuplexSettings) -> tuple[int, ...]:
    limit = unit.max_slice_nums
    if limit is None:
        limit = settings.max_slice_nums if settings.max_slice_nums is not None else 1
    if isinstance(limit, int):
        return (limit,) * len(unit.frames)
    # Frames beyond the list's end are taken as they are.
    return (*limit, *(1 for _ in unit.frames))[: len(unit.frames)]


def _check_slices(unit: Unit, limits: tuple[int, ...], model: MiniCpmO45) -> None:
    """Raises BadImage before anything of the unit is used: too many slices, impossible sizes."""
    n_slices = 0
    for frame, limit in zip(unit.frames, limits, strict=True):
        plan = plan_slices(frame.shape[1], frame.shape[0], limit, model.config.slices)
        n_slices += plan.n_slices
    most = MAX_PICTURE_ROWS // (model.n_image_tokens + 2)
    if n_slices > most:
        raise BadImage(
            f"the frames of one unit have {n_slices} slices, at most {most}: "
            "send fewer frames or a lower max_slice_nums"
        )
