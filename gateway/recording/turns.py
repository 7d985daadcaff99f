"""The log of a half-duplex or chat session -> the turns of `recording.json` and their files."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, Final, TypeVar

from gateway.recording.assets import Assets
from gateway.recording.journal import Record
from shared.audio import F32_BYTES
from shared.limits import INPUT_SAMPLE_RATE_HZ, OUTPUT_SAMPLE_RATE_HZ
from shared.protocol import (
    Answered,
    Ask,
    AudioPart,
    ChatMessage,
    Delta,
    Failure,
    Generating,
    ImagePart,
    Input,
    Speaking,
    TextPart,
    TurnDone,
    VideoPart,
)

P = TypeVar("P", TextPart, ImagePart, AudioPart, VideoPart)

MAX_HEARD_BYTES: Final = 40 * INPUT_SAMPLE_RATE_HZ * F32_BYTES
"""Of the microphone that are kept to cut a turn from: the longest turn and what is around it."""

MARGIN_S: Final = 0.5
"""Around a turn: the gateway sees where it ends only as well as chunks and events are apart."""


class _Open:
    """A turn that is being answered."""

    def __init__(self, entry: dict[str, Any], name: str, began_at: float) -> None:
        self.entry = entry
        self.name = name
        self.began_at = began_at
        self.texts: list[str] = []
        self.sounds: list[bytes] = []

    def add(self, delta: Delta) -> None:
        self.texts.append(delta.text)
        if delta.audio:
            self.sounds.append(delta.audio)

    def close(self, assets: Assets, at: float, text: str | None, sound: bytes = b"") -> None:
        """Raises OSError."""
        output: dict[str, Any] = {"text": "".join(self.texts) if text is None else text}
        sounds = [sound] if sound else self.sounds
        if sounds:
            output["audio"], output["audio_duration_ms"] = assets.audio(
                self.name, sounds, OUTPUT_SAMPLE_RATE_HZ
            )
        self.entry["output"] = output
        self.entry["timing"]["elapsed_ms"] = round(1000.0 * (at - self.began_at), 1)


class _Turns:
    """What both kinds of logs have: turns, of which one may be open."""

    def __init__(self, assets: Assets) -> None:
        self._assets = assets
        self._turns: list[dict[str, Any]] = []
        self._open: _Open | None = None
        self._last_at = 0.0

    def fail(self, slug: str) -> None:
        """The session has failed: note it in the turn that is open, unless its worker said why."""
        if self._open is not None:
            self._open.entry.setdefault("error", slug)

    @property
    def body(self) -> dict[str, Any]:
        self._close()
        return {"turns": self._turns}

    def _close(self) -> None:
        """End the turn that is open, if there is one, with what has been said so far."""
        if self._open is not None:
            self._open.close(self._assets, self._last_at, None)
            self._open = None


class SpokenTurns(_Turns):
    """A half-duplex log. The turn's sound is cut out of what the microphone has sent."""

    def __init__(self, assets: Assets) -> None:
        super().__init__(assets)
        self._heard: deque[bytes] = deque()
        self._n_heard = 0
        self._ended: list[bytes] = []
        """What had been sent when the turn was found to have ended."""
        self._speaks_since: float | None = None
        """When a turn was found to have begun whose end has not been found."""

    def take(self, record: Record) -> None:
        """Raises OSError."""
        self._last_at = max(self._last_at, record.at)
        match record.message:
            case Input():
                self._hear(record.message.audio)
            case Speaking(is_speaking=True):
                self._speaks_since = record.at
                self._ended = []
            case Speaking(is_speaking=False):
                self._speaks_since = None
                self._ended = list(self._heard)
            case Generating():
                self._begin(record.message.speech_ms, record.at)
            case Delta() if self._open is not None:
                self._open.add(record.message)
            case TurnDone() if self._open is not None:
                self._done(self._open, record.message, record.at)
            case Failure(seq=None) if self._open is not None:
                self._open.entry["error"] = record.message.slug
                self._close()

    def fail(self, slug: str) -> None:
        self._break_off()
        super().fail(slug)

    @property
    def body(self) -> dict[str, Any]:
        self._break_off()
        return super().body

    def _break_off(self) -> None:
        """The log ends in the middle of what the user said: that is kept, without an answer."""
        if self._speaks_since is not None:
            self._close()
            self._begin(1000.0 * (self._last_at - self._speaks_since), self._last_at)

    def _hear(self, audio: bytes) -> None:
        self._heard.append(audio)
        self._n_heard += len(audio)
        while self._n_heard > MAX_HEARD_BYTES and len(self._heard) > 1:
            self._n_heard -= len(self._heard.popleft())

    def _begin(self, speech_ms: float, at: float) -> None:
        self._speaks_since = None
        index = len(self._turns) + 1
        name = f"user_audio/{index - 1:03d}.wav"
        n_bytes = round((speech_ms / 1000.0 + MARGIN_S) * INPUT_SAMPLE_RATE_HZ) * F32_BYTES
        sound = b"".join(self._ended or self._heard)[-n_bytes:]
        path, duration_ms = self._assets.audio(name, [sound], INPUT_SAMPLE_RATE_HZ)
        entry: dict[str, Any] = {
            "turn_index": index,
            "request_ts_ms": round(1000.0 * at, 1),
            "input": {"type": "audio", "audio": path, "duration_ms": duration_ms},
            "output": {"text": ""},
            "timing": {"speech_input_ms": round(speech_ms, 1)},
        }
        self._turns.append(entry)
        self._open = _Open(entry, f"ai_audio/turn_{index}.wav", at)
        self._ended = []

    def _done(self, turn: _Open, done: TurnDone, at: float) -> None:
        turn.entry["turn_index"] = done.turn_index
        if done.heard:
            turn.entry["input"]["text"] = done.heard
        turn.entry["timing"]["tokens"] = done.n_tokens
        turn.close(self._assets, at, done.text)
        self._open = None


