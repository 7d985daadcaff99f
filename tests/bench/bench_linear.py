"""How fast is one row times a matrix on one GPU? The decode step of one session, bf16.

    python -m tests.bench.bench_linear --sweep --out tests/bench/results/linear-h200.json

For every matrix of the language model and of the speech head: microseconds and TB/s of the
kernel's current configuration beside cuBLAS (without the norm, sum or gate that the kernel has),
and with `--sweep` of many other configurations. Launches go in one CUDA graph and rotate among
copies of the matrix, so that no cache holds them. Then whole decode steps, captured: compiled
layers with separate operations, as several rows go, and with these kernels. The last line is one
JSON object.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional

from tests.bench.bench_decoder import (
    DEVICE,
    N_TOKENS,
    Captured,
    build,
    filled_cache,
    median_ms,
    show_kernels,
)
from tests.bench.provenance import provenance
from worker.models.minicpmo45.config import FULL_SIZE
from worker.nn import decoder
from worker.nn.decoder import Decoder, DecoderConfig
from worker.nn.kernels.decode_linear import Config, config_of, launch

N_MULTIPROCESSORS = 132
COLD_BYTES = 240 << 20
"""Four times the second cache of an H200."""
N_LAUNCHES = 20
N_REPLAYS = 7
N_COMPILERS = 14
MAX_REGISTERS = 128
"""Of a thread, for the matrix alone."""


@dataclass(frozen=True, slots=True)
class Shape:
    name: str
    n_all: int
    k: int
    has_norm: bool = False
    is_gated: bool = False
    has_residual: bool = False

    @property
    def n_outputs(self) -> int:
        return self.n_all // 2 if self.is_gated else self.n_all

    @property
    def n_bytes(self) -> int:
        return 2 * self.n_all * self.k


def shapes_of(name: str, config: DecoderConfig) -> list[Shape]:
    width, d = config.hidden_size, config.head_dim
    n_heads = config.n_heads + 2 * config.n_kv_heads
    return [
        Shape(f"{name}.qkv", n_heads * d, width, has_norm=True),
        Shape(f"{name}.out", width, config.n_heads * d, has_residual=True),
        Shape(f"{name}.gate_up", 2 * config.ffn_size, width, has_norm=True, is_gated=True),
        Shape(f"{name}.down", width, config.ffn_size, has_residual=True),
        Shape(f"{name}.head", config.vocab_size, width),
    ]


SHAPES = shapes_of("llm", FULL_SIZE.llm) + shapes_of("tts", FULL_SIZE.speech.decoder)


def candidates(shape: Shape) -> Iterator[Config]:
    """Configurations whose registers suffice."""
    k_pad = 1 << (shape.k - 1).bit_length()
    for warps in (1, 2, 4, 8, 16):
        per_thread = k_pad // (32 * warps)
        if not 8 <= per_thread <= 64:
            continue
        for n_rows in (1, 2, 4, 8):
            registers = n_rows * (2 if shape.is_gated else 1) * per_thread // 2
            if registers > MAX_REGISTERS:
                continue
            yield Config(n_rows, 1, warps)
            if 2 * registers > MAX_REGISTERS:
                continue
            shares = {math.ceil(shape.n_outputs / (n_rows * n * N_MULTIPROCESSORS)) for n in (2, 4)}
            for n_groups in sorted({2, 4, *shares} - {1}):
                yield Config(n_rows, n_groups, warps)


def launcher(shape: Shape, config: Config, overlaps: bool) -> Callable[[Tensor], Tensor]:
    """Return the kernel as a function of the matrix."""
    x = torch.randn(1, shape.k, device=DEVICE, dtype=torch.bfloat16)
    norm = torch.ones(shape.k, device=DEVICE, dtype=torch.bfloat16) if shape.has_norm else None
    residual = None
    if shape.has_residual:
        residual = torch.randn(1, shape.n_outputs, device=DEVICE, dtype=torch.bfloat16)

    def run(weight: Tensor) -> Tensor:
        return launch(
            x,
            weight,
            norm,
            1e-6,
            residual,
            is_gated=shape.is_gated,
            overlaps=overlaps,
            config=config,
        )

    return run


def compile_all(jobs: list[tuple[Shape, Config, bool]]) -> None:
    """Compile, in a process of its own, what the sweep will find in Triton's cache."""
    for shape, config, overlaps in jobs:
        weight = torch.empty(shape.n_all, shape.k, device=DEVICE, dtype=torch.bfloat16)
        launcher(shape, config, overlaps)(weight)
    torch.cuda.synchronize()


