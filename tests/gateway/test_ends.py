"""What a client that has everything it asked for is told when its worker then breaks."""

from __future__ import annotations

import asyncio
import json

import pytest

from gateway.offload import LargeFrames
from shared.protocol import Answered
from tests.fakes.patience import PATIENCE_S
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


async def test_an_answer_that_is_not_ready_yet_is_not_taken_for_given(serve, talker, until):
    """Its worker broke while it was made ready: the session ended without it and without a word."""
    async with ScriptedWorker() as worker, serve([worker]) as running:
        is_making = asyncio.Event()

        class Slow(LargeFrames):
            async def run(self, n_bytes, work, *args, **kwargs):
                if args and isinstance(args[0], Answered):
                    is_making.set()
                    await asyncio.Event().wait()
                return await super().run(n_bytes, work, *args, **kwargs)

        running.gateway.large = Slow()
        async with running.dial_path("/ws/chat") as socket:
            client = talker(socket)
            await socket.send(ASK)
            await asyncio.wait_for(is_making.wait(), PATIENCE_S)
            (lease,) = running.gateway.pool.workers[0].leases
            lease.lost.set()

            assert (await client.hear_kind("error"))["slug"] == "worker_lost"
            assert await client.closed() == 1011
