"""The workers as the gateway sees them, and the right to use one of their slots.

A worker is polled by a task of its own, so a slow one delays nobody. The gateway counts the
leases it gave; a poll only adds what it cannot know itself (loading, failed, slots in use by
others). A worker whose connection broke, or that left a poll unanswered, gets no session until a
later poll was good; one that leaves two polls in a row unanswered loses the sessions it has.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import httpx
import msgspec

from gateway.clock import Clock
from shared.errors import WorkerLost
from shared.protocol import CompileStatus, RequestType, WorkerHealth

log = logging.getLogger(__name__)

POLL_S = 0.5
"""From the begin of one poll to the next; a new worker gets sessions this soon after its start."""

POLL_TIMEOUT_S = 0.6
"""A worker that serves answers within this. A single slow answer costs it new sessions until the
next poll, nothing else."""

LOADING_POLL_TIMEOUT_S = 3.0
"""While it loads, imports may hold its interpreter for longer."""

SILENT_POLLS = 2
"""Polls in a row without an answer after which a worker's sessions are given up; their sockets
would say nothing before the ping's timeout. So a worker that freezes is found out within
`POLL_S + 2 * POLL_TIMEOUT_S` = 1.7 s, and one that is busy for up to 1.2 s loses nobody. Polls
are counted instead of seconds because a gateway that was itself held up has not asked meanwhile.
"""

HELD_UP_S = 0.1
"""A poll whose time-out came this much too late met a gateway that was held up; whether the
worker had answered is not known, so it counts neither way."""

RESTART_GRACE_S = 40.0
"""A worker that has been offline or in error for less counts as restarting: a failed worker
exits, and its launcher brings it back after 30 s at most."""

MAX_FAILED_STARTS = 3
"""A worker that was seen to load this many times without ever getting ready needs somebody's help:
between its attempts it does not count as restarting any more."""

BUSY_WORD: dict[RequestType, str] = {
    "omni_duplex": "duplex_active",
    "audio_duplex": "duplex_active",
    "half_duplex_audio": "busy_half_duplex",
    "chat": "busy_chat",
}


@dataclass(frozen=True, slots=True)
class Address:
    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Lease:
    """The right to one slot of a worker, until `release`."""

    def __init__(
        self, pool: Pool, worker: Worker, session_id: str, request_type: RequestType, at: float
    ) -> None:
        self._pool = pool
        self.worker = worker
        self.session_id = session_id
        self.request_type = request_type
        self.started_at = at
        self.is_ending = False
        """The session is over, or about to be; its worker still has to clean the slot."""
        self.released = False
        self.lost = asyncio.Event()
        """Set when the worker has stopped answering."""

    def release(self, *, broken: bool = False, is_sample: bool = False) -> None:
        """Give the slot back; further calls do nothing.

        Args:
            broken: the worker's connection ended before it said that the slot is clean.
            is_sample: the session has begun and ended in order, so that its length tells how
                long others of its type may take.
        """
        if not self.released:
            self.released = True
            self._pool.take_back(self, broken, is_sample)


class Worker:
    """One worker: its last health report and the gateway's own leases on it."""

    def __init__(self, index: int, address: Address, now: float) -> None:
        self.index = index
        self.address = address
        self.health: WorkerHealth | None = None
        self.seen_at: float | None = None
        self.is_offline = True
        self.down_since: float | None = now
        """Since when it has been offline or in error; None = neither."""
        self.suspended = False
        self.failed = False
        """It answered, but with something that is no health report."""
        self.leases: list[Lease] = []
        self.poke = asyncio.Event()
        self._overlapping: set[Lease] = set()
        self._n_foreign = 0
        self._n_breaks = 0
        self._polled_breaks = 0
        self._n_silent_polls = 0
        self._loading_pid: int | None = None
        self._n_failed_starts = 0

    @property
    def name(self) -> str:
        return f"worker_{self.index}"

    @property
    def in_rotation(self) -> bool:
        health = self.health
        return (
            not self.is_offline
            and not self.suspended
            and not self.failed
            and health is not None
            and health.status == "healthy"
            and health.worker_status not in ("loading", "error", "draining")
        )

    @property
    def slots_total(self) -> int:
        return self.health.slots_total if self.health else 0

    @property
    def slots_free(self) -> int:
        if not self.in_rotation:
            return 0
        return max(0, self.slots_total - len(self.leases) - self._n_foreign)

    @property
    def n_foreign(self) -> int:
        """Slots that were in use by others at the last poll."""
        return self._n_foreign

    @property
    def status(self) -> str:
        """The wire's word for what this worker is doing."""
        if self.is_offline:
            return "offline"
        if self.failed or self.health is None or self.health.status == "error":
            return "error"
        if self.suspended:
            return "offline"
        if not self.in_rotation:
            return self.health.worker_status
        if self.slots_free > 0:
            return "idle"
        if self.leases:
            return BUSY_WORD[self.leases[-1].request_type]
        return self.health.worker_status

    def is_starting(self, now: float) -> bool:
        """Whether it may become ready without anybody's help."""
        if self.down_since is not None:
            is_hopeless = self._n_failed_starts >= MAX_FAILED_STARTS
            return not is_hopeless and now - self.down_since < RESTART_GRACE_S
        # A worker that drains exits, and its launcher brings it back.
        return self.suspended or self.status in ("loading", "draining")

    def begin_poll(self) -> None:
        self._overlapping = set(self.leases)
        self._polled_breaks = self._n_breaks

    def observe(self, health: WorkerHealth, now: float) -> None:
        """Take in the answer to the poll that `begin_poll` began."""
        self.health = health
        self.seen_at = now
        self.is_offline = self.failed = False
        self._n_silent_polls = 0
        self._note_down(health.status == "error", now)
        self._note_start(health)
        # A lease that began or ended while the poll was under way may or may not be in its
        # numbers; counting it as ours keeps a slot that was just freed from looking taken.
        in_use = health.slots_total - health.slots_free
        self._n_foreign = max(0, in_use - len(self._overlapping))
        # A report that was asked for before the connection broke says nothing about after.
        if self._polled_breaks == self._n_breaks:
            self.suspended = False

    def miss(self, now: float, *, answered: bool) -> None:
        """The poll failed: no answer, or one that makes no sense."""
        self.failed = answered
        self.is_offline = not answered
        self._n_silent_polls = 0 if answered else self._n_silent_polls + 1
        if answered:
            self.seen_at = now
        if self._n_silent_polls >= SILENT_POLLS:
            for lease in self.leases:
                lease.lost.set()
        self._note_down(True, now)

    def _note_start(self, health: WorkerHealth) -> None:
        if health.status == "healthy":
            self._loading_pid = None
            self._n_failed_starts = 0
        elif health.status == "initializing":
            # Another process loads than last time, so that one has ended without being ready.
            self._n_failed_starts += self._loading_pid not in (None, health.pid)
            self._loading_pid = health.pid

    def _note_down(self, is_down: bool, now: float) -> None:
        if not is_down:
            self.down_since = None
        elif self.down_since is None:
            self.down_since = now

    def lend(self, lease: Lease) -> None:
        self.leases.append(lease)
        self._overlapping.add(lease)

    def take_back(self, lease: Lease, broken: bool) -> None:
        self.leases.remove(lease)
        if broken:
            self.suspended = True
            self._n_breaks += 1
            self.poke.set()

    @property
    def poll_timeout_s(self) -> float:
        serves = self.in_rotation or self.leases
        return POLL_TIMEOUT_S if serves else LOADING_POLL_TIMEOUT_S

    def mark_full(self) -> None:
        """The worker refused a session: send it no other until the next poll, which is now."""
        # The lease of the refused session is still counted among ours.
        self._n_foreign = max(self._n_foreign, self.slots_total - len(self.leases) + 1)
        self.poke.set()


