"""The gateway's log says nothing of what is said."""

import base64
import struct

import pytest

from shared.protocol import Failure, Input, Result
from tests.fakes.logs import written
from tests.fakes.scripted_worker import Script, ScriptedWorker

MARK = "xylophone"
SOUND = struct.pack("<4f", *[0.12345678] * 4)
TRACES = (MARK, "0.12345", base64.b64encode(SOUND).decode()[:12], repr(SOUND)[2:14])
"""What would give away words or sound."""


def tell(chunk: Input) -> Result | Failure:
    if chunk.seq == 1:
        return Failure("model_fault", f"cannot say {MARK}", None, chunk.seq)
    if chunk.seq == 2:
        return Result(99, True, 1)
    if chunk.seq == 3:
        return Failure("engine_fault", f"lost over {MARK}", 1011, chunk.seq)
    return Result(chunk.seq, False, 1, text=MARK, audio=SOUND, heard=MARK)


HOSTILE = [
    f'{{"type": "{MARK}"}}',
    f'["{MARK}"]',
    f'{{"type": "prepare", "config": {{"temperature": "{MARK}", "{MARK}": 1}}}}',
    f'{{"type": "prepare", "system_prompt": ["{MARK}"]}}',
    f'{{"type": "prepare", "ref_audio_path": "/{MARK}"}}',
    f'{{"type": "audio_chunk", "audio_base64": "{MARK}!"}}',
    f'{{"type": "audio_chunk", "frame_base64_list": "{MARK}"}}',
    f'{{"type": "client_diagnostic", "note": "{MARK}"}}',
]


async def test_a_conversation_with_faults_leaves_no_word_and_no_sound_in_the_log(serve, talker):
    audio = base64.b64encode(SOUND).decode()
    with written() as log:
        worker = ScriptedWorker(script=Script(answer=tell))
        async with worker, serve([worker]) as running, running.dial() as socket:
            client = talker(socket)
            await client.prepare(system_prompt=MARK)
            for frame in HOSTILE:
                await socket.send(frame)
            for _ in range(4):
                await client.chunk(audio_base64=audio)
            assert (await client.hear_kind("result"))["text"] == MARK
            assert await client.closed() == 1011
        text = log.getvalue()

    assert "ending=engine_fault" in text
    assert [trace for trace in TRACES if trace in text] == []


async def test_a_text_that_is_no_json_leaves_no_word_in_the_log(serve, talker):
    with written() as log:
        async with ScriptedWorker() as worker, serve([worker]) as running, running.dial() as socket:
            await socket.send(f'{{"{MARK}')
            assert await talker(socket).closed() == 1007
        text = log.getvalue()

    assert "ending=not_json" in text
    assert MARK not in text


@pytest.mark.parametrize("session_id", [f"{MARK}!", f"{MARK}%1b%20ERROR", f"..%2f{MARK}"])
async def test_an_id_that_is_refused_is_not_logged(serve, talker, session_id):
    with written() as log:
        async with (
            ScriptedWorker() as worker,
            serve([worker]) as running,
            running.dial(session_id) as socket,
        ):
            assert await talker(socket).closed() == 1008
        text = log.getvalue()

    assert "session refused slug=bad_session_id" in text
    assert MARK not in text


async def test_every_line_of_a_session_carries_its_id(serve, talker):
    with written() as log:
        async with (
            ScriptedWorker() as worker,
            serve([worker]) as running,
            running.dial("omni_7") as socket,
        ):
            client = talker(socket)
            await client.prepare()
            await client.say("stop")
            await client.closed()
        lines = log.getvalue().splitlines()

    for event in ("session opened", "session assigned", "session ended", "lease released"):
        (line,) = [line for line in lines if event in line]
        assert " session=omni_7 " in line
