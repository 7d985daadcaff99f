"""What a recorder is told of sessions, and that it cannot hurt them."""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from gateway.tape import config_of
from shared.protocol import (
    Answered,
    Ask,
    Command,
    Event,
    Failure,
    Input,
    Prefilled,
    Prepare,
    Prepared,
    PrepareTurns,
    Result,
    Stop,
    TurnDone,
)
from tests.fakes.scripted_worker import Script, ScriptedWorker

LOUD = base64.b64encode(struct.pack("<4f", *[0.5] * 4)).decode()
VOICE = base64.b64encode(bytes(64)).decode()
HELLO = {"messages": [{"role": "user", "content": "Hello"}]}


@dataclass
class FakeRecording:
    recording_id: str
    request_type: str
    worker_id: int
    config: dict[str, Any]
    fails_at: str = ""
    commands: list[tuple[Command, float]] = field(default_factory=list)
    events: list[tuple[Event, float, float]] = field(default_factory=list)
    ends: list[str] = field(default_factory=list)

    def took(self, command: Command, arrived_at: float) -> None:
        self.fail("took")
        self.commands.append((command, arrived_at))

    def gave(self, event: Event, wall_clock_ms: float, at: float) -> None:
        self.fail("gave")
        self.events.append((event, wall_clock_ms, at))

    def end(self, reason: str) -> None:
        self.ends.append(reason)
        self.fail("end")

    def fail(self, where: str) -> None:
        if where == self.fails_at:
            raise OSError("the disk is gone")

    @property
    def kinds(self) -> list[type[Event]]:
        return [type(event) for event, _, _ in self.events]


@dataclass
class FakeRecorder:
    fails_at: str = ""
    records: bool = True
    recordings: list[FakeRecording] = field(default_factory=list)
    n_asked: int = 0

    def begin(
        self, session_id: str, request_type: str, worker_id: int, config: Mapping[str, Any]
    ) -> FakeRecording | None:
        self.n_asked += 1
        if self.fails_at == "begin":
            raise OSError("the disk is gone")
        if not self.records:
            return None
        name = f"rec_{session_id}_x"
        self.recordings.append(
            FakeRecording(name, request_type, worker_id, dict(config), self.fails_at)
        )
        return self.recordings[-1]


async def test_a_duplex_session_is_told_from_prepare_to_its_end(serve, talker, until):
    recorder = FakeRecorder()
    async with ScriptedWorker() as worker, serve([worker]) as running:
        running.gateway.recorder = recorder
        async with running.dial("omni_1") as socket:
            client = talker(socket)
            prepared = await client.prepare(system_prompt="Be kind.", config={"top_k": 3})
            await client.chunk(audio_base64=LOUD)
            await client.hear_kind("result")
            await client.say("stop")
            await client.closed()

        (recording,) = recorder.recordings
        await until(lambda: recording.ends)
        assert prepared["recording_session_id"] == "rec_omni_1_x"
        assert (recording.request_type, recording.worker_id) == ("omni_duplex", 0)
        assert recording.config["system_prompt"] == "Be kind."
        assert recording.config["top_k"] == 3
        assert [type(command) for command, _ in recording.commands] == [Prepare, Input, Stop]
        assert recording.kinds[:2] == [Prepared, Result]
        assert recording.ends == ["stopped"]
        (_, took_at), (_, wall_ms, gave_at) = recording.commands[1], recording.events[1]
        assert gave_at >= took_at
        assert wall_ms == pytest.approx((gave_at - took_at) * 1000, abs=50)


async def test_a_half_duplex_session_is_told(serve, talker, until):
    recorder = FakeRecorder()
    async with ScriptedWorker() as worker, serve([worker]) as running:
        running.gateway.recorder = recorder
        async with running.dial_path("/ws/half_duplex/hdx_1") as socket:
            client = talker(socket)
            prepared = await client.prepare(
                system_content=[
                    {"type": "text", "text": "Be kind."},
                    {"type": "audio", "data": VOICE},
                ]
            )
            await client.chunk(audio_base64=LOUD)
            await client.hear_kind("turn_done")

        (recording,) = recorder.recordings
        await until(lambda: recording.ends)
        assert prepared["recording_session_id"] == "rec_hdx_1_x"
        assert recording.request_type == "half_duplex_audio"
        assert recording.config["system_content"] == [{"type": "text", "text": "Be kind."}]
        assert [type(command) for command, _ in recording.commands] == [PrepareTurns, Input]
        assert recording.kinds[-1] is TurnDone
        assert recording.ends == ["client_gone"]


