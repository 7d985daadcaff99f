from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from client.media import read_audio
from shared.audio import read_wav, write_wav
from shared.clips import MediaError

ASSETS = Path(__file__).parents[1] / "assets"


def test_a_16_khz_wav_is_read_sample_by_sample() -> None:
    path = ASSETS / "capital_france.wav"

    np.testing.assert_array_equal(read_audio(path), read_wav(path)[0])


def test_other_rates_are_resampled_to_16_khz(tmp_path: Path) -> None:
    tone = 0.5 * np.sin(2 * np.pi * 500 * np.arange(44_100) / 44_100)
    write_wav(tmp_path / "tone.wav", tone.astype(np.float32), 44_100)

    audio = read_audio(tmp_path / "tone.wav")

    assert abs(audio.size - 16_000) < 100
    assert np.abs(np.fft.rfft(audio[:16_000], 16_000)).argmax() == 500


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(MediaError, match=r"gone\.wav: no such file"):
        read_audio(tmp_path / "gone.wav")


def test_audio_without_sound_is_refused(tmp_path: Path) -> None:
    Image.new("RGB", (32, 32)).save(tmp_path / "still.png")

    with pytest.raises(MediaError, match="holds no sound"):
        read_audio(tmp_path / "still.png")
