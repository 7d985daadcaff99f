"""How fast is the language model on one GPU? Full-size Qwen3-8B with random weights, bf16.

    python -m tests.bench.bench_decoder --out tests/bench/results/decoder-h200.json

Per-layer `torch.compile`, captured in CUDA graphs: a decode step (final norm and head included) at
several batch sizes and live lengths, and the prefill of the usual buckets at the end of a long
context, each over a common span and with the kernels that read live positions only. Beside the
times stand the checks that the captured step equals the compiled one bit for bit and that the
kernels agree with plain operations. Prints a table and, as the last line, one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from tests.bench.provenance import provenance
from worker.models.minicpmo45.config import FULL_SIZE
from worker.nn import attention, decoder
from worker.nn.decoder import Decoder, DecoderConfig, KvCache

N_TOKENS = 4096
N_REPEATS = 50
COPY_BYTES = 4 << 30
DEVICE = "cuda"

# Every kind of compiled call: with kernels?, further compiler options.
KINDS: dict[str, tuple[bool, dict[str, Any]]] = {
    "span": (False, {}),
    "live": (True, {}),
    # Matrix-vector products as reductions of the compiler's own, for one row only. What the search
    # finds varies: `down` of one layer took 25.6 us after one run and 35.6 us after another.
    "live-tuned": (True, {"coordinate_descent_tuning": True}),
}


def build(config: DecoderConfig) -> Decoder:
    """Return a model with random weights, made on the GPU."""
    with torch.device("meta"):
        model = Decoder(config).to(torch.bfloat16)
    model = model.to_empty(device=DEVICE).requires_grad_(False).eval()
    for name, parameter in model.named_parameters():
        parameter.fill_(1.0) if "norm" in name else parameter.normal_(0.0, 0.02)
    return model


def filled_cache(config: DecoderConfig, n_slots: int) -> KvCache:
    cache = KvCache.allocate(config, n_slots, N_TOKENS, torch.bfloat16, DEVICE)
    for tensor in (*cache.keys, *cache.values):
        tensor.normal_()
    return cache


def compile_calls(model: Decoder, options: dict[str, Any]) -> Callable[[Tensor], Tensor]:
    """Compile both call sites of every layer; return the compiled head."""
    torch._dynamo.reset()  # every kind and size gets its own graph, under its own limit

    def compiled(function: Callable[..., Tensor]) -> Any:
        return torch.compile(function, fullgraph=True, dynamic=False, options=options)

    model.decode_layers = [compiled(layer.forward) for layer in model.layers]
    model.row_layers = model.decode_layers  # one row's own kernels: `bench_linear`
    model.prefill_layers = [compiled(layer.forward) for layer in model.layers]
    return compiled(model.head.forward)


@contextmanager
def kernels(are_on: bool) -> Iterator[None]:
    """Say whether the decoder has kernels, or reads common spans."""

    def has_kernels(tensor: Tensor) -> bool:
        return are_on

    with (
        patch.object(attention, "has_kernels", has_kernels),
        patch.object(decoder, "has_kernels", has_kernels),
    ):
        yield


class Captured:
    """A function of fixed buffers, compiled, warmed up and captured."""

    def __init__(self, function: Callable[[], Tensor]) -> None:
        began = time.perf_counter()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(3):
                function()
        torch.cuda.synchronize()
        self.compile_s = time.perf_counter() - began
        began = time.perf_counter()
        self.compiled = function
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.result = function()
        torch.cuda.synchronize()
        self.capture_s = time.perf_counter() - began

    def run(self) -> Tensor:
        self.graph.replay()
        return self.result

    def checks(self) -> dict[str, Any]:
        compiled = self.compiled().clone()
        self.result.fill_(torch.nan)
        return {
            "captured_equals_compiled": torch.equal(self.run(), compiled),
            "compile_s": round(self.compile_s, 1),
            "capture_s": round(self.capture_s, 2),
        }


def median_ms(function: Callable[[], object]) -> tuple[float, float]:
    """Return median and 90th percentile of many runs, each between two events."""
    for _ in range(5):
        function()
    pairs = []
    for _ in range(N_REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        function()
        end.record()
        pairs.append((start, end))
    torch.cuda.synchronize()
    times = sorted(start.elapsed_time(end) for start, end in pairs)
    return round(statistics.median(times), 3), round(times[int(0.9 * len(times))], 3)


def copy_rate() -> float:
    """Return what the memory moves, read and written, in TB/s."""
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    ms, _ = median_ms(lambda: target.copy_(source))
    return round(2 * COPY_BYTES / ms / 1e9, 2)


def floor_ms(model: Decoder, rate: float, kv_tokens: int) -> float:
    """Return the time of reading every weight once and these cached tokens."""
    weights = size_of(model) - model.embed.weight.nbytes
    return round((weights + kv_tokens * token_bytes(model.config)) / rate / 1e9, 2)


def size_of(model: Decoder) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())


def token_bytes(config: DecoderConfig) -> int:
    return config.n_layers * 2 * config.n_kv_heads * config.head_dim * 2


class Bench:
    def __init__(self, config: DecoderConfig, n_slots: int) -> None:
        self.model = build(config)
        self.cache = filled_cache(config, n_slots)
        self.rate = copy_rate()
        self.results: dict[str, list[dict[str, Any]]] = {"decode": [], "prefill": []}

    def say(self, group: str, **entry: Any) -> None:
        self.results[group].append(entry)
        print(group, *(f"{key}={value}" for key, value in entry.items()), flush=True)

    def decode(self, kind: str, n_rows: int, lengths: list[int], profile: bool) -> None:
        model, cache = self.model, self.cache
        is_live, options = KINDS[kind]
        tokens = torch.randint(model.config.vocab_size, (n_rows,), device=DEVICE)
        slots = torch.randperm(cache.keys[0].shape[0], device=DEVICE)[:n_rows]
        positions = torch.full((n_rows,), lengths[-1] - 1, device=DEVICE)
        head = compile_calls(model, options)

        def step() -> Tensor:
            return head(model.decode(cache, tokens, slots, positions, N_TOKENS))

        with kernels(is_live):
            captured = Captured(step)
            checks = captured.checks()
        for length in lengths:
            positions.fill_(length - 1)
            times = self.times(captured, n_rows * length)
            self.say("decode", kind=kind, rows=n_rows, live=length, **times)
        if profile:
            show_kernels(captured)
        # Rows of every age, as in service.
        ages = torch.linspace(min(lengths), max(lengths), n_rows, device=DEVICE).long()
        positions.copy_(ages - 1)
        times = self.times(captured, int(ages.sum()))
        self.say("decode", kind=kind, rows=n_rows, live="mixed", **times, **checks)

    def prefill(self, kind: str, n_rows: int, bucket: int, start: int, profile: bool) -> None:
        model, cache = self.model, self.cache
        is_live, options = KINDS[kind]
        start = min(start, N_TOKENS - bucket)
        width = model.config.hidden_size
        x = torch.randn(n_rows, bucket, width, device=DEVICE, dtype=torch.bfloat16)
        slots = torch.arange(n_rows, device=DEVICE)
        counts = torch.full((n_rows,), bucket - 5, device=DEVICE)  # the rest is padding
        starts = torch.full((n_rows,), start, device=DEVICE)
        rows = torch.arange(n_rows, device=DEVICE)
        head = compile_calls(model, options)

        def feed() -> Tensor:
            positions = cache.positions(starts, counts, bucket)
            hidden = model.feed(cache, x, slots, positions, N_TOKENS)
            return head(hidden[rows, counts - 1])

        with kernels(is_live):
            captured = Captured(feed)
            checks = captured.checks()
        times = self.times(captured, n_rows * (start + bucket))
        shape = {"rows": n_rows, "bucket": bucket, "start": start}
        self.say("prefill", kind=kind, **shape, **times, **checks)
        if profile:
            show_kernels(captured)

    def times(self, captured: Captured, kv_tokens: int) -> dict[str, float]:
        ms, p90 = median_ms(captured.run)
        return {"ms": ms, "p90": p90, "floor": floor_ms(self.model, self.rate, kv_tokens)}


def show_kernels(captured: Captured) -> None:
    """Print where the time of one replay goes, kernel by kernel."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        captured.run()
        torch.cuda.synchronize()
    total = 0.0
    for event in sorted(profiler.key_averages(), key=lambda e: -e.device_time_total)[:24]:
        spent = event.device_time_total
        total += spent
        each = spent / event.count
        print(f"    {spent:9.1f} us {event.count:5d} x {each:7.2f}  {event.key[:90]}")
    print(f"    {total:9.1f} us of kernels", flush=True)


