"""`/ws/chat` and `POST /api/chat` on real sockets: client <-> gateway <-> scripted worker."""

from __future__ import annotations

import asyncio
import base64
import json
import socket as sockets
from typing import Any

import httpx
import pytest

from gateway import inbox, pool, question
from shared.config import Config
from shared.protocol import Answered, Ask, AudioPart, Failure, Prefilled, Stop
from tests.fakes.scripted_worker import TONE, WORDS, Script, ScriptedWorker

HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}]}
TEXT = "".join(WORDS)


def slow() -> Script:
    """Nothing is answered within a test."""
    return Script(piece_delay_s=30.0)


async def ask(running: Any, body: object = HELLO, **options: Any) -> httpx.Response:
    async with running.client() as http:
        return await http.post("/api/chat", json=body, **options)


class TestSocket:
    async def test_an_answer_streams_and_the_server_closes(self, serve, talker):
        async with (
            ScriptedWorker() as worker,
            serve([worker]) as running,
            running.dial_path("/ws/chat") as socket,
        ):
            client = talker(socket)
            await socket.send(json.dumps({**HELLO, "tts": {"enabled": True}}))
            messages = [await client.hear() for _ in range(4)]

            sound = base64.b64encode(TONE).decode()
            assert messages == [
                {"type": "prefill_done", "input_tokens": 12},
                {"type": "chunk", "text_delta": WORDS[0], "audio_data": sound},
                {"type": "chunk", "text_delta": WORDS[1], "audio_data": sound},
                {
                    "type": "done",
                    "text": TEXT,
                    "generated_tokens": 7,
                    "input_tokens": 12,
                    "ignored": ["length_penalty"],
                },
            ]
            assert await client.closed() == 1000
            session = worker.sessions[0]
            assert (session.opened.mode, session.opened.request_type) == ("chat", "chat")
            assert isinstance(session.commands[0], Ask)

    async def test_a_whole_answer_brings_its_sound(self, serve, talker):
        async with (
            ScriptedWorker() as worker,
            serve([worker]) as running,
            running.dial_path("/ws/chat") as socket,
        ):
            client = talker(socket)
            body = {**HELLO, "streaming": False, "tts": {"enabled": True}}
            await socket.send(json.dumps(body))

            assert (await client.hear())["type"] == "prefill_done"
            done = await client.hear()
            assert base64.b64decode(done["audio_data"]) == TONE * 2

    async def test_no_slot_is_taken_for_a_socket_that_asks_nothing(self, serve, talker):
        async with (
            ScriptedWorker() as worker,
            serve([worker]) as running,
            running.dial_path("/ws/chat"),
            running.dial("omni_1") as other,
        ):
            await talker(other).prepare()

            assert worker.n_opens == 1

    async def test_a_socket_that_asks_nothing_is_closed_in_the_end(self, serve, talker):
        config = Config.model_validate({"duplex": {"idle_timeout_s": 0.1}})
        async with (
            ScriptedWorker() as worker,
            serve([worker], config) as running,
            running.dial_path("/ws/chat") as socket,
        ):
            client = talker(socket)

            assert await client.hear() == {
                "type": "error",
                "error": "No request has come (0.1s)",
                "slug": "session_timeout",
            }
            assert await client.closed() == 1000

    @pytest.mark.parametrize(
        ("frame", "slug", "code"),
        [
            ("{}", "bad_message", 1000),
            ("[]", "bad_message", 1000),
            ('{"messages": [{"role": "x"}]}', "bad_message", 1000),
            (json.dumps({**HELLO, "tts": {"output_path": "/tmp/x"}}), "bad_message", 1000),
            ("hello", "not_json", 1007),
            (b"{}", "unexpected_binary", 1003),
        ],
    )
    async def test_a_request_that_is_none_is_answered_with_an_error(
        self, serve, talker, frame, slug, code
    ):
        async with (
            ScriptedWorker() as worker,
            serve([worker]) as running,
            running.dial_path("/ws/chat") as socket,
        ):
            client = talker(socket)
            await socket.send(frame)

            assert (await client.hear())["slug"] == slug
            assert await client.closed() == code
        assert worker.n_opens == 0

    async def test_a_second_request_does_not_hurt_the_first(self, serve, talker):
        script = Script(piece_delay_s=0.05)
        async with (
            ScriptedWorker(script=script) as worker,
            serve([worker]) as running,
            running.dial_path("/ws/chat") as socket,
        ):
            client = talker(socket)
            await socket.send(json.dumps(HELLO))
            await socket.send(json.dumps(HELLO))

            assert (await client.hear_kind("error"))["slug"] == "bad_message"
            assert (await client.hear_kind("done"))["text"] == TEXT
        assert len(worker.sessions[0].commands) == 1

    async def test_a_failed_question_closes_normally_after_its_error(self, serve, talker):
        script = Script(chat=lambda _: [Failure("bad_image", "no picture", 1000)])
        async with (
            ScriptedWorker(script=script) as worker,
            serve([worker]) as running,
            running.dial_path("/ws/chat") as socket,
        ):
            client = talker(socket)
            await socket.send(json.dumps(HELLO))

            assert await client.hear() == {
                "type": "error",
                "error": "no picture",
                "slug": "bad_image",
            }
            assert await client.closed() == 1000

    async def test_closing_the_socket_stops_the_answer_at_once(self, serve, talker, until):
        """W4: generation went on, and the next request ran beside it."""
        async with ScriptedWorker(script=slow()) as worker, serve([worker]) as running:
            async with running.dial_path("/ws/chat") as socket:
                await socket.send(json.dumps(HELLO))
                await until(lambda: worker.sessions and worker.sessions[0].commands)

            await until(lambda: worker.n_live == 0)
            assert isinstance(worker.sessions[0].commands[-1], Stop)
            assert worker.sessions[0].n_told == 0

    async def test_a_client_that_leaves_the_queue_costs_no_worker(self, serve, talker, until):
        """W7: a gone client still got the next free worker."""
        async with (
            ScriptedWorker() as worker,
            serve([worker]) as running,
            running.dial("omni_1") as busy,
        ):
            client = talker(busy)
            await client.prepare()
            async with running.dial_path("/ws/chat") as socket:
                await socket.send(json.dumps(HELLO))
                await until(lambda: len(running.gateway.queue) == 1)

            await until(lambda: len(running.gateway.queue) == 0)
            await client.say("stop")
            await client.closed()
            assert worker.n_opens == 1

    async def test_the_queue_is_silent_unless_asked_for(self, serve, talker, until):
        async with (
            ScriptedWorker() as worker,
            serve([worker]) as running,
            running.dial("omni_1") as busy,
            running.dial_path("/ws/chat") as quiet,
            running.dial_path("/ws/chat") as curious,
        ):
            client = talker(busy)
            await client.prepare()
            await quiet.send(json.dumps(HELLO))
            await until(lambda: len(running.gateway.queue) == 1)
            await curious.send(json.dumps({**HELLO, "queue_events": True}))
            queued = await talker(curious).hear()
            await client.say("stop")

            assert (queued["type"], queued["position"]) == ("queued", 2)
            await talker(curious).hear_kind("queue_done")
            assert (await talker(quiet).hear())["type"] == "prefill_done"

    async def test_a_cancelled_ticket_is_told(self, serve, talker, until):
        async with (
            ScriptedWorker() as worker,
            serve([worker]) as running,
            running.dial("omni_1") as busy,
            running.dial_path("/ws/chat") as socket,
        ):
            await talker(busy).prepare()
            await socket.send(json.dumps(HELLO))
            await until(lambda: len(running.gateway.queue) == 1)
            (ticket,) = running.gateway.queue.waiting()

            running.gateway.queue.cancel(ticket.ticket_id)

            client = talker(socket)
            assert (await client.hear())["slug"] == "ticket_cancelled"
            assert await client.closed() == 1000

    async def test_a_question_larger_than_what_may_wait_is_asked(self, serve, talker):
        """It is all that its client sends; chunks and prompts have other bounds."""
        sound = bytes(64_000 * 280)
        item = {"type": "audio", "data": base64.b64encode(sound).decode()}
        assert len(sound) > inbox.MAX_HELD_BYTES
        async with (
            ScriptedWorker() as worker,
            serve([worker]) as running,
            running.dial_path("/ws/chat") as socket,
        ):
            await socket.send(json.dumps({"messages": [{"role": "user", "content": [item]}]}))

            assert (await talker(socket).hear())["type"] == "prefill_done"
            (asked,) = worker.sessions[0].commands
            assert isinstance(asked, Ask)
            assert asked.messages[0].parts == [AudioPart(sound)]
            assert running.gateway.held.total == 0

    async def test_a_large_answer_is_no_slow_reader(self, serve, talker, until):
        """It comes behind `prefill_done`, which nobody had a chance to read before."""
        sound = bytes(4 * 24_000 * 120)
        script = Script(chat=lambda _: [Prefilled(1), Answered("x", 1, 1, sound)])
        async with (
            ScriptedWorker(script=script) as worker,
            serve([worker]) as running,
            running.dial_path("/ws/chat") as socket,
        ):
            await socket.send(json.dumps({**HELLO, "streaming": False}))
            done = await talker(socket).hear_kind("done")

            assert len(base64.b64decode(done["audio_data"])) == len(sound)
            assert await talker(socket).closed() == 1000