async def test_a_chat_is_told_on_its_socket(serve, talker, until):
    recorder = FakeRecorder()
    async with ScriptedWorker() as worker, serve([worker]) as running:
        running.gateway.recorder = recorder
        async with running.dial_path("/ws/chat") as socket:
            await socket.send(json.dumps(HELLO))
            done = await talker(socket).hear_kind("done")

        (recording,) = recorder.recordings
        await until(lambda: recording.ends)
        assert done["recording_session_id"] == recording.recording_id
        assert recording.request_type == "chat"
        assert [type(command) for command, _ in recording.commands] == [Ask]
        assert (recording.kinds[0], recording.kinds[-1]) == (Prefilled, Answered)
        assert recording.ends == ["stopped"]


async def test_a_chat_is_told_over_http(serve, until):
    recorder = FakeRecorder()
    async with ScriptedWorker() as worker, serve([worker]) as running:
        running.gateway.recorder = recorder
        async with running.client() as http:
            body = (await http.post("/api/chat", json=HELLO)).json()

        (recording,) = recorder.recordings
        assert body["recording_session_id"] == recording.recording_id
        assert recording.kinds == [Prefilled, Answered]
        assert recording.ends == ["stopped"]


async def test_a_failure_that_ends_a_session_is_its_end(serve, talker, until):
    recorder = FakeRecorder()

    def fail(chunk: Input) -> Failure:
        return Failure("engine_fault", "lost", 1011, chunk.seq)

    worker = ScriptedWorker(script=Script(answer=fail))
    async with worker, serve([worker]) as running:
        running.gateway.recorder = recorder
        async with running.dial() as socket:
            client = talker(socket)
            await client.prepare()
            await client.chunk()
            await client.closed()
        await until(lambda: recorder.recordings[0].ends)
        assert recorder.recordings[0].ends == ["engine_fault"]
        assert recorder.recordings[0].kinds == [Prepared, Failure]


async def test_a_session_that_is_never_prepared_is_not_recorded(serve, talker):
    recorder = FakeRecorder()
    async with ScriptedWorker() as worker, serve([worker]) as running:
        running.gateway.recorder = recorder
        async with running.dial() as socket:
            client = talker(socket)
            await client.chunk()
            await client.hear_kind("result")

    assert recorder.n_asked == 0


async def test_a_session_that_is_prepared_again_stays_one_recording(serve, talker):
    recorder = FakeRecorder()
    async with ScriptedWorker() as worker, serve([worker]) as running:
        running.gateway.recorder = recorder
        async with running.dial() as socket:
            client = talker(socket)
            await client.prepare()
            await client.prepare()

    assert len(recorder.recordings) == 1


async def test_a_recorder_may_record_nothing(serve, talker):
    recorder = FakeRecorder(records=False)
    async with ScriptedWorker() as worker, serve([worker]) as running:
        running.gateway.recorder = recorder
        async with running.dial() as socket:
            client = talker(socket)

            assert "recording_session_id" not in await client.prepare()
            await client.chunk()
            await client.hear_kind("result")

    assert recorder.n_asked == 1


@pytest.mark.parametrize("fails_at", ["begin", "took", "gave", "end"])
async def test_a_recorder_that_fails_ends_its_recording_and_nothing_else(
    serve, talker, until, caplog, fails_at
):
    recorder = FakeRecorder(fails_at)
    async with ScriptedWorker() as worker, serve([worker]) as running:
        running.gateway.recorder = recorder
        async with running.dial() as socket:
            client = talker(socket)
            await client.prepare()
            for _ in range(3):
                await client.chunk()
                await client.hear_kind("result")
            await client.say("stop")
            await client.hear_kind("stopped")
            assert await client.closed() == 1000

    logged = [r for r in caplog.records if "recording failed" in r.getMessage()]
    assert len(logged) == 1
    assert recorder.n_asked == 1
    assert [len(recording.ends) for recording in recorder.recordings] == (
        [] if fails_at == "begin" else [1]
    )


def test_a_configuration_holds_no_voice_and_no_media():
    commands = [
        Prepare("p", reference_voice=bytes(64)),
        PrepareTurns([]),
        Ask([], voice=bytes(64)),
    ]

    for command in commands:
        assert json.loads(json.dumps(config_of(command))) == config_of(command)
