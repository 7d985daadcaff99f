"""Voice activity (silero VAD) as a function of explicit state: how likely each 32 ms are speech."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnxruntime
from numpy.typing import NDArray
from onnxruntime.capi import onnxruntime_pybind11_state as onnx_errors

from shared.errors import ModelLoadError
from shared.limits import INPUT_SAMPLE_RATE_HZ

DETECT_SPEECH = "detect_speech"

Samples = NDArray[np.float32]

VAD_WINDOW = 512
VAD_WINDOW_S = VAD_WINDOW / INPUT_SAMPLE_RATE_HZ
VAD_CONTEXT = 64
"""Samples of the window before that the network sees again."""

TARGET_PEAK = 0.1
MAX_GAIN = 10.0
"""Quiet speech is raised to `TARGET_PEAK` before the network sees it; loud speech stays.

Windows above 0.5 over the four test clips together, without gain -> with it: 270 -> 270 at full
level, 264 -> 270 at a peak of 0.01, 198 -> 270 at 0.003, 29 -> 264 at 0.001; with pink noise 10 dB
below the speech 233 -> 266 at 0.01. White and pink noise from -80 to -10 dBFS stays below 0.1
either way. A gain of 20 hears hardly more, but more of a loudspeaker's faint echo as well.
"""
PEAK_RELEASE = 0.5 ** (VAD_WINDOW_S / 3.0)
"""The remembered peak halves in 3 s; it rises at once, so an onset is never overdriven."""


@dataclass(frozen=True, slots=True, eq=False)
class VadState:
    """Everything the detector knows of one session; a new value per op, so a copy is a save."""

    hidden: Samples
    cell: Samples
    """`[1, 1, 128]` each."""
    context: Samples
    """The last `VAD_CONTEXT` samples, raised."""
    pending: Samples
    """Fewer samples than one window, waiting for the next op."""
    peak: float

    @classmethod
    def initial(cls) -> VadState:
        zeros = np.zeros((1, 1, 128), np.float32)
        empty = np.zeros(0, np.float32)
        return cls(zeros, zeros, np.zeros(VAD_CONTEXT, np.float32), empty, 0.0)


@dataclass(frozen=True, slots=True, eq=False)
class DetectRequest:
    """Result of the op: speech probability of each window `[n]`, and the new state."""

    state: VadState
    samples: Samples
    """16 kHz, any number; what fills no window waits in the state."""


def one_thread() -> onnxruntime.SessionOptions:
    """Return options of a session that leaves the other core to the gateway and the language."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3
    return options


class SpeechDetector:
    """silero VAD as a function: the network runs over all windows of an op in one call.

    Raises:
        ModelLoadError: the file is damaged.
    """

    def __init__(self, path: Path) -> None:
        damage = onnx_errors.Fail, onnx_errors.InvalidGraph, onnx_errors.InvalidProtobuf
        try:
            self._session = onnxruntime.InferenceSession(
                str(path), one_thread(), providers=["CPUExecutionProvider"]
            )
        except damage as error:
            raise ModelLoadError(
                f"{path} cannot be loaded ({error}): install its package anew"
            ) from error

    def detect(self, request: DetectRequest) -> tuple[Samples, VadState]:
        state = request.state
        samples = np.concatenate((state.pending, request.samples.astype(np.float32, copy=False)))
        n = len(samples) // VAD_WINDOW
        pending = samples[n * VAD_WINDOW :].copy()
        if n == 0:
            kept = VadState(state.hidden, state.cell, state.context, pending, state.peak)
            return np.zeros(0, np.float32), kept
        windows = samples[: n * VAD_WINDOW].reshape(n, VAD_WINDOW)
        raised, peak = raise_quiet(windows, state.peak)
        contexts = np.concatenate((state.context[None], raised[:-1, -VAD_CONTEXT:]))
        probabilities, hidden, cell = self._session.run(
            ["speech_probs", "hn", "cn"],
            {
                "input": np.concatenate((contexts, raised), axis=1),
                "h": state.hidden,
                "c": state.cell,
            },
        )
        context = raised[-1, -VAD_CONTEXT:].copy()
        return probabilities, VadState(hidden, cell, context, pending, peak)


def raise_quiet(windows: Samples, peak: float) -> tuple[Samples, float]:
    """Return windows `[n, VAD_WINDOW]` with quiet speech raised, and the new remembered peak."""
    gains = np.empty((len(windows), 1), np.float32)
    for index, own in enumerate(np.abs(windows).max(axis=1)):
        peak = max(float(own), peak * PEAK_RELEASE)
        gains[index] = min(max(TARGET_PEAK / max(peak, 1e-9), 1.0), MAX_GAIN)
    return windows * gains, peak
