"""Trace `sampler`: the duplex decision stage by stage, and the penalty on speech tokens."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shared.config import Compat
from tests.golden.compare import PROB_ABS, Trace
from worker.models.minicpmo45.tokenizer import Tokenizer
from worker.nn.code_sampling import CodeRows, CodeSampling, code_probabilities
from worker.nn.text_sampling import (
    DuplexSampling,
    DuplexVocabulary,
    decide,
    decide_stages,
    decision_inputs,
)

OPTIONS = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "text_repetition_penalty": "repetition_penalty",
    "text_repetition_window_size": "window",
    "length_penalty": "length_penalty",
    "listen_prob_scale": "listen_prob_scale",
    "listen_top_k": "listen_top_k",
}
"""The reference's names -> ours."""


def replay(trace: Trace, folder: Path) -> None:
    vocabulary = check_vocabulary(trace, folder)
    logits = trace.take("logits")
    histories = [np.array(ids, dtype=np.int64) for ids in trace.given("histories")]
    rows: dict[int, Tensor] = {}
    for index in range(len(trace.fields["cases"])):
        check_case(trace, vocabulary, logits, histories, index, rows)
    trace.check(
        "probs_after_filters", torch.stack([rows[row] for row in sorted(rows)]), abs_=PROB_ABS
    )
    check_code_penalty(trace)


def check_vocabulary(trace: Trace, folder: Path) -> DuplexVocabulary:
    """Resolve the special ids by the tokenizer and compare the trace's lists."""
    tokenizer = Tokenizer.read(folder / "checkpoint")
    for token in trace.fields["special"]:
        trace.equal(f"special.{token}", tokenizer.token_id(token))
    ids = tokenizer.ids
    trace.equal("listen_id_used_by_reference", ids.im_end)
    vocabulary = DuplexVocabulary.build(
        trace.tensors["logits"].shape[1],
        tuple(tokenizer.bad_ids),
        tts_pad=ids.tts_pad,
        chunk_eos=ids.chunk_eos,
        turn_eos=ids.turn_eos,
        listen=ids.listen,
        im_end=ids.im_end,
    )
    theirs = trace.fields["forbidden"]  # in any order
    ours = vocabulary.forbidden.nonzero().flatten().tolist()
    trace.equal("forbidden", theirs if sorted(set(theirs)) == ours else ours)
    return vocabulary


def check_case(
    trace: Trace,
    vocabulary: DuplexVocabulary,
    logits: Tensor,
    histories: list[NDArray[np.int64]],
    index: int,
    rows: dict[int, Tensor],
) -> None:
    """Compare one case; its distribution after the filters goes into `rows`."""
    path, fields, compat = f"cases[{index}]", trace.fields["cases"][index], Compat.reference()
    options = trace.given(f"{path}.options")
    setting = DuplexSampling(**{OPTIONS[name]: value for name, value in options.items()})
    said = histories[trace.given(f"{path}.history")]
    case = logits[trace.given(f"{path}.logits"), None]
    quirks = (compat.listen_settings_act_on_im_end, compat.penalty_divides_negative_logits)

    inputs = decision_inputs([setting], [said], [(0.0, 0.0)], case.shape[1], "cpu")
    stages = decide_stages(case, inputs, vocabulary, *quirks)
    trace.equal(f"{path}.p_chunk_eos", float(stages.p_chunk_eos), abs_=PROB_ABS)
    listen = vocabulary.im_end if quirks[0] else vocabulary.listen
    trace.equal(f"{path}.direct_return", listen if bool(stages.is_direct) else None)
    if "row" in fields:
        probabilities = torch.zeros(case.shape[1])
        probabilities[stages.ids[0]] = stages.probabilities[0]
        rows[trace.given(f"{path}.row")] = probabilities
        trace.equal(f"{path}.support", int((probabilities > 0).sum()))

    greedy = dataclasses.replace(setting, is_greedy=True)
    chosen = decide(case, [greedy], [said], [(0.0, 0.0)], vocabulary, *quirks)
    trace.equal(f"{path}.greedy", int(chosen))


def check_code_penalty(trace: Trace) -> None:
    """Temperature and penalty of the speech head, on a piece of the codes."""
    path = "tts_penalty"
    trace.excuse(f"{path}.note", "prose")
    setting = CodeSampling(
        temperature=trace.given(f"{path}.temperature"),
        repetition_penalty=trace.given(f"{path}.penalty"),
        window=trace.given(f"{path}.window"),
    )
    histories = trace.given(f"{path}.histories")
    logits = trace.take(f"{path}.logits_sub")
    n_rows, n_codes = logits.shape
    rows = CodeRows.build(
        settings=[setting] * n_rows,
        recent=histories,
        draws=[()] * n_rows,
        min_new=[0] * n_rows,
        is_free=[False] * n_rows,
        n_codes=n_codes,
        n_steps=1,
        device="cpu",
    )
    ours = code_probabilities(logits, rows, rows.recent, step=0)
    trace.check(f"{path}.probs", ours, abs_=PROB_ABS)
