from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from client.media import MediaError, read_audio, read_clip
from shared.audio import read_wav, write_wav
from tests.media import write_clip

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


def test_a_video_gives_sound_and_one_small_jpeg_per_second(tmp_path: Path) -> None:
    write_clip(tmp_path / "clip.mp4", seconds=3)

    clip = read_clip(tmp_path / "clip.mp4")

    pictures = [Image.open(io.BytesIO(frame)) for frame in clip.frames]
    colours = [picture.resize((1, 1)).getpixel((0, 0)) for picture in pictures]
    assert [picture.size for picture in pictures] == [(1024, 256)] * 3
    assert [colour[0] > colour[2] for colour in colours] == [True, False, True]  # type: ignore[index]
    assert abs(clip.audio.size - 48_000) < 2_000


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(MediaError, match=r"gone\.wav: no such file"):
        read_audio(tmp_path / "gone.wav")


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "note.txt").write_text("hello")

    with pytest.raises(MediaError, match="cannot be read"):
        read_clip(tmp_path / "note.txt")


def test_audio_without_sound_is_refused(tmp_path: Path) -> None:
    Image.new("RGB", (32, 32)).save(tmp_path / "still.png")

    with pytest.raises(MediaError, match="holds no sound"):
        read_audio(tmp_path / "still.png")
