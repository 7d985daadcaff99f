"""The scheduler's decisions, by example and by property."""

import itertools
import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.engine.contract import Op
from worker.engine.scheduler import MAX_EXTENSION_S, Batch, Scheduler

LANES = {"decode": "language", "prefill": "language", "vocode": "speech"}
MAX_BATCH = {"decode": 3, "vocode": 2}


def make() -> Scheduler[str]:
    return Scheduler(LANES, MAX_BATCH)


def test_ops_of_one_kind_and_bucket_run_as_one_batch():
    scheduler = make()
    scheduler.submit("a", Op("decode", 1, bucket=64))
    scheduler.submit("b", Op("decode", 2, bucket=128))
    scheduler.submit("c", Op("decode", 3, bucket=64))

    batch = scheduler.next_batch("language")

    assert batch is not None
    assert (batch.kind, batch.bucket, batch.tasks) == ("decode", 64, ("a", "c"))
    assert [op.payload for op in batch.ops] == [1, 3]


def test_the_group_with_the_earliest_deadline_runs_first():
    scheduler = make()
    scheduler.submit("late", Op("decode", None, deadline=9.0))
    scheduler.submit("early", Op("prefill", None, deadline=1.0))
    scheduler.submit("middle", Op("decode", None, deadline=5.0))

    order = [scheduler.next_batch("language") for _ in range(3)]

    assert [b.tasks if b else None for b in order] == [("early",), ("middle", "late"), None]


def test_a_full_batch_takes_the_earliest_deadlines():
    scheduler = make()
    for name, deadline in (("d", 4.0), ("a", 1.0), ("c", 3.0), ("b", 2.0)):
        scheduler.submit(name, Op("decode", None, deadline=deadline))

    batch = scheduler.next_batch("language")

    assert batch is not None
    assert batch.tasks == ("a", "b", "c")


def test_equal_deadlines_are_first_in_first_out():
    scheduler = make()
    for i in range(7):
        scheduler.submit(f"t{i}", Op("decode", None))

    taken: list[str] = []
    while batch := scheduler.next_batch("language"):
        taken += batch.tasks

    assert taken == [f"t{i}" for i in range(7)]


def test_a_lane_gets_its_own_kinds_only():
    scheduler = make()
    scheduler.submit("a", Op("vocode", None))

    assert scheduler.next_batch("language") is None
    assert scheduler.n_ready("speech") == 1


def test_a_withdrawn_op_never_runs():
    scheduler = make()
    scheduler.submit("a", Op("decode", None))

    assert scheduler.withdraw("a")
    assert not scheduler.withdraw("a")
    assert scheduler.next_batch("language") is None


def test_a_task_has_at_most_one_waiting_op():
    scheduler = make()
    scheduler.submit("a", Op("decode", None))

    with pytest.raises(ValueError, match="waiting already"):
        scheduler.submit("a", Op("vocode", None))


def test_a_kind_without_lane_is_refused_by_name():
    with pytest.raises(ValueError, match="no lane runs 'dream'"):
        make().submit("a", Op("dream", None))


OPS = st.lists(
    st.tuples(
        st.sampled_from(sorted(LANES)),
        st.sampled_from([None, 16, 32]),
        st.sampled_from([0.0, 1.0, 2.0, math.inf]),
    ),
    max_size=40,
)


@given(OPS, st.sets(st.integers(0, 39)), st.sampled_from([0.0, 1.0]))
def test_every_op_that_is_not_withdrawn_runs_exactly_once_in_bounded_batches(ops, withdrawn, span):
    scheduler: Scheduler[int] = Scheduler(LANES, MAX_BATCH, span)
    for task, (kind, bucket, deadline) in enumerate(ops):
        scheduler.submit(task, Op(kind, task, bucket, deadline))
    for task in withdrawn:
        assert scheduler.withdraw(task) == (task < len(ops))
    waiting = {task: op for task, op in enumerate(ops) if task not in withdrawn}

    for lane in ("language", "speech"):
        while batch := scheduler.next_batch(lane):
            assert len(batch.tasks) <= MAX_BATCH.get(batch.kind, 1)
            assert {waiting[task][:2] for task in batch.tasks} == {(batch.kind, batch.bucket)}
            in_lane = [op for op in waiting.values() if LANES[op[0]] == lane]
            earliest = min(op[2] for op in in_lane)
            assert waiting[batch.tasks[0]][2] <= earliest + span
            for task in batch.tasks:
                del waiting[task]

    assert not waiting


