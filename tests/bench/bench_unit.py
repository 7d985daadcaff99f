"""How long does a unit take: eagerly, compiled, and captured? Full size, random weights, one GPU.

    python -m tests.bench.bench_unit [--units 200] --out tests/bench/results/unit-h200.json

One process plays the same kinds of units three times: with eager stages, with compiled regions,
and with CUDA graphs after the start was sealed. Listening and speaking (ten words, 25 codes, one
second of sound), first and last units of turns, without a frame and with 1, 3 and 10 slices; in
sessions with prompts, frame sizes and turns of varied lengths. Beside the times stand the floor
(bytes over the measured copy rate), the counters that have to be zero, the accuracy of compiled
against eager (both against fp32), and whether 1000 replays equal the uncaptured call bit for bit.
Prints tables; the last line is one JSON object.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from shared.config import load_config
from tests.bench.bench_model import compare_all, truths_of
from tests.bench.provenance import provenance
from tests.bench.replay_checks import replays_equal
from tests.bench.unit_traffic import SLICE_LIMITS, Kind, Timed, Traffic, session_plan
from worker.compile.compiler import Compiler
from worker.compile.regions import CompilePlan
from worker.models.minicpmo45.loading import LoadOptions, load
from worker.models.minicpmo45.model import MiniCpmO45
from worker.plan import cache_of

COPY_BYTES = 4 << 30
TFLOPS = 790.0
"""Measured bf16 rate of an H200 (8192 x 8192 x 8192)."""
DECODE_REPEATS = 200
POSITIONS = (500, 2000, 3900)
BOTH = ("audio", *SLICE_LIMITS)
USUAL = ("audio", "1")
"""What ordinary sessions send; of the others a third of the units is played."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--units", type=int, default=200, help="captured ones of every class")
    parser.add_argument("--eager-units", type=int, default=5, help="compiled ones as well")
    parser.add_argument("--slots", type=int, default=2)
    parser.add_argument("--replays", type=int, default=1000)
    parser.add_argument("--config", type=Path, help="whose compile cache is used; None = none")
    parser.add_argument("--no-accuracy", action="store_true", help="leave out the fp32 comparison")
    parser.add_argument("--profile", action="store_true", help="kernels of one captured unit")
    parser.add_argument("--commit", help="of this code, where there is no git")
    parser.add_argument("--out", type=Path, help="file for the JSON object")
    options = parser.parse_args()
    report: dict[str, Any] = {"bench": "unit", **provenance(options.commit)}
    report |= {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    report |= {"command": f"python -m tests.bench.bench_unit {' '.join(sys.argv[1:])}"}
    for part in measure(options):
        report |= part
        # What was measured is kept, whatever becomes of the rest.
        if options.out:
            options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(report))
    return 0


