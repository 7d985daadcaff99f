"""The decoder against transformers on tiny random models, and its promises about caches."""

import shutil

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from worker.compile.regions import compile_decode
from worker.nn.decoder import Decoder, DecoderConfig, KvCache, Rows, decoder_weights

TINY = DecoderConfig(
    vocab_size=97,
    hidden_size=48,
    n_layers=3,
    n_heads=6,
    n_kv_heads=2,
    head_dim=16,
    ffn_size=80,
    rope_theta=10_000.0,
    norm_eps=1e-5,
)
QWEN = DecoderConfig(
    vocab_size=97,
    hidden_size=48,
    n_layers=2,
    n_heads=4,
    n_kv_heads=2,
    head_dim=24,
    ffn_size=80,
    rope_theta=1e6,
    norm_eps=1e-6,
    qk_norm=True,
    tied_head=False,
)
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


def reference(config):
    """A seeded transformers model of the same shape."""
    kind, model = (
        (Qwen3Config, Qwen3ForCausalLM) if config.qk_norm else (LlamaConfig, LlamaForCausalLM)
    )
    torch.manual_seed(0)
    theirs = model(
        kind(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.ffn_size,
            num_hidden_layers=config.n_layers,
            num_attention_heads=config.n_heads,
            num_key_value_heads=config.n_kv_heads,
            head_dim=config.head_dim,
            rms_norm_eps=config.norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
            tie_word_embeddings=config.tied_head,
            max_position_embeddings=512,
        )
    ).eval()
    for name, parameter in theirs.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return theirs


def ours(config, theirs=None):
    decoder = Decoder(config).eval()
    decoder.load_state_dict(
        decoder_weights((theirs or reference(config)).state_dict(), config), strict=True
    )
    return decoder.requires_grad_(False)


def tokens(n, seed=1):
    return torch.randint(97, (1, n), generator=torch.Generator().manual_seed(seed))


def ints(*values):
    return torch.tensor(values)


def prefill(decoder, cache, ids, slot=0, start=0, span=None):
    end = start + ids.shape[1]
    reach = Rows((slot,), (end,)) if span is None else span
    return decoder.prefill(cache, ids, ints(slot), ints(start), reach)


def poisoned(config, n_slots=3, n_tokens=64):
    cache = KvCache.allocate(config, n_slots, n_tokens)
    for slot in range(n_slots):
        cache.poison(slot)
    return cache


@pytest.mark.parametrize("config", [TINY, QWEN], ids=["llama", "qwen3"])
@pytest.mark.parametrize("span", [None, 40], ids=["rows", "span"])
def test_prefill_and_decode_agree_with_transformers(config, span):
    theirs = reference(config)
    decoder = ours(config, theirs)
    ids = tokens(12)
    expected = theirs(ids).logits[0].detach()

    cache = poisoned(config)
    first = decoder.head(prefill(decoder, cache, ids[:, :9], slot=2, span=span))
    steps = [
        decoder.head(
            decoder.decode(
                cache,
                ids[0, n : n + 1],
                ints(2),
                ints(n),
                Rows((2,), (n + 1,)) if span is None else span,
            )
        )
        for n in range(9, 12)
    ]

    torch.testing.assert_close(first[0], expected[8], **CLOSE)
    torch.testing.assert_close(torch.cat(steps), expected[9:], **CLOSE)


@pytest.mark.parametrize("sizes", [(1, 12), (5, 8), (4, 4, 4, 1), (1,) * 13])
def test_prefill_in_pieces_equals_whole(sizes):
    decoder, ids = ours(TINY), tokens(13)
    whole = prefill(decoder, poisoned(TINY), ids)

    cache, start = poisoned(TINY), 0
    for size in sizes:
        hidden = prefill(decoder, cache, ids[:, start : start + size], start=start)
        start += size

    torch.testing.assert_close(hidden, whole, **CLOSE)


