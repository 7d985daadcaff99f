"""Choosing speech tokens: penalty, filters, the ban of the end code, and draws."""

from dataclasses import replace

import pytest
import torch

from worker.nn.code_sampling import (
    CodeRows,
    CodeSampling,
    code_probabilities,
    draw_codes,
    fill_code_rows,
    longest_list,
)

V = 30
PLAIN = CodeSampling(temperature=1.0, repetition_penalty=1.0)


def noise(n_rows=1, seed=0):
    return torch.randn(n_rows, V, generator=torch.Generator().manual_seed(seed)) * 2


def build(settings, recent=None, draws=None, min_new=None, is_free=None, n_steps=1):
    n = len(settings)
    return CodeRows.build(
        settings=settings,
        recent=recent or [()] * n,
        draws=draws or [(0.5,) * n_steps] * n,
        min_new=min_new or [0] * n,
        is_free=is_free or [False] * n,
        n_codes=V,
        n_steps=n_steps,
        device="cpu",
    )


def one(logits, setting=PLAIN, recent=(), min_new=0, is_free=False, step=0):
    rows = build([setting], [recent], min_new=[min_new], is_free=[is_free], n_steps=step + 1)
    return code_probabilities(logits, rows, rows.recent, step)[0]


def kept(p):
    return (p > 0).nonzero().flatten().tolist()


def shares(*values):
    logits = torch.full((1, V), -torch.inf)
    logits[0, : len(values)] = torch.tensor(values).log()
    return logits


def test_plain_settings_are_the_softmax():
    torch.testing.assert_close(one(noise()), noise()[0].softmax(0))


def test_temperature_divides():
    torch.testing.assert_close(
        one(noise(), CodeSampling(temperature=0.5, repetition_penalty=1.0)),
        (noise()[0] * 2).softmax(0),
    )


@pytest.mark.parametrize("logit", [3.0, -3.0])
def test_penalty_counts_occurrences_and_lowers_either_sign(logit):
    logits = torch.zeros(1, V)
    logits[0, 7] = logit
    setting = CodeSampling(temperature=1.0, repetition_penalty=1.2)

    ours = one(logits, setting, recent=(7, 3, 7, 7))

    logits[0, 7] = logit / 1.2**3 if logit > 0 else logit * 1.2**3
    torch.testing.assert_close(ours, logits[0].softmax(0))


def test_penalty_forgets_what_left_the_window():
    setting = CodeSampling(temperature=1.0, repetition_penalty=1.2, window=4)
    logits = noise()

    assert one(logits, setting, recent=(7, 1, 2, 3))[7] != one(logits, setting, recent=(1, 2, 3))[7]
    torch.testing.assert_close(
        one(logits, setting, recent=(7, 1, 2, 3, 4)), one(logits, setting, recent=(1, 2, 3, 4))
    )


def test_window_of_zero_is_no_penalty():
    setting = CodeSampling(temperature=1.0, repetition_penalty=2.0, window=0)

    torch.testing.assert_close(one(noise(), setting, recent=(7, 7)), noise()[0].softmax(0))


def test_nucleus_keeps_the_fewest_that_reach_the_sum_but_three():
    logits = shares(0.4, 0.3, 0.2, 0.06, 0.04)

    for top_p, n in ((0.1, 3), (0.75, 3), (0.91, 4), (0.97, 5), (0.0, 5), (1.0, 5)):
        assert kept(one(logits, CodeSampling(1.0, 1.0, top_p=top_p))) == list(range(n))


def test_top_k_keeps_the_k_likeliest_but_three():
    logits = shares(0.4, 0.3, 0.2, 0.06, 0.04)

    for top_k, n in ((1, 3), (4, 4), (0, 5)):
        assert kept(one(logits, CodeSampling(1.0, 1.0, top_k=top_k))) == list(range(n))


def test_nucleus_is_taken_before_top_k():
    """Of the four left by top k the nucleus would be three, 0.91 of them; of all it is four."""
    logits = shares(0.35, 0.25, 0.2, 0.1, 0.1)

    ours = one(logits, CodeSampling(1.0, 1.0, top_p=0.85, top_k=4))

    assert kept(ours) == [0, 1, 2, 3]


def test_first_draw_may_be_free_of_penalty_and_filters():
    setting = CodeSampling(1.0, 2.0, top_k=5)

    free = one(noise(), setting, recent=(7,), is_free=True)
    torch.testing.assert_close(free, noise()[0].softmax(0))
    assert len(kept(one(noise(), setting, recent=(7,), is_free=True, step=1))) == 5


def test_end_code_is_banned_for_min_new_draws():
    for step, banned in ((0, True), (3, True), (4, False)):
        assert (one(noise(), min_new=4, step=step)[-1] == 0) == banned


def test_ban_comes_after_the_filters():
    """The end code takes its place among the k likeliest and then leaves."""
    logits = noise()
    logits[0, -1] = 20.0

    assert len(kept(one(logits, CodeSampling(1.0, 1.0, top_k=5), min_new=1))) == 4


