"""The worker's states and stages."""

import asyncio
import logging
import threading

import pytest

from shared.errors import EngineFault
from shared.protocol import Timings
from shared.states import WORKER_EDGES, IllegalTransition, StateMachine, WorkerState
from tests.fakes.model import FakeDuplexModel, as_model
from tests.fakes.patience import PATIENCE_S
from tests.fakes.session import eventually
from worker.lifecycle import Lifecycle, WorkerSettings

STAGES = ["load_model", "init_unified", "apply_torch_compile", "warmup_compile"]


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


async def no_warm_up(host, progress) -> None:
    progress(1.0, "nothing to warm")


def make(model: FakeDuplexModel | None = None, warm_up=no_warm_up, **fields) -> Lifecycle:
    fake = model or FakeDuplexModel()
    return Lifecycle(WorkerSettings("fake", 2), lambda: as_model(fake), warm_up, **fields)


async def reach(lifecycle: Lifecycle, state: WorkerState) -> None:
    await eventually(lambda: lifecycle.state is state)


@pytest.mark.parametrize("old", list(WorkerState))
@pytest.mark.parametrize("new", list(WorkerState))
def test_every_pair_of_worker_states(old, new):
    machine = StateMachine("worker", old, WORKER_EDGES)
    allowed = {
        ("loading", "ready"),
        ("loading", "failed"),
        ("loading", "draining"),
        ("ready", "retiring"),
        ("ready", "draining"),
        ("retiring", "draining"),
        ("retiring", "failed"),
        ("ready", "failed"),
        ("draining", "failed"),
    }

    if (old, new) in allowed:
        machine.to(new, "test")
        assert machine.state is new
    else:
        with pytest.raises(IllegalTransition):
            machine.to(new, "test")
        assert machine.state is old


async def test_the_stages_run_in_order_on_the_language_thread():
    model = FakeDuplexModel()
    lifecycle = make(model)
    running = asyncio.create_task(lifecycle.run())
    await reach(lifecycle, WorkerState.READY)
    lifecycle.request_stop()

    assert await running == 0
    assert model.calls == [(name, "omni-language") for name in STAGES[:3]]
    assert [(s.name, s.done) for s in lifecycle.health().stages] == [(n, True) for n in STAGES]


async def test_health_shows_the_running_stage_with_its_progress():
    gate, inside = threading.Event(), threading.Event()

    def hold(name: str) -> None:
        if name == "init_unified":
            inside.set()
            gate.wait(PATIENCE_S)

    clock = Clock()
    lifecycle = make(FakeDuplexModel(on_stage=hold), clock=clock)
    assert lifecycle.health().status == "initializing"
    running = asyncio.create_task(lifecycle.run())
    assert await asyncio.to_thread(inside.wait, PATIENCE_S)
    clock.now += 4.0
    health = lifecycle.health()
    gate.set()
    await reach(lifecycle, WorkerState.READY)
    ready = lifecycle.health()
    lifecycle.request_stop()
    await running

    assert (health.stage, health.stage_progress) == ("init_unified", 0.5)
    assert (health.stage_elapsed_s, health.eta_s) == (4.0, 4.0)
    assert (health.worker_status, health.model_loaded) == ("loading", False)
    assert (health.slots_total, health.slots_free) == (2, 0)
    assert (ready.stage, ready.worker_status, ready.model_loaded) == (None, "idle", True)
    assert ready.slots_free == 2


@pytest.mark.parametrize("stage", STAGES[:3])
async def test_a_failing_stage_fails_the_worker_and_is_logged_once(stage, caplog):
    lifecycle = make(FakeDuplexModel(fail_stage=stage))
    with caplog.at_level(logging.ERROR):
        code = await lifecycle.run()

    assert code == 1
    assert lifecycle.state is WorkerState.FAILED
    health = lifecycle.health()
    assert (health.status, health.worker_status) == ("error", "error")
    assert health.reason == f"{stage}: {stage} was told to fail"
    assert [record.getMessage() for record in caplog.records] == [
        f"start failed stage={stage}: {stage} was told to fail"
    ]


async def test_a_back_end_that_cannot_be_built_fails_the_worker():
    def build():
        raise ImportError("no torch here")

    lifecycle = Lifecycle(WorkerSettings("fake", 2), build, no_warm_up)

    assert await lifecycle.run() == 1
    assert "no torch here" in lifecycle.health().reason


async def test_a_warm_up_that_fails_fails_the_worker():
    async def warm_up(host, progress) -> None:
        raise ValueError("no answer")

    assert await make(warm_up=warm_up).run() == 1


async def test_a_device_lost_during_warm_up_ends_with_the_fault_code():
    async def warm_up(host, progress) -> None:
        host.on_broken(EngineFault("gone"))
        await asyncio.Event().wait()

    assert await make(warm_up=warm_up).run() == 70


async def test_what_warm_up_did_is_not_counted():
    async def warm_up(host, progress) -> None:
        host.metrics.unit_done(Timings(total_ms=5.0), is_listen=True, is_late=False)

    lifecycle = make(warm_up=warm_up)
    running = asyncio.create_task(lifecycle.run())
    await reach(lifecycle, WorkerState.READY)
    lifecycle.request_stop()
    await running

    assert lifecycle.health().total_requests == 0


@pytest.mark.parametrize("ask", [Lifecycle.request_stop, Lifecycle.request_retirement])
async def test_a_worker_can_be_stopped_while_it_loads(ask):
    gate, inside = threading.Event(), threading.Event()

    def hold(name: str) -> None:
        inside.set()
        gate.wait(PATIENCE_S)

    lifecycle = make(FakeDuplexModel(on_stage=hold))
    running = asyncio.create_task(lifecycle.run())
    assert await asyncio.to_thread(inside.wait, PATIENCE_S)
    ask(lifecycle)
    ask(lifecycle)
    gate.set()

    assert await running == 0
    assert lifecycle.state is WorkerState.DRAINING
