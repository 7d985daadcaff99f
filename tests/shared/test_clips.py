from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from shared.clips import MediaError, read_clip
from tests.media import write_clip


def colours(frames: tuple[bytes, ...]) -> list[str]:
    pixels = [
        Image.open(io.BytesIO(frame)).resize((1, 1)).convert("RGB").tobytes() for frame in frames
    ]
    return ["red" if pixel[0] > pixel[2] else "blue" for pixel in pixels]


def test_a_video_gives_sound_and_one_small_jpeg_per_second(tmp_path: Path) -> None:
    write_clip(tmp_path / "clip.mp4", seconds=3)

    clip = read_clip(tmp_path / "clip.mp4")

    sizes = [Image.open(io.BytesIO(frame)).size for frame in clip.frames]
    assert sizes == [(1024, 256)] * 3
    assert colours(clip.frames) == ["red", "blue", "red"]
    assert abs(clip.audio.size - 48_000) < 2_000


def test_only_the_beginning_of_a_long_video_is_read(tmp_path: Path) -> None:
    write_clip(tmp_path / "clip.mp4", seconds=3)

    whole, begin = read_clip(tmp_path / "clip.mp4"), read_clip(tmp_path / "clip.mp4", max_s=1.5)

    assert colours(begin.frames) == ["red", "blue"]
    # The resampler is flushed at the cut.
    np.testing.assert_allclose(begin.audio[:23_900], whole.audio[:23_900], atol=1e-6)
    assert begin.audio.size == 24_000


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(MediaError, match=r"gone\.mp4: no such file"):
        read_clip(tmp_path / "gone.mp4")


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "note.txt").write_text("hello")

    with pytest.raises(MediaError, match="cannot be read"):
        read_clip(tmp_path / "note.txt")


def test_a_video_that_breaks_off_is_refused(tmp_path: Path) -> None:
    write_clip(tmp_path / "clip.mp4", seconds=1)
    data = (tmp_path / "clip.mp4").read_bytes()
    (tmp_path / "half.mp4").write_bytes(data[: len(data) // 2])

    with pytest.raises(MediaError, match="cannot be read"):
        read_clip(tmp_path / "half.mp4")
