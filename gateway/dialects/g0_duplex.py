"""G0 of a full-duplex session (`/ws/duplex`): one `result` for each chunk."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from gateway.dialects.contract import Diagnostic, RefusedChunk
from gateway.dialects.g0 import G0, dump
from gateway.dialects.g0_values import (
    MAX_COUNT,
    MAX_SHOWN_CHARS,
    Check,
    checked,
    chunk_audio,
    file_bytes,
    flag,
    integer,
    json_object,
    number,
    refuse_server_paths,
    section,
    shown,
    switch,
    voice,
    word,
    word_of,
)
from shared import protocol
from shared.audio import encode_base64
from shared.errors import BadImage, BadMessage, SessionTimeout
from shared.limits import (
    INPUT_SAMPLE_RATE_HZ,
    MAX_CHUNK_S,
    MAX_IMAGES_PER_CHUNK,
    MAX_PROMPT_CHARS,
)
from shared.protocol import Command, DuplexSettings, Event, Result

DEFAULT_PROMPT = "You are a helpful assistant."
MAX_SLICES = 9
"""Slices of one image that the model was trained with."""

MAX_PAUSE_S = 3600.0

SLICES = integer(1, MAX_SLICES)

SETTINGS: Mapping[str, Check] = {
    "temperature": number(0, 2),
    "top_k": integer(0, MAX_COUNT),
    "top_p": number(0, 1),
    "text_repetition_penalty": number(1),
    "text_repetition_window_size": integer(0, MAX_COUNT),
    "length_penalty": number(0.1, 5),
    "listen_prob_scale": number(0),
    "listen_top_k": integer(1, MAX_COUNT),
    "decode_mode": word("sampling", "greedy"),
    "generate_audio": switch,
    "ls_mode": word("explicit", "implicit"),
    "force_listen_count": integer(0, MAX_COUNT),
    "max_new_speak_tokens_per_chunk": integer(1, MAX_COUNT),
    "tts_temperature": number(0, 2),
    "max_slice_nums": SLICES,
}
"""`prepare.config`: key -> check of its bounds."""

FIXED: Mapping[str, int] = {"chunk_ms": 1000, "sample_rate": INPUT_SAMPLE_RATE_HZ}
"""Keys of the reference's configuration that have one possible value here."""


class G0Duplex(G0):
    """One session's translation. It remembers what a result has to repeat and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self._unit_index = 0
        self._kv_tokens = 0

    # ---- client -> worker

    def parse(self, frame: str) -> Command | Diagnostic | RefusedChunk:
        body = json_object(frame)
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
        # The reference's own words.
        raise BadMessage(f"Unknown message type: {word_of(kind)}")

    def _prepare(self, body: Mapping[str, Any]) -> protocol.Prepare:
        refuse_server_paths(body, "ref_audio_path")
        said = dict(section(body, "config"))
        if body.get("max_slice_nums") is not None:
            said["max_slice_nums"] = body["max_slice_nums"]
        settings, ignored = _settings(said)
        reference = voice(body, "ref_audio_base64")
        prepare = protocol.Prepare(
            system_prompt=_prompt(body.get("system_prompt")),
            settings=settings,
            reference_voice=reference,
            tts_reference_voice=voice(body, "tts_ref_audio_base64") or reference,
            deferred_finalize=flag("deferred_finalize", body.get("deferred_finalize"), True),
        )
        self._ignored = ignored
        return prepare

    # ---- gateway and worker -> client

    def failure(self, slug: str, message: str, sent_at: float) -> str:
        if slug == SessionTimeout.slug:
            return dump({"type": "timeout", "reason": message, "slug": slug})
        return super().failure(slug, message, sent_at)

    def dropped(self, wall_clock_ms: float, sent_at: float) -> str:
        silent = Result(
            seq=-1,
            is_listen=True,
            unit_index=self._unit_index,
            dropped=True,
            kv_tokens=self._kv_tokens,
        )
        return dump(_result(silent, wall_clock_ms, sent_at))

    def event(self, event: Event, wall_clock_ms: float, sent_at: float) -> tuple[str, ...]:
        match event:
            case Result():
                self._unit_index = event.unit_index
                self._kv_tokens = event.kv_tokens
                message = _result(event, wall_clock_ms, sent_at)
            case protocol.Prepared():
                message = {
                    "type": "prepared",
                    "prompt_length": event.prompt_chars,
                    "prompt_tokens": event.prompt_tokens,
                    "ignored": self._all_ignored(event.ignored),
                    "languages": event.languages,
                    **self._recording(),
                }
            case protocol.Paused():
                message = {"type": "paused", "timeout": event.timeout_s}
            case protocol.Resumed():
                message = {"type": "resumed"}
            case protocol.Interrupted():
                message = {"type": "interrupted"}
            case protocol.Stopped():
                return (self.stopped(),)
            case _:
                # `Notice` repeats what `dropped` on the result says; clients of this dialect have
                # no message for it.
                return ()
        return (dump(message),)


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


def _prompt(value: object) -> str:
    if value is None:
        return DEFAULT_PROMPT
    if not isinstance(value, str):
        raise BadMessage(f"system_prompt is {shown(value)}, expected a string")
    if len(value) > MAX_PROMPT_CHARS:
        raise BadMessage(
            f"system_prompt has {len(value)} characters, at most {MAX_PROMPT_CHARS} are accepted"
        )
    return value


def _chunk(body: Mapping[str, Any]) -> protocol.Input:
    audio = chunk_audio(body, MAX_CHUNK_S)
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
        force_listen=flag("force_listen", body.get("force_listen"), False),
        max_slice_nums=None if slices is None else SLICES("max_slice_nums", slices),
    )


def _image(text: str) -> bytes:
    image = file_bytes(text, "frame_base64_list")
    if not image:
        raise BadImage("frame_base64_list holds an empty frame")
    return image


def _pause_timeout(value: object) -> float | None:
    if value is None:
        return None
    return float(number(0.0, MAX_PAUSE_S, exclusive=True)("timeout", value))


def _settings(said: Mapping[str, Any]) -> tuple[DuplexSettings, tuple[str, ...]]:
    """Return the checked settings and the names that have no effect. null = not said."""
    ignored = tuple(
        key[:MAX_SHOWN_CHARS]
        for key, value in said.items()
        if key not in SETTINGS and FIXED.get(key, object()) != value
    )
    return msgspec.convert(checked(said, SETTINGS), DuplexSettings), ignored
