"""Makes `assets/warmup.mp4`: a spoken question about a sign that moves before the camera.

The same versions of the packages write the same bytes again: the voice has a fixed seed, the font
is the one inside of Pillow, and both encoders run on one thread.
"""

from __future__ import annotations

import math
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from shared.audio import Samples
from shared.limits import OUTPUT_SAMPLE_RATE_HZ
from worker.models.cascade.speech import Speaker, SynthesizeRequest

TARGET = Path(__file__).resolve().parents[1] / "assets" / "warmup.mp4"
QUESTION = "Hello there! Can you read this sign to me, please?"
SIGN = "OPEN TODAY\nFROM 9 TO 5"

SECONDS = 6
LEAD_IN_S = 0.3
FRAMES_PER_S = 10
WIDTH, HEIGHT = 640, 480
"""What browsers take of a camera unless they are told otherwise."""


def main() -> None:
    write_clip(TARGET, Speaker().synthesize(SynthesizeRequest(QUESTION)))
    print(f"{TARGET}: {TARGET.stat().st_size / 1000:.0f} kB")


def write_clip(path: Path, speech: Samples) -> None:
    """Write the clip with this speech (24 kHz) in it; what is longer than the clip is cut."""
    sound = np.zeros(SECONDS * OUTPUT_SAMPLE_RATE_HZ, np.float32)
    begin = round(LEAD_IN_S * OUTPUT_SAMPLE_RATE_HZ)
    room = sound[begin:]
    room[: len(speech)] = speech[: len(room)]
    with av.open(str(path), "w", options={"movflags": "+faststart"}) as container:
        video = container.add_stream("libx264", rate=FRAMES_PER_S)
        video.width, video.height, video.pix_fmt = WIDTH, HEIGHT, "yuv420p"
        video.options = {"preset": "slow", "crf": "26", "threads": "1"}
        audio = container.add_stream("aac", rate=OUTPUT_SAMPLE_RATE_HZ, layout="mono")
        audio.bit_rate = 64_000
        audio.options = {"threads": "1"}
        for index in range(SECONDS * FRAMES_PER_S):
            frame = av.VideoFrame.from_ndarray(picture(index / FRAMES_PER_S), format="rgb24")
            frame.pts, frame.time_base = index, Fraction(1, FRAMES_PER_S)
            container.mux(video.encode(frame))
        container.mux(video.encode(None))
        heard = av.AudioFrame.from_ndarray(sound[None], "fltp", "mono")
        heard.sample_rate = OUTPUT_SAMPLE_RATE_HZ
        container.mux(audio.encode(heard))
        container.mux(audio.encode(None))


def picture(at_s: float) -> NDArray[np.uint8]:
    """Return the camera's picture at this time, RGB `[H, W, 3]`: a sign that sways."""
    down = np.linspace(0.0, 1.0, HEIGHT)[:, None, None]
    wall = (1.0 - down) * np.array([150, 170, 190]) + down * np.array([90, 80, 70])
    image = Image.fromarray(np.broadcast_to(wall, (HEIGHT, WIDTH, 3)).astype(np.uint8))
    draw = ImageDraw.Draw(image)
    x = WIDTH / 2 + 60 * math.sin(2 * math.pi * 0.25 * at_s)
    y = HEIGHT / 2 + 25 * math.sin(2 * math.pi * 0.4 * at_s)
    draw.rectangle((x - 12, y, x + 12, HEIGHT), fill=(96, 64, 40))
    draw.rounded_rectangle(
        (x - 220, y - 100, x + 220, y + 100),
        16,
        fill=(250, 245, 225),
        outline=(40, 40, 40),
        width=6,
    )
    font = ImageFont.load_default(56)
    draw.multiline_text((x, y), SIGN, fill=(20, 20, 20), font=font, anchor="mm", align="center")
    return np.asarray(image)


if __name__ == "__main__":
    main()
