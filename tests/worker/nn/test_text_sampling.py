"""The duplex decision against a slow one written out by the letter, and every setting's effect."""

import dataclasses

import numpy as np
import pytest
import torch

from tests.gpu import waits_are
from worker.nn.text_sampling import (
    CANDIDATE_STEP,
    FIXED_CANDIDATES,
    FIXED_HISTORY,
    TIE_ROOM,
    DuplexSampling,
    DuplexVocabulary,
    decide,
    decide_stages,
    decision_inputs,
    draw_hits,
    draw_index,
    fill_decisions,
    fixed_inputs,
    has_fixed_sizes,
)

V = 60
CHUNK_EOS, TURN_EOS, LISTEN, IM_END, TTS_PAD, BAD = 50, 51, 52, 53, 54, (3, 4, 5)
VOCABULARY = DuplexVocabulary.build(
    V,
    BAD,
    tts_pad=TTS_PAD,
    chunk_eos=CHUNK_EOS,
    turn_eos=TURN_EOS,
    listen=LISTEN,
    im_end=IM_END,
)
PLAIN = DuplexSampling(
    temperature=1.0, top_k=0, top_p=1.0, repetition_penalty=1.0, length_penalty=1.0
)
NOTHING = np.array([], dtype=np.int64)


def ids(*values):
    return np.array(values, dtype=np.int64)


def noise(n_rows=1, seed=0, scale=2.0):
    return torch.randn(n_rows, V, generator=torch.Generator().manual_seed(seed)) * scale


def flat(**raised):
    """Logits of zero, but for some ids: `flat(_7=3.0)`."""
    logits = torch.zeros(1, V)
    for name, value in raised.items():
        logits[0, int(name[1:])] = value
    return logits


def one(logits, setting=PLAIN, said=NOTHING, draws=(0.999999, 0.5), **quirks):
    return int(decide(logits, [setting], [said], [draws], VOCABULARY, **quirks))


def distribution(logits, setting=PLAIN, said=NOTHING, listen_is_im_end=False, divide_negative=True):
    """Probability of every id in the second draw, `[V]`."""
    inputs = decision_inputs([setting], [said], [(0.0, 0.0)], V, "cpu")
    stages = decide_stages(logits, inputs, VOCABULARY, listen_is_im_end, divide_negative)
    return torch.zeros(V).index_copy(0, stages.ids[0], stages.probabilities[0])


def by_the_letter(logits, s, said, draws, listen, divide_negative):
    """One row, one step at a time, in float64."""

    def drawn(p, u):
        total = np.cumsum(p)
        return int(np.nonzero(total > u * total[-1])[0][0])

    def softmax(x):
        e = np.exp(x - x.max())
        return e / e.sum()

    raw = logits.double().numpy()
    first = int(raw.argmax()) if s.is_greedy else drawn(softmax(raw), draws[0])
    if first == CHUNK_EOS:
        return first
    x = raw.copy()
    x[[*BAD, TTS_PAD, CHUNK_EOS]] = -np.inf
    for i in set(said[-s.window :].tolist() if s.window else []):
        divided = x[i] > 0 or divide_negative
        x[i] = x[i] / s.repetition_penalty if divided else x[i] * s.repetition_penalty
    x[TURN_EOS] *= 1 / s.length_penalty if x[TURN_EOS] > 0 else s.length_penalty
    x[listen] *= s.listen_prob_scale
    if s.listen_top_k is not None and (x > x[listen]).sum() < s.listen_top_k:
        return listen
    if s.is_greedy:
        return int(x.argmax())
    x = x / s.temperature
    if s.top_k:
        x[x < np.sort(x)[-s.top_k]] = -np.inf
    if 0 < s.top_p < 1:
        order = np.argsort(-x)
        passed = np.cumsum(softmax(x)[order]) > s.top_p
        x[order[1:][passed[:-1]]] = -np.inf
    return drawn(softmax(x), draws[1])


SETTINGS = [
    DuplexSampling(),
    PLAIN,
    DuplexSampling(is_greedy=True),
    DuplexSampling(top_k=5, top_p=0.99, temperature=1.3),
    DuplexSampling(top_k=0, top_p=0.5),
    DuplexSampling(repetition_penalty=1.8, window=4, length_penalty=2.0),
    DuplexSampling(repetition_penalty=0.8, length_penalty=0.6),
    DuplexSampling(listen_prob_scale=1.7, window=0),
    DuplexSampling(listen_top_k=9),
    DuplexSampling(is_greedy=True, listen_top_k=4, listen_prob_scale=2.0),
]


