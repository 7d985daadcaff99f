"""All metrics of a worker; `docs/operations.md` explains each of them.

Events are counted as they happen. What another object owns (state, slots, sessions, stages) is
not counted a second time: it is read when somebody asks for the metrics.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter as Tally
from collections.abc import Iterator, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Literal

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    Metric,
    ProcessCollector,
)
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from shared.metrics import OTHER, UNIT_BUCKETS_S, slug_labels
from shared.protocol import Timings
from shared.states import SessionState, WorkerState
from worker.compile_metrics import compile_families
from worker.engine.slots import SlotState

if TYPE_CHECKING:
    from worker.lifecycle import Lifecycle

# fmt: off
OP_BUCKETS_S = (
    0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0,
)
# fmt: on
BATCH_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128)

ANSWER_BUCKETS_S = (0.25, 0.5, 1.0, 2.0, 3.0, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0)

ENDINGS = (
    "done",
    "failed",
    "stopped",
    "client_gone",
    "disconnected",
    "timeout",
    "slow_reader",
    "draining",
    "fault",
    "cancelled",
    OTHER,
)
"""`done` and `failed`: chat requests. `stopped` and `client_gone` are the gateway's words;
`disconnected` = it has vanished itself."""

STAGES = tuple(name.removesuffix("_ms") for name in Timings.__struct_fields__ if name != "total_ms")


class WorkerMetrics:
    """What sessions and engine report, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self._unit_seconds = Histogram(
            "omni_worker_unit_seconds",
            "From a unit being complete to its result",
            buckets=UNIT_BUCKETS_S,
            registry=registry,
        )
        stage_seconds = Histogram(
            "omni_worker_unit_stage_seconds",
            "The parts of a unit that took any time, by stage",
            ["stage"],
            buckets=UNIT_BUCKETS_S,
            registry=registry,
        )
        self._stage_seconds = {stage: stage_seconds.labels(stage) for stage in STAGES}
        self.first_audio_seconds = Histogram(
            "omni_worker_first_audio_seconds",
            "From the unit whose result begins a turn to the first audio of that turn",
            buckets=UNIT_BUCKETS_S,
            registry=registry,
        )
        self.prepare_seconds = Histogram(
            "omni_worker_prepare_seconds",
            "Prefill of a session's prompt, waiting for the compute thread included",
            buckets=UNIT_BUCKETS_S,
            registry=registry,
        )
        units = Counter("omni_worker_units", "Units by outcome", ["kind"], registry=registry)
        self._units = {kind: units.labels(kind) for kind in ("listen", "speak", "failed")}
        self.dropped_units = Counter(
            "omni_worker_dropped_units",
            "Units that were dropped because input came too fast",
            registry=registry,
        )
        self.deadline_misses = Counter(
            "omni_worker_deadline_misses",
            "Units whose result came after the next unit was due",
            registry=registry,
        )
        answers = Counter(
            "omni_worker_answers", "Whole answers by outcome", ["kind"], registry=registry
        )
        self._answers = {
            kind: answers.labels(kind) for kind in ("turn", "chat", "interrupted", "failed")
        }
        self._answer_seconds = Histogram(
            "omni_worker_answer_seconds",
            "From a whole turn or chat request to the end of its answer",
            buckets=ANSWER_BUCKETS_S,
            registry=registry,
        )
        self.first_piece_seconds = Histogram(
            "omni_worker_first_piece_seconds",
            "From a whole turn or chat request to the first piece of its answer",
            buckets=ANSWER_BUCKETS_S,
            registry=registry,
        )
        self._n_answers = 0
        self._batch_ops = Histogram(
            "omni_worker_batch_ops",
            "Ops that ran as one batch, by kind",
            ["kind"],
            buckets=BATCH_BUCKETS,
            registry=registry,
        )
        self._batch_seconds = Histogram(
            "omni_worker_batch_seconds",
            "Time of one batch, by kind",
            ["kind"],
            buckets=OP_BUCKETS_S,
            registry=registry,
        )
        failures = Counter(
            "omni_worker_failures", "Failures that were told, by slug", ["slug"], registry=registry
        )
        self._failures = {slug: failures.labels(slug) for slug in slug_labels()}
        ended = Counter(
            "omni_worker_sessions_ended",
            "Sessions by how they ended",
            ["reason"],
            registry=registry,
        )
        self._endings = {reason: ended.labels(reason) for reason in ENDINGS}

    @property
    def n_units(self) -> int:
        """Units that have got their result."""
        return int(self._unit_sample("_count"))

    @property
    def n_requests(self) -> int:
        """What has been answered: units, turns and chat requests."""
        return self.n_units + self._n_answers

    @property
    def mean_unit_ms(self) -> float:
        return 1000.0 * self._unit_sample("_sum") / self.n_units if self.n_units else 0.0

    def unit_done(self, timings: Timings, *, is_listen: bool, is_late: bool) -> None:
        self._unit_seconds.observe(timings.total_ms / 1000.0)
        self._units["listen" if is_listen else "speak"].inc()
        if is_late:
            self.deadline_misses.inc()
        for stage, histogram in self._stage_seconds.items():
            stage_ms = getattr(timings, f"{stage}_ms")
            if stage_ms > 0:
                histogram.observe(stage_ms / 1000.0)

    def unit_failed(self) -> None:
        self._units["failed"].inc()

    def answer_done(self, kind: Literal["turn", "chat", "interrupted"], took_s: float) -> None:
        self._answers[kind].inc()
        self._answer_seconds.observe(took_s)
        self._n_answers += kind != "interrupted"

    def answer_failed(self) -> None:
        self._answers["failed"].inc()

    def batch_done(self, kind: str, n_ops: int, took_s: float) -> None:
        """Called on compute threads.

        Args:
            kind: one of the back end's few op kinds.
        """
        self._batch_ops.labels(kind).observe(n_ops)
        self._batch_seconds.labels(kind).observe(took_s)

    def failed(self, slug: str) -> None:
        """Count a failure that a client is told."""
        self._failures.get(slug, self._failures[OTHER]).inc()

    def session_ended(self, reason: str) -> None:
        """Count a session's end; a reason that is not in `ENDINGS` is a client's own word."""
        self._endings.get(reason.replace(" ", "_"), self._endings[OTHER]).inc()

    def watch(self, lifecycle: Lifecycle) -> None:
        """Export what `lifecycle` knows, and what the system knows of the process."""
        self.registry.register(LifecycleCollector(lifecycle))
        ProcessCollector(registry=self.registry)

    def _unit_sample(self, suffix: str) -> float:
        (family,) = self._unit_seconds.collect()
        return next(s.value for s in family.samples if s.name.endswith(suffix))


