"""How fast are eyes and ears on one GPU? Both encoders at full size with random weights, bf16.

    python -m tests.bench.bench_senses --out tests/bench/results/senses-h200.json

For every planned bucket of both stages: milliseconds without compiler and graph, and captured;
whether both agree, and the host's part of one op. Then one layer's attention over padded slices in
the ways there are to hide padding: with a mask, by shades as `VisionLayer.padded` does, as
sequences of their own (`varlen_attn`), and what it would cost without padding. Prints a table and,
as the last line, one JSON object.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention.varlen import varlen_attn

from tests.bench.bench_decoder import DEVICE, Captured, median_ms
from tests.bench.provenance import provenance
from worker.compile.compiler import Compiler
from worker.compile.graphs import Call
from worker.compile.regions import CompilePlan
from worker.models.minicpmo45.config import FULL_SIZE
from worker.models.minicpmo45.senses import SLICE_BATCHES, Senses, patch_sizes
from worker.nn.audio_encoder import AudioEncoder
from worker.nn.siglip import N_SHADES, SHADE
from worker.nn.vision import VisionTower

N_SLOTS = 32
GRID = (24, 43)
"""Of a 16:9 picture."""
PAST = 1400
"""Frames that every stream has heard: the longest there is, about."""
N_LAUNCHES = 27
"""Attentions in one graph, as many as the original has layers."""


def build() -> tuple[Senses, Compiler]:
    with torch.device("meta"):
        vision = VisionTower(FULL_SIZE.vision, FULL_SIZE.resampler)
        audio = AudioEncoder(FULL_SIZE.audio)

    def filled(module: nn.Module) -> None:
        module.to(torch.bfloat16).to_empty(device=DEVICE).requires_grad_(False).eval()
        for name, parameter in module.named_parameters():
            parameter.fill_(1.0) if "norm.weight" in name else parameter.normal_(0.0, 0.02)

    filled(vision)
    filled(audio)
    compiler = Compiler(CompilePlan())
    compiler.prepare(torch.device(DEVICE))
    return Senses(vision, audio, FULL_SIZE.slices, N_SLOTS, compiler), compiler


def fill(call: Call) -> None:
    """Give a bucket usual input."""
    host = call.begin()
    if "pixels" in call.tensors:
        pixels = call.tensors["pixels"]
        pixels.random_(0, 256, generator=torch.Generator(pixels.device).manual_seed(0))
        host["n_columns"][:] = GRID[1]
        host["n_patches"][:] = GRID[0] * GRID[1]
        return
    generator = torch.Generator().manual_seed(0)
    host["mel"][:] = torch.randn(host["mel"].shape, generator=generator).numpy()
    host["slots"][:] = range(len(host["slots"]))
    host["past"][:] = PAST


def stages(senses: Senses, compiler: Compiler) -> list[dict[str, Any]]:
    """Measure every planned bucket."""
    calls = [stage.at(bucket) for stage in compiler.stages.values() for bucket in stage.buckets]
    for tensor in (*senses.cache.keys, *senses.cache.values):
        tensor.normal_()
    rows = []
    for call in calls:
        fill(call)
        wanted = call.run()[0].float()
        row = {"stage": call.stage.name, "bucket": call.bucket, "eager_ms": median_ms(call.run)[0]}
        rows.append((row, wanted, call))
    for step in (compiler.compile, compiler.capture):
        print(step(lambda share, note: None), flush=True)
    for row, wanted, call in rows:
        fill(call)
        made = call.run()[0].float()
        row["likeness"] = round(torch.cosine_similarity(made, wanted, dim=-1).min().item(), 5)
        row["captured_ms"], row["captured_p90_ms"] = median_ms(call.run)
        row["host_ms"] = host_ms(call)
        print(row, flush=True)
    print(dict(compiler.report.region_graphs), flush=True)
    return [row for row, _, _ in rows]


def host_ms(call: Call) -> float:
    """How long the host takes to send the inputs and to start the graph."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(2):
        call.begin()
        call.run()
    taken = (time.perf_counter() - began) / 2
    torch.cuda.synchronize()
    return round(taken * 1e3, 3)


def attentions(b: int, n: int) -> dict[str, float]:
    """Microseconds of one layer's attention over b slices padded to n patches."""
    n_heads, width = FULL_SIZE.vision.n_heads, FULL_SIZE.vision.width
    n_live = GRID[0] * GRID[1]
    stacked = torch.randn(b, n, 3, n_heads, width // n_heads, device=DEVICE, dtype=torch.bfloat16)
    q, k, v = stacked.permute(2, 0, 3, 1, 4)
    is_patch = torch.arange(n, device=DEVICE) < torch.full((b, 1), n_live, device=DEVICE)
    shade = torch.zeros_like(is_patch, dtype=torch.bfloat16).masked_fill(~is_patch, SHADE)
    # A slice and the padding behind it are two sequences.
    ends = torch.arange(b, device=DEVICE, dtype=torch.int32)[:, None] * n
    ends = functional.pad((ends + torch.tensor((n_live, n), device=DEVICE)).flatten(), (1, 0))
    ends = ends.to(torch.int32)

    def masked() -> Tensor:
        mask = is_patch[:, None, None]
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2)

    def shaded() -> Tensor:
        shades = shade[:, None, :, None].expand(-1, n_heads, -1, N_SHADES)
        mixed = functional.scaled_dot_product_attention(
            torch.cat((q, torch.ones_like(shades)), -1),
            torch.cat((k, shades), -1),
            functional.pad(v, (0, N_SHADES)),
            scale=q.shape[-1] ** -0.5,
        )
        return mixed[..., : q.shape[-1]].transpose(1, 2).contiguous()

    def apart() -> Tensor:
        packed = stacked.flatten(0, 1)
        mixed = varlen_attn(packed[:, 0], packed[:, 1], packed[:, 2], ends, ends, n, n)
        assert isinstance(mixed, Tensor)
        return mixed.view(b, n, n_heads, -1)

    def unpadded() -> Tensor:
        parts = (part[:, :, :n_live] for part in (q, k, v))
        return functional.scaled_dot_product_attention(*parts).transpose(1, 2)

    wanted = masked()[:, :n_live]
    times = {}
    for function in (masked, shaded, apart, unpadded):
        made = torch.compile(function, fullgraph=True) if function is shaded else function
        torch.testing.assert_close(made()[:, :n_live], wanted, rtol=0.02, atol=0.02)
        times[function.__name__] = round(1e3 * median_ms(repeated(made).run)[0] / N_LAUNCHES, 1)
    return times


def repeated(function: Callable[[], Tensor]) -> Captured:
    def many() -> Tensor:
        for _ in range(N_LAUNCHES):
            made = function()
        return made

    return Captured(many)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, help="also write the JSON object to this file")
    parser.add_argument("--commit", help="of this code, where its repository is not at hand")
    options = parser.parse_args()
    usual, _ = patch_sizes(FULL_SIZE.slices)
    found: dict[str, Any] = {"bench": "senses", "torch": torch.__version__}
    found["attention_us"] = {}
    for b in SLICE_BATCHES:
        found["attention_us"][b] = attentions(b, usual)
        print(f"attention {b} x {usual}: {found['attention_us'][b]}", flush=True)
    found["stages"] = stages(*build())
    found |= provenance(options.commit)
    line = json.dumps(found)
    print(line)
    if options.out is not None:
        options.out.write_text(line + "\n")


if __name__ == "__main__":
    main()