def kernel_error(config: DecoderConfig, n_rows: int, n_new: int) -> dict[str, float]:
    """Return relative errors against plain fp32: one layer with kernels, and without.

    Every slot holds NaN behind its row's live length.
    """
    exact = build(replace(config, n_layers=1, vocab_size=1)).float()
    starts = torch.randint(1, N_TOKENS - n_new, (n_rows,), device=DEVICE)
    counts = torch.randint(1, n_new + 1, (n_rows,), device=DEVICE)
    slots = torch.randperm(n_rows, device=DEVICE)
    x = torch.randn(n_rows, n_new, config.hidden_size, device=DEVICE).bfloat16()
    content = filled_cache(exact.config, n_rows)
    is_dead = torch.arange(N_TOKENS + 1, device=DEVICE) >= starts[:, None]
    for tensor in (*content.keys, *content.values):
        tensor[slots] = tensor[slots].masked_fill(is_dead[:, None, :, None], torch.nan)
    mixed = {}
    for name, dtype, are_on in (
        ("exact", torch.float32, False),
        ("plain", torch.bfloat16, False),
        ("kernels", torch.bfloat16, True),
    ):
        model = exact.to(dtype)
        cache = KvCache.allocate(exact.config, n_rows, N_TOKENS, dtype, DEVICE)
        cache.keys[0].copy_(content.keys[0])
        cache.values[0].copy_(content.values[0])
        positions = cache.positions(starts, counts, n_new)
        # What attention adds, without the rest of the layer to hide its errors.
        with kernels(are_on):
            step = model._begin(cache, slots, positions, N_TOKENS)
            added = model.layers[0]._attend(x.to(dtype), cache.keys[0], cache.values[0], step)
        mixed[name] = added[positions < cache.spare].float()
    norm = mixed["exact"].norm()
    return {
        name: round(float((mixed[name] - mixed["exact"]).norm() / norm), 5)
        for name in ("plain", "kernels")
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--lengths", type=int, nargs="+", default=[500, 2000, 4000])
    parser.add_argument(
        "--decode", nargs="*", default=["span", "live", "live-tuned"], choices=list(KINDS)
    )
    parser.add_argument("--prefill", nargs="*", default=["span", "live"], choices=list(KINDS))
    parser.add_argument("--buckets", nargs="+", default=["1x32", "1x96", "1x224", "8x96"])
    parser.add_argument("--start", type=int, default=3900)
    parser.add_argument("--layers", type=int, default=FULL_SIZE.llm.n_layers)
    parser.add_argument("--profile", action="store_true", help="kernels of the first and last size")
    parser.add_argument("--commit", help="where there is no git")
    parser.add_argument("--out", type=Path, help="file for the JSON object")
    options = parser.parse_args()
    config = replace(FULL_SIZE.llm, n_layers=options.layers)
    torch.manual_seed(0)
    with torch.inference_mode():
        errors = {
            f"{n_rows}x{n_new}": kernel_error(config, n_rows, n_new)
            for n_rows, n_new in ((max(options.rows), 1), (1, 1), (4, 96))
        }
        print("relative errors", errors, flush=True)
        bench = Bench(config, max(*options.rows, 8))
        for kind in options.decode:
            for n_rows in options.rows if kind != "live-tuned" else [1]:
                is_end = n_rows in (options.rows[0], options.rows[-1])
                bench.decode(kind, n_rows, options.lengths, options.profile and is_end)
        for kind in options.prefill:
            for text in options.buckets:
                n_rows, bucket = (int(part) for part in text.split("x"))
                bench.prefill(kind, n_rows, bucket, options.start, options.profile)
    result = {
        "commit": options.commit or provenance()["commit"],
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "command": f"python -m tests.bench.bench_decoder {' '.join(sys.argv[1:])}",
        "n_tokens": N_TOKENS,
        "copy_tb_per_s": bench.rate,
        "weights_gb": round(size_of(bench.model) / 1e9, 3),
        "cache_mb_per_slot": round((N_TOKENS + 1) * token_bytes(config) / 1e6, 1),
        "reserved_gb": round(torch.cuda.memory_reserved() / 1e9, 1),
        "relative_errors": errors,
        **bench.results,
    }
    text = json.dumps(result)
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
