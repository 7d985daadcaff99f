"""Pacing on a clock that only moves when somebody sleeps or a send takes time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from functools import partial

import numpy as np
import pytest

from client import paced
from client.duplex import SessionError
from client.events import Closed, Event, parse_event
from client.journal import Journal
from client.paced import LoopProbe, pace, stream
from shared.audio import Samples

CHUNK = (np.zeros(16, np.float32), ())
LISTENED = parse_event('{"type": "result", "is_listen": true}')
assert LISTENED is not None


class FakeSession:
    """Its answers carry stamps of the fake clock, whenever they are read."""

    def __init__(self) -> None:
        self.now = 100.0
        self.sent_at = self.received_at = 0.0
        self.oversleeps_s = 0.0
        self.send_takes_s = 0.0
        self.answers_after_s = 0.125
        self.answers_from_chunk: int | None = 1
        """All answers are held back until that many chunks have come; None = for ever."""
        self.closes_after: int | None = None
        self.sent: list[float] = []
        self._held: list[tuple[float, Event]] = []
        self._ready: asyncio.Queue[tuple[float, Event]] = asyncio.Queue()

    def clock(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds + self.oversleeps_s

    async def send_audio(self, samples: Samples, *, frames: Sequence[bytes] = ()) -> None:
        if self.closes_after == len(self.sent):
            self._ready.put_nowait((self.now, Closed(1011, "worker lost")))
            raise SessionError("the connection to the server is closed")
        self.sent_at = self.now
        self.sent.append(self.now)
        self.now += self.send_takes_s
        self._held.append((self.sent_at + self.answers_after_s, LISTENED))
        if self.answers_from_chunk is not None and len(self.sent) >= self.answers_from_chunk:
            for answer in self._held:
                self._ready.put_nowait(answer)
            self._held.clear()
        # The reader runs before the send returns.
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    async def __aiter__(self) -> AsyncIterator[Event]:
        while True:
            self.received_at, event = await self._ready.get()
            yield event
            if isinstance(event, Closed):
                return


async def run(session: FakeSession, n_chunks: int = 4) -> Journal:
    return await stream(
        session, [CHUNK] * n_chunks, 100.0, 1.0, clock=session.clock, sleep=session.sleep
    )


async def test_a_chunk_leaves_when_its_last_sample_has_been_recorded() -> None:
    session = FakeSession()

    await run(session)

    assert session.sent == [101.0, 102.0, 103.0, 104.0]


async def test_lateness_does_not_add_up() -> None:
    session = FakeSession()
    session.oversleeps_s = 0.125

    journal = await run(session)

    assert session.sent == [101.125, 102.125, 103.125, 104.125]
    assert [chunk.late_s for chunk in journal.sent] == [0.125] * 4


async def test_time_in_the_connection_is_not_the_senders_lateness() -> None:
    session = FakeSession()
    session.send_takes_s = 1.5

    journal = await run(session, 3)

    assert session.sent == [101.0, 102.5, 104.0]
    assert [chunk.late_s for chunk in journal.sent] == [0.0] * 3
    assert [chunk.blocked_s for chunk in journal.sent] == [1.5] * 3


async def test_what_a_microphone_that_is_off_would_have_sent_takes_its_time() -> None:
    session, journal = FakeSession(), Journal()
    send = partial(session.send_audio, *CHUNK[:1])

    await pace(
        session,
        [send, None, None, send],
        journal,
        100.0,
        1.0,
        clock=session.clock,
        sleep=session.sleep,
    )

    assert session.sent == [101.0, 104.0]
    assert [chunk.late_s for chunk in journal.sent] == [0.0, 0.0]


async def test_late_results_delay_no_chunk() -> None:
    session = FakeSession()
    session.answers_after_s = 3.5
    session.answers_from_chunk = 4

    journal = await run(session)

    assert session.sent == [101.0, 102.0, 103.0, 104.0]
    assert journal.latencies_s() == [3.5] * 4


async def test_a_result_that_comes_before_the_send_returns_finds_its_chunk() -> None:
    session = FakeSession()
    session.send_takes_s = 0.5

    journal = await run(session, 2)

    assert journal.latencies_s() == [0.125, 0.125]
    assert journal.n_unanswered == 0


async def test_results_that_do_not_come_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paced, "LAST_RESULTS_S", 0.01)
    session = FakeSession()
    session.answers_from_chunk = None

    journal = await run(session, 3)

    assert journal.n_unanswered == 3


async def test_a_closed_session_ends_the_stream() -> None:
    session = FakeSession()
    session.closes_after = 2

    journal = await run(session)

    assert len(journal.replies) == 2
    # The third was on its way when the connection broke.
    assert journal.n_unanswered == 1


async def test_the_probe_sees_a_blocked_event_loop() -> None:
    async with LoopProbe() as probe:
        await asyncio.sleep(0)
        blocked_until = asyncio.get_running_loop().time() + 0.1
        while asyncio.get_running_loop().time() < blocked_until:
            pass
        await asyncio.sleep(0.03)

    assert max(probe.late_s) > 0.05
