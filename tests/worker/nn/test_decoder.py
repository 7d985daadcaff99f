"""The decoder against transformers on tiny random models, and its promises about caches."""

import shutil
from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from worker.compile.regions import CompilePlan, Dim, Region, compile_region
from worker.compile.report import CompileReport
from worker.nn.decoder import (
    Decoder,
    DecoderConfig,
    DecoderStack,
    KvCache,
    Rows,
    decoder_weights,
    rotary_table,
    rotate,
    stack_weights,
    turn_keys,
)

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


MHA = replace(TINY, n_heads=3, n_kv_heads=3, n_layers=2)
"""Every query head has its own key head, as in the speech head."""
ALL = pytest.mark.parametrize("config", [TINY, QWEN, MHA], ids=["llama", "qwen3", "mha"])
SPAN = 64


def embeddings(config, n, seed=3):
    return torch.randn(n, config.hidden_size, generator=torch.Generator().manual_seed(seed))


def feed_alone(decoder, cache, x, slot, start):
    """Feed one row without padding over exact slices."""
    positions = start + torch.arange(len(x))[None]
    return decoder.feed(cache, x[None], ints(slot), positions, Rows((slot,), (start + len(x),)))[0]


def feed_ragged(decoder, cache, pieces, slots, starts, reach):
    """Feed rows of different lengths at once, NaN in the padding; the states of the tokens."""
    counts = [len(piece) for piece in pieces]
    n_new = max(counts) + 2
    x = torch.full((len(pieces), n_new, decoder.config.hidden_size), torch.nan)
    for row, piece in enumerate(pieces):
        x[row, : len(piece)] = piece
    positions = cache.positions(ints(*starts), ints(*counts), n_new)
    hidden = decoder.feed(cache, x, ints(*slots), positions, reach)
    return [row[:count] for row, count in zip(hidden, counts, strict=True)]


@ALL
def test_states_of_all_positions_agree_with_transformers(config):
    theirs = reference(config)
    decoder, x = ours(config, theirs), embeddings(config, 11)
    expected = theirs.model(inputs_embeds=x[None]).last_hidden_state[0].detach()

    hidden = feed_alone(decoder, poisoned(config), x, slot=1, start=0)

    torch.testing.assert_close(hidden, expected, **CLOSE)


@ALL
@pytest.mark.parametrize("span", [None, SPAN], ids=["rows", "span"])
def test_ragged_rows_equal_rows_alone(config, span):
    decoder = ours(config)
    slots, starts, counts = (2, 0, 1), (0, 9, 57), (13, 1, 7)
    pieces = [embeddings(config, count, seed=count) for count in counts]
    caches = poisoned(config), poisoned(config)
    for cache in caches:
        for slot, start in zip(slots, starts, strict=True):
            if start:
                feed_alone(decoder, cache, embeddings(config, start, seed=start), slot, 0)
    ends = tuple(start + count for start, count in zip(starts, counts, strict=True))

    together = feed_ragged(decoder, caches[0], pieces, slots, starts, span or Rows(slots, ends))
    alone = [
        feed_alone(decoder, caches[1], piece, slot, start)
        for piece, slot, start in zip(pieces, slots, starts, strict=True)
    ]

    torch.testing.assert_close(together, alone, **CLOSE)
    for row, slot in enumerate(slots):  # and so do the tokens that follow
        after = [
            feed_alone(decoder, cache, embeddings(config, 1, seed=8), slot, ends[row])
            for cache in caches
            if ends[row] < cache.n_tokens
        ]
        assert all(torch.allclose(hidden, after[0], **CLOSE) for hidden in after)


def test_padding_stays_behind_a_slot_that_is_full():
    decoder, cache = ours(TINY), poisoned(TINY, n_tokens=16)
    feed_alone(decoder, cache, embeddings(TINY, 10), slot=0, start=0)
    before = cache.save(0, 10)

    (hidden,) = feed_ragged(decoder, cache, [embeddings(TINY, 6)], (0,), (10,), 16)

    assert hidden.isfinite().all()
    torch.testing.assert_close(cache.save(0, 10), before, rtol=0, atol=0)
    assert all(side[0, :, :16].isfinite().all() for side in (*cache.keys, *cache.values))


