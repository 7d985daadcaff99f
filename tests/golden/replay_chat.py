"""Chat: what a prompt becomes, the first logits, and the whole greedy answer."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from shared.errors import BadMessage
from tests.golden.compare import Trace, clip, image
from tests.golden.driver import Played, run_program
from tests.golden.loaded import load_model
from worker.models.contract import Clip, MessagePart, Picture, TurnMessage
from worker.models.minicpmo45 import chat, ops
from worker.models.minicpmo45.chat import ChatRequest
from worker.models.minicpmo45.model import MiniCpmO45

SAMPLED_WITH = (
    *("max_new_tokens", "min_new_tokens", "do_sample", "temperature", "top_p", "top_k"),
    "repetition_penalty",
)
"""Arguments of the original's generate call that are settings of ours under the same name."""

OPTIONS = {
    "max_slice_nums": "max_slice_nums",
    "use_image_id": "use_image_id",
    "omni_mode": "is_omni",
    "enable_thinking": "enable_thinking",
    "use_tts_template": "use_tts_template",
    "max_inp_length": "max_input_tokens",
}
"""Option of the original's chat call -> field of ours."""


def replay(trace: Trace, folder: Path) -> None:
    model = load_model(folder)
    source = Trace("audio", folder).take("base_pcm").numpy()
    clips = {
        n_samples: clip(source, start, n_samples)
        for start, n_samples in trace.given("clips").values()
    }
    for index in range(len(trace.fields["tokenizer"])):
        path = f"tokenizer[{index}]"
        ids = model.tokenizer.encode(trace.given(f"{path}.text"))
        trace.equal(f"{path}.ids", ids)
        trace.equal(f"{path}.decoded_skip", model.tokenizer.decode(ids))
    for index in range(len(trace.fields["cases"])):
        _replay_case(trace, f"cases[{index}]", model, clips)


def _replay_case(
    trace: Trace, path: str, model: MiniCpmO45, clips: dict[int, NDArray[np.float32]]
) -> None:
    name = trace.given(f"{path}.name")
    settings = trace.given(f"{path}.generate_kwargs")
    options = trace.given(f"{path}.options")
    unknown = set(options) - set(OPTIONS) - set(settings)
    assert not unknown, f"options without a field of ours: {unknown}"
    messages = tuple(
        TurnMessage(message["role"], tuple(_part(text, clips) for text in message["content"]))
        for message in trace.given(f"{path}.messages")
    )
    request = ChatRequest(
        messages,
        **{key: settings[key] for key in SAMPLED_WITH if key in settings},
        **{OPTIONS[key]: value for key, value in options.items() if key in OPTIONS},
        is_streaming=False,
    )
    state = chat.new_state(slot=0, seed=0)
    played = run_program(model, chat.chat(model, state, request))
    answer: chat.Answer = played.value
    trace.equal(f"{path}.prompt", answer.prompt)
    trace.equal(f"{path}.prompt_text_ids", model.tokenizer.encode(answer.prompt))
    trace.equal(f"{path}.input_len", answer.n_input_tokens)
    trace.check_every(f"{name}.inputs_embeds", fed_rows(model, played), dim=0)
    if settings.get("num_beams", 1) > 1:
        _check_beams(trace, path, model, request, settings["num_beams"])
        return
    logits = f"{name}.step_logits"
    trace.check(logits, step_logits(played)[: len(trace.tensors[logits])])
    trace.equal(f"{path}.generated_ids", list(answer.token_ids))
    trace.equal(f"{path}.answer", answer.text)


def _check_beams(
    trace: Trace, path: str, model: MiniCpmO45, request: ChatRequest, n_beams: int
) -> None:
    """Several beams are refused in one sentence, so their results are nobody's."""
    refused = dataclasses.replace(request, num_beams=n_beams)
    with pytest.raises(BadMessage, match="num_beams"):
        run_program(model, chat.chat(model, chat.new_state(0, 0), refused))
    for key in ("generated_ids", "answer"):
        trace.excuse(f"{path}.{key}", "beam search is not supported; the request is refused")


def _part(text: str, clips: dict[int, NDArray[np.float32]]) -> MessagePart:
    """Make what a line such as "image 640x480 shift 3" or "audio 40000 samples" stands for."""
    picture = re.fullmatch(r"image (\d+)x(\d+) shift (\d+)", text)
    if picture:
        return Picture(image(*map(int, picture.groups())))
    heard = re.fullmatch(r"audio (\d+) samples", text)
    return Clip(clips[int(heard[1])]) if heard else text


def fed_rows(model: MiniCpmO45, played: Played) -> Tensor:
    """Return what went into the language model as known input, `[N, D]`."""
    parts: list[Any] = []
    for ran in played.of(ops.PREFILL):
        for piece in ran.op.payload.pieces:
            is_ids = isinstance(piece, tuple)
            parts.append(model.parts.llm.embed(torch.tensor(piece)) if is_ids else piece)
    return torch.cat(parts)


def step_logits(played: Played) -> Tensor:
    """Return the raw logits that every generated token was chosen from, `[n, V]`."""
    last_feed = played.of(ops.PREFILL)[-1]
    return torch.stack([ran.logits for ran in (last_feed, *played.of(ops.DECODE))])
