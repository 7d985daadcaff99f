"""The language model's stages against its exact rows: same ids, same states, for any batch."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from shared.config import Compat
from shared.protocol import DuplexSettings
from tests.fakes.graphs import FakeCapture
from worker.compile.compiler import Compiler
from worker.compile.regions import CompilePlan
from worker.models.minicpmo45.duplex import sampling_of
from worker.models.minicpmo45.language import Language
from worker.models.minicpmo45.model import MAX_BATCH
from worker.models.minicpmo45.ops import DECODE, FEED_BUCKETS, Choice, Feed, MoveRequest, Step
from worker.nn.decoder import Decoder
from worker.nn.sampling import Sampling
from worker.nn.text_sampling import DuplexSampling

N_SLOTS, N_POSITIONS = 5, 640
CLOSE = {"rtol": 1e-4, "atol": 1e-5}
CAPTURED = CompilePlan(backend="eager", modules=frozenset())
"""Graphs of eager code: nothing is compiled."""

FIXED = [
    DuplexSampling(),
    DuplexSampling(is_greedy=True),
    DuplexSampling(top_k=5, top_p=0.99, temperature=1.3, window=4, repetition_penalty=1.8),
    DuplexSampling(listen_top_k=40, listen_prob_scale=2.0),
    DuplexSampling(top_k=120, temperature=2.0),
    DuplexSampling(top_k=0, is_greedy=True, repetition_penalty=2.0),
]
OTHER = [
    DuplexSampling(top_k=0, top_p=0.5),
    DuplexSampling(top_k=150, temperature=2.0),
    DuplexSampling(window=2000, repetition_penalty=3.0, is_greedy=True),
    Sampling(temperature=1.1, top_k=30, repetition_penalty=1.3),
    Sampling(),
]


def quiet(share, note):
    pass


def language(model, plan=None, n_slots=N_SLOTS):
    """A language model with the tiny weights and caches of its own, all NaN."""
    weights = model.parts.llm
    llm = Decoder(weights.config).requires_grad_(False)  # its call sites may be replaced
    llm.load_state_dict(weights.state_dict())
    compiler = Compiler(plan, capture=FakeCapture())
    made = Language(llm, model.tokenizer, Compat(), n_slots, N_POSITIONS, compiler)
    if plan is not None:
        if plan.modules:
            compiler.prepare(made.device)
        compiler.compile(quiet)
        compiler.capture(quiet)
    for slot in range(n_slots):
        made.poison(slot)
    return made, compiler


@pytest.fixture(autouse=True, scope="module")
def inference():
    with torch.inference_mode():
        yield


@pytest.fixture(scope="module")
def captured(inference, loaded):
    return language(loaded, CAPTURED)


@pytest.fixture
def staged(captured):
    made, compiler = captured
    for slot in range(N_SLOTS):
        made.poison(slot)
    for stage in compiler.stages.values():
        stage.counts.runs = stage.counts.replays = 0
    return made


@pytest.fixture
def exact(loaded):
    made, _ = language(loaded)
    return made


def embeddings(n, seed):
    return torch.randn(n, 128, generator=torch.Generator().manual_seed(seed))


class Traffic:
    """Random requests to slots that go on from where they are."""

    def __init__(self, seed, settings, n_slots=N_SLOTS):
        self.random = np.random.default_rng(seed)
        self.settings, self.n_slots = settings, n_slots
        self.ends = [0] * n_slots

    def slots(self):
        n = self.random.integers(1, self.n_slots + 1)
        return self.random.permutation(self.n_slots)[:n].tolist()

    def ids(self, n):
        return tuple(self.random.integers(0, 448, n).tolist())

    def choice(self):
        sampling = self.settings[self.random.integers(len(self.settings))]
        if sampling is None:
            return None
        most = 1500 if isinstance(sampling, DuplexSampling) and sampling.window > 1000 else 60
        recent = self.random.integers(0, 448, self.random.integers(0, most))
        forbidden = None
        if isinstance(sampling, Sampling) and self.random.random() < 0.5:
            forbidden = frozenset(self.ids(40))
        return Choice(sampling, tuple(self.random.random(2).tolist()), recent, forbidden)

    def feeds(self, low, high):
        """Feeds of one bucket: ids and embeddings mixed, every row of another length."""
        return [self.feed(slot, self.random.integers(low, high + 1)) for slot in self.slots()]

    def feed(self, slot, n_rows):
        pieces, left = [], int(n_rows)
        while left:
            n = int(self.random.integers(1, left + 1))
            seed = int(self.random.integers(1 << 30))
            pieces.append(self.ids(n) if self.random.random() < 0.5 else embeddings(n, seed))
            left -= n
        request = Feed(slot, self.ends[slot], tuple(pieces), self.choice())
        self.ends[slot] += request.n_rows
        return request

    def steps(self):
        requests = [
            Step(slot, self.ends[slot], self.ids(1)[0], self.choice()) for slot in self.slots()
        ]
        for request in requests:
            self.ends[request.slot] += 1
        return requests


def agree(ours, theirs):
    assert [fed.token for fed in ours] == [fed.token for fed in theirs]
    assert [fed.is_direct for fed in ours] == [fed.is_direct for fed in theirs]
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.hidden, other.hidden, **CLOSE)


@pytest.mark.parametrize("seed", range(4))
def test_any_traffic_gives_what_exact_rows_give(staged, exact, captured, seed):
    """Duplex, chat and no choices in one batch, rows of padding, caches full of NaN."""
    traffic = Traffic(seed, [*FIXED, *OTHER, None])
    chosen = 0
    for _ in range(4):
        for low, high in ((1, 16), (17, 32), (33, 96)):
            feeds = traffic.feeds(low, high)
            theirs = exact.prefill(feeds)
            agree(staged.prefill(feeds), theirs)
            for _ in range(3):
                steps = traffic.steps()
                theirs = exact.decode(steps)
                agree(staged.decode(steps), theirs)
                chosen += sum(fed.token is not None for fed in theirs)

    assert chosen > 40
    stages = captured[1].stages
    assert all(stages[name].counts.runs for name in ("llm.prefill", "llm.decode"))
    assert all(stage.counts.runs == stage.counts.replays for stage in stages.values())


@pytest.mark.parametrize("settings", [FIXED, OTHER, [None]], ids=["fixed", "other", "none"])
def test_batches_of_one_kind_give_what_exact_rows_give(staged, exact, settings):
    traffic = Traffic(11, settings)
    for _ in range(3):
        feeds = traffic.feeds(3, 16)
        agree(staged.prefill(feeds), exact.prefill(feeds))
        for _ in range(4):
            steps = traffic.steps()
            agree(staged.decode(steps), exact.decode(steps))


@pytest.mark.parametrize(
    ("said", "n_outside"),
    [
        ({}, 0),
        ({"top_k": 40}, 0),
        ({"top_k": 100, "text_repetition_window_size": 1024}, 0),
        ({"top_k": 0, "temperature": 0}, 0),
        ({"text_repetition_window_size": 4096}, 1),
        ({"top_k": 0}, 1),
    ],
)
def test_what_clients_ordinarily_ask_for_is_chosen_within_the_run(
    staged, exact, captured, said, n_outside
):
    """With a top_k of 40 every token was chosen by some 70 launches, and nothing told of it."""
    outside = captured[1].report.stages["llm.choose"]
    before = outside.runs
    sampling = sampling_of(DuplexSettings(**said))
    recent = np.arange(4096)[-sampling.window :] % 448
    step = Step(1, 0, 3, Choice(sampling, (0.4, 0.6), recent))

    agree(staged.decode([step]), exact.decode([step]))

    assert outside.runs - before == n_outside


def test_no_step_is_planned_that_no_batch_comes_to(loaded):
    _, compiler = language(loaded, replace(CAPTURED, cuda_graphs=False), n_slots=70)

    sizes = {n_slots for n_slots, _ in compiler.stages["llm.decode"].buckets}

    assert max(sizes) == MAX_BATCH[DECODE] == 64


def test_the_longest_feeds_run_one_by_one(staged, exact, captured):
    traffic = Traffic(3, FIXED)
    feeds = [traffic.feed(slot, n) for slot, n in ((4, 512), (0, 300), (2, 225))]

    agree(staged.prefill(feeds), exact.prefill(feeds))

    counts = captured[1].stages["llm.prefill"].counts
    assert (counts.runs, counts.replays) == (3, 3)


def test_more_feeds_than_one_run_takes_are_cut(loaded, exact):
    many, _ = language(loaded, replace(CAPTURED, cuda_graphs=False), n_slots=11)
    alone, _ = language(loaded, n_slots=11)
    traffic = Traffic(5, FIXED, n_slots=11)
    feeds = [traffic.feed(slot, 3 + slot % 4) for slot in range(11)]

    agree(many.prefill(feeds), alone.prefill(feeds))


@pytest.mark.parametrize("width", FEED_BUCKETS)
def test_a_slot_may_be_filled_to_its_end(staged, exact, width):
    traffic = Traffic(9, FIXED)
    traffic.ends[3] = N_POSITIONS - width - 1
    first = Feed(3, 0, (embeddings(min(512, traffic.ends[3]), 1),), None)
    rest = traffic.ends[3] - first.n_rows
    opening = [first, *([Feed(3, first.n_rows, (embeddings(rest, 2),), None)] if rest else [])]
    for request in (*opening, traffic.feed(3, width)):
        agree(staged.prefill([request]), exact.prefill([request]))
    last = Step(3, N_POSITIONS - 1, 7, traffic.choice())

    agree(staged.decode([last]), exact.decode([last]))


def test_states_stay_when_the_same_bucket_runs_again(staged):
    traffic = Traffic(2, [FIXED[1]])
    (fed,) = staged.prefill([traffic.feed(0, 9)])
    (after,) = staged.decode([Step(0, 9, 5, None)])
    kept = fed.hidden.clone(), after.hidden.clone()

    staged.prefill([traffic.feed(1, 12)])
    staged.decode([Step(1, 12, 6, None)])

    assert torch.equal(fed.hidden, kept[0])
    assert torch.equal(after.hidden, kept[1])


def test_padding_of_a_batch_writes_to_nobody(staged):
    traffic = Traffic(6, FIXED)
    staged.prefill([traffic.feed(slot, 10) for slot in (0, 1, 2)])
    before = [staged.cache.save(slot, 10) for slot in (0, 1, 2)]

    staged.decode([Step(slot, 10, 3, traffic.choice()) for slot in (1, 2, 3)])  # padded to 4

    for slot, saved in zip((0, 1, 2), before, strict=True):
        for side, old in zip(staged.cache.save(slot, 10), saved, strict=True):
            assert all(torch.equal(one, other) for one, other in zip(side, old, strict=True))


def test_the_head_does_not_run_where_nothing_is_chosen(staged):
    calls = []
    hook = staged.llm.head.register_forward_hook(lambda *_: calls.append(1))
    staged.prefill([Feed(0, 0, ((1, 2, 3),), None)])
    staged.decode([Step(0, 3, 4, None)])
    assert not calls

    staged.decode([Step(0, 4, 4, Choice(DuplexSampling(), (0.5, 0.5), np.zeros(0, np.int64)))])
    hook.remove()

    assert len(calls) == 1


@pytest.mark.parametrize("block", [(20, 60, 5), (20, 60, 33), (7, 7, 3), (0, 90, 500)])
def test_a_moved_part_of_the_context_serves_as_the_exact_one_does(staged, exact, block):
    start, end, target = block
    traffic = Traffic(8, FIXED)
    feeds = [traffic.feed(slot, 90) for slot in (2, 1)]
    agree(staged.prefill(feeds), exact.prefill(feeds))

    for one in (staged, exact):
        one.move(MoveRequest(2, start, end, target))

    for slot in (1, 2):
        step = [Step(slot, 90, 9, traffic.choice())]
        agree(staged.decode(step), exact.decode(step))
    moved = [one.cache.keys[1][2, :, target : target + end - start] for one in (staged, exact)]
    torch.testing.assert_close(*moved, **CLOSE)


@pytest.mark.parametrize("block", [(5, 4, 0), (0, 641, 0), (600, 640, 601), (3, 9, -1)])
def test_a_block_that_does_not_fit_is_not_moved(staged, block):
    with pytest.raises(AssertionError):
        staged.move(MoveRequest(0, *block))


@pytest.mark.usefixtures("compiling")
def test_traffic_meets_compiled_graphs_only(loaded, exact):
    """Feeds have a graph for one row and one for more, steps and choices one per batch size."""
    made, compiler = language(loaded, CompilePlan(backend="eager", on_recompile="fail"), 3)
    compiler.seal()
    traffic = Traffic(21, [*FIXED, *OTHER, None], n_slots=3)
    n_sizes = len((1, 2, 3))
    assert compiler.report.region_graphs == {
        "llm.prefill": 2,
        "llm.decode": n_sizes,
        "llm.choose": n_sizes,
    }

    for low, high in ((1, 16), (17, 32), (33, 96), (97, 224)):
        feeds = traffic.feeds(low, high)
        agree(made.prefill(feeds), exact.prefill(feeds))
        steps = traffic.steps()
        agree(made.decode(steps), exact.decode(steps))

    assert compiler.report.recompiles_after_idle == 0
