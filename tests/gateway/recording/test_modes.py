"""Every mode from the client's first message to the recording that its page shows."""

from __future__ import annotations

import base64
import io
import json
import struct

import pytest
from PIL import Image

from shared.config import Config, RecordingConfig, ServiceConfig
from shared.protocol import Delta, Generating
from tests.fakes.scripted_worker import WORDS, Script, ScriptedWorker, speak
from tests.gateway.recording.conftest import PATIENCE_S

LOUD = base64.b64encode(struct.pack("<4f", *[0.5] * 4) * 2000).decode()


@pytest.fixture
def config(tmp_path):
    service = ServiceConfig(data_dir=str(tmp_path / "data"))
    return Config(service=service, recording=RecordingConfig(enabled=True))


async def finished(running, until, recording_id):
    """What the service tells of a recording once it is finished."""
    folder = running.gateway.recordings.store.root / recording_id
    await until(lambda: (folder / "recording.json").exists(), PATIENCE_S)
    async with running.client() as http:
        meta = (await http.get(f"/api/sessions/{recording_id}")).json()
        body = (await http.get(f"/api/sessions/{recording_id}/recording")).json()
        page = await http.get(f"/s/{recording_id}")
        names = [
            name
            for entry in body.get("chunks", []) + body.get("turns", [])
            for part in (entry, *entry.values())
            if isinstance(part, dict)
            for key, name in part.items()
            if key in {"audio", "user_audio", "ai_audio", "user_frame"}
        ]
        for name in names:
            head = await http.head(f"/api/sessions/{recording_id}/assets/{name}")
            assert head.status_code == 200, name
    assert page.status_code in {200, 404}, "404: no page of ours yet"
    return meta, body, names


async def test_full_duplex(serve, talker, until, config):
    file = io.BytesIO()
    Image.new("RGB", (64, 48), "blue").save(file, "JPEG")
    frame = base64.b64encode(file.getvalue()).decode()
    async with (
        ScriptedWorker(script=Script(answer=speak)) as worker,
        serve([worker], config) as running,
    ):
        async with running.dial("omni_1") as socket:
            client = talker(socket)
            prepared = await client.prepare(system_prompt="Be brief.")
            assert running.gateway.recordings.live == {prepared["recording_session_id"]}
            for _ in range(2):
                await client.chunk(frame_base64_list=[frame])
                await client.hear_kind("result")
            await client.say("stop")
            await client.hear_kind("stopped")

        meta, body, names = await finished(running, until, prepared["recording_session_id"])

    assert (meta["app_type"], body["mode"], body["end_reason"]) == (
        "omni_duplex",
        "duplex",
        "stopped",
    )
    assert meta["client_session_id"] == "omni_1"
    assert body["config"]["system_prompt"] == "Be brief."
    assert [chunk["result"]["text"] for chunk in body["chunks"]] == ["word"] * 2
    assert (body["merged_replay"], body["merged_replay_video"]) == (
        "merged_replay.wav",
        "merged_replay.mp4",
    )
    assert len(names) == 6


async def test_half_duplex(serve, talker, until, config):
    async with ScriptedWorker() as worker, serve([worker], config) as running:
        async with running.dial_path("/ws/half_duplex/hdx_1") as socket:
            client = talker(socket)
            await client.say("prepare", system_content=[{"type": "text", "text": "Be kind."}])
            prepared = await client.hear_kind("prepared")
            await client.chunk(audio_base64=LOUD)
            await client.hear_kind("turn_done")
            await client.say("stop")
            await client.closed()

        meta, body, names = await finished(running, until, prepared["recording_session_id"])

    assert (meta["app_type"], body["mode"]) == ("half_duplex_audio", "half_duplex_audio")
    (turn,) = body["turns"]
    assert turn["output"]["text"] == "".join(WORDS)
    assert turn["input"]["text"] == "What is the capital of France?"
    assert len(names) == 2


