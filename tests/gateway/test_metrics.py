"""`GET /metrics` of the gateway, and what one session adds to it."""

from __future__ import annotations

from collections.abc import Mapping

import httpx
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from gateway.metrics import GatewayMetrics, SessionWatch
from shared.config import Config
from shared.errors import slugs
from shared.protocol import Failure, Input, Result
from tests.fakes.scripted_worker import Script, ScriptedWorker, speak

SECOND = np.zeros(24_000, np.float32).tobytes()


class Watched:
    """A session's watch with a player that holds 0.2 s, and its registry."""

    def __init__(self) -> None:
        self.metrics = GatewayMetrics()
        self.watch = SessionWatch(self.metrics, 0.2)

    def answer(self, arrived_at: float, now: float, **fields) -> None:
        fields = {"is_listen": False, "audio": SECOND, **fields}
        self.watch.answered(Result(seq=0, unit_index=0, **fields), arrived_at, now)

    def listen(self, arrived_at: float, now: float) -> None:
        self.answer(arrived_at, now, is_listen=True, audio=b"")

    def value(self, name: str, **labels: str) -> float:
        value = self.metrics.registry.get_sample_value(f"omni_gateway_{name}", labels)
        assert value is not None, name
        return value


@pytest.fixture
def session() -> Watched:
    return Watched()


def test_a_result_is_timed_from_its_chunk(session):
    session.answer(10.0, 10.25)

    assert session.value("result_seconds_count") == 1
    assert session.value("result_seconds_sum") == 0.25
    assert session.value("result_seconds_bucket", le="0.2") == 0
    assert session.value("result_seconds_bucket", le="0.3") == 1


def test_a_result_later_than_a_second_has_missed_its_deadline(session):
    session.answer(10.0, 11.0)
    session.answer(11.0, 12.5)

    assert session.value("deadline_misses_total") == 1


def test_a_chunk_that_came_before_the_prompt_was_there_counts_from_then(session):
    """Chunks that wait in the queue are no slow answers of the model."""
    session.watch.prepared(30.0)
    session.answer(10.0, 30.1)

    assert session.value("result_seconds_sum") == pytest.approx(0.1)
    assert session.value("deadline_misses_total") == 0


def test_what_was_dropped_or_has_failed_is_counted_but_not_timed(session):
    session.watch.dropped()
    session.watch.failed()
    session.answer(0.0, 9.0, dropped=True, is_listen=True, audio=b"")

    assert session.value("results_total", kind="dropped") == 2
    assert session.value("results_total", kind="failed") == 1
    assert session.value("result_seconds_count") == 0
    assert session.value("deadline_misses_total") == 0


def test_the_first_audio_of_a_turn_is_timed_from_the_chunk_that_began_it(session):
    session.listen(0.0, 0.1)
    session.answer(1.0, 1.1, audio=b"")
    session.answer(2.0, 2.5)
    session.answer(3.0, 3.1, end_of_turn=True)

    assert session.value("first_audio_seconds_count") == 1
    assert session.value("first_audio_seconds_sum") == 1.5


def test_speech_that_comes_late_leaves_a_gap(session):
    session.answer(0.0, 0.0)
    session.answer(1.0, 1.5)
    session.answer(2.0, 2.5)

    assert session.value("playback_gaps_total") == 1
    assert session.value("playback_gap_seconds_total") == pytest.approx(0.3)


def test_speech_in_time_leaves_no_gap_and_shows_its_lead(session):
    session.answer(0.0, 0.0)
    session.answer(1.0, 1.1)

    assert session.value("playback_gaps_total") == 0
    assert session.value("playback_lead_seconds_sum") == pytest.approx(1.2 + 1.1)


@pytest.mark.parametrize("end", ["end of turn", "listen", "pause"])
def test_there_is_no_gap_between_two_turns(session, end):
    session.answer(0.0, 0.0, end_of_turn=end == "end of turn")
    if end == "listen":
        session.listen(1.0, 1.1)
    elif end == "pause":
        session.watch.paused()
    session.answer(60.0, 60.0)

    assert session.value("playback_gaps_total") == 0


def test_every_slug_is_an_ending_and_what_is_unknown_is_other(session):
    for ending in (*slugs(), "stopped", "client_gone", "made up by a worker"):
        session.metrics.session_ended(ending)

    assert session.value("sessions_ended_total", ending="worker_lost") == 1
    assert session.value("sessions_ended_total", ending="other") == 1


def test_many_gateways_in_one_process_do_not_share_metrics(session):
    Watched().watch.dropped()

    assert session.value("results_total", kind="dropped") == 0


Samples = Mapping[tuple[str, frozenset[tuple[str, str]]], float]