def test_row_of_padding_may_point_at_the_slot_of_another_row():
    decoder = ours(TINY)
    caches = poisoned(TINY), poisoned(TINY)
    for cache in caches:
        prefill(decoder, cache, tokens(5), slot=1)

    spare = caches[0].spare
    padded = decoder.decode(caches[0], ints(7, 0), ints(1, 1), ints(5, spare), SPAN)
    alone = decoder.decode(caches[1], ints(7), ints(1), ints(5), SPAN)

    torch.testing.assert_close(padded[:1], alone, **CLOSE)


def test_positions_end_in_padding():
    cache = KvCache.allocate(TINY, 1, 20)

    positions = cache.positions(ints(3, 18, 0), ints(4, 2, 0), 4)

    assert positions.tolist() == [[3, 4, 5, 6], [18, 19, 20, 20], [20, 20, 20, 20]]


def test_restored_slot_goes_on_as_if_nothing_had_happened():
    decoder, ids = ours(QWEN), tokens(12)
    cache, other = poisoned(QWEN), poisoned(QWEN)
    prefill(decoder, cache, ids[:, :8], slot=1)
    saved = cache.save(1, 8)
    expected = prefill(decoder, cache, ids[:, 8:], slot=1, start=8)

    cache.poison(1)
    cache.restore(1, saved)
    other.restore(2, saved)

    for restored, slot in ((cache, 1), (other, 2)):
        hidden = prefill(decoder, restored, ids[:, 8:], slot=slot, start=8)
        torch.testing.assert_close(hidden, expected, rtol=0, atol=0)


def test_saved_slot_does_not_follow_the_cache():
    decoder, cache = ours(TINY), poisoned(TINY)
    prefill(decoder, cache, tokens(8), slot=0)
    keys, values = cache.save(0, 8)

    cache.poison(0)

    assert all(tensor.isfinite().all() for tensor in (*keys, *values))


@pytest.mark.parametrize("delta", [-37, 0, 5, 3000])
def test_turned_keys_are_those_of_the_new_position(delta):
    keys = torch.randn(1, 9, 2, 16, generator=torch.Generator().manual_seed(0))
    places = 40 + torch.arange(9)[None]

    then = rotate(keys, *rotary_table(places, 16, 1e6))[0].transpose(0, 1)
    now = rotate(keys, *rotary_table(places + delta, 16, 1e6))[0].transpose(0, 1)

    torch.testing.assert_close(turn_keys(then, delta, 1e6), now, rtol=0, atol=5e-4)


@pytest.mark.parametrize(
    ("start", "end", "target"), [(20, 30, 14), (20, 30, 22), (10, 14, 40), (5, 9, 5), (3, 3, 8)]
)
def test_moved_block_is_what_feeding_it_there_would_have_left(start, end, target):
    """With one layer keys depend on token and position alone, so both ways must agree."""
    config = replace(QWEN, n_layers=1)
    decoder, ids, n = ours(config), tokens(32), end - start
    moved, expected = poisoned(config, n_tokens=64), poisoned(config, n_tokens=64)
    prefill(decoder, moved, ids)
    prefill(decoder, expected, ids)
    if n:
        prefill(decoder, expected, ids[:, start:end], start=target, span=64)

    moved.move(0, start, end, target, config.rope_theta)

    seen = slice(target, target + n)
    torch.testing.assert_close(moved.keys[0][0, :, seen], expected.keys[0][0, :, seen], **CLOSE)
    torch.testing.assert_close(moved.values[0][0, :, seen], expected.values[0][0, :, seen], **CLOSE)
    rest = [place for place in range(32) if not target <= place < target + n]
    torch.testing.assert_close(
        moved.keys[0][0, :, rest], expected.keys[0][0, :, rest], rtol=0, atol=0
    )


@pytest.mark.parametrize("block", [(5, 4, 0), (0, 65, 0), (60, 64, 61), (3, 9, -1)])
def test_block_that_does_not_fit_is_not_moved(block):
    with pytest.raises(AssertionError):
        KvCache.allocate(TINY, 1, 64).move(0, *block, theta=1e4)


