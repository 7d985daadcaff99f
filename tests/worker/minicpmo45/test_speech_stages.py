"""The speech head in stages against the speech head as it is, on caches full of NaN."""

import dataclasses
import warnings

import numpy as np
import pytest
import torch

from tests.fakes.graphs import FakeCapture
from tests.fakes.speech_head import (
    CONFIG,
    END,
    N_TOKENS,
    asked,
    build,
    ending,
    n_live,
    poisoned,
    ragged,
    uniforms,
)
from tests.gpu import waits_are
from worker.compile.compiler import Compiler
from worker.compile.regions import CompilePlan
from worker.models.minicpmo45.speech_stages import SpeechStages
from worker.nn.decoder import KvCache
from worker.nn.speech import CodeSampling, SpeechRequest

CLOSE = {"rtol": 1e-4, "atol": 1e-5}
UNCOMPILED = CompilePlan(modules=frozenset(), backend="eager")


@pytest.fixture(autouse=True)
def inference():
    with torch.inference_mode():
        yield


class Staged:
    """A head with its stages and a cache of its own."""

    def __init__(self, head=None, plan=UNCOMPILED, captures=True, n_slots=4, n_tokens=N_TOKENS):
        self.head = head or build()
        self.cache = poisoned(n_slots, n_tokens)
        self.compiler = Compiler(plan, FakeCapture())
        self.stages = SpeechStages(self.head, self.cache, self.compiler, n_slots)
        if plan.modules:
            self.compiler.prepare(torch.device("cpu"))
        self.note = self.compiler.compile(lambda share, note: None)
        if captures:
            self.compiler.capture(lambda share, note: None)
        for slot in range(n_slots):
            self.cache.poison(slot)
        self.count_anew()

    def speak(self, *requests):
        return self.stages.speak(requests)

    def count_anew(self):
        for stage in self.compiler.stages.values():
            stage.counts.runs = stage.counts.replays = 0

    @property
    def runs(self):
        """How often inputs, steps and draws ran."""
        return tuple(stage.counts.runs for stage in self.compiler.stages.values())

    @property
    def replays(self):
        return tuple(stage.counts.replays for stage in self.compiler.stages.values())


@pytest.fixture(params=["direct", "captured"])
def staged(request):
    return Staged(captures=request.param == "captured")


def live_keys(cache, request, outcome):
    end = request.start + n_live(request, outcome) if request.max_new else request.end
    return [side[request.slot, :, :end] for side in (*cache.keys, *cache.values)]


# ---- the same as the plain run


def test_batches_of_all_kinds_say_the_same_for_two_turns(staged):
    plain, starts = poisoned(), dict.fromkeys(range(4), 0)
    for _ in range(2):
        requests = ragged(starts.__getitem__)

        batch = staged.speak(*requests)

        assert batch == staged.head.speak(plain, requests)
        for request, outcome in zip(requests, batch, strict=True):
            for ours, theirs in zip(
                live_keys(staged.cache, request, outcome),
                live_keys(plain, request, outcome),
                strict=True,
            ):
                torch.testing.assert_close(ours, theirs, **CLOSE)
            starts[request.slot] += n_live(request, outcome)


def random_request(rng, slot, start, last_code):
    """Any request that leaves room for a few more in its slot."""
    max_new = int(rng.choice([0, 1, 9, 25, 26, 27, 60]))
    sampling = CodeSampling(
        window=int(rng.choice([0, 3, 16, 40])),
        top_p=float(rng.choice([1.0, 0.7])),
        top_k=int(rng.choice([0, 5, 25])),
        is_greedy=bool(rng.random() < 0.2),
        first_is_free=bool(rng.random() < 0.5),
    )
    fields = {
        "max_new": max_new,
        "min_new": int(rng.choice([0, 2, max_new])),
        "drops_last": bool(max_new and rng.random() < 0.5),
        "sampling": sampling,
        "recent": tuple(rng.integers(0, END, size=rng.integers(0, 30)).tolist()),
        "normalize": (None, True, False)[rng.integers(3)],
    }
    seed = int(rng.integers(1 << 30))
    if last_code is not None:
        draws = uniforms(max_new, seed)
        return SpeechRequest(slot=slot, start=start, last_code=last_code, draws=draws, **fields)
    n_given = int(rng.choice([0, 0, 4, 110]))
    return asked(
        int(rng.choice([0, 1, 7, 34])),
        seed=seed,
        slot=slot,
        start=start,
        is_closing=bool(rng.random() < 0.5),
        given_codes=tuple(rng.integers(0, END, size=n_given).tolist()),
        **fields,
    )


