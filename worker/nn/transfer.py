"""How arrays come from the host to the device without making the host wait for it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

SIDE_BYTES = 4 * 2**20
N_SIDES = 8


def to_device(values: NDArray, device: torch.device | str) -> Tensor:
    """Copy a small array to the device.

    Args:
        values: writable; on a CPU the tensor shares its memory.
    """
    tensor = torch.from_numpy(values)
    if torch.device(device).type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def ints(values: Sequence[int], device: torch.device | str) -> Tensor:
    """Return int64 numbers on the device, without a wait."""
    return to_device(np.array(values, dtype=np.int64), device)


class Staging:
    """Pinned memory through which bytes travel, however many: pieces take turns with its sides.

    As many bytes as all sides hold are on their way without a wait; then the host waits until the
    oldest piece has gone. For one thread and one stream.
    """

    def __init__(
        self, device: torch.device, side_bytes: int = SIDE_BYTES, n_sides: int = N_SIDES
    ) -> None:
        self._on_gpu = device.type == "cuda"
        memory = torch.empty(n_sides, side_bytes, dtype=torch.uint8, pin_memory=self._on_gpu)
        self._sides = memory.unbind()
        self._arrays = [side.numpy() for side in self._sides]
        self._was_read: list[torch.cuda.Event | None] = [None] * n_sides
        self._next = 0

    def send(self, values: NDArray[np.uint8], target: Tensor) -> None:
        """Copy an array to the begin of a flat uint8 tensor; the array may change right after."""
        values = values.reshape(-1)
        side_bytes = len(self._arrays[0])
        for start in range(0, len(values), side_bytes):
            piece = values[start : start + side_bytes]
            self._send_piece(piece, target[start : start + len(piece)])

    def _send_piece(self, piece: NDArray[np.uint8], target: Tensor) -> None:
        side = self._next
        self._next = (side + 1) % len(self._sides)
        was_read = self._was_read[side]
        if was_read is not None:
            was_read.synchronize()
        np.copyto(self._arrays[side][: len(piece)], piece)
        target.copy_(self._sides[side][: len(piece)], non_blocking=True)
        if not self._on_gpu:
            return
        if was_read is None:
            was_read = self._was_read[side] = torch.cuda.Event()
        was_read.record()
