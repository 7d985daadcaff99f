"""All metrics of a gateway; `docs/operations.md` explains each of them.

Events are counted as they happen. What another object owns (workers, queue, sessions, errors) is
not counted a second time: it is read when somebody asks for the metrics.
"""

from __future__ import annotations

import asyncio
from collections import Counter as Tally
from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    Metric,
    ProcessCollector,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from gateway.recording.writer import STOP_REASONS
from shared.audio import F32_BYTES
from shared.limits import OUTPUT_SAMPLE_RATE_HZ
from shared.metrics import OTHER, UNIT_BUCKETS_S, slug_labels
from shared.playback import Player
from shared.protocol import Mode, Result
from shared.turns import Turn

if TYPE_CHECKING:
    from gateway.context import Gateway

DEADLINE_S = 1.0
"""A result later than this after its chunk comes after the next chunk."""

MIN_GAP_S = 0.001
"""Below this a gap is the rounding of two clocks."""

WAIT_BUCKETS_S = (0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)
LEAD_BUCKETS_S = (0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0)

ANSWER_BUCKETS_S = (*UNIT_BUCKETS_S, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0)
ANSWER_MODES: tuple[Mode, ...] = ("half_duplex", "chat")

RESULT_KINDS = ("listen", "speak", "dropped", "failed")
WORKER_STATES = (
    "loading",
    "idle",
    "duplex_active",
    "busy_half_duplex",
    "busy_chat",
    "draining",
    "error",
    "offline",
    OTHER,
)
"""The words of `status` in `GET /workers`."""


class GatewayMetrics:
    """What sessions report, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.result_seconds = Histogram(
            "omni_gateway_result_seconds",
            "From a chunk's arrival to its result being handed to the client's socket",
            buckets=UNIT_BUCKETS_S,
            registry=registry,
        )
        self.first_audio_seconds = Histogram(
            "omni_gateway_first_audio_seconds",
            "From the chunk whose result begins a turn to the first audio of that turn",
            buckets=UNIT_BUCKETS_S,
            registry=registry,
        )
        self.queue_wait_seconds = Histogram(
            "omni_gateway_queue_wait_seconds",
            "From joining the queue to the session being open on a worker",
            buckets=WAIT_BUCKETS_S,
            registry=registry,
        )
        self.playback_lead_seconds = Histogram(
            "omni_gateway_playback_lead_seconds",
            "Speech that waits in the listener's player when a piece of it has arrived",
            buckets=LEAD_BUCKETS_S,
            registry=registry,
        )
        self.playback_gaps = Counter(
            "omni_gateway_playback_gaps",
            "Gaps inside a turn that a listener would hear",
            registry=registry,
        )
        self.playback_gap_seconds = Counter(
            "omni_gateway_playback_gap_seconds", "Length of these gaps", registry=registry
        )
        self.deadline_misses = Counter(
            "omni_gateway_deadline_misses",
            "Results later than one second after their chunk",
            registry=registry,
        )
        results = Counter(
            "omni_gateway_results", "Answered chunks by kind", ["kind"], registry=registry
        )
        self.answers = Counter(
            "omni_gateway_answers",
            "Whole answers: turns of half duplex, chat requests",
            ["mode"],
            registry=registry,
        )
        self.first_piece_seconds = Histogram(
            "omni_gateway_answer_first_piece_seconds",
            "From a question being complete to the first piece of its answer",
            ["mode"],
            buckets=ANSWER_BUCKETS_S,
            registry=registry,
        )
        for mode in ANSWER_MODES:
            self.answers.labels(mode)
            self.first_piece_seconds.labels(mode)
        self.results = {kind: results.labels(kind) for kind in RESULT_KINDS}
        ended = Counter(
            "omni_gateway_sessions_ended",
            "Sessions by how they ended",
            ["ending"],
            registry=registry,
        )
        self._endings = {
            ending: ended.labels(ending) for ending in ("stopped", "client_gone", *slug_labels())
        }

    def session_ended(self, ending: str) -> None:
        """Count a session's end: `stopped`, `client_gone` or the slug of its failure."""
        self._endings.get(ending, self._endings[OTHER]).inc()

    def watch(self, gateway: Gateway) -> None:
        """Export what the parts of `gateway` know, and what the system knows of the process."""
        self.registry.register(GatewayCollector(gateway))
        ProcessCollector(registry=self.registry)