class LifecycleCollector(Collector):
    """Reads the worker's parts; on its event loop only, where they do not change meanwhile."""

    def __init__(self, lifecycle: Lifecycle) -> None:
        self._lifecycle = lifecycle

    def collect(self) -> Iterator[Metric]:
        lifecycle = self._lifecycle
        host = lifecycle.host
        slots = [host.slots.state(i) for i in range(len(host.slots))] if host else []
        sessions = [session.state for session in host.sessions.values()] if host else []
        yield _by_state("state", "1 = what the worker is doing", WorkerState, [lifecycle.state])
        yield _by_state("slots", "Slots by state", SlotState, slots)
        yield _by_state("sessions", "Sessions by state", SessionState, sessions)
        stages = GaugeMetricFamily(
            "omni_worker_start_seconds", "Stages of the start, by stage", labels=["stage"]
        )
        for stage in lifecycle.health().stages:
            stages.add_metric([stage.name], stage.elapsed_s)
        yield stages
        yield from compile_families(lifecycle.compile_status(), lifecycle.compiling.versions)
        yield GaugeMetricFamily(
            "omni_worker_busy_seconds",
            "How long the compute thread has been at it that has been at one thing for longest",
            value=lifecycle.busy_for_s,
        )
        yield GaugeMetricFamily(
            "omni_worker_tasks", "Tasks of the event loop", value=len(asyncio.all_tasks())
        )
        yield GaugeMetricFamily(
            "omni_worker_threads", "Threads of the interpreter", value=threading.active_count()
        )


def _by_state(
    name: str, text: str, states: type[StrEnum], found: Sequence[StrEnum]
) -> GaugeMetricFamily:
    family = GaugeMetricFamily(f"omni_worker_{name}", text, labels=["state"])
    tally = Tally(found)
    for state in states:
        family.add_metric([state.replace("-", "_")], tally[state])
    return family