class ChatTurns(_Turns):
    """A chat log: one request, its newest message with files, the earlier ones as text."""

    def take(self, record: Record) -> None:
        """Raises OSError."""
        self._last_at = max(self._last_at, record.at)
        match record.message:
            case Ask() if not self._turns:
                self._ask(record.message, record.at)
            case Delta() if self._open is not None:
                self._open.add(record.message)
            case Answered() if self._open is not None:
                self._answered(self._open, record.message, record.at)
            case Failure() if self._open is not None:
                self._open.entry["error"] = record.message.slug

    def _ask(self, ask: Ask, at: float) -> None:
        *earlier, newest = ask.messages or [ChatMessage("user", [])]
        said = self._input(newest)
        if earlier:
            said["history"] = [{"role": m.role, "text": text_of(m)} for m in earlier]
        entry: dict[str, Any] = {
            "turn_index": 0,
            "request_ts_ms": round(1000.0 * at, 1),
            "input": said,
            "output": {"text": ""},
            "timing": {},
        }
        self._turns.append(entry)
        self._open = _Open(entry, "ai_audio/turn_0.wav", at)

    def _input(self, message: ChatMessage) -> dict[str, Any]:
        said: dict[str, Any] = {"text": text_of(message)}
        clips = [
            self._assets.audio(f"user_audio/{i:03d}.wav", [part.data], INPUT_SAMPLE_RATE_HZ)
            for i, part in enumerate(_parts(message, AudioPart))
        ]
        if clips:
            said["audio"], said["duration_ms"] = clips[0]
            said["audios"] = [path for path, _ in clips]
        images = [
            self._assets.image(f"user_images/img_{i}", part.data)
            for i, part in enumerate(_parts(message, ImagePart))
        ]
        videos = [
            self._assets.video(f"user_videos/vid_{i}", part.data)
            for i, part in enumerate(_parts(message, VideoPart))
        ]
        if images:
            said["images"] = images
        if videos:
            said["videos"] = videos
        return said

    def _answered(self, turn: _Open, answer: Answered, at: float) -> None:
        turn.entry["timing"]["tokens"] = answer.n_generated_tokens
        turn.entry["timing"]["input_tokens"] = answer.n_input_tokens
        turn.close(self._assets, at, answer.text, answer.audio)
        self._open = None


def text_of(message: ChatMessage) -> str:
    return "\n".join(part.text for part in _parts(message, TextPart))


def _parts(message: ChatMessage, kind: type[P]) -> Sequence[P]:
    return [part for part in message.parts if isinstance(part, kind)]
