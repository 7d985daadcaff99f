"""`ChatClient`: one question and its answer as a stream (`/ws/chat`), and its events.

    async with ChatClient("ws://127.0.0.1:8006") as chat:
        await chat.ask([{"role": "user", "content": "What is the capital of France?"}])
        async for event in chat:                     # Prefilled, Delta …, Done, Closed
            ...

Leaving the block stops the answer, also in the queue. A further question takes another client and
brings its whole history: the server keeps nothing between two of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from client.connection import SessionClient
from client.events import (
    QUEUE_PARSERS,
    Closed,
    Delta,
    ErrorEvent,
    Parsers,
    Queued,
    QueueDone,
    QueueUpdate,
    SessionError,
    delta_of,
    error_of,
    read_event,
)
from shared.audio import Samples, encode_base64, samples_to_f32

__all__ = [
    "ChatClient",
    "ChatEvent",
    "Closed",
    "Delta",
    "Done",
    "ErrorEvent",
    "Prefilled",
    "QueueDone",
    "QueueUpdate",
    "Queued",
    "SessionError",
    "film",
    "picture",
    "sound",
]


@dataclass(frozen=True, slots=True)
class Prefilled:
    """The question has been read; the answer begins."""

    n_input_tokens: int


@dataclass(frozen=True, slots=True)
class Done:
    """The whole answer. Its sound has come in the `Delta`s."""

    text: str
    n_generated_tokens: int
    n_input_tokens: int
    ignored: tuple[str, ...]
    """What was said in the request and has no effect."""
    recording_session_id: str | None


ChatEvent = Queued | QueueUpdate | QueueDone | Prefilled | Delta | Done | ErrorEvent


class ChatClient(SessionClient[ChatEvent]):
    """One question; what all clients have is in `SessionClient`."""

    def __init__(
        self, url: str, api_key: str | None = None, *, ca_file: Path | None = None
    ) -> None:
        super().__init__(url, "/ws/chat", parse_event, api_key, ca_file)

    async def ask(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        speaks: bool = False,
        reference_voice: Samples | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        """Ask, once; the answer follows as events, with the place in the queue before them.

        Args:
            messages: `{"role", "content"}`, the content a text or a list of items such as
                `{"type": "text", "text"}` and those that `picture`, `sound` and `film` make.
            speaks: the answer comes as sound, too.
            reference_voice: what it is to sound like, float32 16 kHz.
            settings: further fields of the request by their wire names, such as
                `{"generation": {"max_new_tokens": 64}}`.

        Raises:
            SessionError: the connection is gone.
        """
        settings = settings or {}
        tts: dict[str, Any] = {**settings.get("tts", {}), "enabled": speaks}
        if reference_voice is not None:
            tts["ref_audio_data"] = encode_base64(samples_to_f32(reference_voice))
        request = {"messages": [dict(message) for message in messages], "tts": tts}
        await self._send({"queue_events": True, **settings, **request})


def picture(data: bytes) -> dict[str, Any]:
    """Return the item of a JPEG, PNG, GIF or WebP file."""
    return {"type": "image", "data": encode_base64(data)}


def sound(samples: Samples) -> dict[str, Any]:
    """Return the item of a sound, float32 16 kHz."""
    return {"type": "audio", "data": encode_base64(samples_to_f32(samples))}


def film(data: bytes) -> dict[str, Any]:
    """Return the item of a film's whole file."""
    return {"type": "video", "data": encode_base64(data)}


def parse_event(frame: str | bytes) -> ChatEvent | None:
    """Return the event of one message of a chat, as `read_event` does."""
    return read_event(frame, PARSERS)


def _done(message: dict[str, Any]) -> Done:
    return Done(
        text=message.get("text") or "",
        n_generated_tokens=int(message.get("generated_tokens") or 0),
        n_input_tokens=int(message.get("input_tokens") or 0),
        ignored=tuple(message.get("ignored") or ()),
        recording_session_id=message.get("recording_session_id"),
    )


PARSERS: Final[Parsers[ChatEvent]] = {
    **QUEUE_PARSERS,
    "prefill_done": lambda message: Prefilled(int(message.get("input_tokens") or 0)),
    "chunk": delta_of,
    "done": _done,
    "error": error_of,
}
