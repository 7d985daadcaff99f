"""The events of a full-duplex session, and how they are read from G0 messages."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from shared.audio import Samples, decode_base64, samples_from_f32
from shared.errors import BadAudio


class DuplexError(Exception):
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


def parse_event(frame: str | bytes) -> Event | None:
    """Return the event of one server message; None for a type this client does not know.

    Raises:
        DuplexError: the message is no JSON object, or its audio or another field is damaged.
    """
    try:
        message = json.loads(frame)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise DuplexError("the server sent a message that is no JSON") from error
    if not isinstance(message, dict):
        raise DuplexError("the server sent a message that is no JSON object")
    parse = PARSERS.get(str(message.get("type")))
    try:
        return parse(message) if parse else None
    except (TypeError, ValueError) as error:
        raise DuplexError(f"the server sent a damaged {message['type']}: {error}") from error


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
    encoded = message.get("audio_data")
    try:
        data = decode_base64(encoded, "audio_data") if encoded else b""
        audio = samples_from_f32(data)
    except BadAudio as error:
        raise DuplexError(f"the server sent damaged audio: {error}") from error
    return Result(
        is_listen=bool(message.get("is_listen")),
        text=message.get("text") or "",
        audio=audio,
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


PARSERS: dict[str, Callable[[dict[str, Any]], Event]] = {
    "queued": _queued,
    "queue_update": _queue_update,
    "queue_done": lambda message: QueueDone(),
    "prepared": _prepared,
    "result": _result,
    "paused": lambda message: Paused(message.get("timeout")),
    "resumed": lambda message: Resumed(),
    "interrupted": lambda message: Interrupted(),
    "stopped": lambda message: Stopped(),
    "timeout": lambda message: TimedOut(str(message.get("reason") or "timed out")),
    "error": lambda message: ErrorEvent(
        str(message.get("error") or "unknown error"), str(message.get("slug") or "")
    ),
}