def time_us(run: Callable[[Tensor], Tensor], weights: list[Tensor]) -> float:
    """Return microseconds of a launch within a graph."""
    n = max(N_LAUNCHES, len(weights))
    run(weights[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [run(weights[index % len(weights)]) for index in range(n)]
    graph.replay()
    times = []
    for _ in range(N_REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    del results
    return statistics.median(times) * 1000 / n


def copies(shape: Shape) -> list[Tensor]:
    n = max(2, math.ceil(COLD_BYTES / shape.n_bytes))
    return [
        torch.empty(shape.n_all, shape.k, device=DEVICE, dtype=torch.bfloat16).normal_(0, 0.02)
        for _ in range(n)
    ]


def entry(shape: Shape, us: float, config: Config | None = None) -> dict[str, Any]:
    rate = {"us": round(us, 2), "tb_per_s": round(shape.n_bytes / us / 1e6, 2)}
    return rate if config is None else rate | {"config": list(asdict(config).values())}


def measure(shape: Shape, tried: list[Config]) -> dict[str, Any]:
    """Return and print times of a shape: cuBLAS, the current configuration, the best ones."""
    weights = copies(shape)
    x = torch.randn(1, shape.k, device=DEVICE, dtype=torch.bfloat16)
    current = config_of(shape.n_outputs, shape.k, shape.is_gated)
    found: dict[str, Any] = {
        "cublas": entry(shape, time_us(partial(functional.linear, x), weights))
    }
    for name, overlaps in (("plain", False), ("overlap", True)):
        us = time_us(launcher(shape, current, overlaps), weights)
        found[name] = entry(shape, us, current)
        if tried:
            times = {c: time_us(launcher(shape, c, overlaps), weights) for c in tried}
            order = sorted(times, key=lambda config: times[config])
            found[f"{name} best"] = [entry(shape, times[c], c) for c in order[:8]]
    print(shape.name, f"{shape.n_all}x{shape.k}")
    for name, value in found.items():
        for one in value if isinstance(value, list) else [value]:
            print(f"    {name:14}", one, flush=True)
    return found


def sweep(shapes: list[Shape], tries: bool) -> dict[str, Any]:
    tried = {shape: list(candidates(shape)) if tries else [] for shape in shapes}
    jobs = [(s, c, overlaps) for s in shapes for c in tried[s] for overlaps in (False, True)]
    if jobs:
        began = time.perf_counter()
        with ProcessPoolExecutor(N_COMPILERS, mp_context=get_context("spawn")) as pool:
            shares = [jobs[index::N_COMPILERS] for index in range(N_COMPILERS)]
            list(pool.map(compile_all, shares))  # and raise what they raise
        print(f"{len(jobs)} kernels compiled in {time.perf_counter() - began:.0f} s", flush=True)
    return {shape.name: measure(shape, tried[shape]) for shape in shapes}


TUNED = {"coordinate_descent_tuning": True}
STEPS: dict[str, tuple[bool, bool, bool]] = {
    # kernels of one row?, layers compiled?, overlapping?
    "separate": (False, True, False),
    "fused": (True, True, False),
    "fused, not compiled": (True, False, False),
    "fused, overlapping": (True, False, True),
}


def decode_steps(name: str, config: DecoderConfig, live: int, profile: bool) -> dict[str, Any]:
    """Time the captured decode step, head included, in every way."""
    model = build(config)
    cache = filled_cache(config, 1)
    tokens = torch.tensor([7 % config.vocab_size], device=DEVICE)
    slots, positions = tokens * 0, torch.full((1,), live - 1, device=DEVICE)
    found: dict[str, Any] = {}
    exact: Tensor | None = None
    for kind, (is_fused, is_compiled, overlaps) in STEPS.items():
        close = prepare(model, is_fused, is_compiled)

        def step(close: Callable[[Tensor], Tensor] = close) -> Tensor:
            x = model.embed(tokens)[:, None]
            return close(model.run(cache, x, slots, positions[:, None], N_TOKENS))

        with patch.object(decoder, "can_overlap", lambda device, overlaps=overlaps: overlaps):
            captured = Captured(step)
            checks = captured.checks()
        ms, p90 = median_ms(captured.run)
        logits = captured.run().float().clone()
        exact = logits if exact is None else exact
        error = float((logits - exact).norm() / exact.norm())
        found[kind] = {"ms": ms, "p90": p90, "difference": round(error, 5), **checks}
        print(name, f"{live=}", kind, found[kind], flush=True)
        if profile:
            show_kernels(captured)
    return found


def prepare(model: Decoder, is_fused: bool, is_compiled: bool) -> Callable[[Tensor], Tensor]:
    """Set the call sites of one row; return closing norm and head, compiled."""
    torch._dynamo.reset()
    compiled: Any = partial(torch.compile, fullgraph=True, dynamic=False, options=TUNED)
    calls = [layer.decode_row if is_fused else layer.forward for layer in model.layers]
    model.row_layers = [compiled(call) for call in calls] if is_compiled else calls
    head = model.logits if is_fused else model.head.forward

    def close(x: Tensor) -> Tensor:
        return head(model.norm(x[:, 0]))

    return compiled(close)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--sweep", action="store_true", help="try many configurations")
    parser.add_argument("--shapes", nargs="*", default=[s.name for s in SHAPES])
    parser.add_argument("--live", type=int, nargs="*", default=[500])
    parser.add_argument("--layers", type=int, default=FULL_SIZE.llm.n_layers)
    parser.add_argument("--profile", action="store_true", help="kernels of every step")
    parser.add_argument("--commit", help="where there is no git")
    parser.add_argument("--out", type=Path, help="file for the JSON object")
    options = parser.parse_args()
    torch.manual_seed(0)
    llm = replace(FULL_SIZE.llm, n_layers=options.layers)
    with torch.inference_mode():
        shapes = sweep([s for s in SHAPES if s.name in options.shapes], options.sweep)
        steps = {
            f"{name} {live}": decode_steps(name, config, live, options.profile)
            for live in options.live
            for name, config in (("llm", llm), ("tts", FULL_SIZE.speech.decoder))
        }
    result = {
        "commit": options.commit or provenance()["commit"],
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "command": f"python -m tests.bench.bench_linear {' '.join(sys.argv[1:])}",
        "shapes": shapes,
        "steps": steps,
    }
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
