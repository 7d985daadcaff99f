"""What a client sends of a sound file, and what of an answer can be heard."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from shared.audio import Samples
from shared.clips import MediaError, read_clip

AUDIBLE = 0.01
"""Sample magnitude (-40 dBFS) below which sound counts as silence."""


def read_audio(path: Path) -> Samples:
    """Return the sound of a WAV or any audio or video file as float32 16 kHz mono.

    Raises:
        MediaError: no such file, unreadable, or without sound.
    """
    audio = read_clip(path).audio
    if not audio.size:
        raise MediaError(f"{path}: holds no sound")
    return audio


def audible_span(samples: Samples) -> tuple[int, int]:
    """Return the index of the first audible sample and the one after the last; 0, 0 if none is."""
    audible = np.flatnonzero(np.abs(samples) > AUDIBLE)
    return (int(audible[0]), int(audible[-1]) + 1) if audible.size else (0, 0)
