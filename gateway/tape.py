"""The recording of a session as the session sees it: there may be none, and it never hurts."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import msgspec

from gateway.recording.contract import Recorder, SessionRecording
from shared.protocol import Ask, Command, Event, Open, Prepare, PrepareTurns, TextPart

log = logging.getLogger(__name__)


class Tape:
    """Begins with the first command that says what the session is for.

    A recorder that fails is logged and not asked again; the session goes on.

    Args:
        recorder: None = nothing is recorded.
    """

    def __init__(self, recorder: Recorder | None, opening: Open) -> None:
        self._recorder = recorder
        self._opening = opening
        self._recording: SessionRecording | None = None

    @property
    def recording_id(self) -> str | None:
        return self._recording.recording_id if self._recording is not None else None

    def took(self, command: Command, arrived_at: float, worker_index: int) -> None:
        """The worker is about to get a command that came at `arrived_at` (monotonic)."""
        if self._recorder is None:
            return
        if self._recording is None and isinstance(command, Prepare | PrepareTurns | Ask):
            self._guard(lambda: self._begin(command, worker_index))
        recording = self._recording
        if recording is not None:
            self._guard(lambda: recording.took(command, arrived_at))

    def gave(self, event: Event, wall_clock_ms: float, at: float) -> None:
        """The client is being told of an event; see `SessionRecording.gave`."""
        recording = self._recording
        if recording is not None:
            self._guard(lambda: recording.gave(event, wall_clock_ms, at))

    def end(self, reason: str) -> None:
        recording, self._recording, self._recorder = self._recording, None, None
        if recording is not None:
            self._guard(lambda: recording.end(reason))

    def _begin(self, command: Prepare | PrepareTurns | Ask, worker_index: int) -> None:
        assert self._recorder is not None
        opening = self._opening
        self._recording = self._recorder.begin(
            opening.session_id, opening.request_type, worker_index, config_of(command)
        )
        if self._recording is None:
            self._recorder = None

    def _guard(self, note: Callable[[], None]) -> None:
        try:
            note()
        except Exception:
            log.exception("recording failed session=%s", self._opening.session_id)
            self.end("recording_failed")


def config_of(command: Prepare | PrepareTurns | Ask) -> dict[str, Any]:
    """Return what a client has asked for, without its messages, voices, pictures and sound."""
    match command:
        case Prepare():
            return {
                "system_prompt": command.system_prompt,
                "deferred_finalize": command.deferred_finalize,
                "has_reference_voice": bool(command.reference_voice),
                **msgspec.to_builtins(command.settings),
            }
        case PrepareTurns():
            texts = [part.text for part in command.system if isinstance(part, TextPart)]
            return {
                "system_content": [{"type": "text", "text": text} for text in texts],
                "vad": msgspec.to_builtins(command.vad),
                "generation": msgspec.to_builtins(command.generation),
                "tts": {"enabled": command.speaks},
                "session": {"timeout_s": command.timeout_s},
            }
        case Ask():
            return {
                "generation": msgspec.to_builtins(command.generation),
                "streaming": command.is_streaming,
                "tts": {"enabled": command.speaks},
                "has_reference_voice": bool(command.voice),
                "max_slice_nums": command.max_slice_nums,
                "omni_mode": command.is_omni,
                "enable_thinking": command.enable_thinking,
                "use_tts_template": command.use_tts_template,
            }
