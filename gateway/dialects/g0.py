"""Dialect G0: the reference's own full-duplex protocol (`/ws/duplex`), JSON text frames.

Audio is base64 of little-endian float32: 16 kHz towards the model, 24 kHz from it. The base64
ends here; everything behind this module handles bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import orjson

from gateway.dialects.contract import Diagnostic, RefusedChunk
from gateway.tickets import Place
from shared import protocol
from shared.audio import F32_BYTES, check_f32_length, decode_base64, encode_base64
from shared.errors import BadAudio, BadImage, BadMessage, NotJson, SessionTimeout
from shared.limits import (
    INPUT_SAMPLE_RATE_HZ,
    MAX_CHUNK_S,
    MAX_IMAGES_PER_CHUNK,
    MAX_PROMPT_CHARS,
    MAX_REFERENCE_VOICE_S,
)
from shared.protocol import Command, DuplexSettings, Event, Result

DEFAULT_PROMPT = "You are a helpful assistant."
MAX_SLICES = 9
"""Slices of one image that the model was trained with."""

MAX_PAUSE_S = 3600.0
MAX_SHOWN_CHARS = 40
"""Length to which a client's own words are cut inside an error text."""

Check = Callable[[str, Any], Any]


class G0:
    """One session's translation. It remembers what a result has to repeat and nothing else."""

    def __init__(self) -> None:
        self._ignored: tuple[str, ...] = ()
        self._unit_index = 0
        self._kv_tokens = 0

    # ---- client -> worker

    def parse(self, frame: str) -> Command | Diagnostic | RefusedChunk:
        body = _json_object(frame)
        kind = body.get("type")
        match kind:
            case "audio_chunk":
                try:
                    return _chunk(body)
                except BadMessage as error:
                    # A new one: the traceback holds the whole message, and the answer may wait.
                    return RefusedChunk(type(error)(str(error)))
            case "prepare":
                return self._prepare(body)
            case "pause":
                return protocol.Pause(_pause_timeout(body.get("timeout")))
            case "resume":
                return protocol.Resume()
            case "interrupt":
                return protocol.Interrupt()
            case "stop":
                return protocol.Stop()
            case "client_diagnostic":
                return Diagnostic()
        # The reference's own words, without quotes around the type.
        word = kind[:MAX_SHOWN_CHARS] if isinstance(kind, str) else _shown(kind)
        raise BadMessage(f"Unknown message type: {word}")

    def _prepare(self, body: Mapping[str, Any]) -> protocol.Prepare:
        if body.get("ref_audio_path"):
            raise BadMessage(
                "ref_audio_path is not accepted: files of the service are not the client's to "
                "name; send the voice as ref_audio_base64"
            )
        config = body.get("config")
        if config is None:
            config = {}
        if not isinstance(config, dict):
            raise BadMessage(f"config is {_shown(config)}, expected an object")
        said = dict(config)
        if body.get("max_slice_nums") is not None:
            said["max_slice_nums"] = body["max_slice_nums"]
        settings, ignored = _settings(said)
        voice = _voice(body, "ref_audio_base64")
        prepare = protocol.Prepare(
            system_prompt=_prompt(body.get("system_prompt")),
            settings=settings,
            reference_voice=voice,
            tts_reference_voice=_voice(body, "tts_ref_audio_base64") or voice,
            deferred_finalize=_flag("deferred_finalize", body.get("deferred_finalize"), True),
        )
        self._ignored = ignored
        return prepare

    # ---- gateway and worker -> client

    def queued(self, ticket_id: str, place: Place) -> str:
        return _dump({"type": "queued", "ticket_id": ticket_id, **_place(place)})

    def queue_update(self, place: Place) -> str:
        return _dump({"type": "queue_update", **_place(place)})

    def queue_done(self) -> str:
        return _dump({"type": "queue_done"})

    def stopped(self) -> str:
        return _dump({"type": "stopped"})

    def failure(self, slug: str, message: str) -> str:
        if slug == SessionTimeout.slug:
            return _dump({"type": "timeout", "reason": message, "slug": slug})
        return _dump({"type": "error", "error": message, "slug": slug})

    def dropped(self, wall_clock_ms: float, sent_at: float) -> str:
        silent = Result(
            seq=-1,
            is_listen=True,
            unit_index=self._unit_index,
            dropped=True,
            kv_tokens=self._kv_tokens,
        )
        return _dump(_result(silent, wall_clock_ms, sent_at))

    def event(self, event: Event, wall_clock_ms: float, sent_at: float) -> str | None:
        match event:
            case Result():
                self._unit_index = event.unit_index
                self._kv_tokens = event.kv_tokens
                return _dump(_result(event, wall_clock_ms, sent_at))
            case protocol.Prepared():
                return _dump(
                    {
                        "type": "prepared",
                        "prompt_length": event.prompt_chars,
                        "prompt_tokens": event.prompt_tokens,
                        "ignored": sorted({*self._ignored, *event.ignored}),
                        "languages": event.languages,
                    }
                )
            case protocol.Paused():
                return _dump({"type": "paused", "timeout": event.timeout_s})
            case protocol.Resumed():
                return _dump({"type": "resumed"})
            case protocol.Interrupted():
                return _dump({"type": "interrupted"})
            case protocol.Stopped():
                return self.stopped()
        # `Notice` repeats what `dropped` on the result says; clients of this dialect have no
        # message for it.
        return None


