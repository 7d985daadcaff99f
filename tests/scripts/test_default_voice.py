"""The script that makes the default voice, with another voice than the real one."""

from __future__ import annotations

import numpy as np
import pytest

from scripts.make_default_voice import EDGE_S, PAUSE_S, at_input_rate, joined


def test_sentences_are_joined_with_a_pause_and_quiet_edges() -> None:
    samples = joined([np.ones(24_000, np.float32), np.ones(12_000, np.float32)])

    edge, pause = round(EDGE_S * 24_000), round(PAUSE_S * 24_000)
    assert samples.size == 2 * edge + 36_000 + pause
    assert not samples[:edge].any()
    assert not samples[edge + 24_000 : edge + 24_000 + pause].any()
    assert not samples[-edge:].any()


def test_sound_becomes_16_khz() -> None:
    tone = np.sin(2 * np.pi * 440 * np.arange(24_000) / 24_000).astype(np.float32)

    samples = at_input_rate(tone)

    assert samples.size == pytest.approx(16_000, abs=50)
    spectrum = np.abs(np.fft.rfft(samples[4000:12_000]))
    assert spectrum.argmax() * 2 == 440
