"""The speech head against a slow loop by the letter, and its promises about rows and caches."""

import dataclasses

import numpy as np
import pytest
import torch
from torch.nn.utils import parametrizations

from tests.fakes.speech_head import (
    CONFIG,
    END,
    N_TOKENS,
    asked,
    build,
    ending,
    hidden,
    n_live,
    poisoned,
    ragged,
    source,
)
from worker.nn import speech
from worker.nn.decoder import KvCache, Rows
from worker.nn.speech import (
    CodeSampling,
    SpeechRequest,
    SpeechTrace,
    fold_weight_norm,
    speech_weights,
)
from worker.nn.speech_request import InputKind

CLOSE = {"rtol": 1e-4, "atol": 1e-6}


@pytest.fixture(scope="module")
def head():
    return build()


@pytest.fixture
def cache():
    return poisoned()


def by_the_letter(head, conditions, request, before=()):
    """Draw a run's codes with the whole sequence fed afresh for each of them.

    Args:
        conditions: `[n_inputs, D]`.
        before: what lies in front of it in the turn, tensors `[n, D]`.
    """
    s, rows, drawn = request.sampling, [*before, conditions], []
    for step in range(request.max_new):
        x = torch.cat([*rows, head.emb_code(torch.tensor(drawn, dtype=torch.long))])[None]
        n = x.shape[1]
        states = head.stack.feed(
            poisoned(1), x, torch.tensor([0]), torch.arange(n)[None], Rows((0,), (n,))
        )
        logits = head.head_code(states[0, -1]).double() / s.temperature
        if step or not s.first_is_free:
            for code in [*request.recent, *drawn][-s.window :]:
                logits[code] *= s.repetition_penalty ** (1 if logits[code] < 0 else -1)
        if step < request.min_new:
            logits[END] = -torch.inf
        p = logits.softmax(0)
        u = request.draws[step]
        code = int(p.argmax()) if s.is_greedy else int((p.cumsum(0) > u).nonzero()[0])
        if code == END:
            return tuple(drawn), True
        drawn.append(code)
    return tuple(drawn[:-1] if request.drops_last else drawn), False


def conditions_of(head, request):
    """Write out a condition: text rows, end of text, BOS."""
    projected = head.project(request.hidden) if request.text_ids else torch.zeros(0, 16)
    rows = [
        head.emb_text(torch.tensor(request.text_ids, dtype=torch.long))
        + projected / projected.norm(dim=1, keepdim=True)
    ]
    closing = [CONFIG.text_eos_id] if request.is_closing else []
    return torch.cat([*rows, head.emb_text(torch.tensor([*closing, CONFIG.audio_bos_id]))])


# ---- weights and inputs


def test_weights_fold_as_torch_computes_the_norm():
    linear = parametrizations.weight_norm(torch.nn.Linear(16, 9, bias=False))
    torch.nn.init.uniform_(linear.parametrizations.weight.original0, -1, 2)
    norm = linear.parametrizations.weight

    folded = fold_weight_norm(norm.original0, norm.original1)

    torch.testing.assert_close(folded, linear.weight)
    half = fold_weight_norm(norm.original0.bfloat16(), norm.original1.bfloat16())
    assert half.dtype == torch.bfloat16


def test_missing_tensor_is_named():
    tensors = source()
    del tensors["projector_semantic.linear2.bias"]

    with pytest.raises(KeyError, match=r"projector_semantic\.linear2\.bias"):
        speech_weights(tensors, CONFIG)


def test_condition_rows_are_text_plus_normalised_state(head):
    request = asked(n_text=5, is_closing=True)

    rows = head.inputs([request], 8)[0]

    assert request.n_inputs == 7
    torch.testing.assert_close(rows[:7], conditions_of(head, request))
    assert rows[7].isfinite().all()  # padding


def test_states_are_normalised_as_configured_or_as_asked(head):
    raw = build(dataclasses.replace(CONFIG, normalize=False))
    ids, states = torch.tensor([1, 2]), hidden(2)
    normed, plain = head.condition(ids, states), raw.condition(ids, states)

    torch.testing.assert_close(plain - raw.emb_text(ids), raw.project(states))
    assert not torch.allclose(normed, plain)
    request = SpeechRequest(slot=0, start=0, text_ids=(1, 2), hidden=states)
    for asked_for, expected in ((None, plain), (True, normed), (False, plain)):
        one = dataclasses.replace(request, normalize=asked_for)
        torch.testing.assert_close(raw.inputs([one], 3)[0, :2], expected)


def test_states_get_their_length_before_they_are_rounded():
    half, ids, states = build().bfloat16(), torch.arange(1, 9), hidden(8)
    unit = torch.nn.functional.normalize(half.project(states).float(), dim=-1)

    assert torch.equal(half.condition(ids, states), half.emb_text(ids) + unit.bfloat16())


