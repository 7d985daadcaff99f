"""Does a replay compute what the call computes? Bit for bit, with the same noise, many times."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from worker.compile.graphs import Call, Stage
from worker.models.minicpmo45.model import MiniCpmO45

MOST_OF_A_STAGE = 2
"""Buckets of a stage that are replayed that often: the first and the last one planned."""

NAMES_ROWS = ("slots", "rows")
"""Inputs that say which rows of the caches a run belongs to."""


@torch.inference_mode()
def replays_equal(model: MiniCpmO45, n_replays: int) -> dict[str, Any]:
    """Compare graphs with the functions they were captured from.

    Inputs are random where any number is valid. Caches are put back before every run where a run
    goes on from the last one's state (the speech head's steps, the voice).

    Returns:
        Per stage and bucket: replays, and how many of them differed in any bit. The larger one of
        two buckets is replayed a tenth as often.
    """
    found: dict[str, Any] = {}
    if model.token2wav is not None:
        model.token2wav.start_turn(range(len(model.token2wav.cache.seen)), model.default_voice)
    for stage in model.compiler.stages.values():
        calls = [stage.at(bucket) for bucket in ends_of(stage)]
        captured = [call for call in calls if call.graph is not None]
        found[stage.name] = {}
        for call, n in zip(reversed(captured), (n_replays, n_replays // 10), strict=False):
            found[stage.name][str(call.bucket)] = {
                "replays": n,
                "different": differing(model, call, n),
            }
    return found


def ends_of(stage: Stage) -> tuple[Any, ...]:
    buckets = stage.buckets
    return buckets if len(buckets) <= MOST_OF_A_STAGE else (buckets[0], buckets[-1])


def differing(model: MiniCpmO45, call: Call, n_replays: int) -> int:
    """How many of the replays gave other outputs, or left other caches, than the call itself."""
    generator = torch.Generator(device=call.stage.device).manual_seed(1)
    for name, tensor in call.tensors.items():
        if tensor.dtype.is_floating_point:
            tensor.uniform_(0.05, 0.95, generator=generator)
        elif name in NAMES_ROWS:
            # Two of one run never write to the same row.
            tensor.copy_(torch.arange(len(tensor)))
    state = list(written(model, call.stage.name))
    before = [tensor.clone() for tensor in state]
    expected = [one.clone() for one in call.compute()]
    after = [tensor.clone() for tensor in state]
    n_different = 0
    for _ in range(n_replays):
        for tensor, old in zip(state, before, strict=True):
            tensor.copy_(old)
        outputs = call.again()
        n_different += not (same(outputs, expected) and same(state, after))
    return n_different


def written(model: MiniCpmO45, stage: str) -> Iterator[Tensor]:
    """Tensors that a run of the stage goes on from, or a part of what it writes."""
    if stage.startswith("llm"):
        yield from (model.language.cache.keys[0], model.language.cache.values[-1])
    elif stage.startswith("tts"):
        yield from (model.speech_cache.keys[0], model.speech_cache.values[-1])
        assert model.speech_stages is not None
        for run in model.speech_stages._runs.values():
            yield from (run.rows.recent, run.positions, run.step, run.drawn, run.hidden)
    elif stage.startswith("voice"):
        assert model.token2wav is not None
        flow, vocoder = model.token2wav.cache, model.token2wav.vocoder
        yield from (*flow.dit.stacks, *flow.encoder.keys, *flow.encoder.values)
        yield from (flow.encoder.ahead, flow.encoder.up, flow.seen)
        yield from (vocoder.mel, vocoder.received, *vocoder._streams().values())


def same(ours: Any, theirs: Any) -> bool:
    """Equal in every bit, NaN included."""
    return all(
        torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
        for a, b in zip(ours, theirs, strict=True)
    )
