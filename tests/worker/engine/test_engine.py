"""The engine without threads: programs, ops, waits, cancellation, faults."""

import contextlib
import gc
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.errors import EngineFault
from worker.engine.contract import Emit, Op, Program, Spawn, Until
from worker.engine.engine import Engine, ProgramCancelled, Task


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Runner:
    """Doubles numbers; a payload that is an exception instance fails as it says."""

    lanes = {"double": "a", "other": "b", "single": "a"}
    max_batch = {"double": 3}

    def __init__(self) -> None:
        self.batches: list[tuple[str, list[Any]]] = []
        self.raises: Exception | None = None
        self.during: Any = None

    def run(self, kind: str, bucket: Any, payloads: Sequence[Any]) -> Sequence[Any]:
        self.batches.append((kind, list(payloads)))
        if self.during:
            self.during()
        if self.raises:
            raise self.raises
        return [p if isinstance(p, Exception) else p * 2 for p in payloads]


@pytest.fixture
def runner() -> Runner:
    return Runner()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def engine(runner: Runner, clock: Clock) -> Engine:
    return Engine(runner, clock)


def doubled(n: int, kind: str = "double") -> Program:
    return (yield Op(kind, n))


def run_all(engine: Engine) -> None:
    while any(engine.step(lane) for lane in engine.lanes):
        pass


def test_a_program_gets_its_ops_results_and_returns_a_value(engine):
    def program() -> Program:
        first = yield Op("double", 3)
        second = yield Op("other", first)
        return first + second

    done: list[Task] = []
    task = engine.spawn("s", program(), on_done=done.append)
    run_all(engine)

    assert (task.done, task.value, task.error) == (True, 18, None)
    assert done == [task]
    assert engine.n_programs == 0


def test_ops_of_different_sessions_run_in_one_batch(engine, runner):
    tasks = [engine.spawn(f"s{i}", doubled(i)) for i in range(3)]
    engine.step("a")

    assert runner.batches == [("double", [0, 1, 2])]
    assert [task.value for task in tasks] == [0, 2, 4]


def test_an_emitted_value_reaches_the_listener_before_the_program_goes_on(engine):
    events: list[str] = []

    def program() -> Program:
        yield Emit("said")
        events.append("after")
        yield Op("double", 1)

    engine.spawn("s", program(), on_emit=events.append)
    engine.advance()

    assert events == ["said", "after"]


def test_what_a_program_was_about_goes_with_it(engine):
    """At once, not when the collector comes: a unit's pictures may be hundreds of megabytes."""

    class Pictures:
        pass

    def listeners(done):
        pictures = Pictures()

        def on_emit(value, of=pictures):
            pass

        def on_done(task, of=pictures):
            done.append(task)

        return weakref.ref(pictures), on_emit, on_done

    done = []
    gc.disable()
    try:
        alive, on_emit, on_done = listeners(done)
        engine.spawn("s", doubled(1), on_emit, on_done)
        del on_emit, on_done
        run_all(engine)

        assert done[0].value == 2
        assert alive() is None
    finally:
        gc.enable()


def test_a_result_that_is_an_exception_is_raised_in_its_program_alone(engine):
    def careful() -> Program:
        try:
            yield Op("double", ValueError("bad row"))
        except ValueError as error:
            return str(error)

    bad, good = engine.spawn("s", careful()), engine.spawn("t", doubled(4))
    engine.step("a")

    assert (bad.value, good.value) == ("bad row", 8)


def test_a_failed_batch_fails_every_op_of_it_and_nothing_more(engine, runner):
    runner.raises = ZeroDivisionError("boom")
    failed = [engine.spawn("s", doubled(1)), engine.spawn("t", doubled(2))]
    other = engine.spawn("u", doubled(3, "other"))
    engine.step("a")
    runner.raises = None
    engine.step("b")

    assert [str(task.error) for task in failed] == ["batch of double failed: ZeroDivisionError"] * 2
    assert failed[0].error is not failed[1].error
    assert other.value == 6


def test_a_runner_with_too_few_results_fails_the_batch(engine, runner):
    runner.run = lambda kind, bucket, payloads: []
    task = engine.spawn("s", doubled(1))
    engine.step("a")

    assert "0 results for 1 ops" in str(task.error)


