"""G0 of a half-duplex session (`/ws/half_duplex`): the worker hears turns and answers them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gateway.dialects.g0 import G0, dump
from gateway.dialects.g0_messages import GENERATION, generation, parts, text_chars
from gateway.dialects.g0_values import (
    Check,
    checked,
    chunk_audio,
    flag,
    json_object,
    number,
    section,
    unknown,
    word_of,
)
from shared import protocol
from shared.audio import F32_BYTES, encode_base64
from shared.errors import BadAudio, BadMessage, NotPrepared, SessionTimeout
from shared.limits import (
    INPUT_SAMPLE_RATE_HZ,
    MAX_CHUNK_S,
    MAX_PROMPT_CHARS,
    MAX_REFERENCE_VOICE_S,
    OUTPUT_SAMPLE_RATE_HZ,
)
from shared.protocol import AudioPart, Command, Event, VadSettings

MAX_NEW_TOKENS = 256
"""Length of an answer where the client does not say it."""

NOT_PREPARED = "Not prepared yet"
"""The reference's own words."""

TIMEOUT_S = 300.0
MAX_TIMEOUT_S = 3600.0

VAD: Mapping[str, Check] = {
    # Below 0.05 everything is silence. The page of the demo offers 0.1 to 0.95.
    "threshold": number(0.05, 1, exclusive=True),
    "min_speech_duration_ms": number(0, 10_000),
    "min_silence_duration_ms": number(0, 10_000),
    "speech_pad_ms": number(0, 2000),
}
"""`config.vad`: key -> check of its bounds."""

VAD_NAMES = {
    "threshold": "threshold",
    "min_speech_duration_ms": "min_speech_ms",
    "min_silence_duration_ms": "min_silence_ms",
    "speech_pad_ms": "speech_pad_ms",
}
SESSION: Mapping[str, Check] = {"timeout_s": number(1, MAX_TIMEOUT_S)}
TTS = ("enabled",)
PREPARE = ("type", "system_content", "config")
CONFIG: Mapping[str, Mapping[str, Any] | tuple[str, ...]] = {
    "vad": VAD,
    "generation": GENERATION,
    "tts": TTS,
    "session": SESSION,
}