def cases(n_rows, seed):
    generator = np.random.default_rng(seed)
    said = [generator.integers(0, V, size=generator.integers(0, 40)) for _ in range(n_rows)]
    return noise(n_rows, seed=seed), said, generator.random((n_rows, 2)).tolist()


@pytest.mark.parametrize("listen_is_im_end", [False, True])
@pytest.mark.parametrize("divide_negative", [False, True])
def test_a_batch_decides_as_the_rules_do_by_the_letter(listen_is_im_end, divide_negative):
    listen = IM_END if listen_is_im_end else LISTEN
    for seed in range(40):
        logits, said, draws = cases(len(SETTINGS), seed)

        chosen = decide(
            logits, SETTINGS, said, draws, VOCABULARY, listen_is_im_end, divide_negative
        )

        assert chosen.tolist() == [
            by_the_letter(logits[row], s, said[row], draws[row], listen, divide_negative)
            for row, s in enumerate(SETTINGS)
        ]


def test_batched_row_equals_single():
    logits, said, draws = cases(len(SETTINGS), 77)

    batch = decide(logits, SETTINGS, said, draws, VOCABULARY).tolist()

    assert batch == [
        one(logits[row, None], s, said[row], draws[row]) for row, s in enumerate(SETTINGS)
    ]


def test_draws_may_be_a_tensor():
    logits, said, draws = cases(len(SETTINGS), 5)

    chosen = decide(logits, SETTINGS, said, torch.tensor(draws), VOCABULARY)

    assert chosen.tolist() == decide(logits, SETTINGS, said, draws, VOCABULARY).tolist()


