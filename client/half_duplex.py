"""`HalfDuplexClient`: one session of turns (`/ws/half_duplex/{session_id}`), and its events.

    async with HalfDuplexClient("ws://127.0.0.1:8006") as session:
        await session.prepare("Answer in one sentence.")
        await session.send_audio(samples)            # half a second is usual; float32 16 kHz
        async for event in session:                  # Speaking, Generating, Delta …, TurnDone
            ...

The server hears where a turn ends: a second of silence behind it is to be sent, too. What is sent
while an answer is being made is not heard.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from client.connection import OnWait, SessionClient, new_session_id
from client.duplex import DEFAULT_SYSTEM_PROMPT
from client.events import (
    END_PARSERS,
    QUEUE_PARSERS,
    Closed,
    Delta,
    ErrorEvent,
    Interrupted,
    Parsers,
    Queued,
    QueueDone,
    QueueUpdate,
    SessionError,
    Stopped,
    TimedOut,
    delta_of,
    read_event,
)
from shared.audio import Samples, encode_base64, samples_to_f32

__all__ = [
    "Closed",
    "Delta",
    "ErrorEvent",
    "Generating",
    "HalfDuplexClient",
    "Interrupted",
    "Notice",
    "QueueDone",
    "QueueUpdate",
    "Queued",
    "SessionError",
    "Speaking",
    "Stopped",
    "TimedOut",
    "TurnDone",
    "TurnEvent",
    "TurnsPrepared",
]


@dataclass(frozen=True, slots=True)
class TurnsPrepared:
    """The session listens. `ignored` names settings the back end cannot honour."""

    timeout_s: float
    """The session's longest duration from here on."""
    recording_session_id: str | None
    ignored: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Speaking:
    """A turn of the user has begun, or ended; one that was too short gets no answer."""

    is_speaking: bool


@dataclass(frozen=True, slots=True)
class Generating:
    """The turn is being answered; until `TurnDone` nothing is heard."""

    speech_ms: float


@dataclass(frozen=True, slots=True)
class TurnDone:
    """The answer is complete. `index` counts from 1; `heard`: the question, if it is known."""

    index: int
    text: str
    heard: str


@dataclass(frozen=True, slots=True)
class Notice:
    """Something was lost and the session goes on: `count` chunks, for the reason `slug`."""

    slug: str
    message: str
    count: int


TurnEvent = (
    Queued
    | QueueUpdate
    | QueueDone
    | TurnsPrepared
    | Speaking
    | Generating
    | Delta
    | TurnDone
    | Interrupted
    | Notice
    | Stopped
    | TimedOut
    | ErrorEvent
)


class HalfDuplexClient(SessionClient[TurnEvent]):
    """One session of turns; what all clients have is in `SessionClient`."""

    def __init__(
        self, url: str, api_key: str | None = None, *, ca_file: Path | None = None
    ) -> None:
        self.session_id = new_session_id("hdx")
        super().__init__(url, f"/ws/half_duplex/{self.session_id}", parse_event, api_key, ca_file)

    async def prepare(
        self,
        system_prompt: str = DEFAULT_SYSTEM_PROMPT,
        *,
        settings: dict[str, dict[str, Any]] | None = None,
        reference_voice: Samples | None = None,
        on_wait: OnWait | None = None,
    ) -> TurnsPrepared:
        """Set prompt and voice and wait until the session is ready, however long the queue is.

        Args:
            settings: by their sections and wire names, such as
                `{"vad": {"min_silence_duration_ms": 800}, "tts": {"enabled": False}}`.
            reference_voice: float32 16 kHz.
            on_wait: called with each report about the place in the queue.

        Raises:
            SessionError: the server answered with an error or closed the connection.
        """
        content: list[dict[str, Any]] = [{"type": "text", "text": system_prompt}]
        if reference_voice is not None:
            voice = encode_base64(samples_to_f32(reference_voice))
            content.append({"type": "audio", "data": voice})
        message = {"type": "prepare", "system_content": content, "config": settings or {}}
        await self._send(message)
        return await self._until(TurnsPrepared, on_wait)

    async def send_audio(self, samples: NDArray[np.float32]) -> None:
        """Send one chunk; it has no answer of its own.

        Args:
            samples: float32 16 kHz `[n_samples]`.

        Raises:
            SessionError: the connection is gone.
        """
        data = encode_base64(samples_to_f32(samples))
        await self._send({"type": "audio_chunk", "audio_base64": data})

    async def interrupt(self) -> None:
        """End the answer that is under way; `TurnDone` with what was said comes, and another."""
        await self._send({"type": "interrupt"})

    async def stop(self) -> None:
        """Ask for the end; `Stopped` and `Closed` follow as events."""
        await self._send({"type": "stop"})


def parse_event(frame: str | bytes) -> TurnEvent | None:
    """Return the event of one message of a half-duplex session, as `read_event` does."""
    return read_event(frame, PARSERS)


def _prepared(message: dict[str, Any]) -> TurnsPrepared:
    return TurnsPrepared(
        timeout_s=float(message.get("timeout_s") or 0.0),
        recording_session_id=message.get("recording_session_id"),
        ignored=tuple(message.get("ignored") or ()),
    )


def _turn_done(message: dict[str, Any]) -> TurnDone:
    return TurnDone(
        index=int(message.get("turn_index") or 0),
        text=message.get("text") or "",
        heard=message.get("heard") or "",
    )


def _notice(message: dict[str, Any]) -> Notice:
    return Notice(
        slug=str(message.get("slug") or ""),
        message=str(message.get("message") or ""),
        count=int(message.get("count") or 0),
    )


PARSERS: Final[Parsers[TurnEvent]] = {
    **QUEUE_PARSERS,
    **END_PARSERS,
    "prepared": _prepared,
    "vad_state": lambda message: Speaking(bool(message.get("speaking"))),
    "generating": lambda message: Generating(float(message.get("speech_duration_ms") or 0.0)),
    "chunk": delta_of,
    "turn_done": _turn_done,
    "interrupted": lambda message: Interrupted(),
    "notice": _notice,
}
