"""G0 of a chat request: `/ws/chat` as a stream, `POST /api/chat` as one answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from gateway.dialects.g0 import G0, dump
from gateway.dialects.g0_messages import GENERATION, generation, messages
from gateway.dialects.g0_values import (
    audio,
    flag,
    integer,
    json_object,
    refuse_server_paths,
    section,
    unknown,
)
from gateway.tickets import Place
from shared import protocol
from shared.audio import F32_BYTES, encode_base64
from shared.errors import BadMessage
from shared.limits import INPUT_SAMPLE_RATE_HZ, MAX_REFERENCE_VOICE_S, OUTPUT_SAMPLE_RATE_HZ
from shared.protocol import Answered, Ask, Event

STREAM_MAX_NEW_TOKENS = 256
HTTP_MAX_NEW_TOKENS = 512
"""Length of an answer where the client does not say it."""

MAX_SLICES = 16

IMAGE = ("max_slice_nums", "use_image_id")
TTS = ("enabled", "ref_audio_data", "ref_audio_max_ms", "ref_audio_path", "output_path")
FLAGS = ("omni_mode", "enable_thinking", "use_tts_template", "return_prompt")
REQUEST = ("messages", "generation", "tts", "image", "streaming", "queue_events", *FLAGS)

_slices = integer(1, MAX_SLICES)
_voice_ms = integer(1000, 3_600_000)


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """What a client asks, and what the gateway itself has to know of it."""

    ask: Ask
    ignored: tuple[str, ...]
    """What was said and has no effect."""
    has_queue_events: bool
    returns_prompt: bool


def read_request(body: Mapping[str, Any], *, is_streaming: bool) -> ChatRequest:
    """Return the checked request.

    Args:
        is_streaming: whether there is a stream; without one `streaming` has no effect.

    Raises:
        BadMessage, BadAudio, BadImage: naming the field.
    """
    tts, image, said = section(body, "tts"), section(body, "image"), section(body, "generation")
    refuse_server_paths(tts, "ref_audio_path", "output_path")
    slices = image.get("max_slice_nums")
    use_image_id = image.get("use_image_id")
    flags = {name: flag(name, body.get(name), False) for name in FLAGS}
    ask = Ask(
        messages=messages(body.get("messages")),
        generation=generation(said, STREAM_MAX_NEW_TOKENS if is_streaming else HTTP_MAX_NEW_TOKENS),
        is_streaming=flag("streaming", body.get("streaming"), True) and is_streaming,
        speaks=flag("tts.enabled", tts.get("enabled"), False),
        voice=_voice(tts),
        max_slice_nums=None if slices is None else _slices("image.max_slice_nums", slices),
        use_image_id=(
            None if use_image_id is None else flag("image.use_image_id", use_image_id, False)
        ),
        is_omni=flags["omni_mode"],
        enable_thinking=flags["enable_thinking"],
        use_tts_template=flags["use_tts_template"],
    )
    ignored = (
        *unknown(body, REQUEST),
        *(f"generation.{key}" for key in unknown(said, GENERATION)),
        *(f"tts.{key}" for key in unknown(tts, TTS)),
        *(f"image.{key}" for key in unknown(image, IMAGE)),
    )
    has_queue_events = flag("queue_events", body.get("queue_events"), False)
    return ChatRequest(ask, ignored, has_queue_events, flags["return_prompt"])


@dataclass(frozen=True, slots=True)
class Course:
    """How a question has gone."""

    recording_id: str | None
    duration_ms: float
    """From the question being with its worker to the answer."""
    waited_ms: float
    """From joining the queue to having a worker."""
    estimated_wait_s: float
    """What that was expected to be when it began."""


def response(
    answered: Answered, course: Course, ignored: tuple[str, ...], *, returns_prompt: bool
) -> bytes:
    """Return the body that answers `POST /api/chat`; `ignored` is the request's."""
    body = {
        "success": True,
        "text": answered.text,
        "audio_path": None,
        "audio_data": encode_base64(answered.audio) if answered.audio else None,
        "audio_sample_rate": OUTPUT_SAMPLE_RATE_HZ,
        "tokens_generated": answered.n_generated_tokens,
        "duration_ms": round(course.duration_ms, 1),
        "prompt": answered.prompt if returns_prompt else None,
        "token_stats": {
            "cached_tokens": 0,
            "input_tokens": answered.n_input_tokens,
            "generated_tokens": answered.n_generated_tokens,
            "total_tokens": answered.n_input_tokens + answered.n_generated_tokens,
        },
        "recording_session_id": course.recording_id,
        "error": None,
        "ignored": sorted({*ignored, *answered.ignored}),
        "queue_wait_ms": round(course.waited_ms),
        "estimated_queue_wait_s": course.estimated_wait_s,
    }
    return orjson.dumps(body)