@pytest.mark.parametrize("seed", range(4))
def test_random_sessions_say_the_same(seed):
    """Lengths, starts, settings, early ends, long inputs and runs, continuations."""
    rng = np.random.default_rng(seed)
    staged, plain = Staged(ending(1.5), n_tokens=800), poisoned(n_tokens=800)
    starts, last = dict.fromkeys(range(4), 0), dict.fromkeys(range(4), None)
    ends = 0
    for _ in range(4):
        slots = rng.permutation(4)[: rng.integers(1, 5)].tolist()
        requests = [random_request(rng, slot, starts[slot], last[slot]) for slot in slots]

        batch = staged.speak(*requests)

        assert batch == staged.head.speak(plain, requests)
        for request, (codes, has_ended) in zip(requests, batch, strict=True):
            is_open = bool(codes) and not has_ended and not request.drops_last
            last[request.slot] = codes[-1] if is_open else None
            starts[request.slot] += len(live_keys(plain, request, (codes, has_ended))[0][0])
            starts[request.slot] -= request.start
            ends += has_ended
    assert ends


def test_neighbours_and_padding_change_nothing():
    """Three rows run in a batch of four."""
    alone, together = Staged(), Staged()
    requests = ragged()[:3]

    assert together.speak(*requests) == [alone.speak(request)[0] for request in requests]


def test_an_end_of_an_earlier_run_is_not_seen_by_the_next(staged):
    """The 26th draw is left out where it cannot matter; its place holds that of the run before."""
    last = 1 - 2**-53  # the end code is the last one
    first = asked(3, min_new=25, drops_last=False)
    [(codes, has_ended)] = staged.speak(dataclasses.replace(first, draws=(*first.draws[:25], last)))
    assert (len(codes), has_ended) == (25, True)

    [(codes, has_ended)] = staged.speak(asked(2, seed=1, start=29))

    assert (len(codes), has_ended) == (25, False)


def test_states_of_earlier_runs_do_not_matter(staged):
    expected = staged.head.speak(poisoned(), ragged())
    stage = staged.compiler.stages["tts.inputs"]
    for bucket in stage.buckets:
        stage.at(bucket).tensors["states"].fill_(torch.nan)

    assert staged.speak(*ragged()) == expected
    unvoiced = asked(0, seed=3)
    assert staged.speak(unvoiced) == staged.head.speak(poisoned(), [unvoiced])


def test_a_start_may_step_more_often_than_a_run_draws():
    """Compiling and capturing run every step several times, and nothing begins in between."""
    staged = Staged()
    for name in ("tts.step", "tts.draw"):
        call = staged.compiler.stages[name].at((1, 0, 16))
        for _ in range(30):
            call.compute()

    assert staged.speak(asked(3)) == staged.head.speak(poisoned(), [asked(3)])


def test_states_may_be_wider_than_the_head():
    cache = KvCache.allocate(CONFIG.decoder, 1, N_TOKENS, dtype=torch.bfloat16)
    stages = SpeechStages(build().bfloat16(), cache, Compiler(), 1)

    [(codes, has_ended)] = stages.speak([asked(5)])

    assert (len(codes), has_ended) == (25, False)
    assert cache.keys[1][:, :, : 6 + 25].isfinite().all()


# ---- what is written


@pytest.mark.parametrize("strength", [1.0, 3.0])
def test_nothing_is_written_behind_the_live_positions(strength):
    """Neither by rows with a lower limit nor by those that end before their neighbours."""
    staged = Staged(ending(strength))
    requests = [*ragged()[:3], asked(2, slot=1, seed=2, max_new=60, min_new=1)]

    batch = staged.speak(*requests)

    assert any(has_ended for _, has_ended in batch) == (strength > 1)
    for request, outcome in zip(requests, batch, strict=True):
        end = n_live(request, outcome)
        for side in (*staged.cache.keys, *staged.cache.values):
            row = side[request.slot, :, : staged.cache.n_tokens]
            assert row[:, :end].isfinite().all()
            assert row[:, end:].isnan().all()


def test_a_batch_touches_no_other_slot(staged):
    staged.speak(asked(3, slot=1), asked(9, slot=2), asked(40, slot=3))

    for side in (*staged.cache.keys, *staged.cache.values):
        assert side[0, :, : staged.cache.n_tokens].isnan().all()  # where padding writes


