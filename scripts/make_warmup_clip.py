"""Makes `assets/warmup.wav`: a spoken question for the workers' warm-up."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from shared.audio import write_wav
from shared.limits import INPUT_SAMPLE_RATE_HZ, OUTPUT_SAMPLE_RATE_HZ
from worker.models.cascade.speech import Speaker, SynthesizeRequest

TARGET = Path(__file__).resolve().parents[1] / "assets" / "warmup.wav"
QUESTION = "Hello there! What is your favorite color?"


def main() -> None:
    speech = Speaker().synthesize(SynthesizeRequest(QUESTION))
    step = OUTPUT_SAMPLE_RATE_HZ / INPUT_SAMPLE_RATE_HZ
    at = np.arange(0, len(speech) - 1, step)
    samples = np.interp(at, np.arange(len(speech)), speech).astype(np.float32)
    write_wav(TARGET, samples, INPUT_SAMPLE_RATE_HZ)
    print(f"{TARGET}: {len(samples) / INPUT_SAMPLE_RATE_HZ:.1f} s")


if __name__ == "__main__":
    main()
