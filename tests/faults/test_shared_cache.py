"""Several workers that start on one empty data folder."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import torch
from torch import nn

from worker.models.cascade.weights import Converted, Package, cached

N_WORKERS = 4
PACKAGE = Package("numpy", "numpy", "1.0", "any.bin")
"""Any package that is installed: only its name and version are asked for."""


def test_weights_that_several_workers_want_at_once_are_converted_once(tmp_path: Path) -> None:
    """A lock of a file counts between its openings, so threads stand for processes here."""
    conversions: list[float] = []
    given: list[Converted] = []
    together = threading.Barrier(N_WORKERS)

    def convert() -> Converted:
        conversions.append(time.monotonic())
        time.sleep(0.3)
        return Converted({"weight": torch.ones(2, 2), "bias": torch.ones(2)}, {})

    def start() -> None:
        together.wait()
        given.append(cached(tmp_path, PACKAGE, convert, lambda _: nn.Linear(2, 2)))

    threads = [threading.Thread(target=start) for _ in range(N_WORKERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)

    assert len(conversions) == 1
    assert [sorted(made.tensors) for made in given] == [["bias", "weight"]] * N_WORKERS
    assert list(tmp_path.rglob("*.part")) == []
