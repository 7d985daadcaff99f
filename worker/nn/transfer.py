"""How small arrays come from the host to the device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def to_device(values: NDArray, device: torch.device | str) -> Tensor:
    """Copy an array to the device without making the host wait for it.

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
