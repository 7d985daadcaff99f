"""Golden data: a folder of tensors and fields that the original model produced, and its ledger.

A replay takes inputs from a trace and checks results against it. Every tensor and every field has
to be taken or checked by the end: what is left over is a failure, so a replay that silently skips
something cannot pass. Mismatches are collected, so that one run shows all of them.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import Tensor

REL = 1e-4
"""Of a tensor's largest absolute value: embeddings, logits, hidden states, mels (README, 3)."""
PROB_ABS = 1e-5
"""Probabilities (README, 3)."""
CHUNK_MEL_REL = 1e-3
"""Mels after several chunks (README, 3)."""


@dataclass
class Trace:
    """One trace, and which parts of it have been used.

    Paths of fields are like `units[3].tts.codes`; a path stands for everything below it.
    """

    name: str
    folder: Path
    tensors: dict[str, Tensor] = field(default_factory=dict)
    fields: Any = None
    mismatches: list[str] = field(default_factory=list)
    n_compared: int = 0
    """Tensors and leaf fields that were checked against our results."""

    def __post_init__(self) -> None:
        self.tensors = load_file(self.folder / "traces" / f"{self.name}.safetensors")
        text = (self.folder / "traces" / f"{self.name}.json").read_text(encoding="utf-8")
        self.fields = json.loads(text)
        self._open_tensors = set(self.tensors)
        self._open_fields = dict(_leaves(self.fields, ""))
        self.n_total = len(self._open_tensors) + len(self._open_fields)
        self.n_inputs = 0

    # ---- inputs

    def take(self, name: str) -> Tensor:
        """Return a tensor as an input of the replay."""
        if name in self._open_tensors:
            self._open_tensors.remove(name)
            self.n_inputs += 1
        return self.tensors[name]

    def given(self, path: str) -> Any:
        """Return a field (or a branch of fields) as an input of the replay."""
        self.n_inputs += self._close(path)
        return self._at(path)

    def has(self, name: str) -> bool:
        """Whether the trace holds this tensor."""
        return name in self.tensors

    def find(self, stem: str) -> tuple[str, int]:
        """Return the full name of a tensor, and every which element or row it keeps.

        Names may end in `_subK` or `_rowsK` (README, 1); without either, K is 1.
        """
        pattern = re.compile(re.escape(stem) + r"(?:_(?:sub|rows)(\d+))?")
        found = [match for match in map(pattern.fullmatch, self.tensors) if match]
        if len(found) != 1:
            raise KeyError(f"{self.name} holds {len(found)} tensors {stem}, expected 1")
        return found[0][0], int(found[0][1] or 1)

    # ---- results

    def check(
        self, name: str, ours: Tensor | NDArray, rel: float = REL, abs_: float | None = None
    ) -> None:
        """Compare a tensor: within `rel` of its largest absolute value, or within `abs_`."""
        theirs = self.tensors[name]
        self._count_tensor(name)
        ours = torch.as_tensor(ours).detach().cpu()
        if ours.shape != theirs.shape:
            self.fail(f"{name}: shape {list(ours.shape)}, expected {list(theirs.shape)}")
            return
        if not theirs.is_floating_point():
            n_wrong = int((ours.to(theirs.dtype) != theirs).sum())
            if n_wrong:
                self.fail(f"{name}: {n_wrong} of {theirs.numel()} values differ")
            return
        limit = abs_ if abs_ is not None else rel * float(theirs.abs().max())
        worst = float((ours.double() - theirs.double()).abs().max()) if theirs.numel() else 0.0
        if not worst <= limit:  # also true for NaN
            self.fail(f"{name}: differs by {worst:.3g}, at most {limit:.3g}")

    def check_every(
        self, stem: str, ours: Tensor | NDArray, dim: int = -1, rel: float = REL
    ) -> None:
        """Compare a tensor that holds every K-th entry of ours along a dimension, see `find`."""
        name, step = self.find(stem)
        ours = torch.as_tensor(ours)
        index = torch.arange(0, ours.shape[dim], step, device=ours.device)
        self.check(name, ours.index_select(dim, index), rel)

    def check_pixels(self, name: str, ours: NDArray[np.uint8]) -> None:
        """Compare uint8 pixels: another Pillow version may round one of them by 1."""
        theirs = self.tensors[name].numpy().astype(np.int16)
        self._count_tensor(name)
        if ours.shape != theirs.shape:
            self.fail(f"{name}: shape {ours.shape}, expected {theirs.shape}")
            return
        worst = int(np.abs(ours.astype(np.int16) - theirs).max())
        if worst > 1:
            self.fail(f"{name}: pixels differ by {worst}")

    def check_wave(self, name: str, ours: Tensor | NDArray, scale: float = 1.0) -> None:
        """Compare a waveform: correlation above 0.999 and RMS error below 2 % (README, 3).

        Args:
            scale: what our samples are multiplied with before, such as 32768.
        """
        theirs = self.tensors[name].double().flatten()
        self._count_tensor(name)
        got = torch.as_tensor(ours).detach().cpu().double().flatten() * scale
        if got.shape != theirs.shape:
            self.fail(f"{name}: {got.numel()} samples, expected {theirs.numel()}")
            return
        rms = float(theirs.pow(2).mean().sqrt())
        error = float((got - theirs).pow(2).mean().sqrt())
        norm = float(got.norm() * theirs.norm())
        correlation = float(got @ theirs) / norm if norm else 0.0
        if norm and not correlation > 0.999:  # also true for NaN
            self.fail(f"{name}: correlation {correlation:.6f}")
        if not error <= 0.02 * max(rms, 1e-6):
            self.fail(f"{name}: RMS error {error:.3g} of {rms:.3g}")

    def equal(self, path: str, ours: Any, abs_: float = 0.0) -> None:
        """Compare a field, or a whole branch of fields; `abs_` is for numbers."""
        theirs = self._at(path)
        self.n_compared += self._close(path)
        if not _same(ours, theirs, abs_):
            self.fail(f"{path}: {_short(ours)}, expected {_short(theirs)}")

    def expected(self, path: str) -> Any:
        """Return a field for a comparison that the replay makes itself, and calls `fail`."""
        self.n_compared += self._close(path)
        return self._at(path)

    def excuse(self, path: str, why: str) -> None:
        """Leave a field out on purpose. For what cannot be a result, with the reason."""
        assert why
        self.n_inputs += self._close(path)

    def fail(self, text: str) -> None:
        self.mismatches.append(f"{self.name}: {text}")

    def left_over(self) -> list[str]:
        return sorted(self._open_tensors) + sorted(self._open_fields)

    def problems(self) -> list[str]:
        """Return all that speaks against this replay: one sentence each."""
        left = self.left_over()
        if not left:
            return self.mismatches
        text = f"{self.name}: {len(left)} tensors and fields were not compared: {left[:20]}"
        return [*self.mismatches, text]

    def summary(self) -> str:
        n_results = self.n_total - self.n_inputs
        return f"{self.name}: {self.n_compared} of {n_results} results compared"

    def _count_tensor(self, name: str) -> None:
        if name in self._open_tensors:
            self._open_tensors.remove(name)
            self.n_compared += 1

    def _at(self, path: str) -> Any:
        node = self.fields
        for part in path.replace("]", "").replace("[", ".").split("."):
            if part:
                node = node[int(part)] if isinstance(node, list) else node[part]
        return node

    def _close(self, path: str) -> int:
        """Mark everything at and below a path as used; return how many leaves that were."""
        below = [
            p for p in self._open_fields if p == path or p.startswith((f"{path}.", f"{path}["))
        ]
        for leaf in below:
            del self._open_fields[leaf]
        return len(below)


