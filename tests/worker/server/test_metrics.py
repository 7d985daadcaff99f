"""`GET /metrics` of the worker."""

import asyncio
import threading

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from shared.limits import MAX_INBOX_UNITS
from shared.protocol import (
    Closed,
    Failure,
    Notice,
    Open,
    Pause,
    Paused,
    Prepare,
    Result,
    Stop,
    Timings,
)
from tests.fakes.model import FakeDuplexModel
from tests.fakes.patience import PATIENCE_S
from tests.fakes.session import LOUD, SILENT, chunk, eventually
from tests.fakes.worker import FakeWorker
from worker.metrics import WorkerMetrics


class Samples:
    def __init__(self, text: str) -> None:
        self._values = {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    def __call__(self, name: str, **labels: str) -> float:
        return self._values[f"omni_worker_{name}", frozenset(labels.items())]

    def of_process(self, name: str) -> float:
        return self._values[f"process_{name}", frozenset()]


async def scrape(worker: FakeWorker) -> Samples:
    # Loading certificates takes longer than the request.
    async with httpx.AsyncClient(trust_env=False, verify=False) as client:
        answer = await client.get(f"http://127.0.0.1:{worker.port}/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    return Samples(answer.text)


async def test_units_are_counted_and_timed(make):
    worker = await make()
    peer = await worker.session()
    for seq, samples in enumerate((SILENT, LOUD, LOUD, SILENT, LOUD)):
        await peer.send(chunk(seq, samples))
        await peer.until(Result)
    metrics = await scrape(worker)

    assert metrics("units_total", kind="listen") == 2
    assert metrics("units_total", kind="speak") == 3
    assert metrics("unit_seconds_count") == 5
    assert metrics("first_audio_seconds_count") == 2
    assert metrics("prepare_seconds_count") == 1
    assert metrics("batch_ops_count", kind="think") == 5
    assert metrics("batch_seconds_count", kind="speak") == 3
    assert metrics("deadline_misses_total") == 0
    health = await worker.health()
    assert health.total_requests == 5
    assert health.avg_inference_time_ms == pytest.approx(
        1000 * metrics("unit_seconds_sum") / 5, abs=0.05
    )


async def test_what_the_warm_up_played_is_in_no_metric(make):
    worker = await make()
    metrics = await scrape(worker)

    assert ("think", 1) in worker.model.batches
    assert metrics("unit_seconds_count") == 0
    assert metrics("units_total", kind="listen") == 0
    assert metrics("sessions_ended_total", reason="other") == 0
    with pytest.raises(KeyError):
        metrics("batch_ops_count", kind="think")


async def test_state_slots_and_sessions_are_read_when_asked(make):
    worker = await make(n_slots=3)
    await worker.session("a")
    paused = await worker.session("b")
    await paused.send(Pause())
    await paused.until(Paused)
    metrics = await scrape(worker)

    assert metrics("state", state="ready") == 1
    assert metrics("state", state="loading") == 0
    assert metrics("slots", state="in_use") == 2
    assert metrics("slots", state="free") == 1
    assert metrics("slots", state="cleaning") == 0
    assert metrics("sessions", state="live") == 1
    assert metrics("sessions", state="paused") == 1
    assert metrics("start_seconds", stage="load_model") >= 0
    assert metrics("tasks") > 2
    assert metrics("threads") >= 3
    assert metrics.of_process("resident_memory_bytes") > 1e6


async def test_metrics_answer_while_the_worker_loads(make):
    gate = threading.Event()
    worker = await make(
        ready=False, model=FakeDuplexModel(on_stage=lambda name: gate.wait(PATIENCE_S) and None)
    )
    metrics = await scrape(worker)
    gate.set()

    assert metrics("state", state="loading") == 1
    assert metrics("slots", state="free") == 0


async def test_a_thread_that_is_stuck_shows(make):
    worker = await make()
    gate = worker.model.gates["think"] = threading.Event()
    inside = worker.model.entered["think"] = threading.Event()
    peer = await worker.session()
    await peer.send(chunk(0))
    assert await asyncio.to_thread(inside.wait, PATIENCE_S)
    await asyncio.sleep(0.05)
    metrics = await scrape(worker)
    gate.set()
    await peer.until(Result)

    assert metrics("busy_seconds") >= 0.05


async def test_units_that_fail_and_units_that_are_dropped(make):
    worker = await make(model=FakeDuplexModel(fail_units=frozenset({2})))
    gate = worker.model.gates["think"] = threading.Event()
    peer = await worker.session()
    for seq in range(MAX_INBOX_UNITS + 3):
        await peer.send(chunk(seq))
    await peer.until(Notice)
    gate.set()
    await peer.until(Failure)
    metrics = await scrape(worker)

    assert metrics("dropped_units_total") >= 1
    assert metrics("units_total", kind="failed") == 1
    assert metrics("failures_total", slug="model_fault") == 1


async def test_every_end_of_a_session_has_its_reason(make):
    worker = await make()
    peers = [await worker.session(name) for name in "ab"]
    await peers[0].send(Stop("the client's own words"))
    await peers[0].until(Closed)
    peers[1].socket.transport.abort()
    stopped = await worker.session("c")
    await stopped.send(Stop())
    await stopped.until(Closed)
    host = worker.lifecycle.host
    await eventually(lambda: host is not None and not host.sessions)
    metrics = await scrape(worker)

    assert metrics("sessions_ended_total", reason="other") == 1
    assert metrics("sessions_ended_total", reason="disconnected") == 1
    assert metrics("sessions_ended_total", reason="stopped") == 1


async def test_what_a_connection_is_refused_for_is_counted(make):
    worker = await make(n_slots=1)
    peer = await worker.session()
    await peer.socket.send(b"\xc1")
    await peer.until(Failure)
    for first in (Open("b", "duplex", "omni_duplex"), Prepare("no open")):
        other = await worker.connect()
        await other.send(first)
        await other.rest()
    metrics = await scrape(worker)

    assert metrics("failures_total", slug="no_free_slot") == 1
    assert metrics("failures_total", slug="bad_message") == 2


def test_only_stages_that_took_time_are_observed():
    metrics = WorkerMetrics()
    metrics.unit_done(Timings(listen_ms=3.0, total_ms=5.0), is_listen=True, is_late=True)
    count = "omni_worker_unit_stage_seconds_count"

    assert metrics.registry.get_sample_value(count, {"stage": "listen"}) == 1
    assert metrics.registry.get_sample_value(count, {"stage": "vocode"}) == 0
    assert metrics.registry.get_sample_value("omni_worker_deadline_misses_total") == 1
    assert (metrics.n_units, metrics.mean_unit_ms) == (1, 5.0)


def test_the_mean_of_no_unit_is_zero():
    assert WorkerMetrics().mean_unit_ms == 0.0
