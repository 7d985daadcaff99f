"""24 kHz -> 16 kHz, piece by piece without seams and without delay."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from shared.audio import Samples

UP: Final = 2
DOWN: Final = 3
CONTEXT: Final = 24
"""Samples before and behind one that its result depends on."""

PASSED: Final = 0.92
"""Of the band up to 8 kHz."""


class To16Khz:
    """One run of sound; each piece comes back at two thirds of its length at once.

    The first millisecond of the next piece is not known yet and guessed to go on as the last one
    came: nobody hears that, but a pause of the filter's delay in every second would be heard.
    """

    def __init__(self) -> None:
        self._before = np.zeros(CONTEXT, np.float32)
        self._rest = np.zeros(0, np.float32)

    def take(self, samples: Samples) -> Samples:
        """Up to two samples wait for the next piece."""
        joined = np.concatenate([self._rest, samples])
        n = len(joined) // DOWN * DOWN
        piece, self._rest = joined[:n], joined[n:]
        if not n:
            return piece
        around = np.concatenate([self._before, piece, _guess(piece)])
        self._before = around[n : n + CONTEXT]
        dense = np.zeros(UP * len(around), np.float32)
        dense[::UP] = around
        smooth = np.convolve(dense, TAPS, mode="same")
        first = UP * CONTEXT
        return smooth[first : first + UP * n : DOWN].astype(np.float32)


def _guess(piece: Samples) -> Samples:
    """What follows: the piece turned about its last sample, which keeps level and slope."""
    turned = 2 * piece[-1] - piece[-2 : -2 - CONTEXT : -1]
    return np.append(turned, np.full(CONTEXT - len(turned), piece[-1])).astype(np.float32)


def _taps() -> NDArray[np.float32]:
    """A windowed sinc at 48 kHz that leaves nothing above 8 kHz."""
    at = np.arange(-UP * CONTEXT, UP * CONTEXT + 1)
    sinc = np.sinc(at * PASSED / DOWN) * np.hamming(len(at))
    # Half of the dense samples are zeros.
    taps: NDArray[np.float32] = (UP * sinc / sinc.sum()).astype(np.float32)
    return taps


TAPS: Final = _taps()