def measure(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the parts of the report."""
    plan = CompilePlan()
    cache = None
    if options.config:
        config = load_config(options.config).config
        cache = cache_of(config, plan, options.slots, dict(os.environ))
        print("cache:", cache.open().state, flush=True)
    compiler = Compiler(plan)
    model = MiniCpmO45(lambda progress: load(LoadOptions(), progress), compiler=compiler)
    traffic = Traffic(model)

    def quiet(share: float, note: str) -> None:
        pass

    def start() -> None:
        model.load_model(quiet)
        model.init_unified(options.slots, quiet)

    traffic.on_lane(start)
    rate = copy_rate()
    yield {"copy_tb_per_s": rate, "slots": options.slots, "floor_ms": floors(model, rate)}
    accuracy: dict[str, Any] = {}
    truths = None
    if not options.no_accuracy:
        truths = traffic.on_lane(lambda: truths_of(model))
        accuracy["eager"] = traffic.on_lane(lambda: compare_all(model, truths))
    play("first", traffic, 1)
    yield {"eager": play("eager", traffic, options.eager_units)}

    note = timed(lambda: traffic.on_lane(lambda: compiler.compile(quiet)))
    print("compile:", note, flush=True)
    yield {"compile": note}
    if truths is not None:
        accuracy["compiled"] = traffic.on_lane(lambda: compare_all(model, truths))
        print("accuracy", json.dumps(accuracy), flush=True)
        del truths
        torch.cuda.empty_cache()
        yield {"accuracy": accuracy}
    yield {"compiled": play("compiled", traffic, options.eager_units)}
    note = timed(lambda: traffic.on_lane(lambda: compiler.capture(quiet)))
    print("capture:", note, flush=True)
    yield {"capture": note}
    play("warm", traffic, 2)
    # As a worker does: a full collection in the middle of a unit would walk through everything.
    gc.collect()
    gc.freeze()
    traffic.on_lane(compiler.seal)
    yield from measure_captured(traffic, options)
    traffic.close()
    if cache is not None:
        cache.close()


def measure_captured(traffic: Traffic, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield what is to be told about the model as it serves."""
    model = traffic.model
    yield {"captured": play("captured", traffic, options.units)}
    yield {"counts": dict(model.compiler.report.counts())}
    found = traffic.on_lane(lambda: decode_steps(model))
    print("decode step", found, flush=True)
    yield {"decode_step_ms": found}
    found = traffic.on_lane(lambda: replays_equal(model, options.replays))
    print("replays", json.dumps(found), flush=True)
    yield {"replays_equal": found}
    if options.profile:
        profile(traffic)


def timed(function: Callable[[], str]) -> dict[str, Any]:
    began_at = time.perf_counter()
    note = function()
    return {"seconds": round(time.perf_counter() - began_at, 1), "note": note}


def play(way: str, traffic: Traffic, n_units: int) -> dict[str, Any]:
    """Play sessions until every class has its units; times by class, stages of the median unit."""
    found: dict[Kind, list[Timed]] = {Kind(act, sees): [] for sees in BOTH for act in acts_of(sees)}
    first_audio: list[float] = []
    for sees in BOTH:
        kinds = [kind for kind in found if kind.sees == sees]
        n_wanted = n_units if sees in USUAL else min(n_units, n_units // 3 + 2)
        while any(len(found[kind]) < n_wanted for kind in kinds):
            traffic.begin()
            for kind in session_plan(traffic.random, sees, n_turns=6):
                timed_unit = traffic.play(kind)
                if kind in found:
                    found[kind].append(timed_unit)
                if kind.act == "first":
                    first_audio.append(timed_unit.took_ms)
                if all(len(found[kind]) >= n_wanted for kind in kinds):
                    break
            traffic.end()
    table = {kind.name: figures(units) for kind, units in found.items()}
    print(f"{way:10} {'n':>5} {'p50':>8} {'p95':>8} {'p99':>8} {'max':>8} {'p99/p50':>8}  stages")
    for name, row in table.items():
        times = " ".join(f"{row[key]:8.1f}" for key in ("p50", "p95", "p99", "max"))
        print(f"{name:10} {row['n']:5} {times} {row['p99_by_p50']:8.2f}  {row['stages']}")
    print(f"first audio after the deciding unit: p50 {statistics.median(first_audio):.1f} ms")
    sys.stdout.flush()
    return {**table, "first_audio_ms_p50": round(statistics.median(first_audio), 1)}


def acts_of(sees: str) -> tuple[str, ...]:
    """With many slices only the two kinds whose time depends on them."""
    return ("listen", "first", "speak", "end") if sees in USUAL else ("listen", "speak")


def figures(units: list[Timed]) -> dict[str, Any]:
    times = sorted(unit.took_ms for unit in units)
    p50, p95, p99 = (times[min(len(times) - 1, int(q * len(times)))] for q in (0.5, 0.95, 0.99))
    stages: dict[str, list[float]] = defaultdict(list)
    for unit in units:
        for name in unit.result.timings.__struct_fields__:
            stages[name].append(getattr(unit.result.timings, name))
    return {
        "n": len(units),
        "p50": round(p50, 2),
        "p95": round(p95, 2),
        "p99": round(p99, 2),
        "max": round(times[-1], 2),
        "p99_by_p50": round(p99 / p50, 3),
        "codes": statistics.median(unit.result.n_speech_tokens for unit in units),
        "slices": statistics.median(unit.result.vision_slices for unit in units),
        "audio_s": round(statistics.median(len(unit.result.audio) for unit in units) / 24_000, 2),
        "stages": {
            name: round(statistics.median(values), 1)
            for name, values in stages.items()
            if statistics.median(values) > 0.05
        },
    }


@torch.inference_mode()
def decode_steps(model: MiniCpmO45) -> dict[str, float]:
    """Time of one captured step of the language model, one row, at some live lengths."""
    call = model.compiler.stages["llm.decode"].at((1, True))
    found = {}
    for position in POSITIONS:
        call.begin()["starts"][:] = position
        call.run()
        pairs = []
        for index in range(DECODE_REPEATS):
            if index % 16 == 0:
                torch.cuda.synchronize()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call.again()
            end.record()
            pairs.append((start, end))
        torch.cuda.synchronize()
        times = [start.elapsed_time(end) for start, end in pairs]
        found[str(position)] = round(statistics.median(times), 3)
    return found


def copy_rate() -> float:
    """Bytes that the memory reads and writes, in TB/s."""
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    took_ms = timed_ms(lambda: target.copy_(source))
    return round(2 * COPY_BYTES / took_ms / 1e9, 2)


def timed_ms(function: Callable[[], object], n: int = 20) -> float:
    times = []
    for _ in range(n):
        torch.cuda.synchronize()
        began_at = time.perf_counter()
        function()
        torch.cuda.synchronize()
        times.append(1000 * (time.perf_counter() - began_at))
    return statistics.median(times)


def floors(model: MiniCpmO45, rate_tb_s: float) -> dict[str, float]:
    """Reading every weight once a pass; and the multiplications of what is heard and seen."""

    def read_ms(module: torch.nn.Module) -> float:
        return sum(p.nbytes for p in module.parameters()) / rate_tb_s / 1e9

    llm, speech = model.parts.llm, model.parts.speech
    step_ms = read_ms(llm) - llm.embed.weight.nbytes / rate_tb_s / 1e9
    assert model.token2wav is not None
    voice_ms = read_ms(model.token2wav.flow.dit) * model.token2wav.flow.config.n_timesteps
    vision = model.parts.vision.encoder
    n_flops = 2 * 1024 * sum(p.numel() for p in vision.layers.parameters())
    slice_ms = n_flops / TFLOPS / 1e9
    listen_ms = step_ms + read_ms(model.parts.audio)
    speak_ms = listen_ms + (N_STEPS_OF_TEXT * step_ms) + 25 * read_ms(speech.stack) + voice_ms
    found = {}
    for sees in BOTH:
        n_slices = 0 if sees == "audio" else int(sees)
        found[f"listen-{sees}"] = round(listen_ms + n_slices * slice_ms, 1)
        found[f"speak-{sees}"] = round(speak_ms + n_slices * slice_ms, 1)
    return found


N_STEPS_OF_TEXT = 11
"""Decode steps of a unit that says ten words: `<|speak|>` and each of them."""


def profile(traffic: Traffic) -> None:
    """Print where the time of one captured speaking unit goes, kernel by kernel."""
    traffic.begin()
    traffic.play(Kind("first", "1"))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        traffic.play(Kind("speak", "1"))
        torch.cuda.synchronize()
    traffic.end()
    total_us = 0.0
    events = sorted(profiler.key_averages(), key=lambda event: -event.device_time_total)
    for event in events[:60]:
        spent = event.device_time_total
        print(f"  {spent:9.1f} us {event.count:6d} x {spent / event.count:8.2f}  {event.key[:100]}")
    total_us = sum(event.device_time_total for event in events)
    print(f"  {total_us:9.1f} us of kernels in one speaking unit", flush=True)


if __name__ == "__main__":
    sys.exit(main())
