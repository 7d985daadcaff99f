"""An answer that goes out piece by piece as it is made: of chat, and of half-duplex turns."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from shared.limits import OUTPUT_SAMPLE_RATE_HZ
from worker.engine.contract import Emit
from worker.models.cascade.answer import NO_SAMPLES, Answer
from worker.models.contract import Piece


@dataclass(slots=True)
class Reply(Answer):
    """Phrases with their sound, or bare text token by token."""

    speaks: bool
    first_due: float
    """Engine clock by which its first piece is needed; inf = when nothing else is to do."""
    is_streamed: bool = True
    texts: list[str] = field(default_factory=list)
    sounds: list[NDArray[np.float32]] = field(default_factory=list)
    """Kept where nothing is streamed."""
    said_s: float = 0.0
    """Length of the sound made so far: for so long the client is busy with it."""

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def audio(self) -> NDArray[np.float32]:
        """24 kHz; empty where it was streamed."""
        return np.concatenate(self.sounds) if self.sounds else NO_SAMPLES

    def text_due(self) -> float:
        return self.first_due + self.said_s

    def speech_due(self) -> float:
        return self.first_due + self.said_s

    def put(self, text: str, audio: NDArray[np.float32]) -> Emit | None:
        self.texts.append(text)
        self.said_s += len(audio) / OUTPUT_SAMPLE_RATE_HZ
        if self.is_streamed:
            return Emit(Piece(text, audio))
        self.sounds.append(audio)
        return None

    def comes_in_phrases(self) -> bool:
        return self.speaks
