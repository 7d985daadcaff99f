"""What sessions hold of the worker's media budget, from their chunks to their end."""

from __future__ import annotations

import gc
import io
from collections.abc import AsyncIterator

import pytest
from PIL import Image

from shared.protocol import Failure, Result
from tests.fakes.model import FakeDuplexModel
from tests.fakes.session import SILENT, Stage, chunk, eventually
from worker.sessions import media


def picture() -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (100, 100)).save(out, "PNG")
    return out.getvalue()


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    stage = Stage(FakeDuplexModel(), n_slots=1)
    yield stage
    await stage.close()


async def test_a_session_that_ended_holds_no_pictures(stage):
    """Its queue, tasks and tracebacks referred to each other, so its undecoded chunks stayed
    until some later garbage collection."""
    budget = stage.host.media.budget
    gc.disable()
    try:
        client = stage.client()
        await client.prepared()
        client.send(*(chunk(i, SILENT, frames=[picture(), b"junk"]) for i in range(14)))
        await eventually(lambda: budget.total > 0)
        client.disconnect()
        await client.code()

        await eventually(lambda: budget.total == 0)
    finally:
        gc.enable()


async def test_a_chunk_without_room_is_answered_in_its_turn(stage, monkeypatch):
    monkeypatch.setattr(media, "MAX_SESSION_MEDIA_BYTES", 20_000)
    monkeypatch.setattr(stage.host.media.budget, "_fair_share", 0)
    client = stage.client()
    await client.prepared()
    client.send(chunk(0), chunk(1, SILENT, frames=[picture()]), chunk(2))

    assert (await client.until(Result)).seq == 0
    refused = await client.next(Failure)
    assert (refused.slug, refused.seq, refused.close_code) == ("media_full", 1, None)
    assert (await client.next(Result)).seq == 2
    client.disconnect()
    await client.code()
