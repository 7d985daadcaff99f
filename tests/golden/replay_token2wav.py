"""Speech tokens to samples, in chunks and whole: the `token2wav_*` traces."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from tests.golden.compare import CHUNK_MEL_REL, Trace
from tests.golden.replay_vocoder import ASSETS, replay_vocoder
from worker.models.minicpmo45.token2wav import find_generation, read_token2wav
from worker.nn.conformer import TAIL_FRAMES, Trim
from worker.nn.flow import Flow, FlowCache, FlowVoice

SILENCE_CODE = 4218
ROW = 1
"""Of three: a replay must not depend on the first row."""


def replay(trace: Trace, folder: Path) -> None:
    flow = load_flow(trace, folder)
    mus = record(flow)
    voice = check_prompt(trace, flow, mus)
    mels = check_chunks(trace, flow, voice, mus)
    whole = flow.whole(
        torch.tensor(trace.given("whole_codes")),
        trace.take("in.prompt_tokens")[0],
        trace.take("in.prompt_mel")[0],
        trace.take("in.spk")[0],
    )
    trace.check("whole.mel", whole[None])
    replay_vocoder(trace, folder, {**mels, "whole": whole[None]})


def check_prompt(trace: Trace, flow: Flow, mus: Callable[[], Tensor]) -> FlowVoice:
    codes = trace.take("in.prompt_tokens")[0]
    trace.equal("prompt_tokens", len(codes))
    ahead = codes[:3] if trace.fields["layout"] == "causal" else torch.full((3,), SILENCE_CODE)
    voice = flow.set_voice(codes, trace.take("in.prompt_mel")[0], trace.take("in.spk")[0], ahead)
    trace.check("prompt.mu", mus())
    trace.check("prompt.feat", voice.mel[None])

    cache = FlowCache.allocate(flow.config, ROW + 2, voice.n_frames)
    cache.poison(ROW)
    flow.start_turn(cache, ROW, voice)
    layout = as_recorded(cache, ROW)
    shapes = {name: list(tensor.shape) for name, tensor in layout.items()}
    trace.equal("prompt_cache_shapes", shapes)
    for name, tensor in layout.items():
        if tensor.numel() >= 9000:
            tensor = tensor.flatten()[:: max(1, tensor.numel() // 3000)]
        trace.check(f"prompt.cache.{name}", tensor)
    return voice


def check_chunks(
    trace: Trace, flow: Flow, voice: FlowVoice, mus: Callable[[], Tensor]
) -> dict[str, Tensor]:
    chunks = trace.fields["chunks"]
    longest = max(2 * len(chunk["codes"]) for chunk in chunks)
    cache = FlowCache.allocate(flow.config, ROW + 2, voice.n_frames, longest)
    for row in range(ROW + 2):
        cache.poison(row)
    mels: dict[str, Tensor] = {}
    turn = None
    for i, chunk in enumerate(chunks):
        path, name = f"chunks[{i}]", trace.given(f"chunks[{i}].name")
        if trace.given(f"{path}.turn") != turn:
            turn = chunk["turn"]
            flow.start_turn(cache, ROW, voice)
        codes = torch.tensor([trace.given(f"{path}.codes")])
        mel = flow.chunk(cache, torch.tensor([ROW]), codes, trace.given(f"{path}.last"))
        mu = mus()
        if trace.has(f"{name}.mu"):
            trace.check(f"{name}.mu", mu)
        trace.check(f"{name}.mel", mel, rel=CHUNK_MEL_REL)
        trace.equal(f"{path}.mel_frames", mel.shape[2])
        layout = as_recorded(cache, ROW)
        shapes = {key: list(tensor.shape) for key, tensor in layout.items()}
        trace.equal(f"{path}.flow_cache", shapes)
        mels[name] = mel
    return mels


def as_recorded(cache: FlowCache, row: int) -> dict[str, Tensor]:
    """Return a row's caches in the original's layout (model.md, 5.3 and 5.4)."""
    n_prompt, n_seen = int(cache.prompt[row]), int(cache.seen[row])
    n_frames = min(n_seen, n_prompt + TAIL_FRAMES)
    encoder, dit, pair = cache.encoder, cache.dit, slice(2 * row, 2 * row + 2)
    blocks = []
    for keys, values, ratio in zip(encoder.keys, encoder.values, encoder.ratios, strict=True):
        packed = torch.cat((keys[row], values[row]), -1)[:, keys.shape[2] - n_frames // ratio :]
        blocks.append(packed.repeat(1, ratio, 1)[None])
    n_slots = dit.keys[0][0].shape[2]
    ranks = [rank for rank in reversed(range(n_seen)) if rank < 100 or rank >= n_seen - n_prompt]
    slots = torch.tensor(
        [rank if rank < 100 else 100 + (rank - 100) % (n_slots - 100) for rank in ranks]
    )
    return {
        "conformer_cnn_cache": torch.cat((encoder.ahead[row], encoder.up[row])).T[None],
        "conformer_att_cache": torch.stack(blocks),
        "estimator_cnn_cache": torch.stack(
            [
                torch.stack(
                    [torch.cat(ab, -1)[pair].transpose(1, 2) for ab in zip(*convs, strict=True)]
                )
                for convs in zip(dit.first, dit.second, strict=True)
            ]
        ),
        "estimator_att_cache": torch.stack(
            [
                torch.stack(
                    [torch.cat(kv, -1)[pair][:, :, slots] for kv in zip(*step, strict=True)]
                )
                for step in zip(dit.keys, dit.values, strict=True)
            ]
        ),
    }


def record(flow: Flow) -> Callable[[], Tensor]:
    """Return a function that gives the encoder's latest output, `[1, 80, F]`."""
    latest: list[Tensor] = []
    flow.mu.register_forward_hook(lambda _module, _args, mu: latest.append(mu))
    return lambda: latest[-1].transpose(1, 2)


def load_flow(trace: Trace, folder: Path) -> Flow:
    """The trim rule follows the generation of the assets (README, 4.9)."""
    assets = folder / ASSETS[trace.given("layout")]
    trim: Trim = "intended" if find_generation(assets) else "packed"
    token2wav = read_token2wav(assets, trace.given("n_timesteps"), trim=trim)
    token2wav.set_noise(trace.take("in.rand_noise"))
    return token2wav.flow
