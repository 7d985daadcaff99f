"""What do pictures cost before the eyes see them? Cut on one GPU, and by Pillow on the host.

    python -m tests.bench.bench_resize --out tests/bench/results/resize-h200.json

First the slices of many pictures of random sizes are compared with Pillow's, bit for bit (13 or
newer). Then, for usual pictures and most slices: milliseconds of the host lane's plan (of a size
never seen, and of the last one), of the language lane's host, of the device, and of Pillow on the
host. Prints a table and, as the last line, one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import PIL
import torch
from torch import Tensor

from tests.bench.provenance import provenance
from worker.models.minicpmo45.config import FULL_SIZE
from worker.models.minicpmo45.cutting import AnySlice, Cutter
from worker.models.minicpmo45.images import Pixels, slice_image
from worker.models.minicpmo45.senses import patch_sizes
from worker.nn import resize
from worker.nn.attention import HAS_TRITON

CONFIG = FULL_SIZE.slices
SIZES = ((448, 448), (640, 480), (1280, 720), (1920, 1080), (3840, 2160))
"""Width and height."""
LIMITS = (1, 3, 9)
"""Most tiles: up to 1, 4 and 10 slices."""
N_COMPARED = 50
N_REPEATS = 50


def picture(random: np.random.Generator, width: int, height: int) -> Pixels:
    return random.integers(0, 256, (height, width, 3), dtype=np.uint8)


def n_different(cutter: Cutter, target: Tensor) -> int:
    """Return how many of the pictures are not cut as Pillow cuts them."""
    random = np.random.default_rng(0)
    n = 0
    for index in range(N_COMPARED):
        width, height = np.exp(random.uniform(np.log(8), np.log(2500), 2)).astype(int).tolist()
        rgb, most = picture(random, width, height), (1, 3, 9)[index % 3]
        planned = cutter.plan(rgb, most)
        cutter.fill(planned, target)
        got = target.cpu().numpy()
        wanted = slice_image(rgb, most, CONFIG).slices
        same = len(wanted) == len(planned) and all(
            np.array_equal(row[: one.size], one.reshape(-1))
            for row, one in zip(got, wanted, strict=False)
        )
        if not same:
            print(f"different: {width}x{height}, at most {most} tiles", flush=True)
            n += 1
    return n


def median_ms(function: Callable[[], object]) -> float:
    """Of the host's time; the device is idle when it begins."""
    times = []
    for _ in range(N_REPEATS):
        torch.cuda.synchronize()
        began = time.perf_counter()
        function()
        times.append(time.perf_counter() - began)
    return round(statistics.median(times) * 1e3, 3)


def device_ms(function: Callable[[], object]) -> float:
    """From the host's call to the device's end."""

    def finished() -> None:
        function()
        torch.cuda.synchronize()

    return median_ms(finished)


def measured(cutter: Cutter, target: Tensor, size: tuple[int, int], most: int) -> dict[str, Any]:
    rgb = picture(np.random.default_rng(1), *size)

    def plan() -> tuple[AnySlice, ...]:
        return cutter.plan(rgb, most)

    def plan_anew() -> None:
        resize.windows.cache_clear()
        plan()

    def cut() -> None:
        cutter.fill(plan(), target)

    cut()
    plan_ms = median_ms(plan)
    return {
        "size": "x".join(map(str, size)),
        "slices": len(plan()),
        "new_size_plan_ms": median_ms(plan_anew),
        "plan_ms": plan_ms,
        "lane_ms": round(median_ms(cut) - plan_ms, 3),
        "done_ms": round(device_ms(cut) - plan_ms, 3),
        "pillow_ms": median_ms(lambda: slice_image(rgb, most, CONFIG)),
    }


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, help="also write the JSON object to this file")
    parser.add_argument("--commit", help="of this code, where its repository is not at hand")
    options = parser.parse_args()
    device, sizes = torch.device("cuda", torch.cuda.current_device()), patch_sizes(CONFIG)
    began = time.perf_counter()
    cutter = Cutter(CONFIG, sizes, device)
    start_s = round(time.perf_counter() - began, 2)
    n_values = sizes[-1] * CONFIG.patch_size**2 * resize.N_CHANNELS
    target = torch.zeros(16, n_values, dtype=torch.uint8, device=device)
    found: dict[str, Any] = {
        "bench": "resize",
        "torch": torch.__version__,
        "pillow": PIL.__version__,
        "has_kernels": HAS_TRITON,
        "start_s": start_s,
        "different": n_different(cutter, target),
        "compared": N_COMPARED,
        "rows": [measured(cutter, target, size, most) for size in SIZES for most in LIMITS],
        **provenance(options.commit),
    }
    if HAS_TRITON:
        found["kernels"] = _n_kernels()
    for row in found["rows"]:
        print(row)
    line = json.dumps(found)
    print(line)
    if options.out is not None:
        options.out.write_text(line + "\n")


def _n_kernels() -> int:
    """How many were compiled for all these sizes: one per axis, or they depend on a size."""
    from worker.nn.kernels.resize import _weigh  # noqa: PLC0415

    return sum(len(caches[0]) for caches in _weigh.device_caches.values())


if __name__ == "__main__":
    main()