@pytest.mark.parametrize("is_http", [True, False])
async def test_chat(serve, until, config, is_http):
    ask = {
        "messages": [
            {
                "role": "user",
                "content": [{"type": "text", "text": "Hi"}, {"type": "audio", "data": LOUD}],
            }
        ],
        "tts": {"enabled": True},
    }
    async with ScriptedWorker() as worker, serve([worker], config) as running:
        if is_http:
            async with running.client() as http:
                done = (await http.post("/api/chat", json=ask)).json()
        else:
            async with running.dial_path("/ws/chat") as socket:
                await socket.send(json.dumps(ask))
                async for frame in socket:
                    done = json.loads(frame)

        meta, body, names = await finished(running, until, done["recording_session_id"])

    assert (meta["app_type"], body["mode"]) == ("chat", "chat")
    (turn,) = body["turns"]
    assert (turn["input"]["text"], turn["output"]["text"]) == ("Hi", "".join(WORDS))
    assert len(names) == 2


class TestLostWorker:
    """The recording says how the session ended, and where."""

    async def test_full_duplex(self, serve, talker, until, config):
        async with (
            ScriptedWorker(script=Script(answer=speak)) as worker,
            serve([worker], config) as running,
        ):
            async with running.dial("omni_1") as socket:
                client = talker(socket)
                prepared = await client.prepare()
                await client.chunk()
                await client.hear_kind("result")
                # Its turn is open: the last chunk is where it broke off.
                await worker.die()
                assert (await client.hear_kind("error"))["slug"] == "worker_lost"
            _, body, _ = await finished(running, until, prepared["recording_session_id"])

        assert body["end_reason"] == "worker_lost"
        assert [chunk.get("error") for chunk in body["chunks"]] == ["worker_lost"]

    async def test_half_duplex(self, serve, talker, until, config):
        script = Script(turn=lambda _: [Generating(500.0), Delta(0, "Well, ")])
        async with (
            ScriptedWorker(script=script) as worker,
            serve([worker], config) as running,
        ):
            async with running.dial_path("/ws/half_duplex/hdx_1") as socket:
                client = talker(socket)
                prepared = await client.prepare()
                await client.chunk(audio_base64=LOUD)
                await client.hear_kind("generating")
                await worker.die()
                assert (await client.hear_kind("error"))["slug"] == "worker_lost"
            _, body, _ = await finished(running, until, prepared["recording_session_id"])

        assert body["end_reason"] == "worker_lost"
        assert [turn.get("error") for turn in body["turns"]] == ["worker_lost"]

    async def test_chat(self, serve, until, config):
        script = Script(piece_delay_s=10.0)
        async with (
            ScriptedWorker(script=script) as worker,
            serve([worker], config) as running,
        ):
            async with running.dial_path("/ws/chat") as socket:
                ask = {"messages": [{"role": "user", "content": "Hi"}]}
                await socket.send(json.dumps(ask))
                await until(lambda: running.gateway.recordings.live)
                (recording_id,) = running.gateway.recordings.live
                await worker.die()
                await socket.wait_closed()
            _, body, _ = await finished(running, until, recording_id)

        assert body["end_reason"] == "worker_lost"
        assert [turn.get("error") for turn in body["turns"]] == ["worker_lost"]


async def test_an_id_that_is_used_again_and_a_second_prepare_lose_no_recording(
    serve, talker, until, config
):
    """W30: the client's id was that of the recording, and a second prompt began it anew."""
    recorded = []
    async with ScriptedWorker() as worker, serve([worker], config) as running:
        for n_prompts in (2, 1):
            async with running.dial_path("/ws/half_duplex/hdx_same") as socket:
                client = talker(socket)
                for _ in range(n_prompts):
                    prepared = await client.prepare()
                    recorded.append(prepared["recording_session_id"])
                    await client.chunk(audio_base64=LOUD)
                    await client.hear_kind("turn_done")
                await client.say("stop")
                await client.closed()
        first, again, second = recorded
        n_turns = [
            len((await finished(running, until, each))[1]["turns"]) for each in (first, second)
        ]

    assert first == again != second
    assert n_turns == [2, 1]
