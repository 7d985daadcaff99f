from __future__ import annotations

import asyncio

import httpx
import msgspec

from gateway.clock import Clock
from gateway.pool import SILENT_POLLS, Address, Pool, Worker
from shared.protocol import WorkerHealth

READY = WorkerHealth(
    status="healthy",
    worker_status="idle",
    gpu_id=0,
    model_loaded=True,
    current_session_id=None,
    total_requests=0,
    avg_inference_time_ms=0.0,
    kv_cache_length=0,
    slots_total=4,
    slots_free=4,
    backend="fake",
    stage=None,
    stage_progress=1.0,
    stage_elapsed_s=0.0,
    eta_s=None,
    stages=[],
)


def replaced(**changes: object) -> WorkerHealth:
    return msgspec.structs.replace(READY, **changes)


class FakeTime:
    now = 0.0


def make_pool(n_workers: int = 1, transport: httpx.MockTransport | None = None) -> Pool:
    clock = Clock(monotonic=lambda: FakeTime.now)
    client = httpx.AsyncClient(transport=transport, trust_env=False)
    return Pool([Address("127.0.0.1", 9000 + i) for i in range(n_workers)], client, clock)


def seen(worker: Worker, health: WorkerHealth = READY) -> None:
    worker.begin_poll()
    worker.observe(health, 0.0)


def test_an_unseen_worker_is_offline_and_gets_nobody():
    pool = make_pool()

    assert pool.workers[0].status == "offline"
    assert pool.take("s", "omni_duplex") is None


def test_the_least_loaded_worker_comes_first():
    pool = make_pool(2)
    for worker in pool.workers:
        seen(worker)

    names = [pool.take("s", "omni_duplex").worker.name for _ in range(4)]

    assert names == ["worker_0", "worker_1", "worker_0", "worker_1"]


def test_a_worker_is_idle_while_a_slot_is_free_and_then_named_by_its_newest_session():
    pool = make_pool()
    seen(pool.workers[0], replaced(slots_total=2, slots_free=2))

    pool.take("a", "omni_duplex")
    assert pool.workers[0].status == "idle"
    pool.take("b", "audio_duplex")

    assert pool.workers[0].status == "duplex_active"


def test_slots_used_by_others_are_not_leased():
    pool = make_pool()

    seen(pool.workers[0], replaced(slots_total=2, slots_free=1))

    assert pool.workers[0].slots_free == 1


def test_a_lease_given_back_during_a_poll_does_not_count_as_somebody_elses():
    """W23: a poll that landed during clean-up kept a freed worker busy until the next one."""
    pool = make_pool()
    worker = pool.workers[0]
    seen(worker, replaced(slots_total=1, slots_free=1))
    lease = pool.take("a", "omni_duplex")

    worker.begin_poll()
    lease.release()
    worker.observe(replaced(slots_total=1, slots_free=0), 0.0)

    assert worker.slots_free == 1


def test_a_broken_connection_takes_the_worker_out_until_a_later_good_poll():
    """W2: a worker whose connection broke went straight back to idle."""
    pool = make_pool()
    worker = pool.workers[0]
    seen(worker)
    lease = pool.take("a", "omni_duplex")

    worker.begin_poll()
    lease.release(broken=True)
    worker.observe(READY, 0.0)
    stale = worker.in_rotation
    seen(worker)

    assert stale is False
    assert worker.in_rotation


def test_a_broken_connection_asks_for_a_poll_at_once():
    pool = make_pool()
    seen(pool.workers[0])
    lease = pool.take("a", "omni_duplex")

    lease.release(broken=True)

    assert pool.workers[0].poke.is_set()


def test_a_worker_that_refused_for_want_of_a_slot_is_full_until_its_next_report():
    pool = make_pool()
    worker = pool.workers[0]
    seen(worker)
    lease = pool.take("a", "omni_duplex")

    worker.mark_full()
    lease.release()
    refused = worker.slots_free
    seen(worker)

    assert (refused, worker.slots_free) == (0, 4)


