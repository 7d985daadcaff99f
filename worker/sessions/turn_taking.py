"""When a turn of the user begins and ends, from probabilities of speech: no model, no clock."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

import numpy as np

from shared.audio import Samples
from shared.errors import BadMessage
from shared.limits import INPUT_SAMPLE_RATE_HZ, MAX_TURN_S
from shared.protocol import VadSettings

WINDOW = 512
"""Samples that one probability is about; the same as the detector's."""

HYSTERESIS = 0.15
"""How far below the threshold the probability has to fall before speech counts as silence."""

SURE_SILENCE = 0.05
"""A probability below this is silence whatever the threshold: nothing is below 0, so a turn of a
client that asks for 0.15 or less (the demo's slider begins at 0.1) would never end."""

MAX_SETTING_MS = 10_000.0


@dataclass(frozen=True, slots=True)
class TurnBegan:
    """The user has begun to speak."""


@dataclass(frozen=True, slots=True, eq=False)
class TurnEnded:
    """The user has been silent for long enough."""

    samples: Samples | None
    """The turn, its padding and trailing silence included; None: too short to be one."""


TurnEvent = TurnBegan | TurnEnded


def check_settings(settings: VadSettings) -> None:
    """Raises BadMessage: a value that no voice detector can work with."""
    if not SURE_SILENCE < settings.threshold <= 1.0:
        raise BadMessage(
            f"threshold is {settings.threshold}, expected more than {SURE_SILENCE}, at most 1"
        )
    for name in ("min_speech_ms", "min_silence_ms", "speech_pad_ms"):
        value = getattr(settings, name)
        if not 0.0 <= value <= MAX_SETTING_MS:
            raise BadMessage(f"{name} is {value}, expected 0 to {MAX_SETTING_MS:g}")


class TurnTaker:
    """Cuts one stream of sound into turns.

    A turn begins at a probability of `threshold` or more, and ends once the speaker has been silent
    for `min_silence_ms`. Silence begins below `threshold` - 0.15, but not below 0.05; between the
    two it stays as it was. A turn is ended before it is longer than `MAX_TURN_S`.
    """

    def __init__(self, settings: VadSettings) -> None:
        self._settings = settings
        self._silence_below = max(settings.threshold - HYSTERESIS, SURE_SILENCE)
        self._pad = _n_samples(settings.speech_pad_ms)
        self._min_silence = _n_samples(settings.min_silence_ms)
        self._min_speech = _n_samples(settings.min_speech_ms)
        self._uncounted: Samples = np.zeros(0, np.float32)
        """Sound that no probability has been given for yet."""
        self._before: deque[Samples] = deque(maxlen=math.ceil(self._pad / WINDOW))
        """The last windows outside of a turn."""
        self._turn: list[Samples] = []
        """Of the turn: its padding, then its windows; empty outside of one."""
        self._n_windows = 0
        self._n_silent = 0
        """Windows of silence at the end of the turn."""

    @property
    def is_speaking(self) -> bool:
        """A turn has begun and not ended."""
        return bool(self._turn)

    def hear(self, samples: Samples, probabilities: Samples | list[float]) -> list[TurnEvent]:
        """Take what the detector was given and its answer; returns what happened, in order.

        A turn that is no shorter than it has to be is the last event: what was said after it, in
        the same samples, is not heard, because it is being answered.

        Args:
            samples: 16 kHz, any number.
            probabilities: one for each window that they have completed.
        """
        heard = np.concatenate((self._uncounted, samples))
        n = len(probabilities)
        self._uncounted = heard[n * WINDOW :].copy()
        events: list[TurnEvent] = []
        for index, probability in enumerate(probabilities):
            window = heard[index * WINDOW : (index + 1) * WINDOW]
            event = self._take(window, float(probability))
            if event is not None:
                events.append(event)
            if isinstance(event, TurnEnded) and event.samples is not None:
                break
        return events

    def _take(self, window: Samples, probability: float) -> TurnEvent | None:
        is_speech = probability >= self._settings.threshold
        if not self._turn:
            if not is_speech:
                self._before.append(window)
                return None
            padding = np.concatenate([*self._before, np.zeros(0, np.float32)])
            self._turn = [padding[len(padding) - min(self._pad, len(padding)) :], window]
            self._before.clear()
            self._n_windows, self._n_silent = 1, 0
            return TurnBegan()
        self._turn.append(window)
        self._n_windows += 1
        is_silence = probability < self._silence_below
        if is_silence or (self._n_silent and not is_speech):
            self._n_silent += 1
        else:
            self._n_silent = 0
        is_over = self._n_silent and self._n_silent * WINDOW >= self._min_silence
        n_with_next = len(self._turn[0]) + (self._n_windows + 1) * WINDOW
        is_too_long = n_with_next > MAX_TURN_S * INPUT_SAMPLE_RATE_HZ
        return self._end() if is_over or is_too_long else None

    def _end(self) -> TurnEnded:
        turn, self._turn = self._turn, []
        if (self._n_windows - self._n_silent) * WINDOW < self._min_speech:
            return TurnEnded(None)
        return TurnEnded(np.concatenate(turn))


def _n_samples(ms: float) -> int:
    return round(ms * INPUT_SAMPLE_RATE_HZ / 1000.0)
