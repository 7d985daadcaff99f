"""What a half-duplex microphone sends, on a clock that counts chunks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import pytest

from client.half_duplex import Delta, HalfDuplexClient, TurnDone
from client.load import talker
from client.load.answers import Answers
from client.load.plan import Track
from client.load.talker import Talker
from client.paced import Sending
from shared.clips import Clip

CHUNK_S = 0.5
SECOND = np.zeros(24_000, np.float32)
DONE = TurnDone(1, "", "")


class Session:
    """Notes which chunks are loud."""

    def __init__(self) -> None:
        self.sent: list[bool] = []

    async def send_audio(self, samples: Any) -> None:
        assert samples.size == CHUNK_S * 16_000
        self.sent.append(bool(samples.any()))


class Microphone:
    """Takes chunk after chunk of a talker whose clip is 1 s of sound; time begins at 0."""

    def __init__(self, pause_s: float = 2.0, duration_s: float = 3600.0) -> None:
        self.answers = Answers(buffer_s=0.0)
        self.session = Session()
        track = Track(Clip(np.full(16_000, 0.5, np.float32), ()), pause_s)
        subject = Talker(cast(HalfDuplexClient, self.session), track, self.answers, 0.0)
        self._sendings: Iterator[Sending | None] = subject.sendings(duration_s, CHUNK_S)

    async def chunks(self, n: int) -> str:
        """Return one letter a chunk: Loud, quiet, nothing (-); shorter when it is over."""
        letters = ""
        for _ in range(n):
            sending = next(self._sendings, self)
            if sending is self:
                return letters
            if sending is None:
                letters += "-"
            else:
                await cast(Sending, sending)()
                letters += "L" if self.session.sent[-1] else "q"
        return letters


async def test_the_clip_is_said_once_after_what_the_server_does_not_hear() -> None:
    microphone = Microphone()

    assert await microphone.chunks(10) == "qLLqqqqqqq"
    # 0.5 s of silence and the second of the clip.
    assert microphone.answers.awaited_since == 1.5


async def test_nothing_is_sent_while_an_answer_plays_and_rings() -> None:
    microphone = Microphone(pause_s=0.0)
    await microphone.chunks(4)
    microphone.answers.take(Delta("", SECOND), 2.0)
    during = await microphone.chunks(4)
    microphone.answers.take(DONE, 4.0)

    assert during == "----"
    # At 4.0 s all has been played since 3.0 s, which is longer ago than a room rings.
    assert await microphone.chunks(3) == "LLq"


async def test_the_echo_is_waited_for() -> None:
    microphone = Microphone(pause_s=0.0)
    await microphone.chunks(4)
    microphone.answers.take(Delta("", SECOND), 2.0)
    microphone.answers.take(DONE, 2.0)

    # Played until 3.0 s; 3.8 s is within the chunk that begins at 3.5 s.
    assert await microphone.chunks(5) == "----L"


async def test_the_pause_is_kept_after_the_clip() -> None:
    microphone = Microphone(pause_s=2.0)
    await microphone.chunks(3)
    microphone.answers.take(DONE, 1.5)

    assert await microphone.chunks(6) == "qqqqLL"


async def test_the_rest_of_a_clip_that_is_answered_early_is_not_said() -> None:
    microphone = Microphone(pause_s=0.0)
    await microphone.chunks(2)
    microphone.answers.take(Delta("", SECOND), 1.0)
    microphone.answers.take(DONE, 1.0)

    assert await microphone.chunks(6) == "----LL"


async def test_somebody_who_is_silent_for_long_says_that_he_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(talker, "SIGN_OF_LIFE_EVERY", 3)
    microphone = Microphone()
    await microphone.chunks(4)
    microphone.answers.take(Delta("", SECOND), 2.0)

    assert await microphone.chunks(6) == "--q--q"


async def test_no_question_is_begun_after_the_end_and_the_last_answer_is_waited_for() -> None:
    microphone = Microphone(pause_s=0.0, duration_s=1.0)

    assert await microphone.chunks(6) == "qLLqqq"
    microphone.answers.take(DONE, 3.0)
    assert await microphone.chunks(6) == ""


async def test_an_answer_that_does_not_come_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(talker, "ANSWER_LIMIT_S", 2.0)
    microphone = Microphone(pause_s=0.0, duration_s=1.0)

    # Complete at 1.5 s, waited for until 3.5 s.
    assert await microphone.chunks(20) == "qLLqqqqq"
    assert microphone.answers.n_missing == 1


async def test_a_short_session_asks_once() -> None:
    assert await Microphone(duration_s=0.0).chunks(4) == "qLLq"