class G0HalfDuplex(G0):
    """One session's translation.

    Args:
        session_id: repeated in `prepared`.
    """

    def __init__(self, session_id: str) -> None:
        super().__init__()
        self._session_id = session_id
        self._is_prepare_sent = False
        self._timeout_s = TIMEOUT_S
        self._began_at: float | None = None
        """When the session was prepared, or before that, when it got its place."""
        self._n_chunks = 0
        """Of the answer that is under way."""

    # ---- client -> worker

    def parse(self, frame: str) -> Command:
        body = json_object(frame)
        kind = body.get("type")
        match kind:
            case "audio_chunk":
                if not self._is_prepare_sent:
                    raise NotPrepared(NOT_PREPARED)
                return protocol.Input(seq=-1, audio=chunk_audio(body, MAX_CHUNK_S))
            case "prepare":
                return self._prepare(body)
            case "interrupt":
                return protocol.Interrupt()
            case "stop":
                return protocol.Stop()
        # The reference's own words.
        raise BadMessage(f"Unknown type: {word_of(kind)}")

    def _prepare(self, body: Mapping[str, Any]) -> protocol.PrepareTurns:
        config = section(body, "config")
        said = {name: section(config, name) for name in CONFIG}
        vad = checked(said["vad"], VAD, "vad.")
        limits = checked(said["session"], SESSION, "session.")
        prepare = protocol.PrepareTurns(
            system=_system(body.get("system_content")),
            vad=VadSettings(**{VAD_NAMES[key]: value for key, value in vad.items()}),
            generation=generation(said["generation"], MAX_NEW_TOKENS),
            speaks=flag("tts.enabled", said["tts"].get("enabled"), True),
            timeout_s=limits.get("timeout_s", TIMEOUT_S),
        )
        self._ignored = (
            *unknown(body, PREPARE),
            *unknown(config, CONFIG),
            *(
                f"{name}.{key}"
                for name, known in CONFIG.items()
                for key in unknown(said[name], known)
            ),
        )
        self._timeout_s = prepare.timeout_s
        self._is_prepare_sent = True
        return prepare

    # ---- gateway and worker -> client

    def queue_done(self, sent_at: float) -> str | None:
        self._began_at = sent_at
        return super().queue_done(sent_at)

    def failure(self, slug: str, message: str, sent_at: float) -> str:
        if slug == SessionTimeout.slug:
            began_at = sent_at if self._began_at is None else self._began_at
            return dump(
                {
                    "type": "timeout",
                    "elapsed_s": round(max(0.0, sent_at - began_at), 1),
                    "reason": message,
                    "slug": slug,
                }
            )
        if slug == NotPrepared.slug:
            message = NOT_PREPARED
        return super().failure(slug, message, sent_at)

    def dropped(self, wall_clock_ms: float, sent_at: float) -> str:
        return _notice("input_dropped", "Sound came faster than it could be used", 1)

    def event(self, event: Event, wall_clock_ms: float, sent_at: float) -> tuple[str, ...]:
        match event:
            case protocol.Prepared():
                self._began_at = sent_at
                message = {
                    "type": "prepared",
                    "session_id": self._session_id,
                    "timeout_s": self._timeout_s,
                    "ignored": self._all_ignored(event.ignored),
                    "languages": event.languages,
                    **self._recording(),
                }
            case protocol.Speaking():
                message = {"type": "vad_state", "speaking": event.is_speaking}
            case protocol.Generating():
                self._n_chunks = 0
                message = {
                    "type": "generating",
                    "speech_duration_ms": round(event.speech_ms, 1),
                }
            case protocol.Delta():
                message = self._chunk(event.text, event.audio, is_final=False)
            case protocol.TurnDone():
                # Which piece is the last one is known when there is no other: the mark gets a
                # chunk of its own.
                last = self._chunk("", b"", is_final=True)
                message = {
                    "type": "turn_done",
                    "turn_index": event.turn_index,
                    "text": event.text,
                }
                if event.heard:
                    message["heard"] = event.heard
                return dump(last), dump(message)
            case protocol.Interrupted():
                message = {"type": "interrupted"}
            case protocol.Notice():
                return (_notice(event.slug, event.message, event.count),)
            case protocol.Stopped():
                return (self.stopped(),)
            case _:
                return ()
        return (dump(message),)

    def _chunk(self, text: str, audio: bytes, *, is_final: bool) -> dict[str, Any]:
        duration_s = len(audio) / F32_BYTES / OUTPUT_SAMPLE_RATE_HZ
        message = {
            "type": "chunk",
            "chunk_index": self._n_chunks,
            "text_delta": text,
            "audio_data": encode_base64(audio) if audio else None,
            "audio_sample_rate": OUTPUT_SAMPLE_RATE_HZ,
            "is_final": is_final,
            "duration_ms": round(duration_s * 1000.0, 1),
        }
        self._n_chunks += 1
        return message


def _notice(slug: str, message: str, count: int) -> str:
    return dump({"type": "notice", "slug": slug, "message": message, "count": count})


def _system(content: object) -> list[protocol.Part]:
    found = parts(content, "system_content", ("text", "audio"))
    n_chars = text_chars(found)
    if n_chars > MAX_PROMPT_CHARS:
        raise BadMessage(
            f"system_content has {n_chars} characters, at most {MAX_PROMPT_CHARS} are accepted"
        )
    n_bytes = sum(len(part.data) for part in found if isinstance(part, AudioPart))
    if n_bytes > MAX_REFERENCE_VOICE_S * INPUT_SAMPLE_RATE_HZ * F32_BYTES:
        raise BadAudio(
            f"system_content has more than {MAX_REFERENCE_VOICE_S:g} s of sound, which is too long"
        )
    return found
