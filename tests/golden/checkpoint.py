"""The checkpoint of a golden folder, as plain tensors."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor


def load_tensors(folder: Path) -> dict[str, Tensor]:
    """Return every tensor of the golden folder's checkpoint, fp32, under its published name."""
    tensors: dict[str, Tensor] = {}
    for shard in sorted((folder / "checkpoint").glob("*.safetensors")):
        tensors |= {name: tensor.float() for name, tensor in load_file(shard).items()}
    return tensors
