"""Clients of half duplex and of chat that end in every way a client can."""

from __future__ import annotations

import asyncio
import json
from typing import Any, ClassVar

import numpy as np

from shared.limits import INPUT_SAMPLE_RATE_HZ as RATE
from shared.limits import MAX_CHUNK_S
from tests.faults.clients import Caller, Target, chunk_of, holding_slots

MAX_NEW_TOKENS = 48
"""Of a chat answer: long enough to be left in the middle."""


class TurnCaller(Caller):
    """A half-duplex client."""

    path: ClassVar[str] = "/ws/half_duplex/{session_id}"
    prefix: ClassVar[str] = "hdx"

    async def prepare(self, prompt: str | None = None) -> dict[str, Any]:
        text = {"type": "text", "text": prompt or self.target.prompt}
        await self.say("prepare", system_content=[text])
        return await self.hear("prepared")

    async def ask(self) -> bool:
        """Say a turn; True once its answer has begun, False if it was not taken for a turn."""
        for audio in self.target.turn:
            await self.chunk(audio)
        try:
            async with asyncio.timeout(self.target.turn_patience_s):
                await self.hear("chunk")
        except TimeoutError:
            return False
        return True


class ChatCaller(Caller):
    """A chat client."""

    path: ClassVar[str] = "/ws/chat"

    async def request(self, question: str = "Tell me about the sea.", **fields: Any) -> None:
        await self.socket.send(json.dumps(question_of(question, **fields)))

    async def asked(self) -> None:
        """Ask, and wait until the answer has begun."""
        await self.request()
        await self.hear("chunk")


def question_of(text: str, **fields: Any) -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": text}],
        "generation": {"max_new_tokens": MAX_NEW_TOKENS},
        "tts": {"enabled": True},
        "queue_events": True,
        **fields,
    }


# ---- half duplex


async def turns_stopped(target: Target) -> None:
    async with TurnCaller.live(target) as caller:
        if await caller.ask():
            await caller.hear("turn_done")
        assert await caller.stop() == 1000


async def turns_stopped_in_mid_answer(target: Target) -> None:
    async with TurnCaller.live(target) as caller:
        await caller.ask()
        assert await caller.stop() == 1000


async def turns_closed_in_mid_answer(target: Target) -> None:
    async with TurnCaller.live(target) as caller:
        await caller.ask()
        await caller.socket.close()


async def turns_killed_in_mid_answer(target: Target) -> None:
    async with TurnCaller.live(target) as caller:
        await caller.ask()
        caller.vanish()


async def turns_reset_in_mid_question(target: Target) -> None:
    async with TurnCaller.live(target) as caller:
        for audio in target.turn[:-2]:
            await caller.chunk(audio)
        caller.begin_frame()
        caller.reset()


async def turns_interrupted_then_stopped(target: Target) -> None:
    async with TurnCaller.live(target) as caller:
        await caller.ask()
        await caller.say("interrupt")
        await caller.hear("interrupted")
        assert await caller.stop() == 1000


async def turns_killed_while_the_worker_prefills(target: Target) -> None:
    async with TurnCaller.open(target) as caller:
        await caller.hear("queue_done")
        text = {"type": "text", "text": target.slow_prompt}
        await caller.say("prepare", system_content=[text])
        await asyncio.sleep(0.02)
        caller.reset()


async def turns_sent_garbage(target: Target) -> None:
    async with TurnCaller.live(target) as caller:
        await caller.socket.send("[no json" + "x" * target.rng.randrange(1000))
        assert await caller.last_word() == ("not_json", 1007)


async def turns_sent_bad_messages_then_stopped(target: Target) -> None:
    """Among them a chunk of more sound than one may hold."""
    async with TurnCaller.live(target) as caller:
        over_long = chunk_of(np.zeros(round((MAX_CHUNK_S + 1) * RATE), np.float32))
        for audio in ("?", "AAA=", over_long):
            await caller.chunk(audio)
        await caller.say("no such type")
        for _ in range(4):
            answer = json.loads(await caller.socket.recv())
            assert answer["type"] == "error", answer
        assert await caller.stop() == 1000


async def turns_announced_an_over_long_message(target: Target) -> None:
    async with TurnCaller.live(target) as caller:
        caller.announce_too_much()
        assert await caller.last_word() == ("frame_too_large", 1009)


async def turns_killed_while_queued(target: Target) -> None:
    async with holding_slots(target, target.n_slots), TurnCaller.open(target) as caller:
        await caller.hear("queued")
        caller.vanish()


async def turns_stopped_while_queued(target: Target) -> None:
    async with holding_slots(target, target.n_slots), TurnCaller.open(target) as caller:
        await caller.hear("queued")
        assert await caller.stop() == 1000


# ---- chat


async def chat_answered(target: Target) -> None:
    async with ChatCaller.open(target) as caller:
        await caller.request()
        assert await caller.last_word() == ("done", 1000)


async def chat_closed_in_mid_answer(target: Target) -> None:
    async with ChatCaller.open(target) as caller:
        await caller.asked()
        await caller.socket.close()


async def chat_killed_in_mid_answer(target: Target) -> None:
    async with ChatCaller.open(target) as caller:
        await caller.asked()
        caller.vanish()


async def chat_killed_at_once(target: Target) -> None:
    async with ChatCaller.open(target) as caller:
        await caller.request()
        await asyncio.sleep(target.rng.choice((0.0, 0.001, 0.01)))
        caller.reset()


async def chat_killed_before_it_asks(target: Target) -> None:
    async with ChatCaller.open(target) as caller:
        caller.vanish()


async def chat_asked_twice(target: Target) -> None:
    """The second request is refused, which does not hurt the answer to the first."""
    async with ChatCaller.open(target) as caller:
        await caller.asked()
        await caller.request("And the sky?")
        assert await caller.last_word() == ("done", 1000)


async def chat_sent_garbage(target: Target) -> None:
    async with ChatCaller.open(target) as caller:
        await caller.socket.send("[no json" + "x" * target.rng.randrange(1000))
        assert await caller.last_word() == ("not_json", 1007)


async def chat_sent_a_bad_request(target: Target) -> None:
    async with ChatCaller.open(target) as caller:
        await caller.socket.send(json.dumps({"messages": []}))
        assert await caller.last_word() == ("bad_message", 1000)


async def chat_announced_an_over_long_message(target: Target) -> None:
    async with ChatCaller.open(target) as caller:
        caller.announce_too_much()
        assert await caller.last_word() == ("frame_too_large", 1009)


async def chat_given_up_over_http(target: Target) -> None:
    body = json.dumps(question_of("Tell me about the sky.")).encode()
    head = (
        f"POST /api/chat HTTP/1.1\r\nHost: 127.0.0.1:{target.port}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    _, writer = await asyncio.open_connection("127.0.0.1", target.port)
    writer.write(head.encode() + body)
    await writer.drain()
    await asyncio.sleep(target.rng.choice((0.0, 0.01, 0.1)))
    writer.transport.abort()


async def chat_killed_while_queued(target: Target) -> None:
    async with holding_slots(target, target.n_slots), ChatCaller.open(target) as caller:
        await caller.request()
        await caller.hear("queued")
        caller.vanish()


async def chat_closed_while_queued(target: Target) -> None:
    async with holding_slots(target, target.n_slots), ChatCaller.open(target) as caller:
        await caller.request()
        await caller.hear("queued")
        await caller.socket.close()
