"""How fast is the language model on one GPU? Full-size Qwen3-8B with random weights, bf16.

    python -m tests.bench.bench_decoder --out tests/bench/results/decoder-h200.json

Per-layer `torch.compile`, captured in CUDA graphs: a decode step (final norm and head included) at
several batch sizes and live lengths, over a common span and with the kernel that reads live
positions only; and the prefill of the usual buckets at the end of a long context. Beside the
times stand the checks that the captured step equals the compiled one bit for bit and that the
kernel agrees with its twin. Prints a table and, as the last line, one JSON object.
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
from worker.nn import attention
from worker.nn.attention import Span
from worker.nn.decoder import Decoder, DecoderConfig, KvCache

QWEN3_8B = DecoderConfig(
    vocab_size=151_748,
    hidden_size=4096,
    n_layers=36,
    n_heads=32,
    n_kv_heads=8,
    head_dim=128,
    ffn_size=12_288,
    rope_theta=1e6,
    norm_eps=1e-6,
    qk_norm=True,
    tied_head=False,
)
N_TOKENS = 4096
N_REPEATS = 50
COPY_BYTES = 4 << 30
DEVICE = "cuda"

# Every kind of compiled decode step: reads live positions only?, further compiler options.
DECODE_KINDS: dict[str, tuple[bool, dict[str, Any]]] = {
    "span": (False, {}),
    "live": (True, {}),
    "live, tuned": (True, {"coordinate_descent_tuning": True}),
}


def build(config: DecoderConfig) -> Decoder:
    """Return a model with random weights, made on the GPU."""
    with torch.device("meta"):
        decoder = Decoder(config).to(torch.bfloat16)
    decoder = decoder.to_empty(device=DEVICE).requires_grad_(False).eval()
    for name, parameter in decoder.named_parameters():
        parameter.fill_(1.0) if "norm" in name else parameter.normal_(0.0, 0.02)
    return decoder


def filled_cache(config: DecoderConfig, n_slots: int) -> KvCache:
    cache = KvCache.allocate(config, n_slots, N_TOKENS, torch.bfloat16, DEVICE)
    for tensor in (*cache.keys, *cache.values):
        tensor.normal_()
    return cache


def compiled_layers(decoder: Decoder, options: dict[str, Any]) -> list[Any]:
    torch._dynamo.reset()  # every kind and size gets its own graph, under its own limit
    return [
        torch.compile(layer.forward, fullgraph=True, dynamic=False, options=options)
        for layer in decoder.layers
    ]


@contextmanager
def reading(live: bool) -> Iterator[None]:
    """Take the kernel away, so that decode steps read a common span."""
    with patch.object(attention, "HAS_TRITON", live):
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

    def equals_compiled(self) -> bool:
        compiled = self.compiled().clone()
        self.result.fill_(torch.nan)
        return torch.equal(self.run(), compiled)


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


def floor_ms(decoder: Decoder, rate: float, kv_tokens: int) -> float:
    """Return the time of reading every weight once and these cached tokens."""
    weights = size_of(decoder) - decoder.embed.weight.nbytes
    return round((weights + kv_tokens * token_bytes(decoder.config)) / rate / 1e9, 2)


def size_of(decoder: Decoder) -> int:
    return sum(parameter.nbytes for parameter in decoder.parameters())


def token_bytes(config: DecoderConfig) -> int:
    return config.n_layers * 2 * config.n_kv_heads * config.head_dim * 2


class Bench:
    def __init__(self, config: DecoderConfig, n_slots: int) -> None:
        self.decoder = build(config)
        self.cache = filled_cache(config, n_slots)
        self.rate = copy_rate()
        self.results: dict[str, Any] = {"decode": [], "prefill": []}

    def say(self, group: str, entry: dict[str, Any]) -> None:
        self.results[group].append(entry)
        print(group, *(f"{key}={value}" for key, value in entry.items()), flush=True)

    def decode(self, kind: str, n_rows: int, lengths: list[int], profile: bool) -> None:
        live, options = DECODE_KINDS[kind]
        decoder, cache = self.decoder, self.cache
        tokens = torch.randint(decoder.config.vocab_size, (n_rows,), device=DEVICE)
        slots = torch.randperm(cache.keys[0].shape[0], device=DEVICE)[:n_rows]
        positions = torch.full((n_rows,), lengths[-1] - 1, device=DEVICE)
        decoder.decode_layers = compiled_layers(decoder, options)

        def step() -> Tensor:
            return decoder.head(decoder.decode(cache, tokens, slots, positions, N_TOKENS))

        with reading(live):
            captured = Captured(step)
            exact = captured.equals_compiled()
        shared = {"kind": kind, "rows": n_rows}
        for length in lengths:
            positions.fill_(length - 1)
            ms, p90 = median_ms(captured.run)
            floor = floor_ms(decoder, self.rate, n_rows * length)
            self.say("decode", {**shared, "live": length, "ms": ms, "p90": p90, "floor": floor})
        # Rows of every age, as in service.
        ages = torch.linspace(min(lengths), max(lengths), n_rows, device=DEVICE).long()
        positions.copy_(ages - 1)
        ms, p90 = median_ms(captured.run)
        self.say(
            "decode",
            {
                **shared,
                "live": "mixed",
                "ms": ms,
                "p90": p90,
                "floor": floor_ms(decoder, self.rate, int(ages.sum())),
                "captured_equals_compiled": exact,
                "compile_s": round(captured.compile_s, 1),
                "capture_s": round(captured.capture_s, 2),
            },
        )
        if profile:
            show_kernels(captured)

    def prefill(self, n_rows: int, bucket: int, start: int, profile: bool) -> None:
        decoder, cache = self.decoder, self.cache
        width = decoder.config.hidden_size
        x = torch.randn(n_rows, bucket, width, device=DEVICE, dtype=torch.bfloat16)
        slots = torch.arange(n_rows, device=DEVICE)
        counts = torch.full((n_rows,), bucket - 5, device=DEVICE)  # the rest is padding
        starts = torch.full((n_rows,), min(start, N_TOKENS - bucket), device=DEVICE)
        decoder.prefill_layers = compiled_layers(decoder, {})
        rows = torch.arange(n_rows, device=DEVICE)

        def feed() -> Tensor:
            positions = cache.positions(starts, counts, bucket)
            hidden = decoder.feed(cache, x, slots, positions, N_TOKENS)
            return decoder.head(hidden[rows, counts - 1])

        captured = Captured(feed)
        ms, p90 = median_ms(captured.run)
        self.say(
            "prefill",
            {
                "rows": n_rows,
                "bucket": bucket,
                "start": int(starts[0]),
                "ms": ms,
                "p90": p90,
                "floor": floor_ms(decoder, self.rate, n_rows * (start + bucket)),
                "captured_equals_compiled": captured.equals_compiled(),
                "compile_s": round(captured.compile_s, 1),
                "capture_s": round(captured.capture_s, 2),
            },
        )
        if profile:
            show_kernels(captured)


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


def kernel_error(config: DecoderConfig, n_rows: int) -> dict[str, float]:
    """Return the relative error of the kernel and of its bf16 twin against the twin in fp32."""
    n_heads, n_kv_heads, d = config.n_heads, config.n_kv_heads, config.head_dim
    shape = (n_rows, n_kv_heads, N_TOKENS + 1, d)
    q = torch.randn(n_rows, n_heads, d, device=DEVICE, dtype=torch.bfloat16)
    keys, values = (torch.randn(shape, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    slots = torch.randperm(n_rows, device=DEVICE)
    lengths = torch.randint(1, N_TOKENS, (n_rows,), device=DEVICE)
    index = torch.arange(N_TOKENS + 1, device=DEVICE)
    is_live = index < lengths[:, None]
    for tensor in (keys, values):  # whoever reads behind a live length finds NaN there
        tensor[slots] = tensor[slots].masked_fill(~is_live[:, None, :, None], torch.nan)
    span = Span(slots, is_live[:, None, None], ~is_live[:, None, :, None])
    exact = span.read(q.float()[:, :, None], keys.float(), values.float())[:, :, 0]
    twin = span.read(q[:, :, None], keys, values)[:, :, 0]
    kernel = attention.decode_attention(q, keys, values, slots, lengths)
    return {
        name: round(float((mixed.float() - exact).norm() / exact.norm()), 5)
        for name, mixed in (("kernel", kernel), ("twin", twin))
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--lengths", type=int, nargs="+", default=[500, 2000, 4000])
    parser.add_argument("--kinds", nargs="+", default=list(DECODE_KINDS), choices=DECODE_KINDS)
    parser.add_argument("--prefill", nargs="*", default=["1x32", "1x96", "1x224"])
    parser.add_argument("--start", type=int, default=3900)
    parser.add_argument("--layers", type=int, default=QWEN3_8B.n_layers)
    parser.add_argument("--profile", action="store_true", help="kernels of the first and last size")
    parser.add_argument("--commit", help="where there is no git")
    parser.add_argument("--out", type=Path, help="file for the JSON object")
    options = parser.parse_args()
    config = replace(QWEN3_8B, n_layers=options.layers)
    torch.manual_seed(0)
    with torch.inference_mode():
        bench = Bench(config, max(options.rows))
        errors = kernel_error(config, max(options.rows))
        print("kernel error", errors, flush=True)
        for kind in options.kinds:
            for n_rows in options.rows:
                is_end = n_rows in (options.rows[0], options.rows[-1])
                bench.decode(kind, n_rows, options.lengths, options.profile and is_end)
        for text in options.prefill:
            n_rows, bucket = (int(part) for part in text.split("x"))
            bench.prefill(n_rows, bucket, options.start, options.profile)
    result = {
        "commit": options.commit or provenance()["commit"],
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "command": f"python -m tests.bench.bench_decoder {' '.join(sys.argv[1:])}",
        "n_tokens": N_TOKENS,
        "copy_tb_per_s": bench.rate,
        "weights_gb": round(size_of(bench.decoder) / 1e9, 3),
        "cache_mb_per_slot": round((N_TOKENS + 1) * token_bytes(config) / 1e6, 1),
        "reserved_gb": round(torch.cuda.memory_reserved() / 1e9, 1),
        "kernel_relative_error": errors,
        **bench.results,
    }
    text = json.dumps(result)
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