def _dump(message: Mapping[str, Any]) -> str:
    return orjson.dumps(message).decode()


def _place(place: Place) -> dict[str, Any]:
    return {
        "position": place.position,
        "estimated_wait_s": place.estimated_wait_s,
        "queue_length": place.queue_length,
        "state": "starting" if place.is_starting else "waiting",
    }


def _result(result: Result, wall_clock_ms: float, sent_at: float) -> dict[str, Any]:
    timings = result.timings
    message = {
        "type": "result",
        "is_listen": result.is_listen,
        "text": result.text,
        "audio_data": encode_base64(result.audio) if result.audio else None,
        "end_of_turn": result.end_of_turn,
        "current_time": result.unit_index,
        "cost_llm_ms": round(timings.prefill_ms + timings.decode_ms, 3),
        "cost_tts_prep_ms": 0.0,
        "cost_tts_ms": round(timings.speech_tokens_ms, 3),
        "cost_token2wav_ms": round(timings.vocode_ms, 3),
        "cost_all_ms": round(timings.total_ms, 3),
        "n_tokens": result.n_tokens,
        "n_tts_tokens": result.n_speech_tokens,
        "server_send_ts": sent_at,
        "wall_clock_ms": round(wall_clock_ms, 3),
        "kv_cache_length": result.kv_tokens,
        "vision_slices": result.vision_slices,
        "vision_tokens": result.vision_tokens,
    }
    if result.heard:
        message["heard"] = result.heard
    if result.interrupted:
        message["interrupted"] = True
    if result.dropped:
        message["dropped"] = True
    return message


def _json_object(frame: str) -> dict[str, Any]:
    try:
        body = orjson.loads(frame)
    except orjson.JSONDecodeError as error:
        if "limit" in error.msg:
            raise BadMessage("the message is nested too deeply") from error
        if "infinity" in error.msg:
            raise BadMessage("a number is too large") from error
        # JavaScript and Python write half an emoji (a text cut in the middle) as valid JSON.
        if error.msg.endswith("surrogate in string"):
            raise BadMessage("a text holds half of a surrogate pair") from error
        raise NotJson(f"not JSON: {error.msg} at character {error.pos}") from error
    if not isinstance(body, dict):
        raise BadMessage(f"expected a JSON object, got {_shown(body)}")
    return body


def _shown(value: object) -> str:
    """A client's value, short enough for an error text."""
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "an array"
    text = repr(value)
    return text if len(text) <= MAX_SHOWN_CHARS else text[:MAX_SHOWN_CHARS] + "…"


def _prompt(value: object) -> str:
    if value is None:
        return DEFAULT_PROMPT
    if not isinstance(value, str):
        raise BadMessage(f"system_prompt is {_shown(value)}, expected a string")
    if len(value) > MAX_PROMPT_CHARS:
        raise BadMessage(
            f"system_prompt has {len(value)} characters, at most {MAX_PROMPT_CHARS} are accepted"
        )
    return value


def _audio(text: object, what: str, max_s: float) -> bytes:
    if not isinstance(text, str):
        raise BadAudio(f"{what} is {_shown(text)}, expected a base64 string")
    if len(text) // 4 * 3 > (max_s * INPUT_SAMPLE_RATE_HZ + 1) * F32_BYTES:
        raise BadAudio(f"{what} is too long, at most {max_s:g} s are accepted")
    data = decode_base64(text, what)
    check_f32_length(data, max_s, INPUT_SAMPLE_RATE_HZ)
    return data


def _voice(body: Mapping[str, Any], key: str) -> bytes:
    text = body.get(key)
    return _audio(text, key, MAX_REFERENCE_VOICE_S) if text else b""


