from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from client.duplex import Closed, DuplexClient, Event, Result
from client.talk import (
    Answer,
    Conversation,
    Job,
    Microphone,
    converse,
    main,
    recording_address,
    unit_line,
)
from shared.audio import read_wav, write_wav
from tests.fakes.g0_server import ANSWER_UNITS, Scenario, Service

LOUD_S = np.full(16_000, 0.1, np.float32)


class SteppedClient(DuplexClient):
    """A session whose clock jumps over each sleep, once all answers so far have been taken."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.now = 0.0
        self._n_sent = 0
        self._n_read = 0
        self._all_taken = asyncio.Event()

    def clock(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds
        async with asyncio.timeout(10):
            await self._all_taken.wait()

    async def send_audio(self, *args: Any, **kwargs: Any) -> None:
        self._n_sent += 1
        self._all_taken.clear()
        await super().send_audio(*args, **kwargs)

    async def __anext__(self) -> Event:
        if self._n_read == self._n_sent:
            self._all_taken.set()
        event = await super().__anext__()
        self._n_read += isinstance(event, Result)
        if isinstance(event, Closed):
            self._all_taken.set()
        return event


def job(question: np.ndarray, interruption: np.ndarray | None = None, after_s: float = 1.0) -> Job:
    return Job(question, (), 1.0, interruption, after_s)


def result(is_listen: bool, *, end_of_turn: bool = False, interrupted: bool = False) -> Result:
    audio = np.zeros(0 if is_listen else 24_000, np.float32)
    return Result(
        is_listen, "", audio, end_of_turn, "", interrupted, False, 0, None, None, None, None
    )


async def run(service: Service, work: Job) -> tuple[Conversation, float]:
    """Returns what came back and the seconds that passed on the stepped clock."""
    async with SteppedClient(service.ws_url) as session:
        await session.prepare()
        conversation = await converse(session, work, session.clock, session.sleep)
    return conversation, session.now


async def test_the_answer_holds_the_spoken_samples_only(service: Service) -> None:
    conversation, _ = await run(service, job(np.tile(LOUD_S, 2)))

    assert conversation.problem is None
    assert conversation.answer.samples().size == ANSWER_UNITS * 24_000


async def test_silence_follows_the_file_until_two_seconds_after_the_turn(
    service: Service, scenario: Scenario
) -> None:
    await run(service, job(np.tile(LOUD_S, 2)))

    # Two loud chunks, the answer's units, then two seconds that the turn may go on in.
    assert len(scenario.of_type("audio_chunk")) == 2 + ANSWER_UNITS + 2


async def test_chunks_are_sent_at_the_pace_of_a_microphone(
    service: Service, scenario: Scenario
) -> None:
    _, seconds = await run(service, job(LOUD_S))

    assert seconds == len(scenario.of_type("audio_chunk"))


async def test_without_an_answer_the_silence_ends_after_a_minute(
    service: Service, scenario: Scenario
) -> None:
    conversation, _ = await run(service, job(np.zeros(16_000, np.float32)))

    assert len(scenario.of_type("audio_chunk")) == 61
    assert conversation.answer.samples().size == 0


async def test_an_interruption_cuts_what_was_not_played(
    service: Service, scenario: Scenario
) -> None:
    conversation, _ = await run(service, job(LOUD_S, interruption=LOUD_S, after_s=1.0))

    loud = [c for c in scenario.of_type("audio_chunk") if c["audio_base64"][:4] != "AAAA"]
    assert len(loud) == 2
    # A first answer that is cut short, then a whole one to the second question.
    assert 24_000 * ANSWER_UNITS < conversation.answer.samples().size < 24_000 * 2 * ANSWER_UNITS


async def test_a_lost_session_is_reported_as_a_problem(
    service: Service, scenario: Scenario
) -> None:
    scenario.close_after_chunks = 2

    conversation, _ = await run(service, job(LOUD_S))

    assert conversation.problem == "the connection ended: worker lost"


def test_a_turn_that_ended_inside_the_file_is_no_answer_yet() -> None:
    mic = Microphone(np.tile(LOUD_S, 3), (), 1.0)
    conversation = Conversation(mic, job(LOUD_S), lambda: 0.0)
    mic.next_chunk()
    conversation.take(result(False, end_of_turn=True))

    for _ in range(10):
        mic.next_chunk()

    assert not conversation.over


def test_a_flush_keeps_what_has_been_played_already() -> None:
    answer = Answer()
    answer.add(np.ones(24_000, np.float32), now=10.0)
    answer.add(np.ones(24_000, np.float32), now=10.2)

    answer.flush(now=11.5)

    assert answer.samples().size == 36_000


def test_frames_go_with_the_second_they_belong_to() -> None:
    mic = Microphone(LOUD_S, (b"first", b"second"), 0.5)

    sent = [list(mic.next_chunk()[1]) for _ in range(5)]

    assert sent == [[], [b"first"], [], [b"second"], []]


def test_a_unit_is_printed_on_one_line() -> None:
    spoken = Result(
        is_listen=False,
        text=" Paris.",
        audio=np.zeros(0, np.float32),
        end_of_turn=True,
        heard=" hello",
        interrupted=False,
        dropped=False,
        unit_index=3,
        wall_clock_ms=412.4,
        kv_cache_length=None,
        n_tokens=None,
        n_tts_tokens=None,
    )

    line = unit_line(3, spoken)

    assert line == "   3  speak      412 ms  heard: hello  says: Paris.  [end of turn]"


@pytest.mark.parametrize(("recording", "n_lines"), [("omni_1a2b", 1), (None, 0)])
def test_the_address_of_the_recording_stands_at_the_end(
    service: Service,
    scenario: Scenario,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    recording: str | None,
    n_lines: int,
) -> None:
    """Also after a session that was lost, which is the one that one would like to look at."""
    write_wav(tmp_path / "question.wav", LOUD_S[:800], 16_000)
    scenario.recording, scenario.close_after_chunks = recording, 1

    status = main([
        str(tmp_path / "question.wav"), "--url", service.ws_url, "--chunk-s", "0.05",
        "--out", str(tmp_path / "answer.wav"),
    ])  # fmt: skip

    said = [line for line in capsys.readouterr().out.splitlines() if "recording" in line]
    assert status == 1
    assert said == [f"recording: {service.http_url}/s/omni_1a2b"] * n_lines


@pytest.mark.parametrize(
    ("url", "page"),
    [
        ("ws://host:8006/ws/duplex/adx_1", "http://host:8006/s/r1"),
        ("wss://host/ws/duplex/adx_1?key=k", "https://host/s/r1"),
        ("wss://host/omni/ws/duplex/adx_1", "https://host/omni/s/r1"),
    ],
)
def test_a_recording_has_its_page_beside_the_sockets_of_its_service(url: str, page: str) -> None:
    assert recording_address(url, "r1") == page


@pytest.mark.parametrize(
    ("url", "page"),
    [
        ("http://host:8180/talk/", "http://host:8180/talk/s/r1"),
        ("wss://host/talk", "https://host/talk/s/r1"),
        ("ws://host/ws/", "http://host/ws/s/r1"),
        ("ws://host", "http://host/s/r1"),
    ],
)
def test_a_recording_has_its_page_below_the_base_address(url: str, page: str) -> None:
    assert recording_address(DuplexClient(url).url, "r1") == page


@pytest.mark.slow
def test_the_command_saves_the_answer_and_exits_with_0(
    service: Service, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_wav(tmp_path / "question.wav", LOUD_S[:4_000], 16_000)
    out = tmp_path / "answer.wav"

    status = main([
        str(tmp_path / "question.wav"), "--url", service.ws_url, "--out", str(out),
        "--chunk-s", "0.25",
    ])  # fmt: skip

    samples, rate = read_wav(out)
    assert (status, rate, samples.size) == (0, 24_000, ANSWER_UNITS * 24_000)
    assert "says: The capital of France" in capsys.readouterr().out


def test_the_command_fails_with_one_sentence_when_nobody_listens(
    unused_tcp_port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    question = Path(__file__).parents[1] / "assets" / "capital_france.wav"

    status = main([str(question), "--url", f"ws://127.0.0.1:{unused_tcp_port}"])

    error = capsys.readouterr().err
    assert status == 1
    assert error.startswith("error: cannot connect")
    assert error.count("\n") == 1


def test_an_answer_that_could_not_be_saved_is_refused_before_anything_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["question.wav", "--out", str(tmp_path / "nowhere" / "answer.wav")])

    assert "no folder" in capsys.readouterr().err
