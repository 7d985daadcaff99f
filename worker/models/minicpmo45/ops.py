"""What the programs of all modes may ask the model for, and what they get back.

Payloads are plain values; tensors in them lie on the model's device and are only handed on.
`model.py` runs the ops, the programs in `duplex.py`, `half_duplex.py` and `chat.py` yield them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from worker.models.minicpmo45.cutting import AnySlice
from worker.nn.mel import StreamingMel
from worker.nn.sampling import Sampling
from worker.nn.text_sampling import DuplexSampling

FEED_BUCKETS = (16, 32, 96, 224, 512)
"""Rows of one prefill op: a second of sound, the same behind closing tokens, with pictures."""
MAX_FEED_ROWS = FEED_BUCKETS[-1]
"""About 10 ms of one H200, so that nobody waits long behind a long prompt."""

PREPARE_INPUT = "prepare_input"
"""`InputRequest` -> `PreparedInput`. On the host lane: mel frames, image slices or their plans."""
PREPARE_VOICE = "prepare_voice"
"""`VoiceRequest` -> features of a reference voice. On the host lane."""
ENCODE_IMAGES = "encode_images"
"""A tuple of slices, of `PreparedInput`, -> embeddings `[n_slices, 64, D]`."""
ENCODE_AUDIO = "encode_audio"
"""`AudioRequest` -> embeddings `[n, D]` of one streamed second."""
ENCODE_CLIP = "encode_clip"
"""`ClipRequest` -> embeddings `[n, D]` of a whole clip."""
PREFILL = "prefill"
"""`Feed` -> `Fed`."""
DECODE = "decode"
"""`Step` -> `Fed`."""
SPEAK = "speak"
"""`SpeechRequest` -> `Spoken`."""
SET_VOICE = "set_voice"
"""Features of a voice -> the base caches that every turn starts from."""
START_TURN = "start_turn"
"""`TurnRequest` -> None: the slot's flow and vocoder caches start afresh."""
VOCODE = "vocode"
"""`VocodeRequest` -> float32 samples, 24 kHz."""
MOVE = "move"
"""`MoveRequest` -> None: a part of the slot's context changes its place."""


@dataclass(frozen=True, slots=True)
class Choice:
    """How the next token is chosen from the logits that a feed leaves."""

    sampling: DuplexSampling | Sampling
    draws: tuple[float, float]
    """Numbers in [0, 1): duplex uses both (raw, filtered), all others the second one."""
    recent: NDArray[np.int64]
    """Token ids the penalty looks at, latest last, already cut to its window."""
    forbidden: frozenset[int] | None = None
    """Ids that must not be chosen (`Sampling` only)."""


Piece = tuple[int, ...] | Tensor
"""Token ids, or embeddings `[n, D]`."""


@dataclass(frozen=True, slots=True)
class Feed:
    """Known input of a slot's context; at most `MAX_FEED_ROWS` rows."""

    slot: int
    start: int
    """Position of the first row."""
    pieces: tuple[Piece, ...]
    choice: Choice | None = None
    """None: nothing is chosen, which saves the output head."""

    @property
    def n_rows(self) -> int:
        return sum(map(len, self.pieces))

    @property
    def bucket(self) -> int:
        """Rows that it is padded to: feeds of one bucket run together."""
        return next(size for size in FEED_BUCKETS if self.n_rows <= size)


@dataclass(frozen=True, slots=True)
class Step:
    """One token at the end of a slot's context."""

    slot: int
    start: int
    token: int
    choice: Choice | None = None


@dataclass(frozen=True, slots=True)
class Fed:
    token: int | None
    """What was chosen; None if nothing was to be."""
    hidden: Tensor
    """State of the last row after the closing norm, `[D]`."""
    is_direct: bool = False
    """`listen_top_k` alone settled it; the penalty does not count such a token as said."""


@dataclass(frozen=True, slots=True)
class InputRequest:
    mel: StreamingMel | None
    """The session's; advanced by the op. None = pictures of a prompt."""
    samples: NDArray[np.float32] | None
    """One second, 16 kHz; None = no audio."""
    frames: tuple[NDArray[np.uint8], ...] = ()
    max_slice_nums: tuple[int, ...] = ()
    """One per frame."""


@dataclass(frozen=True, slots=True)
class PreparedInput:
    mel: Tensor | None
    """`[80, F]`; None without audio."""
    slices: tuple[tuple[AnySlice, ...], ...] = ()
    """Per frame: the overview, then the tiles in reading order, each uint8 `[h, w, 3]` or planned
    to be."""


@dataclass(frozen=True, slots=True)
class AudioRequest:
    slot: int
    past: int
    """Cached encoder frames of the slot before this second."""
    mel: Tensor
    """`[80, F]`, 102 frames for the first second, else 104."""
    is_first: bool


@dataclass(frozen=True, slots=True)
class ClipRequest:
    samples: NDArray[np.float32]
    """16 kHz."""
    is_chunked: bool
    """Whether a frame sees its own second and what came before only."""
    padded_frames: int = 0
    """Mel frames of the longest clip of the request, where a shorter one hears padding as far
    (`compat.short_clips_hear_padding`); 0 = it hears itself only."""


@dataclass(frozen=True, slots=True)
class VoiceRequest:
    samples: NDArray[np.float32]
    """16 kHz."""


@dataclass(frozen=True, slots=True)
class Spoken:
    codes: tuple[int, ...]
    """What was drawn, without the end code."""
    has_ended: bool
    """Whether the end code was drawn."""


@dataclass(frozen=True, slots=True)
class TurnRequest:
    slot: int
    voice: Any
    """What `SET_VOICE` gave."""


@dataclass(frozen=True, slots=True)
class VocodeRequest:
    slot: int
    codes: tuple[int, ...]
    """The look-ahead of 3 codes included."""
    is_last: bool


@dataclass(frozen=True, slots=True)
class MoveRequest:
    """Positions `start .. end - 1` of a slot's cache move to `target ..`; keys are turned."""

    slot: int
    start: int
    end: int
    target: int
    cache: Literal["context", "speech"] = "context"
