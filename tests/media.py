"""Media files made for tests."""

from __future__ import annotations

from pathlib import Path

import av
import numpy as np


def write_clip(path: Path, seconds: int) -> None:
    """A tone of 440 Hz beside a picture that is red in even seconds, blue in odd ones."""
    with av.open(str(path), "w") as container:
        video = container.add_stream("libx264", rate=10)
        video.width, video.height, video.pix_fmt = 2048, 512, "yuv420p"
        audio = container.add_stream("aac", rate=24_000, layout="mono")
        for index in range(seconds * 10):
            colour = (200, 0, 0) if index // 10 % 2 == 0 else (0, 0, 200)
            picture = np.full((512, 2048, 3), colour, np.uint8)
            container.mux(video.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(video.encode(None))
        tone = 0.3 * np.sin(2 * np.pi * 440 * np.arange(24_000 * seconds) / 24_000)
        sound = av.AudioFrame.from_ndarray(tone.astype(np.float32)[None], "fltp", "mono")
        sound.sample_rate = 24_000
        container.mux(audio.encode(sound))
        container.mux(audio.encode(None))