async def scrape(url: str, **headers: str) -> Samples:
    # Loading certificates takes longer than the request.
    async with httpx.AsyncClient(trust_env=False, verify=False) as client:
        answer = await client.get(f"{url}/metrics", headers=headers)
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    return {
        (sample.name.removeprefix("omni_gateway_"), frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }


def at(samples: Samples, name: str, **labels: str) -> float:
    return samples[name, frozenset(labels.items())]


async def test_the_parts_of_the_gateway_are_read_when_asked(serve, talker):
    async with (
        ScriptedWorker(slots=1) as worker,
        serve([worker]) as running,
        running.dial("omni_a") as a,
        running.dial("omni_b") as b,
    ):
        await talker(a).prepare()
        await talker(b).hear_kind("queued")
        await talker(b).chunk()
        await talker(b).say("client_diagnostic")
        await talker(b).say("nonsense")
        await talker(b).hear_kind("error")

        samples = await scrape(running.http)

    assert at(samples, "workers", state="duplex_active") == 1
    assert at(samples, "workers", state="idle") == 0
    assert at(samples, "worker_up", worker="worker_0") == 1
    assert at(samples, "worker_in_rotation", worker="worker_0") == 1
    assert at(samples, "worker_slots", worker="worker_0") == 1
    assert at(samples, "worker_slots_free", worker="worker_0") == 0
    assert at(samples, "queue_length") == 1
    assert at(samples, "queue_limit") == 1000
    assert at(samples, "sessions") == 2
    assert at(samples, "leases") == 1
    assert at(samples, "held_bytes") == 64_000
    assert at(samples, "cleanups") == 0
    assert at(samples, "client_diagnostics_total") == 1
    assert at(samples, "errors_total", slug="bad_message") == 1
    assert at(samples, "errors_total", slug="queue_full") == 0
    assert at(samples, "tasks") > 2
    assert at(samples, "process_resident_memory_bytes") > 1e6
    assert not any(name.endswith("_created") for name, _ in samples)


async def test_a_conversation_is_counted(serve, talker, until):
    def answer(chunk: Input) -> Result | Failure:
        if chunk.seq == 1:
            return Failure("model_fault", "unit 1 failed", None, chunk.seq)
        return speak(chunk)

    async with (
        ScriptedWorker(script=Script(answer=answer)) as worker,
        serve([worker]) as running,
        running.dial() as socket,
    ):
        client = talker(socket)
        await client.prepare()
        for _ in range(3):
            await client.chunk()
        for kind in ("result", "error", "result"):
            assert (await client.hear())["type"] == kind
        await client.say("stop")
        await client.closed()
        await until(lambda: not running.gateway.sessions and not running.gateway.background)

        samples = await scrape(running.http)

    assert at(samples, "results_total", kind="speak") == 2
    assert at(samples, "results_total", kind="failed") == 1
    assert at(samples, "result_seconds_count") == 2
    assert at(samples, "first_audio_seconds_count") == 1
    assert at(samples, "queue_wait_seconds_count") == 1
    assert at(samples, "playback_lead_seconds_count") == 2
    assert at(samples, "errors_total", slug="model_fault") == 1
    assert at(samples, "sessions_ended_total", ending="stopped") == 1
    assert at(samples, "sessions") == at(samples, "leases") == 0


async def test_a_client_that_vanishes_is_an_ending(serve, talker, until):
    async with ScriptedWorker() as worker, serve([worker]) as running, running.dial() as socket:
        await talker(socket).prepare()
        socket.transport.abort()
        await until(lambda: not running.gateway.sessions)
        samples = await scrape(running.http)

    assert at(samples, "sessions_ended_total", ending="client_gone") == 1


async def test_words_of_a_worker_become_no_label(serve, talker):
    refusal = Failure("made_up", "no", 1011)
    script = Script(refuse_open=refusal, worker_status="dancing")
    async with (
        ScriptedWorker(script=script) as worker,
        serve([worker]) as running,
        running.dial() as socket,
    ):
        await talker(socket).closed()
        samples = await scrape(running.http)

    assert at(samples, "errors_total", slug="other") == 1
    assert at(samples, "sessions_ended_total", ending="other") == 1
    text = repr(samples)
    assert "made_up" not in text
    assert "dancing" not in text


async def test_a_worker_that_is_gone_is_down(serve, until):
    async with ScriptedWorker() as worker, serve([worker]) as running:
        await worker.die()
        await until(lambda: running.gateway.pool.workers[0].is_offline)
        samples = await scrape(running.http)

    assert at(samples, "workers", state="offline") == 1
    assert at(samples, "worker_in_rotation", worker="worker_0") == 0


async def test_metrics_ask_for_a_key_where_there_is_one(serve):
    config = Config.model_validate({"security": {"api_keys": ["k"]}})
    async with serve([], config) as running:
        async with httpx.AsyncClient(trust_env=False, verify=False) as client:
            answer = await client.get(f"{running.http}/metrics")

        assert answer.status_code == 401
        await scrape(running.http, authorization="Bearer k")
