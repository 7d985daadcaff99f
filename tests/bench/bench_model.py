"""MiniCPM-o 4.5 at full size with random weights: memory, bf16 against fp32, time of a unit.

    python -m tests.bench.bench_model [--units 20]

Needs a GPU with 80 GB or more. Prints a table; the last line is one JSON object.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import gc
import itertools
import json
import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shared.protocol import DuplexSettings
from tests.bench.provenance import provenance
from tests.golden.driver import run_program
from worker.models.contract import Prompt, Unit
from worker.models.minicpmo45.loading import LoadOptions, load
from worker.models.minicpmo45.model import MiniCpmO45
from worker.nn.decoder import Decoder, KvCache

GIB = 2**30
N_POSITIONS = 512
"""Of teacher-forced input in the comparison, in one prefill and single steps behind it."""
N_STEPS = 64


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--units", type=int, default=20, help="of each kind that is timed")
    parser.add_argument("--commit", help="of this code, where there is no git")
    arguments = parser.parse_args()
    report: dict[str, Any] = {"bench": "model", **provenance(arguments.commit)}
    report |= {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    began_at = time.perf_counter()
    model = MiniCpmO45(lambda progress: load(LoadOptions(), progress))
    model.load_model(lambda share, note: None)
    torch.cuda.synchronize()
    report["load_s"] = round(time.perf_counter() - began_at, 1)
    report["memory_gib"] = memory(model)
    report["session"] = session(model, arguments.units)
    report["accuracy"] = compare_all(model, truths_of(model))
    for name, value in report.items():
        print(f"{name:12} {value}")
    print(json.dumps(report))
    return 0


# ---- memory


def allocated() -> float:
    gc.collect()
    torch.cuda.empty_cache()
    return round(torch.cuda.memory_allocated() / GIB, 2)


def memory(model: MiniCpmO45) -> dict[str, float]:
    """Allocated by tensors after loading and with slots; and what the driver counts on top."""
    found = {"weights": allocated()}
    for n_slots in (32, 8, 1):
        model.init_unified(n_slots, lambda share, note: None)
        found[f"{n_slots} slots"] = allocated()
    free, total = torch.cuda.mem_get_info()
    found["outside of tensors"] = round((total - free) / GIB - found["1 slots"], 2)
    return found


# ---- time


def session(model: MiniCpmO45, n_units: int) -> dict[str, Any]:
    """Units of one session, eager: listening, then speaking 10 words and 25 codes."""
    state = model.new_state(0)
    none = np.zeros(0, np.float32)
    run_program(model, model.prepare(state, Prompt("", DuplexSettings(), none, none)))
    random = np.random.default_rng(0)
    ids = model.tokenizer.ids
    found: dict[str, Any] = {}
    index = itertools.count()

    def play(script: Iterator[int] | None) -> tuple[float, Any]:
        audio = random.normal(0, 0.05, model.unit_samples).astype(np.float32)
        frame = random.integers(0, 256, (448, 448, 3), dtype=np.uint8)
        state.script = script
        torch.cuda.synchronize()
        began_at = time.perf_counter()
        unit = Unit(next(index), audio, (frame,))
        (result,) = run_program(model, model.unit(state, unit)).emitted
        torch.cuda.synchronize()
        return 1000 * (time.perf_counter() - began_at), result

    def speak() -> Iterator[int]:
        return iter([ids.speak, *random.integers(0, 1000, 10).tolist(), ids.chunk_eos])

    for name, script in (("listen", lambda: iter([ids.listen])), ("speak", speak)):
        times, result = [], None
        for number in range(n_units + 3):
            took_ms, result = play(script())
            if number >= 3:
                times.append(took_ms)
        found[f"{name}_ms"] = {
            "p50": round(statistics.median(times), 1),
            "max": round(max(times), 1),
        }
        found[f"{name}_timings"] = {
            key: round(getattr(result.timings, key), 1)
            for key in ("vision_ms", "listen_ms", "prefill_ms", "decode_ms", "speech_tokens_ms")
        } | {"vocode_ms": round(result.timings.vocode_ms, 1)}
        found[f"{name}_codes"] = result.n_speech_tokens
        found[f"{name}_samples_are_finite"] = bool(np.isfinite(result.audio).all())
    found["kv_tokens"] = state.context_tokens
    return found


# ---- accuracy


@dataclasses.dataclass(frozen=True)
class Truths:
    """What the same weights give in fp32, and what for."""

    slices: list[NDArray[np.uint8]]
    vision: Tensor
    mel: Tensor
    audio: Tensor
    tokens: Tensor
    hidden: Tensor
    logits: Tensor
    cache: KvCache
    codes: Tensor
    speech_hidden: Tensor
    speech_logits: Tensor


@torch.inference_mode()
def truths_of(model: MiniCpmO45) -> Truths:
    """Run fp32 copies of the model's parts, none of which is compiled yet."""
    generator = torch.Generator(device="cuda").manual_seed(1)
    random = np.random.default_rng(2)
    sizes = ((448, 448), (392, 518), (546, 364))
    slices = [random.integers(0, 256, (*size, 3), dtype=np.uint8) for size in sizes]
    mel = torch.rand(1, 80, 800, device="cuda", generator=generator) * 2 - 1
    options = {"generator": generator, "device": "cuda"}
    tokens = torch.randint(0, 100_000, (1, N_POSITIONS), **options)
    codes = torch.randint(0, 6561, (1, N_POSITIONS), **options)
    vision = copy.deepcopy(model.parts.vision).float().encode(slices)
    audio = copy.deepcopy(model.parts.audio).float().encode_clip(mel, (800,), is_chunked=True)
    llm = copy.deepcopy(model.parts.llm).float()
    hidden, cache = teacher_forced(llm, llm.embed(tokens))
    logits = llm.head(hidden)
    del llm
    speech = copy.deepcopy(model.parts.speech).float()
    speech_hidden, _ = teacher_forced(speech.stack, speech.emb_code(codes))
    return Truths(
        slices, vision, mel, audio, tokens, hidden, logits, cache, codes, speech_hidden,
        speech.head_code(speech_hidden),
    )  # fmt: skip


