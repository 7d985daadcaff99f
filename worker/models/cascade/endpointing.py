"""When does the user speak? From one speech probability per 32 ms window to utterances.

Pure decisions, no audio and no tensors: tested with lists of numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

WINDOW_SAMPLES: Final = 512
"""Samples (16 kHz) of one voice activity window."""

WINDOW_S: Final = WINDOW_SAMPLES / 16_000


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """Thresholds of the detector; probabilities between `off` and `on` keep what was decided."""

    on: float
    off: float
    min_speech_windows: int
    """Windows of speech before it counts as the user's."""


LISTENING: Final = Sensitivity(on=0.5, off=0.3, min_speech_windows=4)
SPEAKING: Final = Sensitivity(on=0.7, off=0.45, min_speech_windows=6)
"""While the assistant speaks: higher, so that what its own voice leaks into the microphone does
not stop it; 6 windows = 192 ms, so that 300 ms of speech in a chunk do."""

MAX_GAP_WINDOWS: Final = 3
"""A run of speech survives this many quiet windows (stop consonants)."""

CONTINUING_WINDOWS: Final = 2
"""Windows of speech that keep an utterance open: its last word may be short."""

END_SILENCE_S: Final = 0.5
"""Silence after which an utterance has ended."""

EARLY_SILENCE_S: Final = 0.096
"""Silence after which an answer may be prepared, before it is known that the user has finished."""


@dataclass(slots=True)
class Endpointer:
    """Follows one session's speech. All positions are window numbers since the session began."""

    position: int = 0
    """Windows seen."""
    utterance_start: int | None = None
    """First window of the utterance that is going on; None = the user is silent."""
    last_speech: int = 0
    """Window after the last one with speech."""
    _run_start: int = 0
    _run_windows: int = 0
    _run_gap: int = 0

    @property
    def in_utterance(self) -> bool:
        return self.utterance_start is not None

    @property
    def silence_s(self) -> float:
        """Seconds since the last speech of the utterance that is going on."""
        return (self.position - self.last_speech) * WINDOW_S

    @property
    def has_ended(self) -> bool:
        return self.in_utterance and self.silence_s >= END_SILENCE_S

    def hear(self, probabilities: Sequence[float], sensitivity: Sensitivity) -> bool:
        """Take the windows of one unit; return True if speech was heard in it.

        Speech means: a run of at least `min_speech_windows` has begun or gone on in this unit.
        """
        spoke = False
        for probability in probabilities:
            spoke |= self._window(float(probability), sensitivity)
        return spoke

    def finish(self) -> None:
        """Forget the utterance: it has been taken over by an answer."""
        self.utterance_start = None
        self._run_windows = 0

    def _window(self, probability: float, sensitivity: Sensitivity) -> bool:
        here = self.position
        self.position += 1
        is_speech = probability >= (sensitivity.off if self._run_windows else sensitivity.on)
        if not is_speech:
            self._run_gap += 1
            if self._run_gap > MAX_GAP_WINDOWS:
                self._run_windows = 0
            return False
        if not self._run_windows:
            self._run_start = here
        self._run_windows += 1
        self._run_gap = 0
        needed = CONTINUING_WINDOWS if self.in_utterance else sensitivity.min_speech_windows
        if self._run_windows < needed:
            return False
        if self.utterance_start is None:
            self.utterance_start = self._run_start
        self.last_speech = here + 1
        return True