def test_the_largest_draw_does_not_reach_a_banned_end():
    """In fp32 it is 1, which lies behind the last code that has a share."""
    rows = build([PLAIN], draws=[(1 - 2**-53,)], min_new=[1])

    drawn = draw_codes(code_probabilities(noise(), rows, rows.recent, 0), rows, 0)

    assert drawn.tolist() == [V - 2]


def test_batched_row_equals_single():
    settings = [
        PLAIN,
        CodeSampling(),
        CodeSampling(top_p=0.85, top_k=25),
        CodeSampling(top_k=4, window=2),
        CodeSampling(top_p=0.5, repetition_penalty=1.5),
    ]
    recent = [tuple(range(row, row + 5 * row)) for row in range(len(settings))]
    recent = [tuple(code % V for code in codes) for codes in recent]
    min_new, is_free = [0, 3, 0, 1, 0], [False, True, False, True, True]
    logits = noise(len(settings))

    rows = build(settings, recent, min_new=min_new, is_free=is_free, n_steps=2)
    for step in (0, 1):
        batch = code_probabilities(logits, rows, rows.recent, step)
        single = [
            one(logits[r, None], settings[r], recent[r], min_new[r], is_free[r], step)
            for r in range(len(settings))
        ]
        torch.testing.assert_close(batch, torch.stack(single), rtol=1e-5, atol=1e-7)


def test_filters_of_one_row_leave_another_row_whole():
    rows = build([PLAIN, CodeSampling(1.0, 1.0, top_k=5)])

    ours = code_probabilities(noise(2), rows, rows.recent, 0)

    torch.testing.assert_close(ours[0], noise(2)[0].softmax(0))
    assert len(kept(ours[1])) == 5


def test_frequencies_follow_the_probabilities():
    n, setting = 20_000, CodeSampling(top_p=0.85, top_k=8)
    draws = torch.rand(n, 1, generator=torch.Generator().manual_seed(0)).tolist()
    rows = build([setting] * n, draws=draws)

    p = code_probabilities(noise().expand(n, V), rows, rows.recent, 0)
    codes = draw_codes(p, rows, 0)

    torch.testing.assert_close(torch.bincount(codes, minlength=V) / n, p[0], atol=0.012, rtol=0)


def test_greedy_takes_the_likeliest_after_the_penalty():
    logits = torch.zeros(1, V)
    logits[0, 7], logits[0, 8] = 3.0, 2.9
    rows = build([CodeSampling(is_greedy=True)], recent=[(7,)], draws=[()])

    p = code_probabilities(logits, rows, rows.recent, 0)

    assert draw_codes(p, rows, 0).tolist() == [8]


SETTINGS = [
    CodeSampling(),
    CodeSampling(top_p=0.85, top_k=6),
    CodeSampling(is_greedy=True, window=3),
    CodeSampling(top_p=0.6, first_is_free=False, window=0),
]


def ragged(n_steps):
    generator = torch.Generator().manual_seed(5)
    draws = torch.rand(len(SETTINGS), n_steps, generator=generator, dtype=torch.float64).tolist()
    return {
        "settings": SETTINGS,
        "recent": [(1, 2, 2), (), tuple(range(20)), (4,)],
        "draws": [row[: n_steps - index] for index, row in enumerate(draws)],
        "min_new": [0, 2, 1, 0],
        "is_free": [True, True, False, False],
    }


def test_a_step_that_the_device_counts_is_the_same_step():
    rows = build(**ragged(4), n_steps=4)
    for step in range(4):
        there = torch.tensor([step])
        p = code_probabilities(noise(4), rows, rows.recent, step)

        assert torch.equal(code_probabilities(noise(4), rows, rows.recent, there), p)
        assert torch.equal(draw_codes(p, rows, there), draw_codes(p, rows, step))


def test_filled_rows_are_those_built_whatever_lay_there_and_padding_is_harmless():
    logits, given = noise(7), ragged(4)
    expected = build(**given, n_steps=4)
    rows = CodeRows.allocate(7, 4, 20)
    for tensor in rows.tensors().values():
        tensor.fill_(9 if tensor.dtype == torch.int64 else True)

    arrays = {name: tensor.numpy() for name, tensor in rows.tensors().items()}
    fill_code_rows(arrays, n_codes=V, **given)
    rows = replace(rows, n_candidates=longest_list(SETTINGS, V))

    for step in range(4):
        p = code_probabilities(logits, rows, rows.recent, step)
        ours = code_probabilities(logits[:4], expected, expected.recent, step)
        torch.testing.assert_close(p[:4], ours)
        assert p[4:].isfinite().all()
        assert torch.equal(draw_codes(p, rows, step)[:4], draw_codes(ours, expected, step))


def test_candidate_lists_may_be_longer_than_needed():
    settings = [CodeSampling(top_p=0.85, top_k=6), CodeSampling()]
    rows = build(settings, recent=[(3,), (3,)])
    assert rows.n_candidates == longest_list(settings, V) == 6
    assert longest_list([CodeSampling()], V) == 0

    p = code_probabilities(noise(2), rows, rows.recent, 0)

    for length in (10, V):
        longer = replace(rows, n_candidates=length)
        torch.testing.assert_close(code_probabilities(noise(2), longer, rows.recent, 0), p)
