"""A small server that speaks the G0 dialect: hears by loudness, answers with a tone.

It stands in for gateway and worker where only the client's side is under test: the page and
`DuplexClient`. A stretch of loud chunks counts as a question; the first quiet chunk after it
starts an answer of `ANSWER_UNITS` seconds; loud sound during the answer interrupts it.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import uvicorn
from fastapi import FastAPI, WebSocket, WebSocketDisconnect

from tests.fakes.page_routes import PageData, page_routes
from tests.fakes.turn_sockets import HalfDuplex, TurnScenario, answer_chat

LOUD_RMS = 0.01
ANSWER_UNITS = 3
WORDS = ("The capital of France ", "is Paris, a city ", "on the Seine.")


@dataclass
class Scenario:
    """What the server does out of the ordinary, and what it has seen."""

    queue: list[dict[str, Any]] = field(default_factory=list)
    stays_queued: bool = False
    answer_units: int = ANSWER_UNITS
    unit_audio_s: float = 1.0
    refuse_with: str | None = None
    ignored: list[str] = field(default_factory=list)
    prepare_error: str | None = None
    bad_chunk: int | None = None
    """The chunk (from 1) that is answered with an error; the session goes on."""
    close_after_chunks: int | None = None
    says_why: bool = True
    recording: str | None = None
    pages: PageData = field(default_factory=PageData)
    turns: TurnScenario = field(default_factory=TurnScenario)
    session_ids: list[str] = field(default_factory=list)
    received: list[dict[str, Any]] = field(default_factory=list, repr=False)
    authorization: list[str | None] = field(default_factory=list)

    def prepared(self) -> dict[str, Any]:
        if self.prepare_error is not None:
            return {"type": "error", "error": self.prepare_error, "slug": "bad_audio"}
        message = {"type": "prepared", "prompt_length": 28, "ignored": self.ignored}
        return (
            message
            if self.recording is None
            else message | {"recording_session_id": self.recording}
        )

    def of_type(self, kind: str) -> list[dict[str, Any]]:
        return [message for message in self.received if message["type"] == kind]


class Brain:
    """Turns chunks into results."""

    def __init__(self, scenario: Scenario) -> None:
        self._n_units = scenario.answer_units
        self._audio_s = scenario.unit_audio_s
        self._unit = 0
        self._heard_speech = False
        self._answer_left = 0

    def step(self, chunk: dict[str, Any]) -> dict[str, Any]:
        samples = np.frombuffer(base64.b64decode(chunk["audio_base64"]), "<f4")
        loud = bool(samples.size) and float(np.sqrt(np.mean(samples**2))) > LOUD_RMS
        self._unit += 1
        if self._answer_left and (loud or chunk.get("force_listen")):
            self._answer_left = 0
            self._heard_speech = loud
            return self._result(is_listen=True, interrupted=True, heard="Wait." if loud else "")
        if self._answer_left:
            return self._speak()
        if loud:
            self._heard_speech = True
            return self._result(is_listen=True)
        if self._heard_speech:
            self._heard_speech = False
            self._answer_left = self._n_units
            return self._speak() | {"heard": "What is the capital of France?"}
        return self._result(is_listen=True)

    def _speak(self) -> dict[str, Any]:
        n = np.arange(round(self._audio_s * 24_000))
        tone = (0.2 * np.sin(2 * np.pi * 440 * n / 24_000)).astype("<f4")
        text = WORDS[(self._n_units - self._answer_left) % len(WORDS)]
        self._answer_left -= 1
        return self._result(
            is_listen=False,
            text=text,
            audio_data=base64.b64encode(tone.tobytes()).decode(),
            end_of_turn=self._answer_left == 0,
        )

    def _result(self, **values: Any) -> dict[str, Any]:
        return {
            "type": "result",
            "is_listen": True,
            "text": "",
            "audio_data": None,
            "end_of_turn": False,
            "current_time": self._unit,
            "wall_clock_ms": 120.0 if values["is_listen"] else 430.0,
            "cost_all_ms": 100.0,
            "kv_cache_length": 40 * self._unit,
            "n_tokens": 0,
            "n_tts_tokens": 0,
            "vision_slices": 0,
            "vision_tokens": 0,
            "server_send_ts": 0.0,
        } | values


BAD_CHUNK = {"type": "error", "error": "the audio is damaged", "slug": "bad_audio"}
REPLIES = {"pause": "paused", "resume": "resumed", "interrupt": "interrupted", "stop": "stopped"}


def make_app(scenario: Scenario) -> FastAPI:
    app = FastAPI()

    app.include_router(page_routes(scenario.pages))

    @app.websocket("/ws/duplex/{session_id}")
    async def duplex(socket: WebSocket, session_id: str) -> None:
        scenario.authorization.append(socket.headers.get("authorization"))
        scenario.session_ids.append(session_id)
        await socket.accept()
        # A peer that goes away without a goodbye is part of every test.
        with contextlib.suppress(WebSocketDisconnect, RuntimeError):
            await converse(socket, scenario)

    @app.websocket("/ws/half_duplex/{session_id}")
    async def half_duplex(socket: WebSocket, session_id: str) -> None:
        scenario.session_ids.append(session_id)
        await socket.accept()
        with contextlib.suppress(WebSocketDisconnect, RuntimeError):
            await HalfDuplex(socket, scenario.turns).converse(scenario.received.append)

    @app.websocket("/ws/chat")
    async def chat(socket: WebSocket) -> None:
        await socket.accept()
        with contextlib.suppress(WebSocketDisconnect, RuntimeError):
            await answer_chat(socket, scenario.turns)

    return app


async def converse(socket: WebSocket, scenario: Scenario) -> None:
    if scenario.refuse_with is not None:
        await socket.send_json(
            {"type": "error", "error": scenario.refuse_with, "slug": "no_worker"}
        )
        await socket.close(1013, scenario.refuse_with)
        return
    for message in scenario.queue:
        await socket.send_json(message)
    if scenario.stays_queued:
        await socket.receive_json()
        await socket.receive()
        return
    await socket.send_json({"type": "queue_done"})
    brain, n_chunks = Brain(scenario), 0
    while True:
        message = await socket.receive_json()
        scenario.received.append(message)
        match message["type"]:
            case "prepare":
                await socket.send_json(scenario.prepared())
            case "audio_chunk":
                n_chunks += 1
                is_bad = n_chunks == scenario.bad_chunk
                await socket.send_json(BAD_CHUNK if is_bad else brain.step(message))
                if n_chunks == scenario.close_after_chunks:
                    await lose(socket, scenario)
                    return
            case "stop":
                await socket.send_json({"type": "stopped"})
                await socket.close(1000)
                return
            case kind if kind in REPLIES:
                await socket.send_json({"type": REPLIES[kind], "timeout": 60.0})


async def lose(socket: WebSocket, scenario: Scenario) -> None:
    if scenario.says_why:
        await socket.send_json({"type": "error", "error": "worker lost", "slug": "worker_lost"})
    await socket.close(1011, "worker lost")


class Service:
    """The fake server on a free port, in a thread of its own."""

    def __init__(self, scenario: Scenario, certificate: tuple[Path, Path] | None) -> None:
        certfile, keyfile = certificate or (None, None)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        config = uvicorn.Config(
            make_app(scenario),
            log_level="warning",
            lifespan="off",
            ws="websockets-sansio",
            ssl_certfile=certfile,
            ssl_keyfile=keyfile,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._serve, daemon=True)

    @property
    def http_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def ws_url(self) -> str:
        return f"ws://127.0.0.1:{self.port}"

    def _serve(self) -> None:
        asyncio.run(self._server.serve([self._listener]))

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join(timeout=10)
        self._listener.close()


@contextlib.contextmanager
def serving(scenario: Scenario, certificate: tuple[Path, Path] | None = None) -> Iterator[Service]:
    """A running server; with a certificate (file, key file) it speaks TLS."""
    service = Service(scenario, certificate)
    service.start()
    try:
        yield service
    finally:
        service.stop()
