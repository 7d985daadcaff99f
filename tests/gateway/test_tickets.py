from __future__ import annotations

import httpx
import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gateway import eta
from gateway.clock import Clock
from gateway.pool import Address, Lease, Pool, Worker
from gateway.tickets import Ticket, TicketQueue
from shared.config import ServiceConfig
from shared.errors import NoWorker, QueueFull, TicketCancelled
from shared.protocol import WorkerHealth


def health(slots_total: int, slots_free: int, status: str = "idle") -> WorkerHealth:
    kinds = {"loading": "initializing", "error": "error"}
    return msgspec.convert(
        {
            "status": kinds.get(status, "healthy"),
            "worker_status": status,
            "gpu_id": None,
            "model_loaded": True,
            "current_session_id": None,
            "total_requests": 0,
            "avg_inference_time_ms": 0.0,
            "kv_cache_length": 0,
            "slots_total": slots_total,
            "slots_free": slots_free,
            "backend": "fake",
            "stage": None,
            "stage_progress": 1.0,
            "stage_elapsed_s": 0.0,
            "eta_s": None,
            "stages": [],
        },
        WorkerHealth,
    )


class FakeTime:
    def __init__(self) -> None:
        self.now = 0.0

    @property
    def clock(self) -> Clock:
        return Clock(monotonic=lambda: self.now, wall=lambda: 1_700_000_000.0 + self.now)


def report(worker: Worker, time: FakeTime, status: str = "idle", total: int = 1) -> None:
    """One poll round: the worker knows of exactly the leases that we hold."""
    worker.begin_poll()
    worker.observe(health(total, max(0, total - len(worker.leases)), status), time.now)


def make_queue(
    n_workers: int = 1, slots: int = 1, max_size: int = 10
) -> tuple[TicketQueue, Pool, FakeTime]:
    time = FakeTime()
    client = httpx.AsyncClient(transport=httpx.MockTransport(lambda _: httpx.Response(500)))
    addresses = [Address("127.0.0.1", 9000 + i) for i in range(n_workers)]
    pool = Pool(addresses, client, time.clock)
    queue = TicketQueue(pool, max_size, eta.Durations(ServiceConfig()), time.clock)
    for worker in pool.workers:
        report(worker, time, total=slots)
    return queue, pool, time


def claimed(ticket: Ticket) -> Lease:
    lease = ticket.claim()
    assert lease is not None
    return lease


def test_a_free_slot_is_leased_at_once():
    queue, _, _ = make_queue()

    assert claimed(queue.join("a", "omni_duplex")).session_id == "a"
    assert len(queue) == 0


def test_a_released_slot_goes_to_the_one_who_has_waited_longest():
    queue, _, _ = make_queue()
    first = claimed(queue.join("a", "omni_duplex"))
    b, c = queue.join("b", "omni_duplex"), queue.join("c", "omni_duplex")

    first.release()

    assert claimed(b).session_id == "b"
    assert c.claim() is None


def test_a_newcomer_does_not_overtake_although_it_is_first_to_see_the_free_slot():
    """W31: between two rounds of polls a newcomer took the worker that others waited for."""
    queue, pool, time = make_queue()
    worker = pool.workers[0]
    claimed(queue.join("a", "omni_duplex"))
    b, c = queue.join("b", "omni_duplex"), queue.join("c", "omni_duplex")
    # A slot more than before, and nobody has been told of it yet.
    pool.on_change = lambda: None
    worker.begin_poll()
    worker.observe(health(slots_total=2, slots_free=1), time.now)

    newcomer = queue.join("d", "omni_duplex")

    assert claimed(b).session_id == "b"
    assert (c.claim(), newcomer.claim()) == (None, None)
    assert [ticket.session_id for ticket in queue.waiting()] == ["c", "d"]


def test_leaving_gives_back_a_granted_lease_that_nobody_claimed():
    queue, _, _ = make_queue()
    first = claimed(queue.join("a", "omni_duplex"))
    b, c = queue.join("b", "omni_duplex"), queue.join("c", "omni_duplex")
    first.release()

    queue.leave(b)

    assert claimed(c).session_id == "c"


def test_a_cancelled_ticket_frees_its_place_and_says_so():
    queue, _, _ = make_queue(max_size=1)
    claimed(queue.join("a", "omni_duplex"))
    b = queue.join("b", "omni_duplex")

    assert queue.cancel(b.ticket_id)

    with pytest.raises(TicketCancelled):
        b.claim()
    assert queue.join("c", "omni_duplex").claim() is None


def test_a_full_queue_refuses_and_keeps_nobody():
    queue, _, _ = make_queue(max_size=1)
    claimed(queue.join("a", "omni_duplex"))
    queue.join("b", "omni_duplex")

    with pytest.raises(QueueFull, match=r"Queue full \(1 requests\)"):
        queue.join("c", "omni_duplex")
    assert len(queue) == 1


def test_a_rejoined_ticket_stands_at_the_head():
    queue, pool, time = make_queue()
    a = queue.join("a", "omni_duplex")
    lease = claimed(a)
    b = queue.join("b", "omni_duplex")

    lease.release(broken=True)
    queue.rejoin(a)
    report(pool.workers[0], time)
    queue.dispatch()

    assert claimed(a).session_id == "a"
    assert b.claim() is None


def test_waiters_are_refused_once_no_worker_can_come_back():
    queue, pool, time = make_queue()
    claimed(queue.join("a", "omni_duplex"))
    b = queue.join("b", "omni_duplex")

    pool.workers[0].miss(time.now, answered=False)
    queue.dispatch()
    assert b.claim() is None
    time.now += 60
    queue.dispatch()

    with pytest.raises(NoWorker):
        b.claim()


