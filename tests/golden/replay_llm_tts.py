"""Trace `llm_tts`: the language model teacher forced, the speech head, and one chat answer."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch import Tensor

from tests.golden.compare import PROB_ABS, REL, Trace
from tests.golden.loaded import load_parts
from tests.golden.replay_llm import replay_llm
from worker.nn.code_sampling import MIN_KEPT
from worker.nn.decoder import KvCache, Rows
from worker.nn.speech import (
    CodeSampling,
    SpeechHead,
    SpeechRequest,
    SpeechTrace,
)


def replay(trace: Trace, folder: Path) -> None:
    parts = load_parts(folder)
    replay_llm(trace, parts.llm)
    head = parts.speech
    text_ids, hidden = trace.take("tts.text_ids"), trace.take("tts.hidden_in")
    check_forced(trace, head, text_ids, hidden)
    check_generation(trace, head, text_ids, hidden)


def check_forced(trace: Trace, head: SpeechHead, text_ids: Tensor, hidden: Tensor) -> None:
    """Condition, blocks and code logits for given codes."""
    # Only differences of positions matter, and nothing lies before the first one: start at 0.
    trace.given("tts.first_position")
    trace.given("tts.rows")
    codes = trace.take("tts.codes")
    request = SpeechRequest(
        slot=0,
        start=0,
        text_ids=tuple(text_ids.tolist()),
        hidden=hidden,
        given_codes=tuple(codes.tolist()),
        max_new=0,
        normalize=True,  # as in full duplex, whatever the configuration says
    )
    n_rows = request.n_inputs
    x = head.inputs([request], n_rows)
    n_condition = n_rows - len(codes)
    trace.check("tts.projected", head.project(hidden))
    trace.check("tts.cond", x[0, :n_condition])

    cache = KvCache.allocate(head.config.decoder, 1, n_rows)
    cache.poison(0)
    positions = torch.arange(n_rows)[None]
    states = head.stack.feed(cache, x, torch.tensor([0]), positions, Rows((0,), (n_rows,)))[0]
    trace.check("tts.backbone_out", states)
    logits = head.head_code(states[n_condition - 1 :])
    for name in trace.tensors:
        if match := re.fullmatch(r"tts\.code_logits_sub(\d+)", name):
            trace.check(name, logits[:, :: int(match[1])])
        elif match := re.fullmatch(r"tts\.code_logits_top(\d+)", name):
            check_top(trace, name, logits, REL * float(logits.abs().max()))


def check_generation(trace: Trace, head: SpeechHead, text_ids: Tensor, hidden: Tensor) -> None:
    """Chat: the whole text, its end, then codes with nucleus, top k and penalty."""
    path = "tts_generate"
    sampling, min_kept = stated_sampling(trace.given(f"{path}.sampling"))
    assert min_kept == MIN_KEPT
    uniforms = trace.given(f"{path}.uniforms")
    max_new = trace.given(f"{path}.max_new_token")
    request = SpeechRequest(
        slot=0,
        start=0,
        text_ids=tuple(text_ids.tolist()),
        hidden=hidden,
        is_closing=True,
        max_new=max_new,
        min_new=trace.given(f"{path}.min_new_token"),
        draws=uniforms + [0.5] * (max_new - len(uniforms)),
        sampling=sampling,
    )
    trace.check("ttsgen.inputs_embeds", head.inputs([request], request.n_inputs)[0])

    cache = KvCache.allocate(head.config.decoder, 1, request.end)
    cache.poison(0)
    went = SpeechTrace()
    [(codes, has_ended)] = head.speak(cache, [request], went)
    trace.equal(f"{path}.codes", codes)
    trace.equal(f"{path}.finished", has_ended)
    drawn = torch.stack(went.drawn)[:, 0]
    trace.equal(f"{path}.draws", drawn.tolist())
    probabilities = torch.stack(went.probabilities)[:, 0]
    for name in trace.tensors:
        if re.fullmatch(r"ttsgen\.prob_top\d+", name):
            check_top(trace, name, probabilities, PROB_ABS)


def stated_sampling(text: str) -> tuple[CodeSampling, int]:
    """Read the settings out of the trace's own words, and how many codes the filters leave."""

    def number(pattern: str) -> float:
        match = re.search(pattern, text)
        assert match is not None, f"no {pattern} in {text!r}"
        return float(match[1])

    sampling = CodeSampling(
        temperature=number(r"temperature (\d*\.?\d+)"),
        top_p=number(r"top_p (\d*\.?\d+)"),
        top_k=int(number(r"top_k (\d+)")),
        repetition_penalty=number(r"penalty (\d*\.?\d+)"),
        window=int(number(r"penalty [\d.]+ over (\d+)")),
    )
    return sampling, int(number(r"at least (\d+)"))


def check_top(trace: Trace, name: str, ours: Tensor, limit: float) -> None:
    """Compare the largest values of every row, and the ids they belong to.

    Where two values lie within `limit` of each other (all zeros do), either order of ids is right.
    """
    values, ids = trace.tensors[name], trace.tensors[f"{name}_ids"].long()
    top = ours.topk(values.shape[1], dim=-1)
    trace.check(name, top.values, abs_=limit)
    is_tie = (ours.gather(1, ids) - values).abs() <= limit
    trace.check(f"{name}_ids", torch.where(is_tie, ids, top.indices))
