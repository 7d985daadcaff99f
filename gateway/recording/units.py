"""A full-duplex log -> the chunks of `recording.json` and their files."""

from __future__ import annotations

from typing import Any

from gateway.recording.assets import Assets
from gateway.recording.journal import Record
from shared.limits import INPUT_SAMPLE_RATE_HZ, OUTPUT_SAMPLE_RATE_HZ
from shared.protocol import Failure, Input, Result

LISTEN = "LISTEN"
SPEAK = "SPEAK"


class Units:
    """Takes the records one by one; `body` is what they come to."""

    def __init__(self, assets: Assets) -> None:
        self._assets = assets
        self._chunks: list[dict[str, Any]] = []
        self._unanswered: dict[int, dict[str, Any]] = {}
        """By the chunk's number on the wire."""
        self._turn = 0
        self._is_turn_open = False

    def take(self, record: Record) -> None:
        """Raises OSError."""
        match record.message:
            case Input():
                self._input(record.message, record.at)
            case Result():
                self._result(record.message, record.wall_clock_ms)
            case Failure(seq=int() as seq):
                chunk = self._unanswered.pop(seq, None)
                if chunk is not None:
                    chunk["error"] = record.message.slug

    def fail(self, slug: str) -> None:
        """The session has failed: note it where it owed an answer, or in the turn it broke off."""
        broken = list(self._unanswered.values())
        if not broken and self._is_turn_open:
            broken = self._chunks[-1:]
        for chunk in broken:
            chunk["error"] = slug

    @property
    def body(self) -> dict[str, Any]:
        return {"chunks": self._chunks}

    def _input(self, chunk: Input, at: float) -> None:
        index = len(self._chunks)
        entry: dict[str, Any] = {
            "index": index,
            "receive_ts_ms": round(1000.0 * at, 1),
            # As it stays where no result has come.
            "result": {"mode": LISTEN, "timing": {}},
        }
        name = f"user_audio/{index:03d}.wav"
        entry["user_audio"], _ = self._assets.audio(name, [chunk.audio], INPUT_SAMPLE_RATE_HZ)
        if chunk.frames:
            entry["user_frame"] = self._assets.image(f"user_frames/{index:03d}", chunk.frames[0])
        self._chunks.append(entry)
        self._unanswered[chunk.seq] = entry

    def _result(self, result: Result, wall_clock_ms: float) -> None:
        entry = self._unanswered.pop(result.seq, None)
        if entry is None:
            return
        said: dict[str, Any] = {
            "mode": LISTEN if result.is_listen else SPEAK,
            "timing": timing_of(result, wall_clock_ms),
        }
        if result.text:
            said["text"] = result.text
        if result.audio:
            name = f"ai_audio/turn_{self._turn}_chunk_{entry['index']:03d}.wav"
            said["ai_audio"], said["ai_audio_duration_ms"] = self._assets.audio(
                name, [result.audio], OUTPUT_SAMPLE_RATE_HZ
            )
        for flag in ("end_of_turn", "interrupted", "dropped"):
            if getattr(result, flag):
                said[flag] = True
        if result.heard:
            said["heard"] = result.heard
        entry["result"] = said
        if result.is_listen or result.end_of_turn:
            self._turn += self._is_turn_open or not result.is_listen
            self._is_turn_open = False
        else:
            self._is_turn_open = True


def timing_of(result: Result, wall_clock_ms: float) -> dict[str, float]:
    """Return milliseconds and counts under the wire's names."""
    timings = result.timings
    return {
        "prefill_ms": round(timings.prefill_ms, 3),
        "llm_ms": round(timings.prefill_ms + timings.decode_ms, 3),
        "tts_prep_ms": 0.0,
        "tts_ms": round(timings.speech_tokens_ms, 3),
        "token2wav_ms": round(timings.vocode_ms, 3),
        "all_ms": round(timings.total_ms, 3),
        "wall_clock_ms": round(wall_clock_ms, 3),
        "n_tokens": result.n_tokens,
        "n_tts_tokens": result.n_speech_tokens,
        "kv_cache_length": result.kv_tokens,
        "vision_slices": result.vision_slices,
        "vision_tokens": result.vision_tokens,
    }
