"""The HTTP surface, in-process and on real sockets."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from websockets.exceptions import InvalidStatus

from client.duplex import DuplexClient
from client.events import SessionError
from gateway import pool
from shared.config import Config
from tests.fakes.scripted_worker import Script, ScriptedWorker

ROOT = Path(__file__).parents[2]

WITH_KEYS = Config.model_validate({"security": {"api_keys": ["k1", "k2"], "admin_keys": ["boss"]}})


@pytest.fixture
def pages(tmp_path):
    (tmp_path / "index.html").write_text("<title>page</title>")
    (tmp_path / "app.js").write_text("1")
    return tmp_path


async def test_health_is_live_and_says_whether_it_is_ready(serve):
    async with ScriptedWorker() as worker, serve([worker]) as running, running.client() as http:
        body = (await http.get("/health")).json()

        assert body.pop("timestamp")
        assert body == {
            "status": "healthy",
            "live": True,
            "ready": True,
            "workers_ready": 1,
            "workers_total": 1,
        }


async def test_a_probe_may_ask_for_the_head_alone(serve):
    async with ScriptedWorker() as worker, serve([worker]) as running, running.client() as http:
        answers = [await http.head(path) for path in ("/health", "/ready")]

    assert [(answer.status_code, answer.content) for answer in answers] == [(200, b"")] * 2


async def test_ready_is_200_with_a_ready_worker(serve):
    async with ScriptedWorker() as worker, serve([worker]) as running, running.client() as http:
        assert (await http.get("/ready")).status_code == 200


async def test_ready_is_503_while_loading_and_says_when_to_come_back(serve, until):
    script = Script(worker_status="loading")
    async with (
        ScriptedWorker(script=script) as worker,
        serve([worker], ready=False) as running,
        running.client() as http,
    ):
        await until(lambda: running.gateway.pool.workers[0].status == "loading")
        answer = await http.get("/ready")

        assert answer.status_code == 503
        assert answer.headers["retry-after"]
        assert (answer.json()["ready"], answer.json()["slug"]) == (False, "starting")


async def test_ready_is_503_with_another_reason_when_no_worker_can_serve(serve, until, monkeypatch):
    monkeypatch.setattr(pool, "RESTART_GRACE_S", 0.0)
    script = Script(worker_status="error")
    async with (
        ScriptedWorker(script=script) as worker,
        serve([worker], ready=False) as running,
        running.client() as http,
    ):
        await until(lambda: running.gateway.pool.workers[0].status == "error")

        assert (await http.get("/ready")).json()["slug"] == "no_worker"


async def test_status_counts_each_worker_once(serve, talker, until):
    loading = ScriptedWorker(script=Script(worker_status="loading"))
    async with (
        ScriptedWorker() as busy,
        ScriptedWorker(slots=2) as idle,
        loading,
        serve([busy, idle, loading], ready=False) as running,
        running.client() as http,
    ):
        await running.until_ready(2)
        await until(lambda: running.gateway.pool.workers[2].status == "loading")
        async with running.dial("omni_a") as a:
            await talker(a).prepare()
            body = (await http.get("/status")).json()

    counts = ["total", "idle", "busy", "duplex", "loading", "error", "offline"]
    assert [body[f"{name}_workers"] for name in counts] == [3, 1, 1, 1, 1, 0, 0]
    assert body["gateway_healthy"] is True
    assert (body["queue_length"], body["max_queue_size"]) == (0, 1000)
    (task,) = body["running_tasks"]
    assert set(task) == {
        "worker_id",
        "request_type",
        "started_at",
        "elapsed_s",
        "estimated_remaining_s",
    }
    assert (task["worker_id"], task["request_type"]) == ("worker_0", "omni_duplex")


def test_every_word_for_what_a_worker_does_is_documented():
    text = " ".join((ROOT / "docs/http.md").read_text().split())
    (said,) = re.findall(r"`status` of a worker is (.*?)\. ", text)
    words = {"loading", "idle", "draining", "error", "offline", *pool.BUSY_WORD.values()}

    assert set(re.findall(r"`(\w+)`", said)) == words


async def test_workers_have_the_references_fields_and_the_start_stages(serve, talker):
    async with (
        ScriptedWorker() as worker,
        serve([worker]) as running,
        running.client() as http,
        running.dial("adx_a") as a,
    ):
        await talker(a).prepare()
        body = (await http.get("/workers")).json()

    (row,) = body["workers"]
    assert body["total"] == 1
    assert set(row) == {
        *("worker_id", "host", "port", "gpu_id", "status", "current_session_id"),
        *("total_requests", "avg_inference_time_ms", "last_heartbeat", "current_request_type"),
        *("task_started_at", "slots_total", "slots_free"),
        *("stage", "stage_progress", "stage_elapsed_s", "eta_s"),
    }
    assert row["worker_id"] == "worker_0"
    assert row["status"] == "duplex_active"
    assert row["current_session_id"] == "adx_a"
    assert row["current_request_type"] == "audio_duplex"
    assert (row["slots_total"], row["slots_free"]) == (1, 0)


async def test_a_waiting_ticket_can_be_seen_and_cancelled(serve, talker):
    async with (
        ScriptedWorker() as worker,
        serve([worker]) as running,
        running.client() as http,
        running.dial("omni_a") as a,
        running.dial("adx_b") as b,
    ):
        await talker(a).prepare()
        ticket_id = (await talker(b).hear_kind("queued"))["ticket_id"]

        queue = (await http.get("/api/queue")).json()
        ticket = (await http.get(f"/api/queue/{ticket_id}")).json()
        cancelled = (await http.delete(f"/api/queue/{ticket_id}")).json()
        again = (await http.delete(f"/api/queue/{ticket_id}")).json()
        gone = await http.get(f"/api/queue/{ticket_id}")

    assert queue["queue_length"] == 1
    assert set(queue["items"][0]) == {
        *("ticket_id", "request_type", "session_id", "position", "estimated_wait_s"),
        *("enqueued_at", "wait_elapsed_s"),
    }
    assert ticket["found"] is True
    assert set(ticket["ticket"]) == {
        *("ticket_id", "request_type", "session_id", "enqueued_at", "position"),
        *("estimated_wait_s", "cancelled"),
    }
    assert (cancelled, again) == ({"success": True}, {"success": False})
    assert (gone.status_code, gone.json()["found"]) == (200, False)


async def test_an_unknown_route_has_the_one_error_shape(serve):
    async with serve([], ready=False) as running, running.client() as http:
        answer = await http.get("/nowhere")

        assert answer.status_code == 404
        assert answer.json() == {"detail": "Not Found", "slug": "not_found"}


@pytest.mark.parametrize("path", ["/", "/ws/duplx/omni_1", "/ws/chat/", "/static/x", "/health"])
async def test_a_socket_that_is_not_there_is_unknown_and_not_forbidden(serve, path):
    async with serve([], ready=False) as running:
        with pytest.raises(InvalidStatus) as refused:
            await running.dial_path(path)
        url = f"ws://127.0.0.1:{running.port}/ws/duplx/x"
        with pytest.raises(SessionError, match=r"is no session endpoint \(HTTP 404\)"):
            await DuplexClient(url).__aenter__()

    answer = refused.value.response
    assert (answer.status_code, json.loads(answer.body)["slug"]) == (404, "not_found")


async def test_an_unexpected_failure_tells_no_internals(serve, monkeypatch):
    async with serve([], ready=False) as running, running.client() as http:
        monkeypatch.delattr(running.gateway, "pool")

        answer = await http.get("/workers")

        assert answer.status_code == 500
        assert answer.json() == {"detail": "Internal error (/workers)", "slug": "internal"}


async def test_live_sessions_are_listed_with_their_worker(serve, talker):
    async with (
        ScriptedWorker() as worker,
        serve([worker]) as running,
        running.client() as http,
    ):
        empty = (await http.get("/api/sessions")).json()
        async with running.dial("adx_a") as a:
            await talker(a).prepare()
            paths = ("/sessions", "/api/sessions")
            answers = [(await http.get(path)).json() for path in paths]
            began_at = (await http.get("/workers")).json()["workers"][0]["task_started_at"]

    assert empty == {"total": 0, "sessions": []}
    for body in answers:
        (row,) = body["sessions"]
        # Each reading of the clocks rounds anew.
        assert row.pop("last_active")[:19] == began_at[:19]
        assert body["total"] == 1
        assert row == {"session_id": "adx_a", "worker_id": "worker_0", "messages_hash": ""}


async def test_cache_names_the_workers_and_their_states(serve):
    async with ScriptedWorker() as worker, serve([worker]) as running, running.client() as http:
        body = (await http.get("/cache")).json()

    assert body == {"workers": [{"worker_id": "worker_0", "status": "idle"}]}


class TestKeys:
    async def test_health_and_ready_need_none_and_everything_else_does(self, serve, pages):
        async with (
            serve([], WITH_KEYS, pages, ready=False) as running,
            running.client() as http,
        ):
            codes = {
                path: (await http.get(path)).status_code
                for path in ("/health", "/ready", "/status", "/", "/static/app.js", "/docs")
            }

        assert codes == {
            "/health": 200,
            "/ready": 503,
            "/status": 401,
            "/": 401,
            "/static/app.js": 401,
            "/docs": 401,
        }

    async def test_a_key_is_taken_from_header_query_or_cookie(self, serve):
        async with serve([], WITH_KEYS, ready=False) as running, running.client() as http:
            answers = [
                await http.get("/status", headers={"Authorization": "Bearer k2"}),
                await http.get("/status", headers={"Cookie": "omni_api_key=k1"}),
                await http.get("/status?api_key=k1"),
                await http.get("/status?token=boss"),
            ]

        assert [answer.status_code for answer in answers] == [200] * 4

    @pytest.mark.parametrize("key", ["", "k", "k1x", "K1", "\u00e9"])
    async def test_a_wrong_key_is_refused(self, serve, key):
        async with serve([], WITH_KEYS, ready=False) as running, running.client() as http:
            answer = await http.get("/status", params={"api_key": key})

        assert answer.status_code == 401
        assert answer.json()["slug"] == "unauthorized"

    async def test_a_page_opened_with_its_key_loads_its_parts_by_cookie(self, serve, pages):
        async with (
            serve([], WITH_KEYS, pages, ready=False) as running,
            running.client() as http,
        ):
            await http.get("/?api_key=k1")

            assert (await http.get("/static/app.js")).status_code == 200

    async def test_only_a_valid_key_becomes_a_cookie(self, serve):
        bearer = {"Authorization": "Bearer k1"}
        async with serve([], WITH_KEYS, ready=False) as running, running.client() as http:
            answer = await http.get("/status?token=wrong", headers=bearer)

        assert answer.status_code == 200
        assert "set-cookie" not in answer.headers

    async def test_cancelling_tickets_needs_an_admin_key_where_there_are_any(self, serve):
        async with serve([], WITH_KEYS, ready=False) as running, running.client() as http:
            user = await http.delete("/api/queue/q_1?api_key=k1")
            admin = await http.delete("/api/queue/q_1?api_key=boss")

        assert (user.status_code, admin.status_code) == (403, 200)

    async def test_a_session_without_key_is_told_and_closed_with_1008(self, serve, talker):
        async with (
            ScriptedWorker() as worker,
            serve([worker], WITH_KEYS) as running,
            running.dial() as socket,
        ):
            client = talker(socket)

            assert (await client.hear())["slug"] == "unauthorized"
            assert await client.closed() == 1008
            assert not worker.sessions

    async def test_a_session_with_key_is_served(self, serve, talker):
        async with ScriptedWorker(slots=2) as worker, serve([worker], WITH_KEYS) as running:
            async with running.dial(query="?token=k1") as socket:
                assert (await talker(socket).hear())["type"] == "queue_done"
            bearer = {"Authorization": "Bearer k2"}
            async with running.dial(additional_headers=bearer) as socket:
                assert (await talker(socket).hear())["type"] == "queue_done"


class TestOrigins:
    """B67: any web page could open a session from its visitor's browser."""

    async def test_a_foreign_page_is_told_and_closed_with_1008(self, serve, talker):
        async with (
            ScriptedWorker() as worker,
            serve([worker]) as running,
            running.dial(origin="https://evil.example") as socket,
        ):
            client = talker(socket)

            assert (await client.hear())["slug"] == "forbidden_origin"
            assert await client.closed() == 1008

    async def test_a_foreign_name_for_loopback_is_foreign(self, serve, talker):
        """DNS rebinding: the page's own name resolves to this machine, so Origin equals Host."""
        async with serve([]) as running:
            headers = {"Host": f"evil.example:{running.port}"}
            origin = f"http://evil.example:{running.port}"
            async with running.dial(origin=origin, additional_headers=headers) as socket:
                assert (await talker(socket).hear())["slug"] == "forbidden_origin"

    @pytest.mark.parametrize("origin", ["null", "http://127.0.0.1:1", "http://[", "file://"])
    async def test_an_origin_that_is_nearly_ours_is_foreign(self, serve, talker, origin):
        async with (
            ScriptedWorker() as worker,
            serve([worker]) as running,
            running.dial(origin=origin) as socket,
        ):
            assert (await talker(socket).hear())["slug"] == "forbidden_origin"

    async def test_our_own_page_is_served(self, serve, talker):
        async with (
            ScriptedWorker() as worker,
            serve([worker]) as running,
            running.dial(origin=running.http) as socket,
        ):
            assert (await talker(socket).hear())["type"] == "queue_done"

    @pytest.mark.parametrize("allowed", ["https://app.example", "https://APP.example/", "*"])
    async def test_an_allowed_page_is_served(self, serve, talker, allowed):
        config = Config.model_validate({"security": {"allowed_origins": [allowed]}})
        async with (
            ScriptedWorker() as worker,
            serve([worker], config) as running,
            running.dial(origin="https://app.example") as socket,
        ):
            assert (await talker(socket).hear())["type"] == "queue_done"

    async def test_unsafe_methods_of_a_foreign_page_are_refused(self, serve):
        headers = {"Origin": "https://evil.example"}
        async with serve([], ready=False) as running, running.client() as http:
            foreign = await http.delete("/api/queue/q_1", headers=headers)
            own = await http.delete("/api/queue/q_1", headers={"Origin": running.http})

        assert (foreign.status_code, foreign.json()["slug"]) == (403, "forbidden_origin")
        assert own.status_code == 200