def test_block_moved_there_and_back_is_itself():
    cache = poisoned(QWEN)
    prefill(ours(QWEN), cache, tokens(30))
    before = cache.save(0, 30)

    cache.move(0, 12, 30, 4, QWEN.rope_theta)
    cache.move(0, 4, 22, 12, QWEN.rope_theta)

    for side, saved in zip((cache.keys, cache.values), before, strict=True):
        for tensor, copy in zip(side, saved, strict=True):
            torch.testing.assert_close(tensor[0, :, 12:30], copy[:, 12:], **CLOSE)


def filled(config, n_slots=3, n_tokens=64, dtype=torch.float32):
    """A cache in which every position holds something else."""
    cache = KvCache.allocate(config, n_slots, n_tokens, dtype)
    generator = torch.Generator().manual_seed(4)
    for tensor in (*cache.keys, *cache.values):
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return cache


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "block",
    [(20, 30, 14), (20, 30, 22), (10, 14, 40), (5, 9, 5), (3, 3, 8), (0, 64, 0), (63, 64, 0)],
)
def test_block_known_to_the_device_only_moves_the_same_way(block, dtype):
    start, end, target = block
    ours_, theirs = filled(QWEN, dtype=dtype), filled(QWEN, dtype=dtype)

    ours_.move_block(ints(1, start, end - start, target), QWEN.rope_theta)
    theirs.move(1, *block, QWEN.rope_theta)

    for one, other in zip(
        (*ours_.keys, *ours_.values), (*theirs.keys, *theirs.values), strict=True
    ):
        assert torch.equal(one[:, :, :64], other[:, :, :64])  # the spare position is nobody's


def test_what_lies_behind_a_moved_block_may_be_nan():
    cache = poisoned(QWEN)
    prefill(ours(QWEN), cache, tokens(30))

    cache.move_block(ints(0, 12, 18, 4), QWEN.rope_theta)

    assert all(side[0, :, :22].isfinite().all() for side in (*cache.keys, *cache.values))


def test_states_before_the_closing_norm_are_those_of_feed():
    decoder, x = ours(QWEN), embeddings(QWEN, 6)[None]
    positions = torch.arange(6)[None]

    raw = decoder.run(poisoned(QWEN), x, ints(0), positions, SPAN)

    normed = decoder.feed(poisoned(QWEN), x, ints(0), positions, SPAN)
    torch.testing.assert_close(decoder.norm(raw), normed, rtol=0, atol=0)
    assert not torch.allclose(raw, normed)


def test_stack_without_embedding_and_head_takes_embeddings():
    theirs = reference(MHA)
    stack = DecoderStack(MHA).requires_grad_(False)
    stack.load_state_dict(stack_weights(theirs.state_dict(), MHA), strict=True)
    x = embeddings(MHA, 6)

    hidden = feed_alone(stack, poisoned(MHA), x, slot=0, start=0)

    torch.testing.assert_close(hidden, feed_alone(ours(MHA), poisoned(MHA), x, 0, 0), **CLOSE)


def test_weights_fill_a_model_without_memory():
    theirs = reference(QWEN)
    with torch.device("meta"):
        decoder = Decoder(QWEN)

    decoder.load_state_dict(decoder_weights(theirs.state_dict(), QWEN), strict=True, assign=True)

    assert not any(parameter.is_meta for parameter in decoder.parameters())
    x = embeddings(QWEN, 4)
    with torch.no_grad():
        hidden = feed_alone(decoder, poisoned(QWEN), x, slot=0, start=0)
    torch.testing.assert_close(hidden, feed_alone(ours(QWEN), poisoned(QWEN), x, 0, 0), **CLOSE)


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
@pytest.mark.usefixtures("compiling")
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

        region = Region("decode", "llm", decoder.decode_layers, [Dim("x", 0, 2, 3)])
        compile_region(region, CompilePlan(), CompileReport())
        compiled = decoder.decode(caches[1], *step)
        wider = decoder.decode(caches[1], *step[:3], 48)

    torch.testing.assert_close(compiled, eager, **CLOSE)
    torch.testing.assert_close(wider, eager, **CLOSE)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