@torch.inference_mode()
def compare_all(model: MiniCpmO45, truths: Truths) -> dict[str, Any]:
    """The model as it is now, bf16, eager or compiled, against the truth, stage by stage."""
    parts = model.parts
    audio = parts.audio.encode_clip(truths.mel, (800,), is_chunked=True)
    codes = parts.speech.emb_code(truths.codes)
    speech_hidden, _ = teacher_forced(parts.speech.stack, codes)
    return {
        "vision": compare_rows(parts.vision.encode(truths.slices), truths.vision),
        "audio": compare_rows(audio, truths.audio),
        "llm": compare_llm(parts.llm, truths),
        "speech": {
            "hidden": compare_rows(speech_hidden, truths.speech_hidden),
            "logits": compare_logits(parts.speech.head_code(speech_hidden), truths.speech_logits),
        },
    }


def compare_rows(ours: Tensor, truth: Tensor) -> dict[str, float]:
    ours, truth = ours.double().flatten(0, -2), truth.double().flatten(0, -2)
    cosine = torch.nn.functional.cosine_similarity(ours, truth, dim=-1)
    relative = (ours - truth).norm() / truth.norm()
    return {"cosine_min": round(float(cosine.min()), 6), "relative_l2": float(f"{relative:.2e}")}


def compare_logits(ours: Tensor, truth: Tensor) -> dict[str, float]:
    """KL of fp32 to bf16, and how often both prefer the same token where fp32 is not torn."""
    log_p, log_q = truth.float().log_softmax(-1), ours.float().log_softmax(-1)
    kl = (log_p.exp() * (log_p - log_q)).sum(-1).flatten()
    top = truth.float().topk(2, dim=-1).values
    is_clear = (top[..., 0] - top[..., 1] > 0.1).flatten()
    agrees = (ours.argmax(-1) == truth.argmax(-1)).flatten()
    return {
        "kl_mean": float(f"{kl.mean():.2e}"),
        "kl_p99": float(f"{kl.quantile(0.99):.2e}"),
        "top1_agreement": round(float(agrees[is_clear].float().mean()), 4),
        "n_clear": int(is_clear.sum()),
    }


def compare_llm(llm: Decoder, truths: Truths) -> dict[str, Any]:
    hidden, cache = teacher_forced(llm, llm.embed(truths.tokens))
    found: dict[str, Any] = {"hidden": compare_rows(hidden, truths.hidden)}
    found["logits"] = compare_logits(llm.head(hidden).float(), truths.logits)
    sides = zip(
        (*cache.keys, *cache.values), (*truths.cache.keys, *truths.cache.values), strict=True
    )
    live = slice(0, N_POSITIONS)
    found["cache_cosine_min"] = min(
        compare_rows(a[:1, :, live], b[:1, :, live])["cosine_min"] for a, b in sides
    )
    found["other_slots_untouched"] = bool(
        all((side[1] == 0).all() for side in (*cache.keys, *cache.values))
    )
    return found


def teacher_forced(stack: Any, x: Tensor) -> tuple[Tensor, KvCache]:
    """Hidden states `[1, N, D]`: one prefill, then single steps."""
    cache = KvCache.allocate(stack.config, 2, N_POSITIONS, dtype=x.dtype, device=x.device)
    slot = torch.zeros(1, dtype=torch.int64, device=x.device)
    positions = torch.arange(x.shape[1], device=x.device)[None]
    n_prefill = x.shape[1] - N_STEPS
    parts = [stack.feed(cache, x[:, :n_prefill], slot, positions[:, :n_prefill], N_POSITIONS)]
    for index in range(n_prefill, x.shape[1]):
        step = slice(index, index + 1)
        parts.append(stack.feed(cache, x[:, step], slot, positions[:, step], N_POSITIONS))
    return torch.cat(parts, dim=1), cache


if __name__ == "__main__":
    sys.exit(main())
