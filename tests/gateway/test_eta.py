"""How long sessions take: configured, learned from those that ended in order, changed later."""

from __future__ import annotations

import json
import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway import eta
from gateway.eta import Durations
from shared.config import Config, ServiceConfig
from shared.protocol import Failure, Input, StageReport, Stop
from tests.fakes.scripted_worker import Script, ScriptedWorker

WITH_KEYS = Config.model_validate({"security": {"api_keys": ["k"], "admin_keys": ["boss"]}})
BOSS = {"Authorization": "Bearer boss"}
DEFAULTS = {
    "eta_chat_s": 15.0,
    "eta_half_duplex_s": 180.0,
    "eta_audio_duplex_s": 120.0,
    "eta_omni_duplex_s": 90.0,
    "ema_alpha": 0.3,
}


def test_the_first_sample_counts_as_it_is_and_later_ones_by_their_weight():
    durations = Durations(ServiceConfig(eta_ema_alpha=0.25, eta_ema_min_samples=1))

    durations.learn("chat", 10.0)
    first = durations.expected_s("chat")
    durations.learn("chat", 30.0)

    assert (first, durations.expected_s("chat")) == (10.0, 15.0)


def test_a_learned_length_is_used_only_once_there_are_enough_samples():
    durations = Durations(ServiceConfig(eta_ema_min_samples=3))

    lengths = []
    for _ in range(3):
        durations.learn("audio_duplex", 40.0)
        lengths.append(durations.expected_s("audio_duplex"))

    assert lengths == [120.0, 120.0, 40.0]


def test_one_type_teaches_nothing_about_another():
    durations = Durations(ServiceConfig(eta_ema_min_samples=1))

    durations.learn("audio_duplex", 40.0)

    assert durations.expected_s("omni_duplex") == 90.0


@given(st.lists(st.floats(0.0, 1e6), min_size=1), st.floats(0.01, 1.0))
def test_a_learned_length_lies_between_the_shortest_and_the_longest_sample(samples, alpha):
    durations = Durations(ServiceConfig(eta_ema_alpha=alpha, eta_ema_min_samples=1))

    for sample in samples:
        durations.learn("chat", sample)

    learned = durations.expected_s("chat")
    assert min(samples) - 1e-6 <= learned <= max(samples) + 1e-6


def loading(stage: str, done: list[str], **changes: object):
    stages = [StageReport(name, 1.0, True) for name in done] + [StageReport(stage, 4.0, False)]
    health = ScriptedWorker(script=Script(worker_status="loading")).health()
    changes = {"eta_s": None, "stage_elapsed_s": 4.0, **changes}
    return msgspec.structs.replace(health, stage=stage, stages=stages, **changes)


LAST_START = {"load_model": 20.0, "init_unified": 5.0, "warmup_compile": 30.0}


def test_the_rest_of_a_start_is_its_running_stage_and_the_lengths_of_those_to_come():
    by_last_start = eta.start_left(loading("init_unified", ["load_model"]), LAST_START)
    by_itself = eta.start_left(loading("init_unified", ["load_model"], eta_s=9.0), LAST_START)

    assert (by_last_start, by_itself) == (1.0 + 30.0, 9.0 + 30.0)


def test_a_start_that_is_not_there_yet_takes_as_long_as_the_last_one():
    assert eta.start_left(None, LAST_START) == 55.0


def test_without_an_earlier_start_only_the_running_stage_is_known():
    assert eta.start_left(loading("init_unified", [], eta_s=9.0), {}) == 9.0
    assert eta.start_left(loading("init_unified", []), {}) == eta.STARTUP_S
    assert eta.start_left(None, {}) == eta.STARTUP_S


def test_a_stage_that_takes_longer_than_last_time_never_leaves_less_than_a_second():
    late = loading("warmup_compile", ["load_model", "init_unified"], stage_elapsed_s=99.0)

    assert eta.start_left(late, LAST_START) == eta.MIN_START_S


async def run_session(running, talker, session_id: str = "omni_a") -> None:
    async with running.dial(session_id) as socket:
        client = talker(socket)
        await client.prepare()
        await client.say("stop")
        await client.hear_kind("stopped")
        await client.closed()