def test_rows_of_inputs_do_not_mix(head):
    requests = [asked(n, seed=n, slot=n) for n in (0, 3, 1)]
    requests.append(SpeechRequest(slot=3, start=9, last_code=11))

    together = head.inputs(requests, 4)

    for row, request in enumerate(requests):
        torch.testing.assert_close(
            together[row, : request.n_inputs], head.inputs([request], request.n_inputs)[0]
        )
    torch.testing.assert_close(together[3, 0], head.emb_code.weight[11])


def test_inputs_in_pieces_are_the_whole(head):
    requests = [
        asked(5, slot=1, is_closing=True, given_codes=(7, 8, 9)),
        asked(1, seed=1, normalize=False),
        SpeechRequest(slot=2, start=9, last_code=11),
    ]
    expected, pieces = head.inputs(requests, 12), []
    for offset in range(0, 12, 4):
        arrays = {name: np.full((3, 4), 30) for name in ("ids", "kinds", "places")}
        states = head.fill_inputs(arrays, requests, offset)
        states = torch.cat([*states, torch.full((1, CONFIG.llm_dim), torch.nan)])
        places = torch.from_numpy(arrays["places"])
        is_condition = torch.from_numpy(arrays["kinds"]) >= InputKind.STATE
        # What no row asks for may be anything.
        places = places.where(is_condition, len(states) - 1)
        ids, kinds = (torch.from_numpy(arrays[name]) for name in ("ids", "kinds"))
        pieces.append(head.input_rows(ids, kinds, states[places]))

    torch.testing.assert_close(torch.cat(pieces, dim=1), expected)


# ---- runs


@pytest.mark.parametrize("n_text", [0, 1, 6])
@pytest.mark.parametrize("is_greedy", [False, True])
def test_a_unit_speaks_as_the_rules_do_by_the_letter(head, cache, n_text, is_greedy):
    request = asked(n_text, seed=n_text, sampling=CONFIG.unit_sampling(is_greedy))

    outcome = head.speak(cache, [request])

    assert outcome == [by_the_letter(head, conditions_of(head, request), request)]
    assert len(outcome[0][0]) == 25


def test_units_of_a_turn_follow_each_other(head, cache):
    """The dropped code leaves no trace: the next unit begins right behind the returned ones."""
    before, start = [], 0
    for unit, n_text in enumerate((2, 0, 5)):
        request = asked(n_text, seed=unit, start=start)
        conditions = conditions_of(head, request)

        [outcome] = head.speak(cache, [request])

        assert outcome == by_the_letter(head, conditions, request, before)
        before += [conditions, head.emb_code(torch.tensor(outcome[0]))]
        start += n_live(request, outcome)
    assert start == sum((3 + 25, 1 + 25, 6 + 25))


def test_batched_row_equals_single(head):
    caches = poisoned(), poisoned()
    starts = dict.fromkeys(range(4), 0)
    for _ in range(2):
        requests = ragged(starts.__getitem__)
        together, alone = SpeechTrace(), [SpeechTrace() for _ in requests]

        batch = head.speak(caches[0], requests, together)
        single = [
            head.speak(caches[1], [request], trace)[0]
            for request, trace in zip(requests, alone, strict=True)
        ]

        assert batch == single
        for row, trace in enumerate(alone):
            for step, p in enumerate(trace.probabilities):
                if step < requests[row].max_new and END not in [int(c) for c in trace.drawn[:step]]:
                    torch.testing.assert_close(together.probabilities[step][row], p[0], **CLOSE)
                    assert int(together.drawn[step][row]) == int(trace.drawn[step])
        for request, outcome in zip(requests, batch, strict=True):
            starts[request.slot] += n_live(request, outcome)


def test_what_is_live_after_a_batch_is_what_single_runs_leave(head):
    caches, requests = (poisoned(), poisoned()), ragged()

    batch = head.speak(caches[0], requests)
    for request in requests:
        head.speak(caches[1], [request])

    for request, outcome in zip(requests, batch, strict=True):
        end = n_live(request, outcome)
        for ours, theirs in zip(caches[0].keys, caches[1].keys, strict=True):
            torch.testing.assert_close(
                ours[request.slot, :, :end], theirs[request.slot, :, :end], **CLOSE
            )


def test_a_batch_touches_no_other_slot(head):
    cache = poisoned()
    head.speak(cache, [asked(3, slot=1), asked(9, slot=3)])

    for tensor in (*cache.keys, *cache.values):
        assert tensor[[0, 2]].isnan().all()


def test_poisoned_slot_serves_the_next_session_like_a_fresh_one(head):
    fresh = head.speak(KvCache.allocate(CONFIG.decoder, 1, N_TOKENS), [asked(5)])

    used = poisoned(1)
    head.speak(used, [asked(12, seed=9, max_new=90, min_new=90)])
    used.poison(0)

    assert head.speak(used, [asked(5)]) == fresh


