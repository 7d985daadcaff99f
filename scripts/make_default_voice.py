"""Makes `assets/ref_audio/default.wav`: the voice of sessions that bring none.

The same versions of the packages write the same bytes again: the voice has a fixed seed.
"""

from __future__ import annotations

from pathlib import Path

import av
import numpy as np

from shared.audio import Samples, write_wav
from shared.limits import INPUT_SAMPLE_RATE_HZ, OUTPUT_SAMPLE_RATE_HZ
from worker.models.cascade.speech import Speaker, SynthesizeRequest

TARGET = Path(__file__).resolve().parents[1] / "assets" / "ref_audio" / "default.wav"
SENTENCES = (
    "The morning train follows the river and reaches the lake before noon.",
    "From there it is a short walk to the old town and its market.",
)
"""Neutral, and with most sounds of the language in them."""

PAUSE_S = 0.4
EDGE_S = 0.15


def main() -> None:
    speaker = Speaker()
    speech = [speaker.synthesize(SynthesizeRequest(sentence)) for sentence in SENTENCES]
    samples = at_input_rate(joined(speech))
    TARGET.parent.mkdir(exist_ok=True)
    write_wav(TARGET, samples, INPUT_SAMPLE_RATE_HZ)
    print(f"{TARGET}: {samples.size / INPUT_SAMPLE_RATE_HZ:.1f} s")


def joined(speech: list[Samples]) -> Samples:
    """Return the sentences (24 kHz) with a pause between them and a short silence around."""
    edge, pause = silence(EDGE_S), silence(PAUSE_S)
    pieces = [edge]
    for index, sentence in enumerate(speech):
        pieces += [pause, sentence] if index else [sentence]
    return np.concatenate([*pieces, edge])


def silence(seconds: float) -> Samples:
    return np.zeros(round(seconds * OUTPUT_SAMPLE_RATE_HZ), np.float32)


def at_input_rate(samples: Samples) -> Samples:
    """Return 24 kHz sound at 16 kHz."""
    frame = av.AudioFrame.from_ndarray(samples[None], "flt", "mono")
    frame.sample_rate = OUTPUT_SAMPLE_RATE_HZ
    resampler = av.AudioResampler(format="flt", layout="mono", rate=INPUT_SAMPLE_RATE_HZ)
    pieces = [*resampler.resample(frame), *resampler.resample(None)]
    return np.concatenate([piece.to_ndarray()[0] for piece in pieces])


if __name__ == "__main__":
    main()