class Pool:
    """All workers; gives out leases, least loaded worker first."""

    def __init__(self, addresses: Sequence[Address], client: httpx.AsyncClient, clock: Clock):
        self._client = client
        self._clock = clock
        now = clock.monotonic()
        self.workers = [Worker(i, address, now) for i, address in enumerate(addresses)]
        self.on_change: Callable[[], None] = lambda: None
        """Called after every change that may free, add or remove a slot."""
        self.on_sample: Callable[[RequestType, float], None] = lambda request_type, length_s: None
        """Called with the length of every session that began and ended in order."""
        self.stage_lengths_s: dict[str, float] = {}
        """Stages of the last start of a worker that was seen to its end."""

    @property
    def n_ready(self) -> int:
        return sum(worker.in_rotation for worker in self.workers)

    @property
    def is_starting(self) -> bool:
        now = self._clock.monotonic()
        return any(worker.is_starting(now) for worker in self.workers)

    def leases(self) -> Iterator[Lease]:
        for worker in self.workers:
            yield from worker.leases

    def take(self, session_id: str, request_type: RequestType) -> Lease | None:
        """Lease a slot of the worker with the smallest share of its slots in use; None = full."""
        free = [worker for worker in self.workers if worker.slots_free > 0]
        if not free:
            return None
        worker = max(free, key=lambda w: (w.slots_free / w.slots_total, -w.index))
        lease = Lease(self, worker, session_id, request_type, self._clock.monotonic())
        worker.lend(lease)
        log.info("lease given worker=%s leased_session=%s", worker.name, session_id)
        return lease

    def take_back(self, lease: Lease, broken: bool, is_sample: bool) -> None:
        lease.worker.take_back(lease, broken)
        held_s = self._clock.monotonic() - lease.started_at
        log.info(
            "lease released worker=%s leased_session=%s broken=%s held_s=%.1f",
            lease.worker.name,
            lease.session_id,
            broken,
            held_s,
        )
        if is_sample:
            self.on_sample(lease.request_type, held_s)
        self.on_change()

    async def run(self) -> None:
        """Poll every worker until cancelled."""
        async with asyncio.TaskGroup() as group:
            for worker in self.workers:
                group.create_task(self._watch(worker))

    async def _watch(self, worker: Worker) -> None:
        loop = asyncio.get_running_loop()
        while True:
            worker.poke.clear()
            began_at = loop.time()
            try:
                await self.poll(worker)
            except Exception:
                # Without its polls a worker would look as it did last, for ever.
                log.exception("poll failed worker=%s", worker.name)
            try:
                async with asyncio.timeout_at(began_at + POLL_S):
                    await worker.poke.wait()
            except TimeoutError:
                continue

    async def poll(self, worker: Worker) -> None:
        """Ask one worker for its health and take in the answer."""
        before = worker.status
        worker.begin_poll()
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + worker.poll_timeout_s
        try:
            async with asyncio.timeout_at(ends_at):
                # httpx counts each of its steps by itself; the poll as a whole is what is bounded.
                response = await self._client.get(f"http://{worker.address}/health", timeout=None)
            health = msgspec.json.decode(response.content, type=WorkerHealth)
        except TimeoutError:
            held_up_s = loop.time() - ends_at
            if held_up_s > HELD_UP_S:
                log.warning("poll says nothing worker=%s held_up_s=%.1f", worker.name, held_up_s)
                return
            worker.miss(self._clock.monotonic(), answered=False)
        except (httpx.HTTPError, msgspec.MsgspecError) as error:
            answered = isinstance(error, msgspec.MsgspecError)
            worker.miss(self._clock.monotonic(), answered=answered)
        else:
            worker.observe(health, self._clock.monotonic())
            if worker.in_rotation:
                self.stage_lengths_s = {stage.name: stage.elapsed_s for stage in health.stages}
        if worker.status != before:
            log.info("worker seen worker=%s old=%s new=%s", worker.name, before, worker.status)
        self.on_change()

    async def compile_status(self, worker: Worker) -> CompileStatus:
        """Ask one worker what it has compiled.

        Raises:
            WorkerLost: no answer in the time of a poll, or one that makes no sense.
        """
        url = f"http://{worker.address}/api/compile"
        timeout_s = worker.poll_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                response = await self._client.get(url, timeout=None)
            return msgspec.json.decode(response.content, type=CompileStatus)
        except TimeoutError as error:
            raise WorkerLost(f"no answer within {timeout_s:g} s") from error
        except httpx.HTTPError as error:
            raise WorkerLost("does not answer") from error
        except msgspec.MsgspecError as error:
            raise WorkerLost("answers with something else") from error