def test_nobody_joins_when_no_worker_is_ready_loading_or_restarting():
    queue, pool, time = make_queue()
    pool.workers[0].miss(time.now, answered=False)
    time.now += 60

    with pytest.raises(NoWorker):
        queue.join("a", "omni_duplex")


def test_estimates_simulate_the_dispatch_chain():
    queue, _, time = make_queue(slots=1)
    claimed(queue.join("a", "omni_duplex"))
    time.now += 30
    b, c = queue.join("b", "audio_duplex"), queue.join("c", "omni_duplex")

    assert queue.place(b).estimated_wait_s == 60.0
    assert queue.place(c).estimated_wait_s == 180.0
    assert (queue.place(c).position, queue.place(c).queue_length) == (2, 2)


def test_estimates_while_loading_are_the_workers_own():
    queue, pool, time = make_queue()
    report(pool.workers[0], time, status="loading")
    a = queue.join("a", "omni_duplex")

    assert queue.place(a).is_starting
    assert queue.place(a).estimated_wait_s == eta.STARTUP_S


def test_waiters_keep_their_place_while_the_only_worker_drains():
    """A retired worker comes back; its waiters were told that there was none."""
    queue, pool, time = make_queue()
    claimed(queue.join("a", "omni_duplex"))
    time.now += 30
    report(pool.workers[0], time, status="draining")
    b, c = queue.join("b", "omni_duplex"), queue.join("c", "omni_duplex")
    queue.dispatch()

    assert b.claim() is None
    assert queue.place(b).is_starting
    assert (queue.place(b).position, queue.place(c).position) == (1, 2)
    # The session that is still on it, and then the start.
    assert queue.place(b).estimated_wait_s == 60.0 + eta.STARTUP_S


def test_an_overdue_run_counts_as_fifteen_more_seconds():
    durations = eta.Durations(ServiceConfig(eta_omni_duplex_s=90.0))

    assert durations.left_s("omni_duplex", 100.0, is_ending=False) == 15.0


def test_without_any_slot_estimates_are_zero():
    assert eta.simulate([], [90.0, 90.0]) == [0.0, 0.0]


class QueueMachine(RuleBasedStateMachine):
    """Random joins, leaves, releases, breaks and reports against a plain list as the model."""

    N_WORKERS, SLOTS, MAX_SIZE = 2, 2, 4

    def __init__(self) -> None:
        super().__init__()
        self.queue, self.pool, self.time = make_queue(self.N_WORKERS, self.SLOTS, self.MAX_SIZE)
        self.line: list[Ticket] = []
        """Tickets whose holders have not seen an outcome, in order of arrival."""
        self.leases: list[Lease] = []

    def collect(self) -> None:
        """Every holder looks at its ticket, in any order; outcomes must respect the line."""
        outcomes = [ticket.lease is not None for ticket in self.line]
        assert outcomes == sorted(outcomes, reverse=True), "someone was served out of turn"
        for ticket in list(self.line):
            if ticket.lease is not None:
                self.line.remove(ticket)
                self.leases.append(claimed(ticket))

    @rule()
    def join(self) -> None:
        try:
            self.line.append(self.queue.join("s", "omni_duplex"))
        except QueueFull:
            # A ticket that came back to the head may be one too many.
            assert len(self.line) >= self.MAX_SIZE
        self.collect()

    @precondition(lambda self: self.line)
    @rule(data=st.data(), by_operator=st.booleans())
    def give_up(self, data: st.DataObject, by_operator: bool) -> None:
        ticket = data.draw(st.sampled_from(self.line))
        self.line.remove(ticket)
        if by_operator:
            assert self.queue.cancel(ticket.ticket_id)
        self.queue.leave(ticket)
        self.collect()

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), broken=st.booleans())
    def release(self, data: st.DataObject, broken: bool) -> None:
        lease = data.draw(st.sampled_from(self.leases))
        self.leases.remove(lease)
        lease.release(broken=broken)
        lease.release(broken=broken)
        self.collect()

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def worker_unreachable(self, data: st.DataObject) -> None:
        """A session that could not open goes back to the head."""
        lease = data.draw(st.sampled_from(self.leases))
        self.leases.remove(lease)
        ticket = Ticket("s", "omni_duplex", self.time.now)
        lease.release(broken=True)
        self.queue.rejoin(ticket)
        self.line.insert(0, ticket)
        self.collect()

    @rule(index=st.integers(0, N_WORKERS - 1))
    def good_poll(self, index: int) -> None:
        report(self.pool.workers[index], self.time, total=self.SLOTS)
        self.queue.dispatch()
        self.collect()

    @rule(index=st.integers(0, N_WORKERS - 1))
    def bad_poll(self, index: int) -> None:
        self.pool.workers[index].miss(self.time.now, answered=False)
        self.queue.dispatch()

    @invariant()
    def the_line_is_the_queue(self) -> None:
        assert self.queue.waiting() == self.line

    @invariant()
    def no_slot_is_leased_twice(self) -> None:
        for worker in self.pool.workers:
            assert len(worker.leases) <= self.SLOTS
        assert sorted(map(id, self.pool.leases())) == sorted(map(id, self.leases))

    @invariant()
    def nobody_waits_beside_a_free_slot(self) -> None:
        if self.line:
            assert all(worker.slots_free == 0 for worker in self.pool.workers)


TestQueueMachine = QueueMachine.TestCase
TestQueueMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