def test_a_run_may_fill_its_slot_to_the_last_position():
    runs = [
        asked(20, slot=0, max_new=19, min_new=19),
        asked(0, slot=1, max_new=39, min_new=39),
        asked(6, slot=2, max_new=0, min_new=0, drops_last=False, given_codes=(1,) * 32),
    ]

    full = Staged(n_tokens=39).speak(*runs)

    assert full == build().speak(poisoned(), runs)
    assert [len(codes) for codes, _ in full] == [18, 38, 0]


def test_requests_that_cannot_run_are_refused_before_anything_is_written(staged):
    with pytest.raises(ValueError, match="needs 179 positions"):
        staged.speak(asked(2, slot=1), asked(3, start=150))

    assert staged.cache.keys[0].isnan().all()
    assert staged.runs == (0, 0, 0)


# ---- how often what runs


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        (asked(3), (1, 25, 0)),  # the last draw cannot matter
        (asked(3, min_new=0), (1, 25, 1)),  # the last code is not fed
        (asked(3, max_new=0, min_new=0, drops_last=False), (1, 0, 0)),
        (asked(3, max_new=1, min_new=0, drops_last=False), (1, 0, 1)),
        (asked(3, max_new=52, min_new=52, drops_last=False), (2, 50, 2)),
        (asked(97, max_new=2, min_new=2), (2, 1, 0)),
        (asked(3, sampling=CONFIG.text_sampling()), (1, 25, 0)),
    ],
)
def test_a_unit_is_one_run_of_inputs_and_a_replay_per_code(request_, expected):
    staged = Staged()

    staged.speak(request_)

    assert staged.runs == staged.replays == expected


def test_a_run_that_has_ended_takes_no_further_piece():
    staged = Staged(ending(3.0))

    [(codes, has_ended)] = staged.speak(asked(3, seed=2, max_new=90, min_new=0))

    assert has_ended
    assert staged.runs[0] == len(codes) // 26 + 1 < 4


def test_what_fits_no_bucket_runs_uncaptured():
    staged = Staged()
    wide = CodeSampling(window=40, repetition_penalty=1.5)
    nucleus = CodeSampling(top_p=0.5)
    codes = tuple(range(40))
    requests = [
        asked(3, sampling=wide, recent=codes, slot=0),
        asked(3, sampling=nucleus, slot=1),
    ]

    for request in requests:
        assert staged.speak(request) == staged.head.speak(poisoned(), [request])
    assert staged.runs == (2, 50, 0)
    assert staged.replays == (1, 0, 0)


def test_a_window_that_nothing_fills_needs_no_other_bucket():
    staged = Staged()

    staged.speak(
        asked(3, max_new=12, min_new=12, sampling=CodeSampling(window=1000), recent=(1, 2))
    )

    assert staged.replays == staged.runs == (1, 11, 0)


# ---- compiled


@pytest.mark.usefixtures("compiling")
def test_compiled_stages_say_the_same_and_no_call_needs_another_graph():
    """Two rows come first, and the head has two heads: to the compiler that was the same size."""
    staged = Staged(plan=CompilePlan(backend="eager"))
    graphs = dict(staged.compiler.report.region_graphs)

    assert staged.speak(*ragged()) == build().speak(poisoned(), ragged())
    staged.speak(asked(70, max_new=30, min_new=30, start=40))

    # Inputs of one row and of several; steps and draws per number of rows, draws with filters too.
    assert graphs == {"tts.prefill": 2, "tts.decode": 3, "tts.draw": 6}
    assert dict(staged.compiler.report.region_graphs) == graphs


# ---- on an accelerator

on_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("plan", [None, CompilePlan(modules=frozenset())])
@pytest.mark.parametrize("device", [pytest.param("cuda", marks=on_gpu)])
def test_an_accelerator_says_the_same_and_reads_back_once(device, plan):
    def there(requests):
        return [
            one if one.hidden is None else dataclasses.replace(one, hidden=one.hidden.to(device))
            for one in requests
        ]

    expected = build().speak(poisoned(), ragged())
    cache = KvCache.allocate(CONFIG.decoder, 4, N_TOKENS, device=device)
    compiler = Compiler(plan)
    stages = SpeechStages(build().to(device), cache, compiler, 4)
    compiler.compile(lambda share, note: None)
    compiler.capture(lambda share, note: None)
    units = [asked(n, seed=n, slot=n) for n in range(4)]

    assert stages.speak(there(ragged())) == expected
    units, expected = there(units), build().speak(poisoned(), units)
    assert stages.speak(units) == expected
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with waits_are("warn"):
            stages.speak(units)

    waits = [str(w.message) for w in seen if "synchronizing CUDA operation" in str(w.message)]
    assert len(waits) == 1, waits