def test_a_new_turn_needs_no_reset(head, cache):
    fresh = head.speak(poisoned(), [asked(5)])
    head.speak(cache, [asked(12, seed=9)])

    assert head.speak(cache, [asked(5)]) == fresh


@pytest.mark.parametrize("sizes", [(1, 29), (12, 18), (26, 4), (7, 8, 9, 6)])
def test_a_run_in_pieces_equals_the_whole(head, sizes):
    whole = asked(
        4,
        is_closing=True,
        max_new=30,
        min_new=30,
        drops_last=False,
        sampling=CONFIG.text_sampling(),
    )
    [(expected, _)] = head.speak(poisoned(), [whole])

    cache, codes, start = poisoned(), (), 0
    for size in sizes:
        done = len(codes)
        piece = dataclasses.replace(
            whole,
            start=start,
            max_new=size,
            min_new=whole.min_new - done,
            draws=whole.draws[done : done + size],
            recent=codes,
        )
        if codes:
            piece = dataclasses.replace(
                piece, text_ids=(), hidden=None, is_closing=False, last_code=codes[-1]
            )
        [outcome] = head.speak(cache, [piece])
        codes += outcome[0]
        start += n_live(piece, outcome)

    assert codes == expected
    assert len(codes) == 30


@pytest.mark.parametrize("drops_last", [False, True])
@pytest.mark.parametrize("max_new", [0, 1, 7, 8, 14, 20])
def test_pieces_that_a_request_makes_equal_the_whole(head, max_new, drops_last):
    whole = asked(
        4,
        start=2,
        max_new=max_new,
        min_new=5,
        drops_last=drops_last,
        sampling=CONFIG.text_sampling(),
        given_codes=(3, 4),
        recent=(1, 2),
    )
    caches = poisoned(), poisoned()
    for cache in caches:
        head.speak(cache, [asked(1, max_new=0, min_new=0)])
    [expected] = head.speak(caches[0], [whole])

    said, has_ended, n_done = (), False, 0
    while n_done < max(1, max_new) and not has_ended:
        [(codes, has_ended)] = head.speak(caches[1], [whole.piece(said, 7)])
        said += codes
        n_done += 7

    assert (said, has_ended) == expected
    end = whole.start + n_live(whole, expected) if max_new else whole.end
    for cache in caches:
        assert cache.keys[0][0, 0, : cache.n_tokens, 0].isfinite().sum() == end


def test_saved_slot_goes_on_in_another(head, cache):
    first, second = asked(3), asked(4, seed=1, start=29)
    [outcome] = head.speak(cache, [first])
    live = n_live(first, outcome)
    saved = cache.save(0, live)
    expected = head.speak(cache, [second])

    cache.poison(2)
    cache.restore(2, saved)

    assert live == second.start
    assert head.speak(cache, [dataclasses.replace(second, slot=2)]) == expected


def test_given_codes_equal_drawn_ones(head):
    """Recomputing a chunk: its condition and codes are fed in one piece, nothing is drawn."""
    first = asked(3)
    caches = poisoned(), poisoned()
    [(codes, _)] = head.speak(caches[0], [first])
    again = dataclasses.replace(first, given_codes=codes, max_new=0, min_new=0, drops_last=False)
    assert head.speak(caches[1], [again]) == [((), False)]
    second = asked(2, seed=5, start=again.n_inputs)

    assert head.speak(caches[1], [second]) == head.speak(caches[0], [second])


def test_a_run_may_fill_its_slot_to_the_last_position(head):
    """Neither a wider neighbour's padding nor waiting for a longer one needs room."""
    runs = [
        asked(20, slot=0, max_new=19, min_new=19),
        asked(0, slot=1, start=0, max_new=39, min_new=39),
        asked(6, slot=2, max_new=0, min_new=0, drops_last=False, given_codes=(1,) * 32),
    ]
    assert {run.end for run in runs} == {39}

    full = head.speak(poisoned(n_tokens=39), runs)

    assert full == head.speak(poisoned(), runs)
    assert [len(codes) for codes, _ in full] == [18, 38, 0]


def test_nothing_is_written_behind_the_live_positions(head):
    cache, requests = poisoned(), ragged()

    batch = head.speak(cache, requests)

    for request, outcome in zip(requests, batch, strict=True):
        end = n_live(request, outcome)
        keys = cache.keys[1][request.slot, :, : cache.n_tokens]
        assert keys[:, :end].isfinite().all()
        assert keys[:, end:].isnan().all()


# ---- settings