def test_frequencies_follow_both_draws():
    """Total probability: p for the end of the chunk, (1 - p) times the filtered one for others."""
    logits, n = noise(seed=4, scale=1.0), 20_000
    logits[0, CHUNK_EOS] = 2.5
    setting = DuplexSampling(temperature=1.2, top_k=12, top_p=0.9)
    draws = torch.rand(n, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    p_end = float(logits.softmax(-1)[0, CHUNK_EOS])
    expected = distribution(logits, setting) * (1 - p_end)
    expected[CHUNK_EOS] = p_end

    chosen = decide(logits.expand(n, V), [setting] * n, [NOTHING] * n, draws, VOCABULARY)

    share = torch.bincount(chosen, minlength=V) / n
    torch.testing.assert_close(share, expected, atol=0.012, rtol=0)
    assert (share[expected == 0] == 0).all()
    assert 0.1 < p_end < 0.9


def test_only_the_raw_draw_can_end_the_chunk():
    logits = flat(_50=20.0)

    assert one(logits, draws=(0.5, 0.5)) == CHUNK_EOS
    assert distribution(logits)[CHUNK_EOS] == 0


def test_settings_do_not_act_on_the_raw_draw():
    """Temperature, filters and penalties leave the end of the chunk as likely as it was."""
    logits = flat(_50=1.0, _7=4.0)
    p = logits.softmax(-1)[0]
    before = float(p[:CHUNK_EOS].sum())
    setting = DuplexSampling(temperature=0.01, top_k=1, repetition_penalty=9.0)

    inside = (before + 0.01 * float(p[CHUNK_EOS]), 0.5)
    assert one(logits, setting, ids(CHUNK_EOS), inside) == CHUNK_EOS
    outside = (before + 1.01 * float(p[CHUNK_EOS]), 0.5)
    assert one(logits, setting, ids(CHUNK_EOS), outside) == 7


@pytest.mark.parametrize("draw", [0.0, 0.5, 1.0 - 2**-53])
def test_forbidden_ids_are_never_chosen(draw):
    logits = noise() + flat(_3=30.0, _4=30.0, _54=30.0)

    for setting in (PLAIN, DuplexSampling(), DuplexSampling(is_greedy=True)):
        assert one(logits, setting, draws=(0.0, draw)) not in (*BAD, TTS_PAD, CHUNK_EOS)


def test_greedy_ends_the_chunk_only_if_it_is_likeliest():
    greedy = DuplexSampling(is_greedy=True)

    assert one(flat(_50=5.0, _7=4.0), greedy) == CHUNK_EOS
    assert one(flat(_50=4.0, _7=5.0), greedy, draws=(0.0, 0.0)) == 7


def test_greedy_knows_the_penalties():
    greedy = DuplexSampling(is_greedy=True, repetition_penalty=2.0)

    assert one(flat(_7=5.0, _8=4.0), greedy, ids(7)) == 8


def test_temperature_sharpens():
    logits = flat(_7=2.0)
    cold = dataclasses.replace(PLAIN, temperature=0.5)

    assert distribution(logits, cold)[7] > distribution(logits)[7]


@pytest.mark.parametrize("temperature", [0.0, 1e-39])
def test_a_temperature_next_to_nothing_is_the_likeliest_token(temperature):
    setting = dataclasses.replace(PLAIN, temperature=temperature)

    assert one(flat(_7=2.0), setting, draws=(0.9999, 0.9999)) == 7


def test_top_k_keeps_the_likeliest_and_what_ties_with_the_last_of_them():
    logits = flat(_7=3.0, _8=2.0, _9=2.0, _10=2.0, _11=1.0)

    kept = distribution(logits, dataclasses.replace(PLAIN, top_k=2)).nonzero().flatten()

    assert kept.tolist() == [7, 8, 9, 10]


def test_ties_with_the_last_of_the_likeliest_stay_whatever_their_number_is():
    logits = torch.full((1, V), -torch.inf)
    logits[0, 10 : 10 + CANDIDATE_STEP + 3] = 1.0  # three more than a list without room holds

    kept = distribution(logits, dataclasses.replace(PLAIN, top_k=CANDIDATE_STEP)).nonzero()

    assert len(kept) == CANDIDATE_STEP + 3


def test_top_p_keeps_the_first_token_that_passes_the_sum():
    logits = torch.full((1, V), -torch.inf)
    logits[0, 10:13] = torch.tensor([0.5, 0.3, 0.2]).log()

    def kept(top_p):
        setting = dataclasses.replace(PLAIN, top_p=top_p)
        return (distribution(logits, setting) > 0).nonzero().flatten().tolist()

    assert kept(0.4) == [10]
    assert kept(0.6) == [10, 11]
    assert kept(0.9) == [10, 11, 12]
    assert kept(0.0) == kept(1.0) == [10, 11, 12]


def test_nucleus_is_taken_of_what_top_k_left():
    logits = torch.full((1, V), -torch.inf)
    logits[0, 10:14] = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    setting = dataclasses.replace(PLAIN, top_k=2, top_p=0.5)  # 0.57, 0.43 after top k

    assert (distribution(logits, setting) > 0).nonzero().flatten().tolist() == [10]


def test_repetition_penalty_lowers_positive_logits():
    setting = dataclasses.replace(PLAIN, repetition_penalty=1.5)
    logits = flat(_7=3.0)

    lowered = distribution(logits, setting, ids(7, 7))  # once, however often it was said

    torch.testing.assert_close(lowered, distribution(flat(_7=2.0)))


@pytest.mark.parametrize(("divide_negative", "becomes"), [(True, -2.0), (False, -4.5)])
def test_negative_logits_are_raised_as_the_reference_does_or_lowered(divide_negative, becomes):
    setting = dataclasses.replace(PLAIN, repetition_penalty=1.5)

    ours = distribution(flat(_7=-3.0), setting, ids(7), divide_negative=divide_negative)

    torch.testing.assert_close(ours, distribution(flat(_7=becomes)))


def test_penalty_forgets_what_left_the_window():
    setting = dataclasses.replace(PLAIN, repetition_penalty=2.0, window=3)
    logits = flat(_7=3.0)

    assert distribution(logits, setting, ids(7, 1, 2))[7] < distribution(logits)[7]
    torch.testing.assert_close(
        distribution(logits, setting, ids(7, 10, 11, 12))[7], distribution(logits)[7]
    )


def test_window_of_zero_is_no_penalty():
    setting = dataclasses.replace(PLAIN, repetition_penalty=2.0, window=0)

    torch.testing.assert_close(
        distribution(flat(_7=3.0), setting, ids(7)), distribution(flat(_7=3.0))
    )


@pytest.mark.parametrize("logit", [2.0, -2.0])
def test_length_penalty_makes_the_end_of_the_turn_rarer(logit):
    setting = dataclasses.replace(PLAIN, length_penalty=1.5)
    logits = flat(_51=logit)

    expected = logit / 1.5 if logit > 0 else logit * 1.5
    torch.testing.assert_close(distribution(logits, setting), distribution(flat(_51=expected)))


@pytest.mark.parametrize(("quirk", "listen"), [(False, LISTEN), (True, IM_END)])
def test_listen_scale_acts_on_listen_or_as_the_reference_on_im_end(quirk, listen):
    setting = dataclasses.replace(PLAIN, listen_prob_scale=2.0)
    logits = flat(_52=1.0, _53=1.0)

    ours = distribution(logits, setting, listen_is_im_end=quirk)

    expected = logits.clone()
    expected[0, listen] = 2.0
    torch.testing.assert_close(ours, distribution(expected))


def test_listen_is_certain_among_the_top_k():
    logits = flat(_52=1.0, _7=3.0, _8=2.0)  # two tokens are likelier

    for k, chosen in ((None, 7), (2, 7), (3, LISTEN)):
        setting = dataclasses.replace(PLAIN, listen_top_k=k, is_greedy=True)
        assert one(logits, setting) == chosen


def test_the_end_of_the_chunk_comes_before_a_certain_listen():
    setting = dataclasses.replace(PLAIN, listen_top_k=V, is_greedy=True)

    assert one(flat(_50=9.0), setting) == CHUNK_EOS


def test_logits_stay_as_they_were():
    logits = noise()
    before = logits.clone()
    one(logits, DuplexSampling(repetition_penalty=2.0, listen_prob_scale=3.0), ids(7, TURN_EOS))

    assert torch.equal(logits, before)


def test_bf16_logits_decide_as_their_fp32_values():
    logits, said, draws = cases(len(SETTINGS), 3)
    rounded = logits.bfloat16()

    ours = decide(rounded, SETTINGS, said, draws, VOCABULARY)

    assert torch.equal(ours, decide(rounded.float(), SETTINGS, said, draws, VOCABULARY))


def test_probabilities_of_bf16_logits_are_fp32():
    rounded = noise(seed=4).bfloat16()
    inputs = decision_inputs([DuplexSampling()], [ids(7, 8)], [(0.2, 0.6)], V, "cpu")

    ours = decide_stages(rounded, inputs, VOCABULARY, False, True)
    exact = decide_stages(rounded.float(), inputs, VOCABULARY, False, True)

    assert torch.equal(ours.p_chunk_eos, exact.p_chunk_eos)
    assert torch.equal(ours.probabilities, exact.probabilities)


def fixed_arrays(n_rows):
    """Inputs of fixed sizes, zeros as at the start of a program, and their tensors."""
    arrays = {
        "numbers": np.zeros((n_rows, 8)),
        "draws": np.zeros((n_rows, 2)),
        "recent": np.zeros((n_rows, FIXED_HISTORY), np.int32),
    }
    return arrays, {name: torch.from_numpy(array) for name, array in arrays.items()}


FIXED = [s for s in SETTINGS if s.top_k or s.is_greedy]


def test_fixed_sizes_decide_as_exact_ones():
    """Among rows of padding, and over what an earlier, longer history has left."""
    arrays, tensors = fixed_arrays(2 * len(FIXED))
    arrays["recent"][:] = 7
    rows = list(range(1, 2 * len(FIXED), 2))
    for seed in range(20):
        logits, said, draws = cases(len(FIXED), seed)
        fill_decisions(arrays, rows, FIXED, said, draws, V)
        spread = noise(2 * len(FIXED), seed=100 + seed)
        spread[rows] = logits

        chosen = decide_stages(spread, fixed_inputs(tensors, V), VOCABULARY, False, True).chosen

        exact = decide(logits, FIXED, said, draws, VOCABULARY)
        assert chosen[rows].tolist() == exact.tolist()


def test_zeros_are_valid_inputs_of_fixed_sizes():
    _, tensors = fixed_arrays(3)

    chosen = decide_stages(noise(3), fixed_inputs(tensors, V), VOCABULARY, False, True).chosen

    assert ((chosen >= 0) & (chosen < V)).all()


@pytest.mark.parametrize(
    ("setting", "n_said", "fits"),
    [
        (DuplexSampling(), 2048, True),
        (DuplexSampling(top_k=FIXED_CANDIDATES - TIE_ROOM), 0, True),
        (DuplexSampling(top_k=FIXED_CANDIDATES - TIE_ROOM + 1), 0, False),
        (DuplexSampling(top_k=0), 0, False),
        (DuplexSampling(top_k=0, is_greedy=True), 0, True),
        (DuplexSampling(top_k=100, window=1024), 1024, True),
        (DuplexSampling(window=FIXED_HISTORY + 1), FIXED_HISTORY, True),
        (DuplexSampling(window=FIXED_HISTORY + 1), FIXED_HISTORY + 1, False),
        (DuplexSampling(window=0), FIXED_HISTORY + 1, True),
    ],
)
def test_what_is_larger_than_the_fixed_sizes_is_known_beforehand(setting, n_said, fits):
    assert has_fixed_sizes(setting, np.zeros(n_said, np.int64)) is fits


@pytest.mark.parametrize("n_ties", [1, TIE_ROOM, TIE_ROOM + 1, 40])
def test_the_length_of_the_candidate_list_changes_nothing(n_ties):
    """Ties with the k-th used to stay as far as the list went, and a neighbour made it longer."""
    k, n = FIXED_CANDIDATES - TIE_ROOM, 500
    logits = torch.full((1, n), -torch.inf)
    logits[0, :n_ties] = 1.0
    logits[0, -(k - 1) :] = torch.linspace(2, 3, k - 1)
    settings = [dataclasses.replace(PLAIN, top_k=k)]
    inputs = decision_inputs(settings, [NOTHING], [(0.9, 0.5)], n, "cpu")
    open_vocabulary = dataclasses.replace(VOCABULARY, forbidden=torch.zeros(n, dtype=torch.bool))

    def probabilities(n_candidates):
        sized = dataclasses.replace(inputs, n_candidates=n_candidates)
        stages = decide_stages(logits, sized, open_vocabulary, False, True)
        return stages.probabilities[stages.probabilities > 0].sort().values

    assert inputs.n_candidates == FIXED_CANDIDATES
    assert torch.equal(probabilities(FIXED_CANDIDATES), probabilities(n))
    assert len(probabilities(n)) == k - 1 + min(n_ties, TIE_ROOM + 1)


def test_draw_is_the_first_sum_that_passes_it():
    p = torch.tensor([[0.0, 0.25, 0.0, 0.5, 0.25, 0.0]]).expand(6, -1)
    draws = torch.tensor([0.0, 0.2499, 0.25, 0.7499, 0.75, 1 - 2**-53], dtype=torch.float64)

    assert draw_index(p, draws).tolist() == [1, 1, 3, 3, 4, 4]


def test_a_share_below_the_rounding_of_fp32_is_drawn_too():
    p = torch.tensor([[1.0, 2**-25]])

    assert draw_index(p, torch.tensor([1 - 2**-53], dtype=torch.float64)).tolist() == [1]


def test_a_row_of_nans_still_gives_an_index():
    """It went beyond the table of embeddings, which on an accelerator takes all rows down."""
    p = torch.full((1, 6), torch.nan)

    assert 0 <= int(draw_index(p, torch.tensor([0.5], dtype=torch.float64))) < 6


def test_asking_for_one_index_equals_drawing():
    p = noise(seed=8).softmax(-1).expand(500, -1)
    draws = torch.rand(500, generator=torch.Generator().manual_seed(2), dtype=torch.float64)

    drawn = draw_index(p, draws)

    for index in (0, int(p[0].argmax()), V - 1):
        assert torch.equal(draw_hits(p, draws, index), drawn == index)
    assert len(drawn.unique()) > 20


@pytest.mark.parametrize(
    "device",
    [
        pytest.param(
            "cuda",
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
            ],
        )
    ],
)
def test_an_accelerator_decides_the_same_without_a_wait(device):
    logits, said, draws = cases(len(SETTINGS), 21)
    there = dataclasses.replace(VOCABULARY, forbidden=VOCABULARY.forbidden.to(device))
    on_device = logits.to(device)
    decide(on_device, SETTINGS, said, draws, there)  # libraries wait when they are first used

    with waits_are("error"):
        chosen = decide(on_device, SETTINGS, said, draws, there)

    assert chosen.tolist() == decide(logits, SETTINGS, said, draws, VOCABULARY).tolist()
