"""What one paced session sent and got, with times, and the figures that follow from it."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from client.events import ErrorEvent, Event, Result, TimedOut
from shared.limits import OUTPUT_SAMPLE_RATE_HZ
from shared.playback import Player
from shared.turns import Turn

NO_SAMPLES = np.zeros(0, np.float32)


@dataclass(slots=True)
class Sent:
    """One chunk on its way out. `late_s` is the sender's own fault, `blocked_s` is not."""

    sent_at: float
    late_s: float
    """From the moment the sender could have begun to the moment it did."""
    blocked_s: float = 0.0
    """How long the connection took to accept the chunk; it does when the peer does not read."""


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer to one chunk; of its audio only the length is kept."""

    chunk: Sent
    at: float
    result: Result
    n_samples: int
    """24 kHz samples that came with it."""

    @property
    def latency_s(self) -> float:
        return self.at - self.chunk.sent_at


@dataclass(frozen=True, slots=True)
class Piece:
    """Audio as a player with a jitter buffer gets it; not the first of its turn."""

    gap_s: float
    """Silence in front of it."""
    lead_s: float
    """Audio that was still unplayed when it came."""


class Journal:
    """Takes the chunks and the events of a session in their order; all times are of one clock."""

    def __init__(self) -> None:
        self.sent: list[Sent] = []
        self.replies: list[Reply] = []
        self.errors: list[ErrorEvent] = []
        self.problem: str | None = None
        """Why the session could not go on."""
        self.slug = ""
        self._unanswered: deque[Sent] = deque()

    def send(self, chunk: Sent) -> None:
        self.sent.append(chunk)
        self._unanswered.append(chunk)

    def take(self, event: Event, at: float) -> None:
        match event:
            case Result():
                self._answer(event, at)
            case ErrorEvent():
                self.errors.append(event)
                # The protocol does not say which chunk an error answers. We send nothing else
                # that can fail, and chunks are answered in order.
                if self._unanswered:
                    self._unanswered.popleft()
            case TimedOut():
                self.problem, self.slug = event.reason, "timeout"
            case _:
                pass

    def _answer(self, result: Result, at: float) -> None:
        if not self._unanswered:
            self.problem, self.slug = "a result came that answers no chunk", "extra_result"
            return
        chunk = self._unanswered.popleft()
        n_samples = int(result.audio.size)
        silent = dataclasses.replace(result, audio=NO_SAMPLES)
        self.replies.append(Reply(chunk, at, silent, n_samples))

    @property
    def n_unanswered(self) -> int:
        return len(self._unanswered)

    @property
    def n_dropped(self) -> int:
        return sum(reply.result.dropped for reply in self.replies)

    def latencies_s(self) -> list[float]:
        """From a chunk at the socket to its result at the socket."""
        return [reply.latency_s for reply in self.replies]

    def first_audio_s(self) -> list[float]:
        """For each turn, from the chunk whose answer began it to its first audio."""
        turn, firsts = Turn(), []
        for reply in self._used():
            began_at = turn.take(
                reply.chunk.sent_at,
                is_listen=reply.result.is_listen,
                has_audio=bool(reply.n_samples),
                end_of_turn=reply.result.end_of_turn,
            )
            if began_at is not None:
                firsts.append(reply.at - began_at)
        return firsts

    def first_audio_after(self, moment: float) -> float | None:
        """Return the seconds from a moment to the first audio that came later."""
        return next((r.at - moment for r in self.replies if r.at > moment and r.n_samples), None)

    def pieces(self, buffer_s: float) -> Iterator[Piece]:
        """Play what came, as a player that begins each turn `buffer_s` late would."""
        player, is_speaking = Player(buffer_s), False
        for reply in self._used():
            if reply.result.is_listen or reply.result.interrupted:
                player.end_turn()
                is_speaking = False
            if reply.n_samples:
                lead_s = player.lead_s(reply.at)
                gap_s = player.receive(reply.at, reply.n_samples / OUTPUT_SAMPLE_RATE_HZ)
                if is_speaking:
                    yield Piece(gap_s, lead_s)
                is_speaking = True
            if reply.result.end_of_turn:
                player.end_turn()
                is_speaking = False

    def _used(self) -> Iterator[Reply]:
        """The answers that tell the model's decision; that to dropped input does not."""
        return (reply for reply in self.replies if not reply.result.dropped)

    def gaps_s(self, buffer_s: float) -> list[float]:
        """The silences inside turns that a listener would hear."""
        return [piece.gap_s for piece in self.pieces(buffer_s) if piece.gap_s > 0]


def percentiles(values: Iterable[float], scale: float = 1.0) -> dict[str, float]:
    """Return n, p50, p95, p99 and max of `values` times `scale`; only n when there are none."""
    scaled: Sequence[float] = [scale * value for value in values]
    if not scaled:
        return {"n": 0}
    figures = np.percentile(scaled, [50, 95, 99, 100])
    names = ("p50", "p95", "p99", "max")
    rounded = {name: round(float(v), 2) for name, v in zip(names, figures, strict=True)}
    return {"n": len(scaled), **rounded}