def _chunk(body: Mapping[str, Any]) -> protocol.Input:
    text = body.get("audio_base64")
    if text is None:
        raise BadMessage("Missing audio_base64")
    audio = _audio(text, "audio_base64", MAX_CHUNK_S)
    if not audio:
        raise BadAudio("audio_base64 is empty")
    frames = body.get("frame_base64_list")
    if frames is None:
        frames = []
    if not isinstance(frames, list) or not all(isinstance(frame, str) for frame in frames):
        raise BadImage("frame_base64_list is no list of base64 strings")
    if len(frames) > MAX_IMAGES_PER_CHUNK:
        raise BadImage(
            f"the chunk has {len(frames)} frames, at most {MAX_IMAGES_PER_CHUNK} are accepted"
        )
    slices = body.get("max_slice_nums")
    return protocol.Input(
        seq=-1,
        audio=audio,
        frames=[_image(frame) for frame in frames],
        force_listen=_flag("force_listen", body.get("force_listen"), False),
        max_slice_nums=None if slices is None else _slices("max_slice_nums", slices),
    )


def _image(text: str) -> bytes:
    try:
        image = decode_base64(text, "frame_base64_list")
    except BadAudio as error:
        raise BadImage(str(error)) from error
    if not image:
        raise BadImage("frame_base64_list holds an empty frame")
    return image


def _pause_timeout(value: object) -> float | None:
    if value is None:
        return None
    return float(_number(0.0, MAX_PAUSE_S, exclusive=True)("timeout", value))


def _flag(key: str, value: object, default: bool) -> bool:
    if value is None:
        return default
    if not isinstance(value, bool):
        raise BadMessage(f"{key} is {_shown(value)}, expected true or false")
    return value


# ---- prepare.config


def _number(low: float, high: float = math.inf, *, exclusive: bool = False) -> Check:
    def check(key: str, value: Any) -> float:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not low <= value <= high or (exclusive and value == low):
            above = "above" if exclusive else "from"
            upper = "" if high == math.inf else f", at most {high:g}"
            raise BadMessage(f"{key} is {_shown(value)}, expected a number {above} {low:g}{upper}")
        return float(value)

    return check


def _integer(low: int, high: int) -> Check:
    def check(key: str, value: Any) -> int:
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise BadMessage(
                f"{key} is {_shown(value)}, expected a whole number from {low} to {high}"
            )
        return value

    return check


def _word(*words: str) -> Check:
    def check(key: str, value: Any) -> str:
        if value not in words:
            raise BadMessage(f"{key} is {_shown(value)}, expected one of {', '.join(words)}")
        return str(value)

    return check


def _switch(key: str, value: Any) -> bool:
    return _flag(key, value, False)


_slices = _integer(1, MAX_SLICES)

MAX_COUNT = 1_000_000

SETTINGS: Mapping[str, Check] = {
    "temperature": _number(0, 2),
    "top_k": _integer(0, MAX_COUNT),
    "top_p": _number(0, 1),
    "text_repetition_penalty": _number(1),
    "text_repetition_window_size": _integer(0, MAX_COUNT),
    "length_penalty": _number(0.1, 5),
    "listen_prob_scale": _number(0),
    "listen_top_k": _integer(1, MAX_COUNT),
    "decode_mode": _word("sampling", "greedy"),
    "generate_audio": _switch,
    "ls_mode": _word("explicit", "implicit"),
    "force_listen_count": _integer(0, MAX_COUNT),
    "max_new_speak_tokens_per_chunk": _integer(1, MAX_COUNT),
    "tts_temperature": _number(0, 2),
    "max_slice_nums": _slices,
}
"""`prepare.config`: key -> check of its bounds."""

FIXED: Mapping[str, int] = {"chunk_ms": 1000, "sample_rate": INPUT_SAMPLE_RATE_HZ}
"""Keys of the reference's configuration that have one possible value here."""


def _settings(said: Mapping[str, Any]) -> tuple[DuplexSettings, tuple[str, ...]]:
    """Return the checked settings and the names that have no effect. null = not said."""
    known = {
        key: SETTINGS[key](key, value)
        for key, value in said.items()
        if key in SETTINGS and value is not None
    }
    ignored = tuple(
        key[:MAX_SHOWN_CHARS]
        for key, value in said.items()
        if key not in SETTINGS and FIXED.get(key, object()) != value
    )
    return msgspec.convert(known, DuplexSettings), ignored
