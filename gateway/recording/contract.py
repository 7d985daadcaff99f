"""What the relay tells whoever records a session. Quick: nothing here waits for a disk."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from shared.protocol import Command, Event, RequestType


class SessionRecording(Protocol):
    """The record of one session, from the moment it has a worker to its end."""

    recording_id: str
    """What the client is told as `recording_session_id`; unguessable."""

    def took(self, command: Command, arrived_at: float) -> None:
        """Note what the client has sent and the worker will get.

        Args:
            arrived_at: monotonic seconds.
        """

    def gave(self, event: Event, wall_clock_ms: float, at: float) -> None:
        """Note what the client is being told.

        Args:
            wall_clock_ms: of a `Result`: from its chunk's arrival at the gateway to now.
            at: monotonic seconds.
        """

    def end(self, reason: str) -> None:
        """The session is over; nothing more will be noted."""


class Recorder(Protocol):
    """Makes the record of each session."""

    def begin(
        self,
        session_id: str,
        request_type: RequestType,
        worker_id: int,
        config: Mapping[str, Any],
    ) -> SessionRecording | None:
        """Return the record of a session that has got its worker; None = it is not recorded.

        Args:
            config: what the client asked for, without voices.
        """