@given(st.integers(0, 12), st.integers(1, 4))
def test_nobody_starves_among_equal_deadlines(n_before, n_newcomers):
    """Whatever keeps coming, an op waits for those that were there before it, and no others."""
    scheduler: Scheduler[str] = Scheduler(LANES, MAX_BATCH)
    for i in range(n_before):
        scheduler.submit(f"before {i}", Op("prefill", None, deadline=1.0))
    scheduler.submit("waiting", Op("prefill", None, deadline=1.0))

    ran: list[str] = []
    for round_ in range(n_before + 1):
        for i in range(n_newcomers):
            scheduler.submit(f"{round_}.{i}", Op("decode", None, deadline=1.0))
        batch = scheduler.next_batch("language")
        assert batch is not None
        ran += batch.tasks

    assert ran == [f"before {i}" for i in range(n_before)] + ["waiting"]


def in_rounds() -> Scheduler[str]:
    return Scheduler(LANES, MAX_BATCH, round_span_s=1.0)


def kinds(scheduler: Scheduler[str]) -> list[str]:
    taken = []
    while batch := scheduler.next_batch("language"):
        taken.append(batch.kind)
    return taken


def test_kinds_take_it_in_turn_though_one_is_due_first():
    scheduler = in_rounds()
    scheduler.submit("first", Op("decode", None, deadline=1.0))
    scheduler.submit("second", Op("prefill", None, deadline=1.5))
    scheduler.next_batch("language")
    scheduler.submit("first", Op("decode", None, deadline=1.0))

    assert kinds(scheduler) == ["prefill", "decode"]


def test_a_turn_is_for_all_that_were_ready_and_for_nobody_else():
    scheduler = in_rounds()
    for name in ("a", "b", "c"):
        scheduler.submit(name, Op("prefill", None, deadline=1.0))
    scheduler.submit("d", Op("decode", None, deadline=1.2))

    order = []
    while batch := scheduler.next_batch("language"):
        order.append(batch.kind)
        if batch.tasks == ("a",):
            # Begins while its kind has the turn: it is not the end of everybody else's.
            scheduler.submit("late", Op("prefill", None, deadline=1.0))

    assert order == ["prefill", "prefill", "prefill", "decode", "prefill"]


def test_what_is_due_later_than_the_span_yields():
    scheduler = in_rounds()
    scheduler.submit("chat", Op("prefill", None))
    scheduler.submit("unit", Op("decode", None, deadline=1.0))
    first = scheduler.next_batch("language")
    scheduler.submit("unit", Op("decode", None, deadline=1.0))
    second = scheduler.next_batch("language")

    assert first is not None
    assert second is not None
    assert (first.tasks, second.tasks) == (("unit",), ("unit",))
    assert kinds(scheduler) == ["prefill"]


def test_without_deadlines_kinds_take_turns_too():
    scheduler = in_rounds()
    scheduler.submit("a", Op("decode", None))
    scheduler.submit("b", Op("prefill", None))
    scheduler.next_batch("language")
    scheduler.submit("a", Op("decode", None))

    assert kinds(scheduler) == ["prefill", "decode"]


def test_a_turn_ends_when_its_last_op_is_withdrawn():
    scheduler = in_rounds()
    for name in ("a", "b"):
        scheduler.submit(name, Op("prefill", None, deadline=1.0))
    scheduler.submit("c", Op("decode", None, deadline=1.0))
    scheduler.next_batch("language")
    scheduler.withdraw("b")

    assert kinds(scheduler) == ["decode"]


def steps_in_a_row(scheduler: Scheduler[str], step_s: float) -> int:
    """Have "a" decode on and on while "b" waits with a prefill; how often it could."""
    scheduler.submit("a", Op("decode", None, deadline=1.0))
    scheduler.submit("b", Op("prefill", None, deadline=1.0))
    n_steps = 0
    while (batch := scheduler.next_batch("language")) and batch.kind == "decode":
        n_steps += 1
        scheduler.ran("language", step_s)
        scheduler.submit("a", Op("decode", None, deadline=1.0))
    return n_steps


@pytest.mark.parametrize(("others_s", "expected"), [(0.0, 1), (0.055, 6), (30.0, 20)])
def test_a_turn_goes_on_for_as_long_as_others_took(others_s, expected):
    scheduler = in_rounds()
    scheduler.submit("a", Op("decode", None, deadline=1.0))
    scheduler.next_batch("language")
    scheduler.ran("language", 0.01)
    scheduler.submit("b", Op("prefill", None, deadline=1.0))
    scheduler.next_batch("language")
    scheduler.ran("language", others_s)

    assert steps_in_a_row(scheduler, 0.01) == expected