async def test_one_client_holds_at_most_its_share_of_sessions(serve, talker, until):
    """B70: one address could fill the queue."""
    config = Config.model_validate({"security": {"max_sessions_per_client": 1}})
    async with ScriptedWorker(slots=2) as worker, serve([worker], config) as running:
        async with running.dial("omni_a") as a, running.dial("omni_b") as b:
            await talker(a).prepare()
            assert (await talker(b).hear())["slug"] == "too_many_sessions"
            assert await talker(b).closed() == 1013
        await until(lambda: not running.gateway.sessions)
        async with running.dial("omni_c") as c:
            await talker(c).prepare()


async def test_a_wrong_key_beside_the_right_one_makes_no_other_client(serve, talker):
    """Sessions were counted under the first key given, valid or not."""
    config = Config.model_validate({"security": {"api_keys": ["k1"], "max_sessions_per_client": 1}})
    wrong = {"Authorization": "Bearer x"}
    async with (
        ScriptedWorker(slots=2) as worker,
        serve([worker], config) as running,
        running.dial("omni_a", query="?api_key=k1") as a,
    ):
        await talker(a).prepare()
        async with running.dial("omni_b", query="?api_key=k1", additional_headers=wrong) as b:
            assert (await talker(b).hear())["slug"] == "too_many_sessions"


async def test_proxies_of_the_environment_are_ignored(serve, talker, monkeypatch):
    """B20: a system proxy caught the calls between gateway and worker."""
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")

    async with ScriptedWorker() as worker, serve([worker]) as running, running.dial() as socket:
        await talker(socket).prepare()
