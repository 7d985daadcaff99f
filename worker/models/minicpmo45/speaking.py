"""From what a turn says to what is heard: text pieces, codes of the speech head, samples.

Half duplex and chat share all of it, full duplex the buffer in front of the vocoder. Follows the
MiniCPM-o 4.5 reference: its speech generator and the chunks that it gives to token2wav.
"""

from __future__ import annotations

import codecs
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shared.limits import OUTPUT_SAMPLE_RATE_HZ
from worker.engine.contract import Emit, Op, Program
from worker.models.contract import Piece
from worker.models.minicpmo45 import ops
from worker.nn.code_sampling import CodeSampling
from worker.nn.speech import SpeechRequest

if TYPE_CHECKING:
    from worker.models.minicpmo45.draws import Draws
    from worker.models.minicpmo45.model import MiniCpmO45
    from worker.models.minicpmo45.tokenizer import Tokenizer

SILENCE_CODE: Final = 4218
LOOK_AHEAD: Final = 3
"""Codes behind those that the vocoder turns into sound; also what a turn's buffer begins with."""
CHUNK_CODES: Final = 25
"""One second."""
MIN_CHUNK_CODES: Final = 5
"""Fewer wait for more, unless the turn is over."""
PIECE_CODES: Final = 25
"""Codes of one op: short enough for others, and one second can go to the vocoder."""
WINDOW_POSITIONS: Final = 300
"""What `sliding_window` keeps of the speech head's cache."""

NO_SAMPLES: Final = np.zeros(0, np.float32)


# ---- text


class TextStream:
    """Text of a growing list of tokens, never half a character."""

    def __init__(self, tokenizer: Tokenizer, shows_special: bool = False) -> None:
        self._tokenizer = tokenizer
        self._shows_special = shows_special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """Return the text that this token completes."""
        data = self._tokenizer.token_bytes(token, skip_special=not self._shows_special)
        return self._decoder.decode(data)

    def flush(self) -> str:
        """Return what is left when no token follows: a replacement character, or nothing."""
        return self._decoder.decode(b"", final=True)


# ---- codes


@dataclass(slots=True)
class CodeBuffer:
    """Codes of a turn that the vocoder has not consumed. It begins with a little silence."""

    waiting: list[int] = field(default_factory=lambda: [SILENCE_CODE] * LOOK_AHEAD)

    def push(self, new: Sequence[int]) -> None:
        self.waiting += new

    def take(
        self, is_last: bool, at_least: int = MIN_CHUNK_CODES
    ) -> Iterator[tuple[tuple[int, ...], bool]]:
        """Yield what can be vocoded now: codes, the look-ahead included, and the last flag.

        Args:
            is_last: the turn ends: nothing is left waiting.
            at_least: fewest codes that are consumed, but for the end of the turn.
        """
        while len(self.waiting) >= LOOK_AHEAD + at_least:
            piece = tuple(self.waiting[: LOOK_AHEAD + CHUNK_CODES])
            del self.waiting[: len(piece) - LOOK_AHEAD]
            yield piece, False
        if is_last and self.waiting:
            piece = tuple(self.waiting)
            self.waiting.clear()
            yield piece, True


@dataclass(frozen=True, slots=True)
class Words:
    """Text tokens for the speech head, and the hidden state at each of them."""

    ids: tuple[int, ...]
    states: tuple[Tensor, ...]
    """`[D]` each."""
    is_closing: bool
    """The text ends with them of its own accord, which the speech head is told."""

    def stacked(self) -> Tensor | None:
        return torch.stack(self.states) if self.states else None


@dataclass(slots=True)
class Utterance:
    """The voice of one turn: a program says its words, once or piece by piece."""

    slot: int
    voice: Any
    """What `learn_voice` gave."""
    sampling: CodeSampling
    attention: str
    """`attention_type` of the checkpoint: what of the cache later words see."""
    position: int = 0
    """Live positions of the speech head's cache."""
    codes: list[int] = field(default_factory=list)
    """All codes of the turn."""
    buffer: CodeBuffer = field(default_factory=CodeBuffer)
    has_begun: bool = False
    """The vocoder knows of the turn."""
    first_end: int = 0
    """Where the first words and their codes end in the cache."""
    last_start: int = 0
    """Where the latest words begin in the cache."""
    last: tuple[Words, tuple[int, ...]] | None = None
    """The latest words and their codes."""
    n_said: int = 0
    """How often words were said."""
    is_streamed: bool = True
    """Samples are handed out as soon as they exist."""
    reply_s: float = math.inf
    """Its ops are to run within this time while nothing is left to be played; infinite: whenever
    nothing else is due."""
    plays_until: float = 0.0
    """When all that was made has been played, on the engine's clock, if it is played at once."""

    def due(self, now: float) -> float:
        """Return the deadline of what comes next: sound that is ahead of its hearer can wait."""
        return max(now + self.reply_s, self.plays_until)

    @property
    def recent(self) -> tuple[int, ...]:
        """Codes that the repetition penalty may look at."""
        n = self.sampling.window
        return tuple(self.codes[-n:]) if n else ()


