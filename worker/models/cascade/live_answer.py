"""One turn of the assistant in a duplex session: made ahead of what the units hand out."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from shared.limits import OUTPUT_SAMPLE_RATE_HZ
from worker.engine.contract import Op, Program, TaskHandle
from worker.models.cascade.answer import Answer, begin_turn, feed, take_in, trim, write
from worker.models.cascade.reading import READ_TEXT, ReadRequest, cut_text, needs_camera

if TYPE_CHECKING:
    from worker.models.cascade.conversation import Conversation
    from worker.models.cascade.model import CascadeModel

MAX_LEAD_S: Final = 6.0
"""Speech made ahead of what has been handed out; more would be thrown away at an interruption."""

URGENT_S: Final = 0.3
"""Until its first phrase exists, an answer's ops are due this long after its unit."""


@dataclass(slots=True)
class Segment:
    """One phrase of an answer, ready to be handed out."""

    text: str
    audio: NDArray[np.float32]
    """24 kHz; empty when the client wants text only."""
    n_taken: int = 0
    """Samples handed out."""


@dataclass(slots=True)
class LiveAnswer(Answer):
    """State of one turn, from the user's silence to the last sample handed out."""

    utterance: NDArray[np.float32]
    """16 kHz: what the user said."""
    frame: NDArray[np.uint8] | None
    """RGB picture the question may be about."""
    begun_at: float
    now: float
    """Engine clock at the newest unit's arrival."""
    task: TaskHandle | None = None
    confirmed: bool = False
    """The user has been silent for long enough: the answer may be heard."""
    audible: bool = False
    finished: bool = False
    """Everything there is to say is in `segments`."""
    heard: str = ""
    turn_start: int | None = None
    """Length of the context before this turn; None = not touched yet."""
    question_end: int = 0
    """Length of the context with the question and without anything of the answer."""
    n_tokens_reported: int = 0
    segments: deque[Segment] = field(default_factory=deque)

    @property
    def buffered_s(self) -> float:
        n_samples = sum(len(segment.audio) - segment.n_taken for segment in self.segments)
        return n_samples / OUTPUT_SAMPLE_RATE_HZ

    @property
    def failed(self) -> bool:
        return self.task is not None and self.task.error is not None

    def text_due(self) -> float:
        return self.speech_due() if self.audible else self.begun_at + URGENT_S

    def speech_due(self) -> float:
        return self.now + self.buffered_s

    def put(self, text: str, audio: NDArray[np.float32]) -> None:
        self.segments.append(Segment(text, audio))

    def wants_more(self) -> bool:
        return self.buffered_s < MAX_LEAD_S


def answer_program(model: CascadeModel, state: Conversation, answer: LiveAnswer) -> Program:
    """Fill `answer.segments`, phrase by phrase; end with `answer.finished`."""
    urgent = answer.begun_at + URGENT_S
    with answer.costs.timed("transcribe_ms", state.clock):
        answer.heard = yield from model.transcriber.transcribe(
            state.slot, answer.utterance, deadline=urgent
        )
    if answer.heard:
        yield from _think(model, state, answer)
    answer.finished = True
    # While it is being heard: close the turn in the cache and make room for the next one.
    shift = trim(model, state)
    answer.question_end += shift
    if answer.turn_start is not None:
        answer.turn_start += shift
    yield from feed(state, deadline=answer.now + 1.0)


def _think(model: CascadeModel, state: Conversation, answer: LiveAnswer) -> Program:
    text = yield from _question(state, answer)
    question = begin_turn(model, state, text)
    answer.turn_start, answer.question_end = question.start, question.end
    token = yield from take_in(model, state, answer)
    n_most = min(state.generation.n_most, question.n_most)
    yield from write(model, state, answer, token, n_most)


def _question(state: Conversation, answer: LiveAnswer) -> Program:
    """The user's words, with what the camera shows if they are about that."""
    if answer.frame is None or not needs_camera(answer.heard):
        return answer.heard
    with answer.costs.timed("vision_ms", state.clock):
        request = ReadRequest(answer.frame)
        seen = yield Op(READ_TEXT, request, deadline=answer.begun_at + URGENT_S)
    if not seen:
        return answer.heard
    return f"The camera shows this text:\n{cut_text(seen)}\n\n{answer.heard}"
