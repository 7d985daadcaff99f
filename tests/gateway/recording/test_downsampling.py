"""Sound at 16 kHz is what it was at 24 kHz, however it is cut into pieces."""

from __future__ import annotations

import numpy as np
import pytest

from gateway.recording.downsampling import To16Khz


def sine(hz, rate, seconds=1.0):
    at = np.arange(round(seconds * rate)) / rate
    return np.sin(2 * np.pi * hz * at).astype(np.float32)


@pytest.mark.parametrize("hz", [50, 440, 3000, 6000])
def test_a_tone_keeps_pitch_phase_and_level(hz):
    made = To16Khz().take(sine(hz, 24_000))

    assert len(made) == 16_000
    assert np.abs(made - sine(hz, 16_000))[100:-100].max() < 0.02


def test_what_16_khz_cannot_hold_is_gone():
    assert np.abs(To16Khz().take(sine(9500, 24_000)))[100:-100].max() < 0.02


@pytest.mark.parametrize("length", [100, 1000, 8000])
def test_pieces_join_without_a_seam(length):
    whole = sine(440, 24_000)
    run = To16Khz()

    made = np.concatenate([run.take(whole[i : i + length]) for i in range(0, 24_000, length)])

    assert len(made) == 16_000
    assert np.abs(made - sine(440, 16_000))[100:-100].max() < 0.02
