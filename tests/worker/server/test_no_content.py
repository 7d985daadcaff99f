"""The log of a worker says nothing of what is said, and a failing model does not fill it."""

import numpy as np
import pytest

from shared.logs import TRACE_PREFIX
from shared.protocol import DuplexSettings, Failure, Open, Prepare, Result, Stop
from tests.fakes.logs import written
from tests.fakes.model import UNIT_SAMPLES, FakeDuplexModel
from tests.fakes.session import LOUD, chunk
from tests.fakes.worker import FakeWorker
from worker.engine.contract import Emit, Op
from worker.models.contract import UnitResult

MARK = "xylophone"
SOUND = np.full(UNIT_SAMPLES, 0.62345678, np.float32)


class TalkingModel(FakeDuplexModel):
    """Quotes the user: in its answers, and in the errors of every unit after the first."""

    is_warm = False

    def unit(self, state, unit):
        yield Op("think", (state, unit))
        if unit.index and self.is_warm:
            raise KeyError(f"{state.prompts} {unit.audio}")
        yield Emit(UnitResult(False, text=MARK, audio=SOUND, heard=MARK))


@pytest.fixture
async def worker():
    model = TalkingModel()
    worker = await FakeWorker(model).start()
    model.is_warm = True
    yield worker
    await worker.close()


async def test_a_conversation_with_faults_leaves_no_word_and_no_sound_in_the_log(worker):
    with written() as log:
        peer = await worker.connect()
        await peer.send(
            Open("s", "duplex", "omni_duplex"),
            Prepare(f"say {MARK}", DuplexSettings(decode_mode=MARK)),
            chunk(0, SOUND),
            chunk(1, SOUND),
            chunk(2, SOUND, frames=[MARK.encode()]),
        )
        await peer.socket.send(MARK)
        await peer.socket.send(b"\x81" + MARK.encode())
        slugs = [(await peer.until(Failure)).slug for _ in range(4)]
        await peer.send(Stop())
        await peer.rest()
        text = log.getvalue()

    assert sorted(slugs) == ["bad_image", "bad_message", "bad_message", "model_fault"]
    assert "unit 1 failed" in text
    assert MARK not in text
    assert "0.6234" not in text


async def test_every_line_of_a_session_carries_its_id(worker):
    with written() as log:
        peer = await worker.session("omni_7")
        await peer.send(chunk(0, SOUND))
        await peer.until(Result)
        await peer.send(Stop())
        await peer.rest()
        lines = log.getvalue().splitlines()

    assert any("unit done" in line for line in lines)
    assert [line for line in lines if " session=omni_7 " not in line] == []


async def test_a_model_that_fails_on_every_unit_leaves_one_traceback(worker):
    """Each unit wrote up to three tracebacks."""
    with written() as log:
        peer = await worker.session()
        for seq in range(30):
            await peer.send(chunk(seq, LOUD))
            await peer.next()
        text = log.getvalue()

    assert text.count(f"{TRACE_PREFIX}KeyError") == 1
    assert "error=KeyError repeat=29" in text


async def test_a_reason_or_an_id_of_the_peer_begins_no_line(worker):
    forged = "bye\n2026-01-01 00:00:00,000 ERROR gateway root session=- all is lost"
    with written() as log:
        peer = await worker.session()
        await peer.send(Stop(forged))
        await peer.rest()
        other = await worker.connect()
        await other.send(Open(forged, "duplex", "omni_duplex"))
        await other.rest()
        lines = log.getvalue().splitlines()

    assert not any(line.startswith("2026-01-01") for line in lines)
