"""The events of a session, and how they are read from G0 messages: those that all modes have, and
those of full duplex."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from shared.audio import Samples, decode_base64, samples_from_f32
from shared.errors import BadAudio


class SessionError(Exception):
    """A session that cannot start or go on; `slug` is the server's stable name of the cause."""

    def __init__(self, message: str, slug: str = "") -> None:
        super().__init__(message)
        self.slug = slug


# ---- events, in the order in which a session meets them


@dataclass(frozen=True, slots=True)
class Queued:
    """The session waits. `state` is "starting" while no worker has finished loading."""

    position: int
    estimated_wait_s: float
    queue_length: int
    ticket_id: str
    state: str


@dataclass(frozen=True, slots=True)
class QueueUpdate:
    position: int
    estimated_wait_s: float
    queue_length: int
    state: str


@dataclass(frozen=True, slots=True)
class QueueDone:
    """A worker is reserved for this session."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """Prompt and voice are in place. `ignored` names settings the back end cannot honour."""

    prompt_length: int
    recording_session_id: str | None
    ignored: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Result:
    """The answer to one chunk.

    `audio` is float32 24 kHz (empty while listening). `heard` is what the user was understood
    to say since the last caption. `interrupted`: drop what has not been played yet.
    `dropped`: the chunk came too late and was not used.
    """

    is_listen: bool
    text: str
    audio: Samples
    end_of_turn: bool
    heard: str
    interrupted: bool
    dropped: bool
    unit_index: int
    wall_clock_ms: float | None
    kv_cache_length: int | None
    n_tokens: int | None
    n_tts_tokens: int | None


@dataclass(frozen=True, slots=True)
class Paused:
    timeout_s: float | None


@dataclass(frozen=True, slots=True)
class Resumed:
    pass


@dataclass(frozen=True, slots=True)
class Interrupted:
    """The server has taken note of `interrupt`."""


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of an answer (half duplex and chat): text, sound (float32 24 kHz), or both."""

    text: str
    audio: Samples


@dataclass(frozen=True, slots=True)
class Stopped:
    pass


@dataclass(frozen=True, slots=True)
class TimedOut:
    reason: str


@dataclass(frozen=True, slots=True)
class ErrorEvent:
    """An error; the session goes on unless `Closed` follows."""

    message: str
    slug: str


@dataclass(frozen=True, slots=True)
class Closed:
    """Always the last event. Code 1006: the connection was lost without a goodbye."""

    code: int
    reason: str


Event = (
    Queued
    | QueueUpdate
    | QueueDone
    | Prepared
    | Result
    | Paused
    | Resumed
    | Interrupted
    | Stopped
    | TimedOut
    | ErrorEvent
    | Closed
)


EventT = TypeVar("EventT")
Parsers = Mapping[str, Callable[[dict[str, Any]], EventT]]
"""By the message's type."""


def parse_event(frame: str | bytes) -> Event | None:
    """Return the event of one message of a full-duplex session, as `read_event` does."""
    return read_event(frame, PARSERS)


def read_event(frame: str | bytes, parsers: Parsers[EventT]) -> EventT | None:
    """Return the event of one server message; None for a type that no parser is for.

    Raises:
        SessionError: the message is no JSON object, or its audio or another field is damaged.
    """
    try:
        message = json.loads(frame)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise SessionError("the server sent a message that is no JSON") from error
    if not isinstance(message, dict):
        raise SessionError("the server sent a message that is no JSON object")
    parse = parsers.get(str(message.get("type")))
    try:
        return parse(message) if parse else None
    except (TypeError, ValueError) as error:
        raise SessionError(f"the server sent a damaged {message['type']}: {error}") from error


def audio_of(message: dict[str, Any]) -> Samples:
    """Return a message's sound, float32 24 kHz; none is empty.

    Raises:
        SessionError: it is damaged.
    """
    encoded = message.get("audio_data")
    try:
        return samples_from_f32(decode_base64(encoded, "audio_data") if encoded else b"")
    except BadAudio as error:
        raise SessionError(f"the server sent damaged audio: {error}") from error


def delta_of(message: dict[str, Any]) -> Delta:
    """Return a message's piece of an answer. Raises SessionError: its sound is damaged."""
    return Delta(message.get("text_delta") or "", audio_of(message))


def error_of(message: dict[str, Any]) -> ErrorEvent:
    return ErrorEvent(str(message.get("error") or "unknown error"), str(message.get("slug") or ""))


def _queued(message: dict[str, Any]) -> Queued:
    return Queued(
        position=int(message.get("position") or 0),
        estimated_wait_s=float(message.get("estimated_wait_s") or 0.0),
        queue_length=int(message.get("queue_length") or 0),
        ticket_id=str(message.get("ticket_id") or ""),
        state=str(message.get("state") or ""),
    )


def _queue_update(message: dict[str, Any]) -> QueueUpdate:
    place = _queued(message)
    return QueueUpdate(place.position, place.estimated_wait_s, place.queue_length, place.state)


def _prepared(message: dict[str, Any]) -> Prepared:
    return Prepared(
        prompt_length=int(message.get("prompt_length") or 0),
        recording_session_id=message.get("recording_session_id"),
        ignored=tuple(message.get("ignored") or ()),
    )


def _result(message: dict[str, Any]) -> Result:
    return Result(
        is_listen=bool(message.get("is_listen")),
        text=message.get("text") or "",
        audio=audio_of(message),
        end_of_turn=bool(message.get("end_of_turn")),
        heard=message.get("heard") or "",
        interrupted=bool(message.get("interrupted")),
        dropped=bool(message.get("dropped")),
        unit_index=int(message.get("current_time") or 0),
        wall_clock_ms=message.get("wall_clock_ms"),
        kv_cache_length=message.get("kv_cache_length"),
        n_tokens=message.get("n_tokens"),
        n_tts_tokens=message.get("n_tts_tokens"),
    )


QUEUE_PARSERS: Final[Parsers[Queued | QueueUpdate | QueueDone]] = {
    "queued": _queued,
    "queue_update": _queue_update,
    "queue_done": lambda message: QueueDone(),
}

END_PARSERS: Final[Parsers[Stopped | TimedOut | ErrorEvent]] = {
    "stopped": lambda message: Stopped(),
    "timeout": lambda message: TimedOut(str(message.get("reason") or "timed out")),
    "error": error_of,
}

PARSERS: Final[Parsers[Event]] = {
    **QUEUE_PARSERS,
    **END_PARSERS,
    "prepared": _prepared,
    "result": _result,
    "paused": lambda message: Paused(message.get("timeout")),
    "resumed": lambda message: Resumed(),
    "interrupted": lambda message: Interrupted(),
}
