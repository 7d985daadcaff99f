"""The compute threads around a real engine."""

import threading
import time
from concurrent.futures import CancelledError
from typing import Any

import pytest

from shared.errors import EngineFault
from tests.fakes.patience import PATIENCE_S
from worker.engine.contract import Emit, Op, Program, Until
from worker.engine.engine import Engine
from worker.engine.gpu_thread import LaneThreads


class Runner:
    lanes = {"language": "language", "speech": "speech"}
    max_batch: dict[str, int] = {}

    def __init__(self) -> None:
        self.threads: dict[str, set[str]] = {"language": set(), "speech": set()}
        self.gate = threading.Event()
        self.entered = threading.Event()

    def run(self, kind: str, bucket: Any, payloads: Any) -> Any:
        self.threads[kind].add(threading.current_thread().name)
        if payloads == ["gate"]:
            self.entered.set()
            assert self.gate.wait(PATIENCE_S)
        return payloads


@pytest.fixture
def runner():
    return Runner()


@pytest.fixture
def threads():
    threads = LaneThreads()
    yield threads
    threads.stop()
    assert threads.join(5.0)


@pytest.fixture
def engine(runner, threads):
    engine = Engine(runner)
    threads.serve(engine)
    yield engine
    runner.gate.set()


def finished(engine: Engine, program: Program, session: str = "s", **listeners: Any) -> Any:
    done = threading.Event()
    task = engine.spawn(session, program, on_done=lambda _: done.set(), **listeners)
    assert done.wait(PATIENCE_S)
    return task


def ops(*kinds: str) -> Program:
    for kind in kinds:
        yield Op(kind, 1)
    return "end"


def test_stages_and_ops_of_a_lane_run_on_one_thread(threads, runner):
    stage = threads.call("language", lambda: threading.current_thread().name).result(5)
    engine = Engine(runner)
    threads.serve(engine)

    assert finished(engine, ops("language", "speech")).value == "end"
    assert runner.threads == {"language": {stage}, "speech": {"omni-speech"}}


def test_a_lane_works_while_another_is_held_up(engine, runner):
    def held() -> Program:
        yield Op("language", "gate")

    engine.spawn("held", held())
    assert runner.entered.wait(PATIENCE_S)

    assert finished(engine, ops("speech", "speech")).value == "end"


def test_an_until_deadline_is_kept_while_all_lanes_are_held_up(engine, runner):
    def held(kind: str) -> Program:
        yield Op(kind, "gate")

    def waits() -> Program:
        yield Emit((yield Until(lambda: False, engine.clock() + 0.02)))

    engine.spawn("x", held("language"))
    engine.spawn("y", held("speech"))
    emitted: list[bool] = []

    finished(engine, waits(), on_emit=emitted.append)

    assert emitted == [False]


def test_the_time_of_the_running_op_is_told(engine, threads, runner):
    def held() -> Program:
        yield Op("language", "gate")

    engine.spawn("held", held())
    assert runner.entered.wait(PATIENCE_S)
    begun = time.monotonic()
    while threads.stuck_for() < 0.02:
        assert time.monotonic() - begun < 5
    runner.gate.set()
    engine.cancel_session("held").result(5)
    begun = time.monotonic()
    while threads.stuck_for() > 0.0:
        assert time.monotonic() - begun < 5


def test_a_call_that_fails_gives_its_error_to_the_caller_only(threads, engine):
    with pytest.raises(ZeroDivisionError):
        threads.call("language", lambda: 1 / 0).result(5)

    assert finished(engine, ops("language")).value == "end"


def test_stopping_cancels_the_calls_that_wait(threads):
    gate, entered = threading.Event(), threading.Event()

    def hold() -> None:
        entered.set()
        gate.wait(PATIENCE_S)

    threads.call("language", hold)
    assert entered.wait(PATIENCE_S)
    waiting = threads.call("language", lambda: None)
    threads.stop()
    gate.set()

    with pytest.raises(CancelledError):
        waiting.result(5)


def test_a_listener_that_breaks_fails_the_engine_instead_of_hanging_it(runner, threads):
    faults: list[EngineFault] = []
    told = threading.Event()

    def on_fault(fault: EngineFault) -> None:
        faults.append(fault)
        told.set()

    engine = Engine(runner, on_fault=on_fault)
    threads.serve(engine)

    def emits() -> Program:
        yield Emit(1)

    engine.spawn("s", emits(), on_emit=lambda value: 1 / 0)

    assert told.wait(PATIENCE_S)
    assert "ZeroDivisionError" in str(faults[0])


def test_many_sessions_end_completely(engine):
    tasks = [finished(engine, ops(*["language", "speech"] * 5), f"s{i}") for i in range(20)]

    assert all(task.value == "end" for task in tasks)
    assert engine.n_programs == 0
