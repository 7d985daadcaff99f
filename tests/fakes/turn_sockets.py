"""The sockets of half-duplex sessions and of chat, answered by a script."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from fastapi import WebSocket, WebSocketDisconnect

LOUD_RMS = 0.01
PIECES = ("The capital ", "of France ", "is Paris.")
QUESTION = "What is the capital of France?"


def tone(duration_s: float) -> str:
    n = np.arange(round(duration_s * 24_000))
    return base64.b64encode((0.2 * np.sin(n / 9)).astype("<f4").tobytes()).decode()


def rms(message: dict[str, Any]) -> float:
    samples = np.frombuffer(base64.b64decode(message["audio_base64"]), "<f4")
    return float(np.sqrt(np.mean(samples**2))) if samples.size else 0.0


@dataclass
class TurnScenario:
    """How turns and chat are answered, and what has been asked."""

    piece_audio_s: float = 0.3
    recording: str | None = "rec_1"
    waits_before_piece: int | None = None
    """The piece (from 0) before which the answer stops until the client acts."""
    prepare_error: str | None = None
    """Half duplex: what a prompt is refused with."""
    chat_error: str | None = None
    chat_queue: list[dict[str, Any]] = field(default_factory=list)
    """Places that a chat request is told; it never gets its turn then."""
    questions: list[dict[str, Any]] = field(default_factory=list, repr=False)
    is_answering: bool = False
    n_lost: int = 0
    """Chat connections that the client closed in the middle of an answer."""

    def recorded(self) -> dict[str, str]:
        return {} if self.recording is None else {"recording_session_id": self.recording}

    def prepared(self) -> dict[str, Any]:
        if self.prepare_error is not None:
            return {"type": "error", "error": self.prepare_error, "slug": "bad_message"}
        return {"type": "prepared", "timeout_s": 300, "ignored": []} | self.recorded()


class HalfDuplex:
    """A stretch of loud chunks is a turn; the first quiet chunk after it ends it."""

    def __init__(self, socket: WebSocket, scenario: TurnScenario) -> None:
        self._socket = socket
        self._scenario = scenario
        self._n_loud = 0
        self._turn = 0
        self._answer: asyncio.Task[None] | None = None

    async def converse(self, note: Callable[[dict[str, Any]], None]) -> None:
        await self._socket.send_json({"type": "queue_done"})
        while True:
            message = await self._socket.receive_json()
            note(message | {"while_answering": self._scenario.is_answering})
            match message["type"]:
                case "prepare":
                    await self._socket.send_json(self._scenario.prepared())
                case "audio_chunk":
                    await self._hear(message)
                case "interrupt":
                    await self._cut()
                case "stop":
                    await self._socket.send_json({"type": "stopped"})
                    await self._socket.close(1000)
                    return

    async def _hear(self, message: dict[str, Any]) -> None:
        if self._answer is not None:
            return
        if rms(message) > LOUD_RMS:
            if not self._n_loud:
                await self._socket.send_json({"type": "vad_state", "speaking": True})
            self._n_loud += 1
        elif self._n_loud:
            await self._socket.send_json({"type": "vad_state", "speaking": False})
            await self._socket.send_json(
                {"type": "generating", "speech_duration_ms": 500 * self._n_loud}
            )
            self._n_loud = 0
            self._answer = asyncio.create_task(self._say())

    async def _say(self) -> None:
        self._scenario.is_answering = True
        for i, text in enumerate(PIECES):
            if i == self._scenario.waits_before_piece:
                await asyncio.Event().wait()
            await self._socket.send_json(
                {
                    "type": "chunk",
                    "chunk_index": i,
                    "text_delta": text,
                    "audio_data": tone(self._scenario.piece_audio_s),
                    "audio_sample_rate": 24_000,
                    "is_final": False,
                    "duration_ms": 1000 * self._scenario.piece_audio_s,
                }
            )
        await self._done()

    async def _done(self) -> None:
        self._scenario.is_answering = False
        self._answer = None
        self._turn += 1
        await self._socket.send_json(
            {"type": "turn_done", "turn_index": self._turn, "text": "", "heard": QUESTION}
        )

    async def _cut(self) -> None:
        if self._answer is None:
            return
        self._answer.cancel()
        await self._socket.send_json({"type": "interrupted"})
        await self._done()


async def answer_chat(socket: WebSocket, scenario: TurnScenario) -> None:
    question = await socket.receive_json()
    scenario.questions.append(question)
    if scenario.chat_error is not None:
        await socket.send_json(
            {"type": "error", "error": scenario.chat_error, "slug": "queue_full"}
        )
        await socket.close(1000)
        return
    for message in scenario.chat_queue:
        await socket.send_json(message)
    if scenario.chat_queue:
        await _until_closed(socket, scenario)
        return
    await socket.send_json({"type": "prefill_done", "input_tokens": 12})
    speaks = question.get("tts", {}).get("enabled", False)
    for i, text in enumerate(PIECES):
        if i == scenario.waits_before_piece:
            await _until_closed(socket, scenario)
            return
        chunk = {"type": "chunk", "text_delta": text}
        if speaks:
            chunk["audio_data"] = tone(scenario.piece_audio_s)
        await socket.send_json(chunk)
    await socket.send_json(
        {"type": "done", "text": "".join(PIECES), "generated_tokens": 6, "input_tokens": 12}
        | scenario.recorded()
    )
    await socket.close(1000)


async def _until_closed(socket: WebSocket, scenario: TurnScenario) -> None:
    try:
        await socket.receive_json()
    except WebSocketDisconnect:
        scenario.n_lost += 1