@pytest.mark.parametrize("span", [None, 33], ids=["rows", "span"])
def test_batched_row_equals_single(span):
    decoder = ours(TINY)
    lengths, slots = (3, 20, 11), (2, 0, 1)
    caches = poisoned(TINY), poisoned(TINY)
    for cache in caches:
        for slot, length in zip(slots, lengths, strict=True):
            prefill(decoder, cache, tokens(length, seed=slot), slot=slot)
    ends = tuple(length + 1 for length in lengths)

    batch = decoder.decode(
        caches[0],
        ints(5, 6, 7),
        ints(*slots),
        ints(*lengths),
        Rows(slots, ends) if span is None else span,
    )
    single = [
        decoder.decode(caches[1], ints(5 + row), ints(slot), ints(length), Rows((slot,), (end,)))
        for row, (slot, length, end) in enumerate(zip(slots, lengths, ends, strict=True))
    ]

    torch.testing.assert_close(batch, torch.cat(single), **CLOSE)


@pytest.mark.parametrize("span", [None, 64], ids=["rows", "span"])
def test_poisoned_slot_serves_the_next_session_like_a_fresh_one(span):
    decoder, ids = ours(TINY), tokens(7)
    fresh = prefill(decoder, KvCache.allocate(TINY, 1, 64), ids, span=span)

    used = KvCache.allocate(TINY, 1, 64)
    prefill(decoder, used, tokens(50, seed=9))
    used.poison(0)
    again = prefill(decoder, used, ids, span=span)

    torch.testing.assert_close(again, fresh, rtol=0, atol=0)


def test_poison_of_one_slot_leaves_its_neighbour_alone():
    decoder, ids = ours(TINY), tokens(7)
    cache = KvCache.allocate(TINY, 2, 64)
    prefill(decoder, cache, ids, slot=1)
    cache.poison(0)

    hidden = decoder.decode(cache, ints(3), ints(1), ints(7), Rows((1,), (8,)))

    assert hidden.isfinite().all()


def test_rewriting_from_an_earlier_position_forgets_what_followed():
    decoder, ids = ours(TINY), tokens(20)
    whole = prefill(decoder, poisoned(TINY), ids[:, :10])

    cache = poisoned(TINY)
    prefill(decoder, cache, torch.cat((ids[:, :6], tokens(14, seed=5)), dim=1))
    again = prefill(decoder, cache, ids[:, 6:10], start=6)

    torch.testing.assert_close(again, whole, **CLOSE)


@pytest.mark.parametrize("config", [TINY, QWEN], ids=["llama", "qwen3"])
def test_bf16_stays_close_to_fp32(config):
    decoder, ids = ours(config), tokens(12)
    exact = prefill(decoder, KvCache.allocate(config, 1, 32), ids)

    half = KvCache.allocate(config, 1, 32, dtype=torch.bfloat16)
    rounded = prefill(decoder.bfloat16(), half, ids)

    assert rounded.dtype == torch.bfloat16
    torch.testing.assert_close(rounded.float(), exact, rtol=0.05, atol=0.1)


def test_missing_tensor_is_named():
    weights = reference(TINY).state_dict()
    del weights["model.layers.1.mlp.up_proj.weight"]

    with pytest.raises(KeyError, match=r"layers\.1\.mlp\.up_proj"):
        decoder_weights(weights, TINY)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile on a CPU needs g++")
def test_compiled_decode_equals_eager_with_one_graph_for_all_layers():
    decoder = ours(TINY)
    caches = poisoned(TINY), poisoned(TINY)
    for cache in caches:
        for slot in range(3):
            prefill(decoder, cache, tokens(4 + slot, seed=slot), slot=slot)
    step = (ints(1, 2, 3), ints(0, 1, 2), ints(4, 5, 6), 32)
    with torch.inference_mode():
        eager = decoder.decode(caches[0], *step)

        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        compile_decode(decoder)
        compiled = decoder.decode(caches[1], *step)
        wider = decoder.decode(caches[1], *step[:3], 48)

    torch.testing.assert_close(compiled, eager, **CLOSE)
    torch.testing.assert_close(wider, eager, **CLOSE)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
