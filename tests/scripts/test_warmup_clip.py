"""The clip that workers play before they take clients."""

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from scripts.make_warmup_clip import HEIGHT, QUESTION, SECONDS, TARGET, WIDTH, picture, write_clip
from shared.clips import read_clip
from worker.models.cascade.reading import Reader, ReadRequest, needs_camera


def test_the_same_speech_gives_the_same_file(tmp_path: Path):
    speech = 0.3 * np.sin(np.arange(3 * 24_000) / 10).astype(np.float32)

    for name in ("a.mp4", "b.mp4"):
        write_clip(tmp_path / name, speech)

    assert (tmp_path / "a.mp4").read_bytes() == (tmp_path / "b.mp4").read_bytes()
    clip = read_clip(tmp_path / "a.mp4")
    assert len(clip.frames) == SECONDS
    loud = np.flatnonzero(np.abs(clip.audio) > 0.1) / 16_000
    assert (loud[0], loud[-1]) == pytest.approx((0.3, 3.3), abs=0.05)


def test_speech_that_is_too_long_is_cut(tmp_path: Path):
    write_clip(tmp_path / "clip.mp4", np.full(10 * 24_000, 0.3, np.float32))

    assert read_clip(tmp_path / "clip.mp4").audio.size == pytest.approx(SECONDS * 16_000, abs=1600)


def test_the_picture_moves():
    first, later = picture(0.0), picture(1.0)

    assert first.shape == later.shape == (HEIGHT, WIDTH, 3)
    assert (first != later).any()


@pytest.mark.weights
def test_the_question_is_about_what_can_be_read():
    assert needs_camera(QUESTION)
    reader = Reader()
    for jpeg in read_clip(TARGET).frames:
        frame = np.asarray(Image.open(io.BytesIO(jpeg)))
        read = reader.read(ReadRequest(frame))
        assert read.replace(" ", "") == "OPENTODAY\nFROM9TO5"