@pytest.mark.parametrize("way", ["stop", "leave", "fail"])
async def test_a_slot_that_is_being_cleaned_is_as_good_as_free(serve, talker, until, way):
    """It counted as a session that had just begun: minutes were told, and a second waited."""
    script = Script(answer=lambda _: Failure("engine_fault", "It is lost", close_code=1011))
    async with ScriptedWorker(script=script) as worker, serve([worker]) as running:
        worker.may_clean.clear()
        async with running.dial("omni_a") as socket:
            client = talker(socket)
            await client.prepare()
            if way != "leave":
                await (client.say("stop") if way == "stop" else client.chunk())
                await client.hear_kind("stopped" if way == "stop" else "error")
        await until(lambda: isinstance(worker.sessions[0].commands[-1], Stop))

        async with running.dial("omni_b") as socket, running.client() as http:
            place = await talker(socket).hear()
            (task,) = (await http.get("/status")).json()["running_tasks"]
            worker.may_clean.set()

    assert 0 < place["estimated_wait_s"] <= 1
    assert task["estimated_remaining_s"] <= 1


async def test_sessions_that_end_in_order_teach_their_length(serve, talker, until):
    config = Config.model_validate({"service": {"eta_ema_min_samples": 2}})
    async with ScriptedWorker() as worker, serve([worker], config) as running:
        durations = running.gateway.durations
        for _ in range(2):
            await run_session(running, talker)
        await until(lambda: durations.learned["omni_duplex"].n_samples == 2)
        async with (
            running.client() as http,
            running.dial("omni_a") as a,
            running.dial("omni_b") as b,
        ):
            await talker(a).prepare()
            place = await talker(b).hear_kind("queued")
            (task,) = (await http.get("/api/queue")).json()["running_tasks"]

    # The sessions took milliseconds, so the one that runs is overdue.
    assert durations.expected_s("omni_duplex") < 5.0
    assert place["estimated_wait_s"] <= eta.OVERDUE_S
    assert task["estimated_remaining_s"] <= eta.OVERDUE_S


async def test_a_client_that_leaves_ends_its_session_in_order(serve, talker, until):
    async with ScriptedWorker() as worker, serve([worker]) as running:
        async with running.dial("adx_a") as socket:
            await talker(socket).prepare()

        learned = running.gateway.durations.learned
        await until(lambda: learned["audio_duplex"].n_samples == 1)


async def test_lost_workers_failures_and_sessions_that_never_began_teach_nothing(
    serve, talker, until
):
    def fail(chunk: Input) -> Failure:
        return Failure("engine_fault", "The device is lost", 1011, chunk.seq)

    worker = ScriptedWorker(slots=4, script=Script(answer=fail))
    async with worker, serve([worker]) as running:
        async with running.dial("omni_early") as socket:
            await talker(socket).hear_kind("queue_done")
        async with running.dial("omni_failed") as socket:
            client = talker(socket)
            await client.prepare()
            await client.chunk()
            await client.closed()
        await until(lambda: not list(running.gateway.pool.leases()))
        async with running.dial("omni_lost") as socket:
            client = talker(socket)
            await client.prepare()
            await worker.die()
            await client.closed()
        await until(lambda: not list(running.gateway.pool.leases()))

        assert running.gateway.durations.learned["omni_duplex"].n_samples == 0