class G0Chat(G0):
    """The translation of one request and its answer."""

    def __init__(self) -> None:
        super().__init__()
        # Not the request itself: it may hold 100 MiB.
        self._is_asked = False
        self._is_streaming = True
        self._has_queue_events = False
        self._returns_prompt = False

    def parse(self, frame: str) -> Ask:
        """Return the request: the first frame that can be one.

        Raises:
            BadMessage: it cannot be, or the connection has asked already.
        """
        if self._is_asked:
            raise BadMessage(
                "One request per connection: close it to stop the answer, open another one to ask"
            )
        request = read_request(json_object(frame), is_streaming=True)
        self._is_asked = True
        self._ignored = request.ignored
        self._is_streaming = request.ask.is_streaming
        self._has_queue_events = request.has_queue_events
        self._returns_prompt = request.returns_prompt
        return request.ask

    # The reference sends nothing while a request waits, and its pages know no message for it.

    def queued(self, ticket_id: str, place: Place) -> str | None:
        return super().queued(ticket_id, place) if self._has_queue_events else None

    def queue_update(self, place: Place) -> str | None:
        return super().queue_update(place) if self._has_queue_events else None

    def queue_done(self, sent_at: float) -> str | None:
        return super().queue_done(sent_at) if self._has_queue_events else None

    def dropped(self, wall_clock_ms: float, sent_at: float) -> str:
        raise AssertionError("a chat request has no chunks")

    def event(self, event: Event, wall_clock_ms: float, sent_at: float) -> tuple[str, ...]:
        match event:
            case protocol.Prefilled():
                message: dict[str, Any] = {
                    "type": "prefill_done",
                    "input_tokens": event.n_input_tokens,
                }
            case protocol.Delta():
                message = {"type": "chunk"}
                if event.text:
                    message["text_delta"] = event.text
                if event.audio:
                    message["audio_data"] = encode_base64(event.audio)
            case Answered():
                message = self._done(event)
            case _:
                return ()
        return (dump(message),)

    def _done(self, answered: Answered) -> dict[str, Any]:
        message = {
            "type": "done",
            "text": answered.text,
            "generated_tokens": answered.n_generated_tokens,
            "input_tokens": answered.n_input_tokens,
            "ignored": self._all_ignored(answered.ignored),
            **self._recording(),
        }
        if not self._is_streaming:
            message["audio_data"] = encode_base64(answered.audio) if answered.audio else None
        if self._returns_prompt:
            message["prompt"] = answered.prompt
        return message


def _voice(tts: Mapping[str, Any]) -> bytes:
    text = tts.get("ref_audio_data")
    data = audio(text, "tts.ref_audio_data", MAX_REFERENCE_VOICE_S) if text else b""
    longest_ms = tts.get("ref_audio_max_ms")
    if longest_ms is None:
        return data
    n_samples = _voice_ms("tts.ref_audio_max_ms", longest_ms) * INPUT_SAMPLE_RATE_HZ // 1000
    return data[: n_samples * F32_BYTES]