def test_an_uncaught_error_ends_its_program_alone(engine):
    def broken() -> Program:
        yield Op("double", 1)
        raise KeyError("mine")

    bad, good = engine.spawn("s", broken()), engine.spawn("s", doubled(5))
    run_all(engine)

    assert isinstance(bad.error, KeyError)
    assert good.value == 10


def test_a_kind_that_no_lane_runs_is_an_error_in_the_program(engine):
    task = engine.spawn("s", doubled(1, "dream"))
    engine.advance()

    assert "no lane runs 'dream'" in str(task.error)


def test_yielding_nonsense_is_an_error_in_the_program(engine):
    def program() -> Program:
        yield "nonsense"

    task = engine.spawn("s", program())
    engine.advance()

    assert isinstance(task.error, TypeError)


def test_until_is_true_as_soon_as_another_program_of_the_session_makes_it_so(engine):
    state = {"ready": False}

    def waits() -> Program:
        return (yield Until(lambda: state["ready"], 100.0))

    def makes() -> Program:
        yield Op("double", 1)
        state["ready"] = True
        yield Op("double", 1)

    waiting = engine.spawn("s", waits())
    engine.spawn("s", makes())
    engine.advance()
    assert not waiting.done
    engine.step("a")

    assert waiting.value is True


def test_until_is_not_looked_at_for_programs_of_other_sessions(engine):
    looks: list[int] = []

    def waits() -> Program:
        return (yield Until(lambda: bool(looks.append(1)), 100.0))

    engine.spawn("s", waits())
    engine.advance()
    n_before = len(looks)
    engine.spawn("t", doubled(1))
    run_all(engine)

    assert len(looks) == n_before


def test_until_is_false_at_its_deadline(engine, clock):
    def waits() -> Program:
        return (yield Until(lambda: False, 5.0))

    task = engine.spawn("s", waits())
    engine.advance()
    assert engine.next_deadline() == 5.0
    clock.now = 4.9
    engine.advance()
    assert not task.done
    clock.now = 5.0
    engine.advance()

    assert (task.done, task.value) == (True, False)
    assert engine.next_deadline() == float("inf")


def test_a_condition_that_fails_is_raised_in_the_program(engine):
    def waits() -> Program:
        try:
            yield Until(lambda: 1 / 0, 5.0)
        except ZeroDivisionError:
            return "caught"

    task = engine.spawn("s", waits())
    engine.advance()

    assert task.value == "caught"


def test_spawn_starts_a_program_beside_and_returns_its_handle(engine):
    def parent() -> Program:
        handle = yield Spawn(doubled(7))
        yield Until(lambda: handle.done, 100.0)
        return handle.value

    task = engine.spawn("s", parent())
    run_all(engine)

    assert task.value == 14


def test_a_program_can_cancel_one_it_spawned(engine, runner):
    def parent() -> Program:
        handle = yield Spawn(doubled(7))
        yield Op("other", 1)
        handle.cancel()
        yield Until(lambda: handle.done, 100.0)
        return handle.error

    task = engine.spawn("s", parent())
    engine.step("b")
    run_all(engine)

    assert isinstance(task.value, ProgramCancelled)
    assert ("double", [7]) not in runner.batches


def test_cancel_withdraws_a_waiting_op_and_runs_the_programs_cleanup(engine, runner):
    cleaned: list[bool] = []

    def program() -> Program:
        try:
            yield Op("double", 1)
        finally:
            cleaned.append(True)

    task = engine.spawn("s", program())
    engine.advance()
    task.cancel()
    run_all(engine)

    assert isinstance(task.error, ProgramCancelled)
    assert cleaned == [True]
    assert runner.batches == []


def test_a_session_is_quiet_only_after_its_running_op_has_ended(engine, runner):
    """The slot must not be cleaned under a running op."""
    futures: list[Any] = []

    def during() -> None:
        futures.append(engine.cancel_session("s"))
        engine.advance()
        assert not futures[0].done()

    runner.during = during
    emitted: list[Any] = []

    def program() -> Program:
        yield Emit((yield Op("double", 1)))

    task = engine.spawn("s", program(), on_emit=emitted.append)
    engine.step("a")

    assert futures[0].done()
    assert (task.done, emitted) == (True, [])


def test_nothing_starts_in_a_session_that_is_being_cancelled(engine):
    engine.spawn("s", doubled(1))
    engine.cancel_session("s")

    with pytest.raises(RuntimeError, match="being cancelled"):
        engine.spawn("s", doubled(1))


