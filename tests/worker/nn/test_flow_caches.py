"""What the flow's caches hold after each chunk, against the original's lists spelled out."""

import itertools
import random

import pytest
import torch

from worker.nn import conformer as module
from worker.nn.conformer import (
    Conformer,
    ConformerCache,
    ConformerConfig,
    Memory,
    RelativeAttention,
    Rows,
    append,
    distance_table,
    list_span,
)
from worker.nn.dit import Dit, DitCache, DitConfig, rank_window, step_times, time_table
from worker.nn.streaming import RowConv, attend, resume

TINY = ConformerConfig(12, 16, n_heads=2, ffn_size=20, n_blocks=2, n_up_blocks=1)
DIT = DitConfig(24, 6, depth=2, n_heads=2, head_dim=8, width=20, mlp_ratio=2.0, time_size=16)
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


def randomise(layer):
    generator = torch.Generator().manual_seed(0)
    for tensor in layer.state_dict().values():
        tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.3)
    return layer.eval().requires_grad_(False)


def draw(*shape, seed=1):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def ints(*values):
    return torch.tensor(values)


# ---- lists of the encoder


def cut_together(tokens, frames, prompt):
    """Up to 1.0.6: both rates in one tensor, the token lists twice, cut as a whole."""

    def cut(packed):
        return packed[:prompt] + packed[-100:] if len(packed) > prompt + 100 else packed

    both = cut(tokens + tokens)
    return both[: len(both) // 2], cut(frames)


def cut_apart(tokens, frames, prompt):
    """1.0.7: each rate by itself."""
    if len(frames) <= prompt + 100:
        return tokens, frames
    return tokens[: prompt // 2] + tokens[-50:], frames[:prompt] + frames[-100:]


@pytest.mark.parametrize("cut", [cut_apart, cut_together])
@pytest.mark.parametrize("prompt", [2, 36, 60, 98, 100, 102, 240])
def test_lists_are_cut_as_the_original_does(cut, prompt):
    """Entries carry their number in place of a key."""
    random.seed(prompt)
    sizes = {2: (prompt + 124) // 2, 1: prompt + 124}
    cached = {ratio: torch.full((3, 1, size, 1), torch.nan) for ratio, size in sizes.items()}
    lists = {2: [], 1: []}
    seen, row = 0, 1
    for n in [prompt // 2, *random.choices((1, 3, 5, 9, 24, 25, 28), k=14)]:
        known = Rows(ints(row), ints(prompt), ints(seen))
        for ratio in (2, 1):
            n_new = 2 * n // ratio
            new = torch.arange(seen // ratio, seen // ratio + n_new).float()
            span = list_span(known, ratio, sizes[ratio], n_new, cut is cut_together and ratio == 2)
            joined = append(cached[ratio], new.view(1, 1, -1, 1), span)
            lists[ratio] = lists[ratio] + new.tolist()
            assert joined[0, 0, span.visible[0, 0, 0], 0].tolist() == lists[ratio]
        seen += 2 * n
        lists[2], lists[1] = cut(lists[2], lists[1], prompt)
        for ratio in (2, 1):
            length = min(seen, prompt + 100) // ratio
            assert cached[ratio][row, 0, -length:, 0].tolist() == lists[ratio]
            assert bool(cached[ratio][::2].isnan().all())


def test_packed_lists_keep_their_first_entries_for_ever():
    cached, prompt, seen = torch.zeros(1, 1, 125, 1), 150, 0
    for n in (75, 25, 25, 25, 25):
        span = list_span(Rows(ints(0), ints(prompt), ints(seen)), 2, 125, n, True)
        new = torch.arange(seen // 2, seen // 2 + n).float()
        append(cached, new.view(1, 1, -1, 1), span)
        seen += 2 * n
    assert cached.flatten().tolist() == list(range(125))


def test_scores_by_distance_are_those_of_the_definition():
    attention = randomise(RelativeAttention(16, 2))
    q, k = draw(1, 2, 3, 8), draw(1, 2, 10, 8, seed=2)  # 3 new among 10 keys
    distances = attention.distance_keys(distance_table(7 + 5 - 1, -5, 16, torch.device("cpu")))
    ours = attention._distance_scores(q, distances, n_keys=10, n_past=7, start=0)
    for i, j in itertools.product(range(3), range(k.shape[2])):
        distance = torch.tensor(float(7 + i - j))
        angles = distance / 10_000 ** (torch.arange(0, 16, 2) / 16)
        position = torch.stack((angles.sin(), angles.cos()), -1).flatten()
        key = (attention.distance.weight @ position).view(2, 8)
        expected = ((q[0, :, i] + attention.distance_bias) * key).sum(-1) / 8**0.5
        torch.testing.assert_close(ours[0, :, i, j], expected, **CLOSE)


def test_blocks_of_queries_give_what_one_pass_gives(monkeypatch):
    attention = randomise(RelativeAttention(16, 2))
    table = attention.distance_keys(distance_table(22, -23, 16, torch.device("cpu")))
    x = draw(2, 23, 16)
    expected = attention(x, Memory(table, None))
    monkeypatch.setattr(module, "QUERY_BLOCK", 5)
    torch.testing.assert_close(attention(x, Memory(table, None)), expected, **CLOSE)


def test_an_encoder_row_that_begins_with_everything_sees_the_whole():
    encoder = randomise(Conformer(TINY))
    x = draw(1, 21, 12)
    cache = ConformerCache.allocate(TINY, 2, max_prompt_frames=0, max_chunk_frames=60)
    known = Rows(ints(1), ints(0), ints(0))
    torch.testing.assert_close(encoder(x, True, cache, known), encoder(x, True), **CLOSE)


def test_sizes_that_the_original_does_not_have_are_refused():
    with pytest.raises(ValueError, match="up_stride is 4, expected 2"):
        ConformerConfig(up_stride=4)
    with pytest.raises(ValueError, match="does not divide into 7 heads"):
        ConformerConfig(n_heads=7)
    with pytest.raises(ValueError, match="in_size is 300, expected 320"):
        DitConfig(in_size=300)


# ---- the set of the transformer


def front_list(held, new, prompt):
    """The original: new frames in front, then the first P and the last 100."""
    joined = [*new, *held]
    return joined[:prompt] + joined[-100:] if len(joined) > prompt + 100 else joined


def fill(prompt, chunks, max_chunk):
    """Yield what our slots hold before each cut, and the original's list."""
    n_slots = 100 + prompt + max_chunk
    slots = torch.full((n_slots,), -1)
    held, seen = [], 0
    for n_new in (prompt, *chunks):
        window = rank_window(ints(3), ints(prompt), ints(seen), n_new, n_slots)
        new = list(range(seen, seen + n_new))
        slots[window.slots[0]] = torch.tensor(new)
        yield set(slots[window.visible[0, 0, 0]].tolist()), {*held, *new}
        held = front_list(held, new, prompt)
        seen += n_new


@pytest.mark.parametrize("prompt", [2, 20, 60, 98, 100, 102, 180, 400])
def test_the_slots_hold_what_the_original_list_holds(prompt):
    random.seed(prompt)
    sizes = random.choices((2, 6, 10, 18, 48, 50, 56), k=30)
    for ours, theirs in fill(prompt, sizes, max_chunk=max(56, prompt)):
        assert ours == theirs


def test_eviction_of_a_prompt_of_eight_seconds():
    """The example of model.md, 5.4; the set after chunk n is what chunk n + 1 finds."""
    found = [ours for ours, _ in fill(400, [50] * 12, max_chunk=56)]
    tail = set(range(300, 400))

    def before(chunk, new=50):
        start = 400 + 50 * (chunk - 1)
        return found[chunk] - set(range(start, start + new))

    assert before(3) == set(range(400)) | set(range(400, 500))
    assert before(4) == set(range(250)) | tail | set(range(400, 550))
    for chunk in (9, 10, 12):
        newest = 400 + 50 * (chunk - 1)
        assert before(chunk) == tail | set(range(newest - 400, newest))


def test_both_halves_of_a_row_share_its_window():
    window = rank_window(ints(4, 1), ints(10, 30), ints(10, 180), 6, 176)
    assert window.rows.tolist() == [8, 9, 2, 3]
    assert torch.equal(window.slots[0::2], window.slots[1::2])
    assert torch.equal(window.visible[0::2], window.visible[1::2])
    assert int(window.visible[0].sum()) == 16
    assert int(window.visible[2].sum()) == 136


def test_a_transformer_row_that_begins_with_everything_sees_the_whole():
    dit = randomise(Dit(DIT, 2))
    x, mu, speaker = draw(1, 30, 6), draw(1, 30, 6, seed=2), draw(1, 6, seed=3)
    condition = dit.condition(mu, speaker, draw(1, 30, 6, seed=4))
    cache = DitCache.allocate(DIT, 2, 2, max_prompt_frames=0, max_chunk_frames=30)
    n_slots = cache.keys[0][0].shape[2]
    assert n_slots % 16 == 0
    window = rank_window(ints(1), ints(30), ints(0), 30, n_slots)
    for step in range(2):
        expected = dit(x, condition, step)
        torch.testing.assert_close(dit(x, condition, step, cache, window), expected, **CLOSE)
        assert bool(cache.keys[step][0][:2].eq(0).all())
    free = dit(x, dit.condition(0 * mu, 0 * speaker, None), 1)[1]
    torch.testing.assert_close(expected[1], free, **CLOSE)  # guidance knows no condition


def test_the_steps_grow_and_the_table_begins_with_cosines():
    times = step_times(5)
    assert times[0] == 0.0
    assert times[-1] == pytest.approx(1.0, abs=1e-6)
    gaps = [b - a for a, b in itertools.pairwise(times)]
    assert gaps == sorted(gaps)
    table = time_table(5, 16)
    assert table.shape == (5, 16)
    assert table[0].tolist() == [1.0] * 8 + [0.0] * 8
    assert float(table[1, 8]) == pytest.approx(float(torch.sin(torch.tensor(1000 * times[1]))))


# ---- what layers share


@pytest.mark.parametrize("kind", ["bool", "bias"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_is_softmax_over_what_the_mask_leaves(dtype, kind):
    q, k, v = (draw(2, 3, n, 8, seed=n).to(dtype) for n in (4, 11, 12))
    v = v[:, :, :11]
    visible = draw(2, 1, 1, 11, seed=3) > 0
    bias = torch.where(visible, draw(2, 1, 1, 11), -torch.inf).to(dtype)
    mask = visible if kind == "bool" else bias
    for row, head in itertools.product(range(2), range(3)):
        live = visible[row, 0, 0]
        scores = q[row, head].double() @ k[row, head, live].double().T / 8**0.5
        if kind == "bias":
            scores += bias[row, 0, 0, live].double()
        expected = (scores.softmax(-1) @ v[row, head, live].double()).float()
        ours = attend(q, k, v, mask)[row, head].float()
        loose = {"rtol": 0.05, "atol": 0.05} if dtype == torch.bfloat16 else CLOSE
        torch.testing.assert_close(ours, expected, **loose)


def test_a_convolution_in_pieces_is_the_convolution_of_the_whole():
    conv = randomise(RowConv(5, 7, 4))
    x = draw(1, 12, 5)
    padded = torch.nn.functional.pad(x.transpose(1, 2), (3, 0))
    whole = torch.nn.functional.conv1d(padded, conv.weight, conv.bias).transpose(1, 2)
    torch.testing.assert_close(conv(resume(x, 3, None, None)), whole, **CLOSE)

    history = torch.full((4, 3, 5), torch.nan)
    history[2] = 0.0
    pieces = [conv(resume(piece, 3, history, ints(2))) for piece in x.split((1, 2, 7, 2), dim=1)]
    torch.testing.assert_close(torch.cat(pieces, 1), whole, **CLOSE)
    assert bool(history[[0, 1, 3]].isnan().all())