def test_end_code_ends_the_run_and_is_not_returned(cache):
    head, request = ending(3.0), asked(3, seed=2, max_new=60, min_new=0)

    trace = SpeechTrace()
    [(codes, has_ended)] = head.speak(cache, [request], trace)

    assert has_ended
    assert 0 < len(codes) < 40
    drawn = torch.stack(trace.drawn)[:, 0].tolist()
    assert drawn[: len(codes) + 1] == [*codes, END]
    assert (codes, has_ended) == by_the_letter(head, conditions_of(head, request), request)


def test_min_new_holds_the_end_off(cache):
    head = ending(3.0)

    def count(min_new):
        return len(head.speak(cache, [asked(3, seed=2, max_new=60, min_new=min_new)])[0][0])

    free = count(0)
    assert count(free + 5) >= free + 5


def test_an_end_in_the_first_draw_leaves_the_condition_only(head, cache):
    p = SpeechTrace()
    request = asked(3, min_new=0)
    head.speak(cache, [request], p)
    below_end = 1 - float(p.probabilities[0][0, END]) / 2  # the end code is the last one
    request = dataclasses.replace(request, draws=[below_end, *request.draws[1:]])

    [outcome] = head.speak(cache, [request])

    assert outcome == ((), True)
    assert n_live(request, outcome) == 4


def test_the_last_draw_is_dropped_even_if_it_would_be_the_end(head, cache):
    """A shorter run of the same draws is a prefix of a longer one."""
    long = head.speak(cache, [asked(3, seed=7)])[0][0]
    short = head.speak(cache, [asked(3, seed=7, max_new=10, min_new=10)])[0][0]

    assert short == long[:9]


def test_a_draw_that_cannot_matter_is_left_out(head, cache, monkeypatch):
    calls = []
    real = speech.draw_codes
    monkeypatch.setattr(speech, "draw_codes", lambda *a: calls.append(1) or real(*a))

    fixed = head.speak(cache, [asked(3)])
    assert len(calls) == 25
    traced = head.speak(cache, [asked(3)], SpeechTrace())
    assert len(calls) == 25 + 26
    assert fixed == traced


def test_penalty_looks_at_recent_codes_if_the_first_draw_is_not_free(head, cache):
    def first(recent, **fields):
        trace = SpeechTrace()
        sampling = CodeSampling(repetition_penalty=3.0, **fields)
        head.speak(cache, [asked(3, sampling=sampling, recent=recent)], trace)
        return trace.probabilities[0][0]

    torch.testing.assert_close(first((5, 5)), first(()))
    assert not torch.allclose(first((5, 5), first_is_free=False), first((), first_is_free=False))


def test_continuing_is_never_free(head, cache):
    first = asked(3, max_new=5, min_new=5, drops_last=False)
    [outcome] = head.speak(cache, [first])
    trace = SpeechTrace()
    further = SpeechRequest(
        slot=0,
        start=n_live(first, outcome),
        last_code=outcome[0][-1],
        max_new=1,
        draws=(0.5,),
        sampling=CodeSampling(top_k=4),
    )

    head.speak(cache, [further], trace)

    assert int((trace.probabilities[0] > 0).sum()) == 4


def test_text_sampling_takes_its_filters_from_the_configuration():
    sampling = dataclasses.replace(CONFIG, top_p=0.5, top_k=7, temperature=0.3).text_sampling()

    assert (sampling.top_p, sampling.top_k, sampling.temperature) == (0.5, 7, 0.3)
    assert not CONFIG.unit_sampling().has_filters


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"start": 150}, "needs 179 positions"),
        ({"draws": (0.5,) * 25}, "25 draws for 26"),
        ({"hidden": None}, "0 hidden states for 3"),
        ({"last_code": 4}, "continues from"),
    ],
)
def test_requests_that_cannot_run_are_refused_before_anything_is_written(
    head, cache, changed, message
):
    with pytest.raises(ValueError, match=message):
        head.speak(cache, [asked(2, slot=1), dataclasses.replace(asked(3), **changed)])

    assert cache.keys[0].isnan().all()


def test_bf16_states_stay_close_to_fp32():
    head, half = build(), build().bfloat16()
    request = asked(5)

    exact = head.inputs([request], 6)
    rounded = half.inputs([request], 6)
    halves = KvCache.allocate(CONFIG.decoder, 1, N_TOKENS, dtype=torch.bfloat16)
    trace, trace_16 = SpeechTrace(), SpeechTrace()
    head.speak(poisoned(), [request], trace)
    half.speak(halves, [request], trace_16)

    assert rounded.dtype == torch.bfloat16
    torch.testing.assert_close(rounded.float(), exact, rtol=0.05, atol=0.05)
    assert trace_16.probabilities[0].dtype == torch.float32
    torch.testing.assert_close(trace_16.probabilities[0], trace.probabilities[0], rtol=0, atol=0.1)
