"""What a client that has everything it asked for is told when its worker then breaks."""

from __future__ import annotations

import json

import pytest

from tests.fakes.scripted_worker import ScriptedWorker

ASK = json.dumps({"messages": [{"role": "user", "content": "Where is Paris?"}]})


@pytest.mark.parametrize("path", ["/ws/duplex/omni_a", "/ws/half_duplex/hdx_a", "/ws/chat"])
async def test_a_worker_that_breaks_while_it_cleans_up_is_no_error_of_the_session(
    serve, talker, path
):
    """`stopped` or `done` was followed by an error and 1011."""
    async with ScriptedWorker() as worker, serve([worker]) as running:
        worker.may_clean.clear()
        async with running.dial_path(path) as socket:
            client = talker(socket)
            if path == "/ws/chat":
                await socket.send(ASK)
                await client.hear_kind("done")
            else:
                await client.prepare()
                await client.say("stop")
                await client.hear_kind("stopped")
            worker.sessions[0].connection.transport.abort()
            worker.may_clean.set()

            rest = [frame async for frame in socket]
            assert (rest, await client.closed()) == ([], 1000)
