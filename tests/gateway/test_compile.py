"""`GET /api/compile`: what all workers have compiled, asked at once."""

from __future__ import annotations

import time

import httpx
import msgspec

from gateway import pool
from gateway.pool import Address
from shared.config import Config
from shared.protocol import CompileStatus
from tests.fakes.ports import free_port
from tests.fakes.scripted_worker import Script, ScriptedWorker


async def ask(running, **options) -> httpx.Response:
    async with running.client(**options) as http:
        return await http.get("/api/compile")


async def test_every_worker_has_a_row_with_the_fields_of_its_status(serve):
    async with ScriptedWorker() as first, ScriptedWorker() as second, serve([first, second]) as run:
        rows = (await ask(run)).json()["workers"]

    assert [row.pop("worker_id") for row in rows] == ["worker_0", "worker_1"]
    assert [msgspec.convert(row, CompileStatus) for row in rows] == [
        CompileStatus("warm", fingerprint="ab12")
    ] * 2
    assert set(rows[0]) == set(CompileStatus.__struct_fields__)


async def test_a_dead_worker_is_named_and_hides_no_other(serve):
    async with ScriptedWorker() as worker:
        dead = Address("127.0.0.1", free_port())
        async with serve([worker, dead], ready=False) as running:
            await running.until_ready(1)
            rows = (await ask(running)).json()["workers"]

    assert rows[0]["state"] == "warm"
    assert rows[1] == {"worker_id": "worker_1", "error": "does not answer"}


async def test_slow_workers_are_waited_for_at_the_same_time_and_not_for_long(serve, monkeypatch):
    monkeypatch.setattr(pool, "POLL_TIMEOUT_S", 1.0)
    workers = [ScriptedWorker(script=Script(compile_delay_s=5.0)) for _ in range(3)]
    async with workers[0], workers[1], workers[2], serve(workers) as running:
        began_at = time.monotonic()
        rows = (await ask(running)).json()["workers"]
        took_s = time.monotonic() - began_at

    assert [row["error"] for row in rows] == ["no answer within 1 s"] * 3
    assert took_s < 2.8


async def test_an_answer_that_is_no_status_is_not_handed_on(serve):
    odd = ScriptedWorker(script=Script(compile_status='{"state": "lukewarm"}'))
    async with odd, serve([odd]) as running:
        rows = (await ask(running)).json()["workers"]

    assert rows == [{"worker_id": "worker_0", "error": "answers with something else"}]


async def test_it_needs_a_key_where_there_are_any_as_all_routes_do(serve):
    config = Config.model_validate({"security": {"api_keys": ["k1"], "admin_keys": ["boss"]}})
    async with ScriptedWorker() as worker, serve([worker], config) as running:
        without = await ask(running)
        codes = [
            (await ask(running, headers={"authorization": f"Bearer {key}"})).status_code
            for key in ("k1", "boss")
        ]

    assert (without.status_code, without.json()["slug"]) == (401, "unauthorized")
    assert codes == [200, 200]