def test_a_turn_is_not_prolonged_by_those_who_came_later_and_are_due_sooner():
    """A full batch took the newcomers: those whose turn it was waited, and all other kinds."""
    scheduler = in_rounds()
    for name in ("a", "b", "c", "d"):
        scheduler.submit(name, Op("decode", None, deadline=1.0 if name == "d" else 0.5))
    scheduler.submit("e", Op("prefill", None, deadline=1.0))
    scheduler.next_batch("language")
    for name in ("a", "b", "c"):
        scheduler.submit(name, Op("decode", None, deadline=0.5))

    batch = scheduler.next_batch("language")

    assert batch is not None
    assert batch.tasks == ("d", "a", "b")
    assert kinds(scheduler)[0] == "prefill"


def test_three_kinds_take_turns_though_their_batches_take_no_time():
    scheduler: Scheduler[str] = Scheduler(dict.fromkeys("xyz", "lane"), {}, round_span_s=1.0)
    deadlines = {"x": 0.0, "y": 0.0, "z": 1.0}
    for kind, deadline in deadlines.items():
        scheduler.submit(kind, Op(kind, None, deadline=deadline))

    order = ""
    for _ in range(6):
        batch = scheduler.next_batch("lane")
        assert batch is not None
        scheduler.ran("lane", 0.0)
        order += batch.kind
        scheduler.submit(batch.kind, Op(batch.kind, None, deadline=deadlines[batch.kind]))

    assert order == "xyzxyz"


MORE_LANES = {**LANES, "speak": "language"}
Step = tuple[str, int | None, float]
STEPS = st.tuples(
    st.sampled_from(sorted(MORE_LANES)),
    st.sampled_from([None, 16]),
    st.sampled_from([-5.0, -4.5, -4.0]),
)


class Waiting:
    """Programs that repeat their ops for ever: how many batches each has waited for."""

    def __init__(self, scheduler: Scheduler[int], programs: Sequence[Sequence[Step]]) -> None:
        self.n_batches: dict[str, dict[int, int]] = {lane: {} for lane in MORE_LANES.values()}
        self._scheduler = scheduler
        self._steps = {task: itertools.cycle(steps) for task, steps in enumerate(programs)}
        for task in self._steps:
            self._submit(task)

    def _submit(self, task: int) -> None:
        kind, bucket, deadline = next(self._steps[task])
        lane = self._scheduler.submit(task, Op(kind, None, bucket, deadline))
        self.n_batches[lane][task] = 0

    def leave(self, task: int) -> None:
        self._scheduler.withdraw(task)
        for tasks in self.n_batches.values():
            tasks.pop(task, None)

    def ran(self, batch: Batch[int]) -> None:
        tasks = self.n_batches[batch.lane]
        for task in batch.tasks:
            tasks.pop(task, None)
        for task in tasks:
            tasks[task] += 1
        for task in self._steps.keys() & batch.tasks:
            self._submit(task)

    def longest(self, lane: str) -> int:
        return max(self.n_batches[lane].values(), default=0)


LEAST_S = 0.02
DURATIONS = st.sampled_from([[0.0], [LEAST_S, 0.05, 0.3]]).flatmap(
    lambda seconds: st.lists(st.sampled_from(seconds), min_size=1, max_size=5)
)


@given(
    st.lists(st.lists(STEPS, min_size=1, max_size=3), min_size=1, max_size=7),
    DURATIONS,
    st.integers(0, 30),
)
def test_whatever_is_due_within_the_span_waits_for_a_bounded_number_of_batches(
    programs, durations, leaves_after
):
    """Programs repeat their ops for ever, also those that are due first; one is cancelled."""
    scheduler: Scheduler[int] = Scheduler(MORE_LANES, MAX_BATCH, round_span_s=1.0)
    n_extended = round(MAX_EXTENSION_S / LEAST_S) if any(durations) else 0
    # The rest of the turn that is going on, one of each other kind, then its own.
    limit = (len(MORE_LANES) + 1) * (len(programs) + n_extended)
    seconds = itertools.cycle(durations)
    waiting = Waiting(scheduler, programs)
    for i, kind in enumerate(MORE_LANES):
        scheduler.submit(-1 - i, Op(kind, None))
    for n_steps in range(3 * limit):
        if n_steps == leaves_after:
            waiting.leave(0)
        for lane in waiting.n_batches:
            if batch := scheduler.next_batch(lane):
                scheduler.ran(lane, next(seconds))
                waiting.ran(batch)
                assert waiting.longest(lane) <= limit