def test_states_that_cannot_serve_leave_the_rotation_under_their_own_word():
    pool = make_pool()
    worker = pool.workers[0]
    words = {
        "loading": replaced(status="initializing", worker_status="loading"),
        "error": replaced(status="error", worker_status="error"),
        "draining": replaced(worker_status="draining"),
    }

    for word, health in words.items():
        seen(worker, health)
        assert (worker.status, worker.slots_free) == (word, 0)


def test_a_worker_away_for_a_short_time_counts_as_restarting():
    FakeTime.now = 0.0
    worker = make_pool().workers[0]
    seen(worker)

    worker.miss(100.0, answered=False)

    assert worker.is_starting(105.0)
    assert not worker.is_starting(200.0)


def test_a_worker_in_error_counts_as_restarting_at_first():
    """A failed worker exits and is started again; its waiters must not be refused meanwhile."""
    worker = make_pool().workers[0]
    seen(worker)

    seen(worker, replaced(status="error", worker_status="error"))

    assert worker.status == "error"
    assert worker.is_starting(5.0)
    assert not worker.is_starting(200.0)


def test_a_worker_that_dies_in_every_start_does_not_count_as_restarting_for_ever():
    """Each new attempt began the time of grace anew, so its waiters waited without end."""
    worker = make_pool().workers[0]
    starting = []
    for pid in range(1, 6):
        for _ in range(2):
            seen(worker, replaced(status="initializing", worker_status="loading", pid=pid))
        worker.miss(0.0, answered=False)
        starting.append(worker.is_starting(1.0))
    seen(worker, replaced(status="initializing", worker_status="loading", pid=9))
    while_loading = worker.is_starting(1.0)
    seen(worker)
    worker.miss(0.0, answered=False)

    assert starting == [True, True, True, False, False]
    assert while_loading
    assert worker.is_starting(1.0)


async def test_an_answer_that_is_no_health_report_is_an_error_not_a_crash():
    transport = httpx.MockTransport(lambda _: httpx.Response(500, text="boom"))
    pool = make_pool(1, transport)

    await pool.poll(pool.workers[0])

    assert pool.workers[0].status == "error"


async def test_a_refused_connection_is_offline():
    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused", request=request)

    pool = make_pool(1, httpx.MockTransport(refuse))
    seen(pool.workers[0])

    await pool.poll(pool.workers[0])

    assert pool.workers[0].status == "offline"


def test_sessions_are_given_up_after_several_silent_polls_in_a_row():
    pool = make_pool()
    (worker,) = pool.workers
    seen(worker)
    lease = pool.take("s", "omni_duplex")
    assert lease is not None

    for _ in range(SILENT_POLLS - 1):
        worker.miss(1.0, answered=False)
    seen(worker)
    for _ in range(SILENT_POLLS - 1):
        worker.miss(1.0, answered=False)
    early = lease.lost.is_set()
    worker.miss(1.0, answered=False)

    assert not early
    assert lease.lost.is_set()


def test_one_slow_answer_costs_a_worker_new_sessions_only_until_the_next_poll():
    pool = make_pool()
    (worker,) = pool.workers
    seen(worker)

    worker.miss(1.0, answered=False)
    meanwhile = pool.take("s", "omni_duplex")
    seen(worker)

    assert meanwhile is None
    assert pool.take("s", "omni_duplex") is not None


async def test_a_slow_poll_of_one_worker_delays_no_other():
    """W31: dispatch waited for the slowest poll, and newcomers overtook the waiters meanwhile."""
    never = asyncio.Event()

    async def answer(request: httpx.Request) -> httpx.Response:
        if request.url.port == 9000:
            await never.wait()
        return httpx.Response(200, content=msgspec.json.encode(READY))

    pool = make_pool(2, httpx.MockTransport(answer))
    changed = asyncio.Event()
    pool.on_change = changed.set

    polling = asyncio.create_task(pool.run())
    async with asyncio.timeout(1):
        await changed.wait()

    assert [worker.status for worker in pool.workers] == ["offline", "idle"]
    polling.cancel()
    await asyncio.gather(polling, return_exceptions=True)
