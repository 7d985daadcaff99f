"""The language model's part of the trace `llm_tts`: logits, hidden states, caches, turned keys."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.golden.compare import Trace
from worker.nn.decoder import Decoder, DecoderConfig, KvCache, Rows, turn_keys

SLOT = 1


def replay_llm(trace: Trace, decoder: Decoder) -> None:
    """Feed the trace's tokens and embeddings as it says; compare everything that came out."""
    ids, mid = trace.take("ids"), trace.take("mid_embeds")
    n_prefill = trace.given("prefill")
    trace.equal("decode", len(ids) - n_prefill)
    trace.excuse("order", "a sentence for people; the pieces below are what it says")
    pieces = [
        decoder.embed(ids[None, :n_prefill]),
        mid[None],
        *decoder.embed(ids[n_prefill:])[:, None, None],
    ]
    n_tokens = sum(piece.shape[1] for piece in pieces)
    for padding in (0, 5):  # padded feeds take the way of compiled regions: spans, no exact rows
        cache, hidden = feed(decoder, pieces, n_tokens, padding)
        trace.check("hidden", hidden)
        trace.check("logits", decoder.head(hidden))
        for layer, (keys, values) in enumerate(zip(cache.keys, cache.values, strict=True)):
            for kind, tensor in (("key", keys), ("value", values)):
                name = f"cache.layer{layer}.{kind}"
                if trace.has(name):
                    trace.check(name, tensor[SLOT, :, :n_tokens])
    replay_rotation(trace, decoder.config)


def feed(
    decoder: Decoder, pieces: list[Tensor], n_tokens: int, padding: int
) -> tuple[KvCache, Tensor]:
    """Feed pieces `[1, n, D]` one by one; return the cache and all hidden states `[n, D]`."""
    cache = KvCache.allocate(decoder.config, SLOT + 1, n_tokens)
    for slot in range(SLOT + 1):
        cache.poison(slot)
    hidden, start = [], 0
    for piece in pieces:
        n_new = piece.shape[1]
        x = torch.nn.functional.pad(piece, (0, 0, 0, padding), value=torch.nan)
        positions = cache.positions(torch.tensor([start]), torch.tensor([n_new]), n_new + padding)
        reach = n_tokens if padding else Rows((SLOT,), (start + n_new,))
        hidden.append(decoder.feed(cache, x, torch.tensor([SLOT]), positions, reach)[0, :n_new])
        start += n_new
    return cache, torch.cat(hidden)


def replay_rotation(trace: Trace, config: DecoderConfig) -> None:
    """Turn keys that move, by themselves and in a cache."""
    given = {key: trace.given(f"rotate.{key}") for key in ("old_start", "new_start", "theta")}
    start, target, theta = given["old_start"], given["new_start"], given["theta"]
    keys = trace.take("rotate.in")
    n_keys = keys.shape[2]
    trace.equal("rotate.length", n_keys)
    trace.check("rotate.out", turn_keys(keys, target - start, theta))

    layout = DecoderConfig(
        vocab_size=1,
        hidden_size=1,
        n_layers=1,
        n_heads=keys.shape[1],
        n_kv_heads=keys.shape[1],
        head_dim=keys.shape[3],
        ffn_size=1,
        rope_theta=config.rope_theta,
        norm_eps=config.norm_eps,
    )
    cache = KvCache.allocate(layout, 1, max(start, target) + n_keys)
    cache.keys[0][:, :, start : start + n_keys] = keys
    cache.move(0, start, start + n_keys, target, theta)
    trace.check("rotate.out", cache.keys[0][:, :, target : target + n_keys])