class SessionWatch:
    """What one session adds to the metrics.

    Args:
        buffer_s: how long the client's player holds back the first audio of a turn.
        mode: what the session is; sessions of mode "duplex" have results, the others answers.
    """

    def __init__(self, metrics: GatewayMetrics, buffer_s: float, mode: Mode = "duplex") -> None:
        self._metrics = metrics
        self._mode = mode
        self._asked_at: float | None = None
        """When the question was complete whose answer has no piece yet."""
        self._player = Player(buffer_s)
        self._turn = Turn()
        self._prepared_at = 0.0

    def prepared(self, now: float) -> None:
        """The worker takes chunks from now on: an earlier one counts as arrived now."""
        self._prepared_at = now

    def paused(self) -> None:
        """Silence is wanted, so what comes later has no gap before it."""
        self._player.end_turn()

    def asked(self, now: float) -> None:
        """A question is complete: the user's turn is over, or the worker has the request."""
        self._asked_at = now

    def piece(self, audio: bytes, now: float) -> None:
        """A piece of an answer has come."""
        if self._asked_at is not None:
            self._metrics.first_piece_seconds.labels(self._mode).observe(now - self._asked_at)
            self._asked_at = None
        if audio:
            self._play(len(audio) / F32_BYTES / OUTPUT_SAMPLE_RATE_HZ, now)

    def answer_done(self, now: float) -> None:
        """An answer is whole; where nothing came before, it is its own first piece."""
        self.piece(b"", now)
        self._metrics.answers.labels(self._mode).inc()
        self._player.end_turn()

    def dropped(self) -> None:
        self._metrics.results["dropped"].inc()

    def failed(self) -> None:
        self._metrics.results["failed"].inc()

    def answered(self, result: Result, arrived_at: float, now: float) -> None:
        """A chunk that arrived at `arrived_at` has its result."""
        metrics = self._metrics
        arrived_at = max(arrived_at, self._prepared_at)
        if result.dropped:
            # The rest of the chunk may speak all the same.
            self.dropped()
        else:
            metrics.results["listen" if result.is_listen else "speak"].inc()
            metrics.result_seconds.observe(now - arrived_at)
            if now - arrived_at > DEADLINE_S:
                metrics.deadline_misses.inc()
        turn_began_at = self._turn.take(
            arrived_at,
            is_listen=result.is_listen,
            has_audio=bool(result.audio),
            end_of_turn=result.end_of_turn,
        )
        if turn_began_at is not None:
            metrics.first_audio_seconds.observe(now - turn_began_at)
        if result.audio:
            self._play(len(result.audio) / F32_BYTES / OUTPUT_SAMPLE_RATE_HZ, now)
        if result.is_listen or result.end_of_turn:
            self._player.end_turn()

    def _play(self, duration_s: float, now: float) -> None:
        gap_s = self._player.receive(now, duration_s)
        if gap_s >= MIN_GAP_S:
            self._metrics.playback_gaps.inc()
            self._metrics.playback_gap_seconds.inc(gap_s)
        self._metrics.playback_lead_seconds.observe(self._player.lead_s(now))


class GatewayCollector(Collector):
    """Reads the gateway's parts; on its event loop only, where they do not change meanwhile."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    def collect(self) -> Iterator[Metric]:
        gateway = self._gateway
        yield from self._workers()
        yield _gauge("queue_length", "Clients that wait for a slot", len(gateway.queue))
        yield _gauge("queue_limit", "Clients that may wait", gateway.queue.max_size)
        yield _gauge("sessions", "Sessions, waiting ones included", len(gateway.sessions))
        yield _gauge("leases", "Slots lent out", sum(1 for _ in gateway.pool.leases()))
        yield _gauge("held_bytes", "Input that waits for a worker", gateway.held.total)
        yield _gauge(
            "cleanups",
            "Ended sessions whose worker has not said yet that the slot is clean",
            len(gateway.background),
        )
        yield _gauge("tasks", "Tasks of the event loop", len(asyncio.all_tasks()))
        yield _counter(
            "client_diagnostics", "Reports of clients about themselves", gateway.n_diagnostics
        )
        errors = CounterMetricFamily(
            "omni_gateway_errors", "Failures that clients were told", labels=["slug"]
        )
        for slug in slug_labels():
            errors.add_metric([slug], gateway.desk.counts[slug])
        yield errors
        yield from self._recordings()

    def _recordings(self) -> Iterator[Metric]:
        recordings = self._gateway.recordings
        yield _gauge("recordings_live", "Sessions that are being recorded", len(recordings.live))
        yield _gauge("recordings_unfinished", "Ended recordings that wait", recordings.n_unfinished)
        yield _gauge(
            "recording_queue_bytes",
            "Messages that wait for the disk",
            recordings.writer.queued_bytes,
        )
        stopped = CounterMetricFamily(
            "omni_gateway_recordings_stopped",
            "Recordings that ended before their session",
            labels=["reason"],
        )
        for reason in STOP_REASONS:
            stopped.add_metric([reason], recordings.writer.n_stopped[reason])
        yield stopped

    def _workers(self) -> Iterator[Metric]:
        workers = self._gateway.pool.workers
        states = Tally(w.status if w.status in WORKER_STATES else OTHER for w in workers)
        by_state = GaugeMetricFamily("omni_gateway_workers", "Workers by state", labels=["state"])
        for state in WORKER_STATES:
            by_state.add_metric([state], states[state])
        yield by_state
        for name, text, values in (
            ("worker_up", "1 = it answers", [not w.is_offline for w in workers]),
            ("worker_in_rotation", "1 = it may get sessions", [w.in_rotation for w in workers]),
            ("worker_slots", "Slots it has", [w.slots_total for w in workers]),
            ("worker_slots_free", "Slots that may be lent", [w.slots_free for w in workers]),
        ):
            family = GaugeMetricFamily(f"omni_gateway_{name}", text, labels=["worker"])
            for worker, value in zip(workers, values, strict=True):
                family.add_metric([worker.name], float(value))
            yield family


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"omni_gateway_{name}", text, value=value)


def _counter(name: str, text: str, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(f"omni_gateway_{name}", text, value=value)