def test_a_cancelled_session_can_be_used_again(engine):
    engine.spawn("s", doubled(1))
    quiet = engine.cancel_session("s")
    engine.advance()
    assert quiet.done()

    task = engine.spawn("s", doubled(2))
    run_all(engine)

    assert task.value == 4


def test_cancelling_an_unknown_session_is_done_at_once(engine):
    assert engine.cancel_session("nobody").done()


def test_between_steps_is_seen_by_those_who_wait(engine):
    state = {"stop": False}

    def waits() -> Program:
        return (yield Until(lambda: state["stop"], 100.0))

    task = engine.spawn("s", waits())
    engine.advance()
    future = engine.between_steps("s", lambda: state.update(stop=True))
    assert not future.done()
    engine.advance()

    assert future.done()
    assert task.value is True


def test_a_lost_device_ends_every_program_and_refuses_new_ones(runner, clock):
    faults: list[EngineFault] = []
    engine = Engine(runner, clock, faults.append)
    runner.raises = EngineFault("gone")
    running, waiting = engine.spawn("s", doubled(1)), engine.spawn("t", doubled(1, "other"))
    engine.step("a")

    assert [str(fault) for fault in faults] == ["gone"]
    assert running.error is waiting.error is faults[0]
    assert not engine.step("b")
    with pytest.raises(EngineFault):
        engine.spawn("u", doubled(1))


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("spawn"), st.integers(0, 2), st.integers(1, 4)),
        st.tuples(st.just("cancel"), st.integers(0, 20), st.just(0)),
        st.tuples(st.just("cancel_session"), st.integers(0, 2), st.just(0)),
        st.tuples(st.just("step"), st.integers(0, 1), st.just(0)),
        st.tuples(st.just("cancel_during_step"), st.integers(0, 2), st.integers(0, 1)),
    ),
    max_size=40,
)


class Play:
    """Does what hypothesis thinks of, and remembers what has to come of it."""

    def __init__(self) -> None:
        self.runner = Runner()
        self.engine = Engine(self.runner, Clock())
        self.started: list[tuple[Task, list[Any], int]] = []
        self.done: list[Task] = []
        self.quiet: list[Any] = []

    def spawn(self, session: int, n_ops: int) -> None:
        results: list[Any] = []
        program = self._program(len(self.started), n_ops, results)
        with contextlib.suppress(RuntimeError):  # that session is being cancelled
            task = self.engine.spawn(session, program, on_done=self.done.append)
            self.started.append((task, results, n_ops))

    def cancel(self, number: int, _: int) -> None:
        if number < len(self.started):
            self.started[number][0].cancel()

    def cancel_session(self, session: int, _: int) -> None:
        self.quiet.append(self.engine.cancel_session(session))

    def step(self, lane: int, _: int) -> None:
        self.engine.step("ab"[lane])

    def cancel_during_step(self, session: int, lane: int) -> None:
        self.runner.during = lambda: self.cancel_session(session, 0)
        self.step(lane, 0)
        self.runner.during = None

    def _program(self, number: int, n_ops: int, results: list[Any]) -> Program:
        for i in range(n_ops):
            results.append((yield Op("double" if i % 2 == 0 else "other", (number, i))))


@settings(max_examples=200)
@given(ACTIONS)
def test_whenever_programs_are_cancelled_no_op_is_lost_run_twice_or_left_behind(actions):
    play = Play()
    for name, x, y in actions:
        getattr(play, name)(x, y)
    run_all(play.engine)

    assert play.engine.n_programs == 0
    assert all(future.done() for future in play.quiet)
    assert sorted(map(id, play.done)) == sorted(id(task) for task, _, _ in play.started)
    ran = [payload for _, payloads in play.runner.batches for payload in payloads]
    assert len(ran) == len(set(ran))
    for task, results, n_ops in play.started:
        assert len(results) == n_ops if task.error is None else len(results) < n_ops


def test_every_batch_is_told_with_its_size_and_time(runner, clock):
    told: list[tuple[str, int, float]] = []
    engine = Engine(runner, clock, on_batch=lambda *batch: told.append(batch))
    runner.during = lambda: setattr(clock, "now", clock.now + 0.5)
    for i in range(3):
        engine.spawn(f"s{i}", doubled(i))
    engine.step("a")
    runner.raises = RuntimeError("no")
    engine.spawn("s", doubled(1, "other"))
    engine.step("b")

    assert told == [("double", 3, 0.5), ("other", 1, 0.5)]
