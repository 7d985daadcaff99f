"""What one session of turns or of chat was answered, with times."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from client.chat import ChatEvent, Done
from client.events import Closed, Delta, ErrorEvent, TimedOut
from client.half_duplex import Generating, Notice, TurnDone, TurnEvent
from client.journal import Sent
from shared.limits import OUTPUT_SAMPLE_RATE_HZ
from shared.playback import Player


@dataclass(slots=True)
class Answer:
    """One, in seconds from the moment at which the question was complete; None = it never came."""

    asked_at: float
    first_text_s: float | None = None
    first_audio_s: float | None = None
    done_s: float | None = None
    gaps_s: list[float] = field(default_factory=list)
    """The silences that a listener would hear inside it."""


class Answers:
    """Takes the questions and the events of a session in their order; all times are of one clock.

    Args:
        buffer_s: how much later than its arrival the first sound of an answer is played.
    """

    def __init__(self, buffer_s: float) -> None:
        self.sent: list[Sent] = []
        self.answers: list[Answer] = []
        self.errors: list[ErrorEvent] = []
        self.n_dropped = 0
        """Chunks that the server could not use."""
        self.n_cut_short = 0
        """Questions that the server began to answer before they were said to their end."""
        self.problem: str | None = None
        """Why the session could not go on."""
        self.slug = ""
        self._player = Player(buffer_s)
        self._open: Answer | None = None
        self._is_overdue = False
        """What comes may be the rest of an answer that was given up."""
        self._played_until = -math.inf

    def send(self, chunk: Sent) -> None:
        self.sent.append(chunk)

    def ask(self, complete_at: float) -> None:
        """A question that is complete at that moment, which may be still to come."""
        assert self._open is None, "one question at a time"
        self._open = Answer(complete_at)
        self.answers.append(self._open)
        self._player.end_turn()

    def give_up(self) -> None:
        """Expect no answer to the newest question any more; one that comes late is no other's."""
        self._is_overdue = self._open is not None
        self._open = None

    def take(self, event: TurnEvent | ChatEvent | Closed, at: float) -> None:
        match event:
            case Generating():
                self._is_overdue = False
                self._begin(at)
            case Delta():
                self._piece(event, at)
            case TurnDone() | Done():
                self._end(at)
            case ErrorEvent():
                self.errors.append(event)
                self._end(None)
            case Notice():
                self.n_dropped += event.count
            case TimedOut():
                self.problem, self.slug = event.reason, "timeout"
            case _:
                pass

    def _begin(self, at: float) -> None:
        if self._open is not None and at < self._open.asked_at:
            # What comes behind a pause is not heard any more.
            self.n_cut_short += 1
            self._open.asked_at = at

    def _end(self, done_at: float | None) -> None:
        if self._is_overdue:
            self._is_overdue = False
            return
        if self._open is not None and done_at is not None:
            self._open.done_s = done_at - self._open.asked_at
        self._open = None

    def _piece(self, piece: Delta, at: float) -> None:
        answer = None if self._is_overdue else self._open
        if piece.audio.size:
            gap_s = self._player.receive(at, piece.audio.size / OUTPUT_SAMPLE_RATE_HZ)
            self._played_until = at + self._player.lead_s(at)
            if answer is not None and gap_s > 0:
                answer.gaps_s.append(gap_s)
        if answer is None:
            return
        if piece.text and answer.first_text_s is None:
            answer.first_text_s = at - answer.asked_at
        if piece.audio.size and answer.first_audio_s is None:
            answer.first_audio_s = at - answer.asked_at

    @property
    def awaited_since(self) -> float | None:
        """When the question was complete whose answer is not; it may be still to come."""
        return None if self._open is None else self._open.asked_at

    @property
    def played_until(self) -> float:
        """When a listener has heard all of the newest answer; infinity while it is being made."""
        if self._open is not None and self._open.first_audio_s is not None:
            return math.inf
        return self._played_until

    @property
    def n_unanswered(self) -> int:
        """Questions whose answer may still come."""
        return int(self._open is not None)

    @property
    def n_missing(self) -> int:
        """Questions without a whole answer."""
        return sum(answer.done_s is None for answer in self.answers)
