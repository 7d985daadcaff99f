"""What every dialect gives to the relay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from gateway.tickets import Place
from shared.errors import BadMessage
from shared.protocol import Command, Event


@dataclass(frozen=True, slots=True)
class Diagnostic:
    """Something a client reports about itself; counted and dropped."""


@dataclass(frozen=True, slots=True)
class RefusedChunk:
    """An audio chunk that cannot be used; its error is the answer to it, in its turn."""

    error: BadMessage


class Dialect(Protocol):
    """One outside protocol, for one session. Pure translation; knows no socket and no clock."""

    def parse(self, frame: str) -> Command | Diagnostic | RefusedChunk:
        """Return what a client's text frame asks for; an `Input` has seq -1.

        Raises:
            NotJson: the frame is no JSON; the session ends.
            BadMessage: it is JSON but asks for something impossible; the session goes on.
        """

    # Frames about the queue: None where the client must not hear of it.
    def queued(self, ticket_id: str, place: Place) -> str | None: ...

    def queue_update(self, place: Place) -> str | None: ...

    def queue_done(self, sent_at: float) -> str | None: ...

    def recorded(self, recording_id: str) -> None:
        """The session is recorded under this id, which its client is told when it is fitting."""

    def event(self, event: Event, wall_clock_ms: float, sent_at: float) -> Sequence[str]:
        """Return the frames of a worker's event; none for one that this dialect does not show.

        Args:
            event: any event but `Failure` and `Closed`, which are the relay's to judge.
            wall_clock_ms: for a `Result`, from its chunk's arrival at the gateway to now.
            sent_at: Unix seconds.
        """

    def dropped(self, wall_clock_ms: float, sent_at: float) -> str:
        """Return what is said of a chunk that the gateway had to drop."""

    def failure(self, slug: str, message: str, sent_at: float) -> str: ...

    def stopped(self) -> str: ...