def say(
    model: MiniCpmO45,
    utterance: Utterance,
    words: Words,
    draws: Draws,
    *,
    is_last: bool,
    max_new: int,
    min_new: int = 0,
) -> Program:
    """Say words. Every second of sound is emitted as a `Piece`; the value is all samples.

    Args:
        is_last: no words follow, so nothing waits for more codes.
        max_new: most draws for these words; without an end the last one is not used.
        min_new: as many draws cannot be the end.
    """
    yield from _make_place(utterance, utterance.due(model.clock()))
    utterance.last_start = utterance.position
    # Only the very first code of a turn is drawn without penalty and filters.
    sampling = replace(utterance.sampling, first_is_free=not utterance.codes)
    said: list[int] = []
    samples: list[NDArray[np.float32]] = []
    n_drawn, is_over = 0, False
    while not is_over:
        n = min(PIECE_CODES, max_new - n_drawn)
        n_rows = 1 if n_drawn else len(words.ids) + 2
        deadline = utterance.due(model.clock())
        yield from _make_room(model, utterance, n_rows + n, deadline)
        request = SpeechRequest(
            slot=utterance.slot,
            start=utterance.position,
            text_ids=() if n_drawn else words.ids,
            hidden=None if n_drawn else words.stacked(),
            is_closing=words.is_closing and not n_drawn,
            last_code=said[-1] if n_drawn else None,
            max_new=n,
            min_new=max(0, min_new - n_drawn),
            draws=() if utterance.sampling.is_greedy else tuple(draws.codes(n)),
            sampling=sampling,
            recent=utterance.recent,
            drops_last=n_drawn + n == max_new,
        )
        spoken: ops.Spoken = yield Op(ops.SPEAK, request, deadline=deadline)
        n_drawn += n
        is_over = spoken.has_ended or n_drawn == max_new
        # In between, the last code is not fed yet: the next piece begins with it.
        utterance.position += request.n_inputs + len(spoken.codes) - (0 if is_over else 1)
        said += spoken.codes
        utterance.codes += spoken.codes
        utterance.buffer.push(spoken.codes)
        samples += yield from _vocode(model, utterance, is_last and is_over)
    utterance.last = words, tuple(said)
    if utterance.n_said == 0:
        utterance.first_end = utterance.position
    utterance.n_said += 1
    return np.concatenate(samples) if samples else NO_SAMPLES


def _make_place(utterance: Utterance, deadline: float) -> Program:
    """Forget what the next words must not see of those before."""
    if utterance.last is None:
        return
    if utterance.attention == "sliding_window":
        if utterance.position > WINDOW_POSITIONS:
            yield from _keep(utterance, utterance.position - WINDOW_POSITIONS, 0, deadline)
    elif utterance.attention == "reindex":
        if utterance.last_start > utterance.first_end:
            yield from _keep(utterance, utterance.last_start, utterance.first_end, deadline)
    elif utterance.attention == "sliding_recompute":
        words, codes = utterance.last
        again = SpeechRequest(
            slot=utterance.slot,
            start=0,
            text_ids=words.ids,
            hidden=words.stacked(),
            is_closing=words.is_closing,
            given_codes=codes,
            max_new=0,
            sampling=utterance.sampling,
        )
        yield Op(ops.SPEAK, again, deadline=deadline)
        utterance.position = again.n_inputs


def _make_room(model: MiniCpmO45, utterance: Utterance, n_rows: int, deadline: float) -> Program:
    """A turn that outgrows the speech head's cache goes on with its newest part."""
    if utterance.position + n_rows <= model.n_speech_positions:
        return
    n_kept = min(model.n_speech_positions // 2, model.n_speech_positions - n_rows)
    yield from _keep(utterance, utterance.position - n_kept, 0, deadline)
    utterance.first_end = 0


def _keep(utterance: Utterance, start: int, target: int, deadline: float) -> Program:
    """Move the cache from `start` on down to `target`."""
    move = ops.MoveRequest(utterance.slot, start, utterance.position, target, "speech")
    yield Op(ops.MOVE, move, deadline=deadline)
    utterance.position += target - start
    utterance.last_start = max(0, utterance.last_start + target - start)


def _vocode(model: MiniCpmO45, utterance: Utterance, is_last: bool) -> Program:
    samples: list[NDArray[np.float32]] = []
    for codes, is_end in utterance.buffer.take(is_last, CHUNK_CODES):
        deadline = utterance.due(model.clock())
        if not utterance.has_begun:
            turn = ops.TurnRequest(utterance.slot, utterance.voice)
            yield Op(ops.START_TURN, turn, deadline=deadline)
            utterance.has_begun = True
        request = ops.VocodeRequest(utterance.slot, codes, is_end)
        made = yield Op(ops.VOCODE, request, (len(codes), is_end), deadline)
        samples.append(through_int16(made) if model.compat.voice_through_int16 else made)
        begins_at = max(utterance.plays_until, model.clock())
        utterance.plays_until = begins_at + len(made) / OUTPUT_SAMPLE_RATE_HZ
        if utterance.is_streamed:
            yield Emit(Piece(audio=samples[-1]))
    return samples


def through_int16(samples: NDArray[np.float32]) -> NDArray[np.float32]:
    """Round samples to 16 bit and back, as the original does on its way."""
    whole = np.clip(samples * np.float32(32767), -32768, 32767).astype(np.int16)
    return whole.astype(np.float32) / np.float32(32768)