class TestHttp:
    async def test_an_answer_has_the_references_fields(self, serve):
        async with ScriptedWorker() as worker, serve([worker]) as running:
            answer = await ask(running, {**HELLO, "tts": {"enabled": True}, "streaming": True})
            body = answer.json()

        assert answer.status_code == 200
        assert (body["success"], body["text"], body["error"]) == (True, TEXT, None)
        assert base64.b64decode(body["audio_data"]) == TONE * 2
        assert body["token_stats"]["total_tokens"] == 19
        assert (body["prompt"], body["recording_session_id"]) == (None, None)
        assert body["estimated_queue_wait_s"] == 0.0
        (asked,) = worker.sessions[0].commands
        assert isinstance(asked, Ask)
        assert (asked.is_streaming, asked.generation.max_new_tokens) == (False, 512)

    async def test_waiting_is_told_in_numbers(self, serve, talker, until):
        """W21: the estimate was always 0."""
        async with (
            ScriptedWorker() as worker,
            serve([worker]) as running,
            running.dial("omni_1") as busy,
        ):
            client = talker(busy)
            await client.prepare()
            asking = asyncio.create_task(ask(running))
            await until(lambda: len(running.gateway.queue) == 1)
            await asyncio.sleep(0.05)
            await client.say("stop")
            body = (await asking).json()

        assert body["queue_wait_ms"] >= 50
        assert 80 < body["estimated_queue_wait_s"] <= 90

    @pytest.mark.parametrize(
        ("content", "status", "slug"),
        [
            (b"hello", 400, "not_json"),
            (b"", 400, "not_json"),
            (b"[]", 422, "bad_message"),
            (b"{}", 422, "bad_message"),
            (b'{"messages": [{"role": "user", "content": 5}]}', 422, "bad_message"),
            (
                b'{"messages": [{"role":"user","content":[{"type":"audio","data":"A"}]}]}',
                422,
                "bad_audio",
            ),
            (
                b'{"messages": [{"role":"user","content":"x"}],"tts":{"ref_audio_path":"/x"}}',
                422,
                "bad_message",
            ),
        ],
    )
    async def test_a_body_that_cannot_be_asked_is_refused_by_kind(
        self, serve, content, status, slug
    ):
        async with (
            ScriptedWorker() as worker,
            serve([worker]) as running,
            running.client() as http,
        ):
            answer = await http.post("/api/chat", content=content)

        assert (answer.status_code, answer.json()["slug"]) == (status, slug)
        assert worker.n_opens == 0

    @pytest.mark.parametrize(
        ("slug", "status"),
        [
            ("bad_image", 422),
            ("voice_unavailable", 409),
            ("media_full", 503),
            ("model_fault", 500),
            ("session_timeout", 504),
            ("something_new", 502),
        ],
    )
    async def test_a_failure_of_the_worker_keeps_its_status(self, serve, slug, status):
        """W8: every failure came as 200."""
        script = Script(chat=lambda _: [Failure(slug, "no", 1000)])
        async with ScriptedWorker(script=script) as worker, serve([worker]) as running:
            answer = await ask(running)

        assert (answer.status_code, answer.json()) == (status, {"detail": "no", "slug": slug})

    async def test_a_full_queue_is_a_503(self, serve, talker):
        config = Config.model_validate({"service": {"max_queue_size": 0}})
        async with (
            ScriptedWorker() as worker,
            serve([worker], config) as running,
            running.dial("omni_1") as busy,
        ):
            await talker(busy).prepare()
            answer = await ask(running)

        assert answer.status_code == 503
        assert answer.json() == {"detail": "Queue full (0 requests)", "slug": "queue_full"}

    async def test_a_cancelled_ticket_is_a_503(self, serve, talker, until):
        async with (
            ScriptedWorker() as worker,
            serve([worker]) as running,
            running.dial("omni_1") as busy,
        ):
            await talker(busy).prepare()
            asking = asyncio.create_task(ask(running))
            await until(lambda: len(running.gateway.queue) == 1)
            (ticket,) = running.gateway.queue.waiting()
            running.gateway.queue.cancel(ticket.ticket_id)
            answer = await asking

        assert (answer.status_code, answer.json()["slug"]) == (503, "ticket_cancelled")

    async def test_no_worker_is_a_503(self, serve, until, monkeypatch):
        monkeypatch.setattr(pool, "RESTART_GRACE_S", 0.0)
        worker = ScriptedWorker(script=Script(worker_status="error"))
        async with worker, serve([worker], ready=False) as running:
            await until(lambda: running.gateway.pool.workers[0].status == "error")
            answer = await ask(running)

        assert (answer.status_code, answer.json()["slug"]) == (503, "no_worker")

    async def test_an_app_that_is_switched_off_is_a_403(self, serve):
        async with ScriptedWorker() as worker, serve([worker]) as running:
            apps = running.gateway.apps
            apps.switch(apps.find("turnbased"), enabled=False)
            answer = await ask(running)

        assert answer.status_code == 403
        assert answer.json() == {
            "detail": "Turn-based Chat is currently disabled",
            "slug": "app_disabled",
        }

    async def test_a_dying_worker_is_a_502(self, serve, until):
        async with ScriptedWorker(script=slow()) as worker, serve([worker]) as running:
            asking = asyncio.create_task(ask(running))
            await until(lambda: worker.sessions and worker.sessions[0].commands)
            await worker.die()
            answer = await asking

        assert (answer.status_code, answer.json()["slug"]) == (502, "worker_lost")

    async def test_a_worker_that_never_answers_is_a_504(self, serve, monkeypatch, until):
        monkeypatch.setattr(question, "WORKER_SLACK_S", 0.0)
        config = Config.model_validate({"service": {"request_timeout": 0.2}})
        async with ScriptedWorker(script=slow()) as worker, serve([worker], config) as running:
            answer = await ask(running)
            await until(lambda: worker.n_live == 0)

        assert (answer.status_code, answer.json()["slug"]) == (504, "session_timeout")
        assert isinstance(worker.sessions[0].commands[-1], Stop)

    async def test_a_client_that_leaves_stops_its_answer(self, serve, until):
        async with ScriptedWorker(script=slow()) as worker, serve([worker]) as running:
            leave = await self.ask_raw(running)
            await until(lambda: worker.sessions and worker.sessions[0].commands)

            leave()

            await until(lambda: worker.n_live == 0)
            assert isinstance(worker.sessions[0].commands[-1], Stop)
            await until(lambda: not running.gateway.sessions)

    async def test_a_client_that_leaves_the_queue_costs_no_worker(self, serve, talker, until):
        async with (
            ScriptedWorker() as worker,
            serve([worker]) as running,
            running.dial("omni_1") as busy,
        ):
            await talker(busy).prepare()
            leave = await self.ask_raw(running)
            await until(lambda: len(running.gateway.queue) == 1)

            leave()

            await until(lambda: len(running.gateway.queue) == 0)
            assert worker.n_opens == 1

    async def ask_raw(self, running: Any) -> Any:
        """Send a whole request; what is returned closes the connection."""
        body = json.dumps(HELLO).encode()
        _, writer = await asyncio.open_connection("127.0.0.1", running.port)
        head = f"POST /api/chat HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        await writer.drain()

        def leave() -> None:
            writer.get_extra_info("socket").shutdown(sockets.SHUT_RDWR)
            writer.close()

        return leave

    async def test_shutdown_is_told(self, serve, until):
        async with ScriptedWorker(script=slow()) as worker:
            async with serve([worker]) as running:
                asking = asyncio.create_task(ask(running))
                await until(lambda: worker.sessions and worker.sessions[0].commands)
            answer = await asking

        assert (answer.status_code, answer.json()["slug"]) == (503, "server_shutdown")

    async def test_a_client_has_as_many_requests_as_sessions(self, serve, talker):
        config = Config.model_validate({"security": {"max_sessions_per_client": 1}})
        async with (
            ScriptedWorker() as worker,
            serve([worker], config) as running,
            running.dial("omni_1") as busy,
        ):
            await talker(busy).prepare()
            answer = await ask(running)

        assert (answer.status_code, answer.json()["slug"]) == (429, "too_many_sessions")

    async def test_bodies_count_as_held_input(self, serve, monkeypatch, until):
        monkeypatch.setattr(inbox, "MAX_HELD_BYTES_IN_ALL", 100_000)
        monkeypatch.setattr(inbox, "OWN_SHARE_BYTES", 1000)
        item = {"type": "image", "data": base64.b64encode(bytes(120_000)).decode()}
        async with ScriptedWorker() as worker, serve([worker]) as running:
            answer = await ask(running, {"messages": [{"role": "user", "content": [item]}]})

            assert (answer.status_code, answer.json()["slug"]) == (503, "media_full")
            await until(lambda: running.gateway.held.total == 0)


async def test_chat_answers_teach_how_long_chats_are(serve, talker, until):
    """W21: they were labelled with a type that nobody estimated."""
    async with ScriptedWorker() as worker, serve([worker]) as running:
        await ask(running)
        async with running.dial_path("/ws/chat") as socket:
            await socket.send(json.dumps(HELLO))
            await talker(socket).closed()

        learned = running.gateway.durations.learned
        await until(lambda: learned["chat"].n_samples == 2)
        assert learned["chat"].mean_s < 5
        answers = "omni_gateway_answers_total"
        registry = running.gateway.metrics.registry
        assert registry.get_sample_value(answers, {"mode": "chat"}) == 2
        assert running.gateway.pool.n_ready == 1


async def test_a_failed_question_teaches_nothing(serve, until):
    script = Script(chat=lambda _: [Failure("bad_image", "no", 1000)])
    async with ScriptedWorker(script=script) as worker, serve([worker]) as running:
        await ask(running)
        await until(lambda: not running.gateway.background)

        assert running.gateway.durations.learned["chat"].n_samples == 0
        assert running.gateway.pool.n_ready == 1