class TestRoute:
    async def test_it_shows_configured_and_learned_lengths(self, serve, talker, until):
        async with (
            ScriptedWorker() as worker,
            serve([worker]) as running,
            running.client() as http,
        ):
            learned = running.gateway.durations.learned["omni_duplex"]
            await run_session(running, talker)
            await until(lambda: learned.n_samples == 1)
            body = (await http.get("/api/config/eta")).json()

        assert body == {
            "config": DEFAULTS,
            "ema_alpha": 0.3,
            "ema_chat_s": None,
            "ema_half_duplex_s": None,
            "ema_audio_duplex_s": None,
            "ema_omni_duplex_s": learned.mean_s,
            "ema_chat_samples": 0,
            "ema_half_duplex_samples": 0,
            "ema_audio_duplex_samples": 0,
            "ema_omni_duplex_samples": 1,
        }

    async def test_a_partial_change_keeps_the_rest(self, serve):
        """The reference reset what a PUT did not name."""
        async with serve([], ready=False) as running, running.client() as http:
            await http.put("/api/config/eta", json={"eta_chat_s": 20})
            change = {"eta_omni_duplex_s": 60.5, "ema_alpha": None}
            body = (await http.put("/api/config/eta", json=change)).json()
            again = (await http.get("/api/config/eta")).json()

        assert body["config"] == {**DEFAULTS, "eta_chat_s": 20.0, "eta_omni_duplex_s": 60.5}
        assert {**again, "ignored": []} == body

    async def test_what_it_shows_can_be_sent_back(self, serve):
        async with serve([], ready=False) as running, running.client() as http:
            shown = (await http.get("/api/config/eta")).json()
            answer = await http.put("/api/config/eta", json=shown["config"])

        assert (answer.status_code, answer.json()) == (200, {**shown, "ignored": []})

    async def test_the_operators_page_of_the_demo_can_save(self, serve):
        """It sends a field that it reads nowhere: null when empty, a number when filled in."""
        seconds = {"eta_chat_s": 20, "eta_audio_duplex_s": 100, "eta_omni_duplex_s": 80}
        async with serve([], ready=False) as running, running.client() as http:
            saved = [
                await http.put("/api/config/eta", json={**seconds, "eta_streaming_s": value})
                for value in (None, 20)
            ]

        assert [answer.status_code for answer in saved] == [200, 200]
        assert saved[1].json()["config"] == {**DEFAULTS, **seconds}
        assert saved[1].json()["ignored"] == ["eta_streaming_s"]

    async def test_waiting_clients_get_their_new_estimate(self, serve, talker):
        async with (
            ScriptedWorker() as worker,
            serve([worker]) as running,
            running.client() as http,
            running.dial("omni_a") as a,
            running.dial("omni_b") as b,
        ):
            await talker(a).prepare()
            ticket_id = (await talker(b).hear_kind("queued"))["ticket_id"]
            await http.put("/api/config/eta", json={"eta_omni_duplex_s": 1000})
            ticket = (await http.get(f"/api/queue/{ticket_id}")).json()["ticket"]

        assert ticket["estimated_wait_s"] > 900

    @pytest.mark.parametrize(
        ("key", "value"),
        [
            ("eta_chat_s", 0),
            ("eta_chat_s", -1),
            ("eta_chat_s", "15"),
            ("eta_chat_s", True),
            ("eta_chat_s", math.nan),
            ("eta_omni_duplex_s", math.inf),
            ("eta_half_duplex_s", 86_401),
            ("ema_alpha", 0),
            ("ema_alpha", 1.01),
        ],
    )
    async def test_a_bad_field_is_refused_by_name_and_changes_nothing(self, serve, key, value):
        # httpx itself refuses to encode NaN.
        content = json.dumps({"eta_half_duplex_s": 1.0, key: value})
        headers = {"Content-Type": "application/json"}
        async with serve([], ready=False) as running, running.client() as http:
            answer = await http.put("/api/config/eta", content=content, headers=headers)
            after = (await http.get("/api/config/eta")).json()["config"]

        assert answer.status_code == 422
        assert answer.json()["slug"] == "bad_message"
        assert key in answer.json()["detail"]
        assert after == DEFAULTS

    async def test_a_number_that_no_parser_takes_is_a_bad_request(self, serve):
        content = '{"eta_chat_s": ' + 5001 * "9" + "}"
        headers = {"Content-Type": "application/json"}
        async with serve([], ready=False) as running, running.client() as http:
            answer = await http.put("/api/config/eta", content=content, headers=headers)

        assert (answer.status_code, answer.json()["slug"]) == (400, "bad_request")

    async def test_changing_asks_for_an_admin_key_where_there_are_any(self, serve):
        user = {"Authorization": "Bearer k"}
        async with serve([], WITH_KEYS, ready=False) as running, running.client() as http:
            seen = await http.get("/api/config/eta", headers=user)
            refused = await http.put("/api/config/eta", headers=user, json={"eta_chat_s": 1})
            unseen = await http.put("/api/config/eta", headers=user, json={"nonsense": 1})
            done = await http.put("/api/config/eta", headers=BOSS, json={"eta_chat_s": 1})

        codes = [answer.status_code for answer in (seen, refused, unseen, done)]
        assert codes == [200, 403, 403, 200]
        assert done.json()["config"]["eta_chat_s"] == 1.0