def _leaves(node: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield path and value of every leaf; an empty list or object and a list of plain values are
    one leaf."""
    if isinstance(node, dict) and node:
        for key, value in node.items():
            yield from _leaves(value, f"{path}.{key}" if path else key)
    elif isinstance(node, list) and any(isinstance(item, (dict, list)) for item in node):
        for index, value in enumerate(node):
            yield from _leaves(value, f"{path}[{index}]")
    else:
        yield path, node


def _same(ours: Any, theirs: Any, abs_: float) -> bool:
    if isinstance(theirs, dict):
        return (
            isinstance(ours, dict)
            and ours.keys() == theirs.keys()
            and all(_same(ours[key], theirs[key], abs_) for key in theirs)
        )
    if isinstance(theirs, list):
        return (
            isinstance(ours, (list, tuple))
            and len(ours) == len(theirs)
            and all(_same(a, b, abs_) for a, b in zip(ours, theirs, strict=True))
        )
    if isinstance(theirs, float) and isinstance(ours, (int, float)):
        return math.isclose(ours, theirs, rel_tol=0.0, abs_tol=abs_)
    return type(ours) is type(theirs) and bool(ours == theirs)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 160 else f"{text[:160]}…"


# ---- inputs that are computed, not stored (README, 1)


def wave(base_pcm: NDArray[np.int16], gains: list[float], k: int) -> NDArray[np.float32]:
    """Return second k of the source, with its gain: float32 `[16000]`."""
    n_seconds = len(base_pcm) // 16_000
    piece = base_pcm[(k % n_seconds) * 16_000 :][:16_000]
    return piece.astype(np.float32) / np.float32(32768) * np.float32(gains[k % len(gains)])


def clip(base_pcm: NDArray[np.int16], start: int, n_samples: int) -> NDArray[np.float32]:
    """Return samples of the source without gain, repeated end to end where it is too short."""
    index = (start + np.arange(n_samples)) % len(base_pcm)
    return base_pcm[index].astype(np.float32) / np.float32(32768)


def image(width: int, height: int, shift: int) -> NDArray[np.uint8]:
    """Return the test picture `[H, W, 3]`, uint8."""
    y, x = np.mgrid[0:height, 0:width].astype(np.int64)
    red = (3 * x + 5 * y + (x * y) // 64 + shift) % 256
    green = (7 * x + (y * y) // 32 + 2 * shift) % 256
    blue = (((x // 8) ^ (y // 8)) * 9) % 256
    return np.stack((red, green, blue), axis=-1).astype(np.uint8)
