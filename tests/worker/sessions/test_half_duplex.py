"""A session of turns on the fake model: order of events, interrupts, what is not heard."""

from __future__ import annotations

import asyncio
import gc
import tracemalloc

import numpy as np
import pytest

from shared.protocol import (
    Ask,
    AudioPart,
    ChatMessage,
    Closed,
    Delta,
    Failure,
    Generating,
    GenerationSettings,
    Input,
    Interrupt,
    Interrupted,
    Notice,
    Opened,
    Pause,
    Prepare,
    Prepared,
    PrepareTurns,
    Speaking,
    Stop,
    Stopped,
    TextPart,
    TurnDone,
    VadSettings,
)
from shared.states import SessionState
from tests.fakes.model import VAD_WINDOW, FakeDuplexModel
from tests.fakes.session import Client, Stage, chunk, entered, eventually, gated
from worker.engine.slots import SlotState
from worker.sessions import half_duplex
from worker.sessions.failures import WorkerStopping
from worker.sessions.host import SessionLimits

VAD = VadSettings(0.7, min_speech_ms=64.0, min_silence_ms=64.0, speech_pad_ms=0.0)
SETTLING = np.zeros(8000, np.float32)


def speech(n: int) -> np.ndarray:
    return np.ones(n * VAD_WINDOW, np.float32)


def silence(n: int) -> np.ndarray:
    return np.zeros(n * VAD_WINDOW, np.float32)


TURN = np.concatenate((speech(3), silence(2)))
"""What is a turn by `VAD`."""


async def prepared(client: Client, **fields) -> Prepared:
    """A live session that has settled."""
    client.send(PrepareTurns([TextPart("be brief")], VAD, **fields))
    prepared = await client.until(Prepared)
    client.send(chunk(0, SETTLING))
    return prepared


def sample(stage: Stage, name: str, **labels: str) -> float | None:
    return stage.host.metrics.registry.get_sample_value(f"omni_worker_{name}", labels)


def kinds(events) -> list[type]:
    return [type(event) for event in events]


async def listening(client: Client) -> None:
    """Nothing waits and nothing runs: what came last has been dealt with."""
    session, host = client.session, client.session._host
    await eventually(
        lambda: client._commands.empty() and not session._waiting and not host.engine.n_programs
    )


# ---- the ordinary life


async def test_a_turn_is_answered_in_this_order(stage):
    client = stage.half_duplex()
    assert await client.next(Opened)
    client.send(PrepareTurns([TextPart("be brief")], VAD, GenerationSettings(temperature=0.5)))
    assert await client.next(Prepared) == Prepared(8, 1, ["temperature"], "fake", ["en"])
    client.send(chunk(0, SETTLING), chunk(1, TURN))
    events = [await client.next(object) for _ in range(7)]

    assert events[:3] == [Speaking(True), Speaking(False), Generating(5 * 32.0)]
    assert kinds(events[3:]) == [Delta, Delta, Delta, TurnDone]
    assert [(delta.index, delta.text) for delta in events[3:6]] == [
        (0, "w0 "), (1, "w1 "), (2, "w2 "),
    ]  # fmt: skip
    assert all(len(delta.audio) == 4 * stage.model.speech_samples for delta in events[3:6])
    done = events[6]
    assert (done.turn_index, done.text, done.heard) == (1, "w0 w1 w2 ", f"heard {TURN.size}")
    assert (done.n_tokens, done.kv_tokens) == (3, TURN.size + 3)
    assert done.timings.total_ms > 0
    assert np.array_equal(stage.model.states[0].turns[0], TURN)
    assert client.session.kv_tokens == TURN.size + 3
    client.send(Stop())
    assert kinds([await client.next(object) for _ in range(2)]) == [Stopped, Closed]
    assert await client.code() == 1000


async def test_turns_are_counted_from_one(stage):
    client = stage.half_duplex()
    await prepared(client)
    for expected in (1, 2):
        client.send(chunk(expected, TURN))
        assert (await client.until(TurnDone)).turn_index == expected

    assert sample(stage, "answers_total", kind="turn") == 2
    assert stage.host.metrics.n_requests == 2


async def test_sound_may_come_in_pieces_of_any_length(stage):
    client = stage.half_duplex()
    await prepared(client)
    for seq, piece in enumerate(np.array_split(TURN, 13)):
        client.send(chunk(seq, piece))
    await client.until(TurnDone)

    assert np.array_equal(stage.model.states[0].turns[0], TURN)


async def test_a_turn_that_is_too_short_is_not_answered(stage):
    client = stage.half_duplex()
    await prepared(client)
    client.send(chunk(1, np.concatenate((speech(1), silence(2)))), chunk(2, TURN))
    events = [await client.next(object) for _ in range(5)]

    assert events[:4] == [Speaking(True), Speaking(False), Speaking(True), Speaking(False)]
    assert isinstance(events[4], Generating)


async def test_the_first_half_second_is_not_listened_to(stage):
    client = stage.half_duplex()
    client.send(PrepareTurns([], VAD))
    await client.until(Prepared)
    for seq in range(5):
        client.send(chunk(seq, np.ones(1600, np.float32)))
    await listening(client)
    assert client.rest() == []
    client.send(chunk(5, TURN))

    assert await client.next(Speaking) == Speaking(True)


async def test_the_model_gets_the_system_message(stage):
    client = stage.half_duplex()
    voice = AudioPart(np.full(8, 0.5, "<f4").tobytes())
    client.send(
        PrepareTurns(
            [TextPart("be brief"), voice],
            generation=GenerationSettings(max_new_tokens=9),
            speaks=False,
        )
    )
    await client.until(Prepared)
    (prompt,) = stage.model.states[0].systems

    assert prompt.system[0] == "be brief"
    assert prompt.system[1].samples.tolist() == [0.5] * 8
    assert (prompt.generation.max_new_tokens, prompt.speaks) == (9, False)


async def test_a_long_turn_is_cut_and_answered(stage, monkeypatch):
    monkeypatch.setattr("worker.sessions.turn_taking.MAX_TURN_S", 4 * VAD_WINDOW / 16_000)
    client = stage.half_duplex()
    await prepared(client)
    client.send(chunk(1, speech(6)))
    await client.until(TurnDone)

    assert np.array_equal(stage.model.states[0].turns[0], speech(4))


# ---- while an answer is given


async def test_what_is_said_during_an_answer_is_not_heard(make):
    stage = make(model=gated("write"))
    client = stage.half_duplex()
    await prepared(client)
    client.send(chunk(1, TURN))
    await entered(stage, "write")
    client.send(*(chunk(seq, TURN) for seq in range(2, 6)))
    await eventually(client._commands.empty)
    stage.model.gates["write"].set()
    await client.until(TurnDone)
    await listening(client)
    assert client.rest() == []
    client.send(chunk(6, TURN))
    await client.until(TurnDone)

    assert len(stage.model.states[0].turns) == 2


async def test_what_follows_a_turn_in_the_same_chunk_is_not_heard(stage):
    client = stage.half_duplex()
    await prepared(client)
    client.send(chunk(1, np.concatenate((TURN, TURN))), chunk(2, TURN))
    await client.until(TurnDone)
    await listening(client)

    assert len(stage.model.states[0].turns) == 1


async def test_an_interrupt_ends_the_answer_with_what_was_said(make):
    stage = make(model=gated("write", n_pieces=50))
    client = stage.half_duplex()
    await prepared(client)
    stage.model.gates["write"].set()
    client.send(chunk(1, TURN))
    await client.until(Delta)
    stage.model.gates["write"].clear()
    stage.model.entered["write"].clear()
    await entered(stage, "write")
    client.send(Interrupt())
    await eventually(client._commands.empty)
    n_batches = len(stage.model.batches)
    stage.model.gates["write"].set()
    done, interrupted = await client.until(TurnDone), await client.next(Interrupted)

    said = stage.model.states[0].said
    assert 0 < len(said) < 50
    assert done.text == "".join(said)
    assert interrupted == Interrupted()
    assert len(stage.model.batches) == n_batches
    assert sample(stage, "answers_total", kind="interrupted") == 1
    assert stage.host.metrics.n_requests == 0
    client.send(chunk(2, TURN))
    assert (await client.until(TurnDone)).turn_index == 2


async def test_an_interrupt_between_turns_is_only_answered(stage):
    client = stage.half_duplex()
    client.send(Interrupt())
    await client.until(Interrupted)
    await prepared(client)
    client.send(Interrupt())

    assert await client.next(Interrupted) == Interrupted()


@pytest.mark.parametrize("kind", ["read", "write", "speak", "hear", "prefill"])
@pytest.mark.parametrize("ending", ["stop", "vanish", "drain"])
async def test_the_end_of_a_session_stops_what_is_computed(make, kind, ending):
    stage = make(model=gated(kind, n_pieces=50), n_slots=1)
    client = stage.half_duplex()
    client.send(PrepareTurns([], VAD))
    if kind != "prefill":
        await client.until(Prepared)
        client.send(chunk(0, SETTLING), chunk(1, TURN))
    await entered(stage, kind)
    match ending:
        case "stop":
            client.send(Stop())
        case "vanish":
            client.disconnect()
        case "drain":
            client.session.end("draining", WorkerStopping("The worker is shutting down"))
    await eventually(lambda: client.session.state is SessionState.CLOSING)
    n_batches = len(stage.model.batches)
    assert stage.host.slots.state(0) is not SlotState.FREE
    stage.model.gates[kind].set()
    await client.code()
    events = client.rest()

    assert len(stage.model.batches) == n_batches
    assert stage.model.states[0].ended
    assert isinstance(events[-1], Closed)
    assert TurnDone not in kinds(events)
    assert stage.host.slots.n_free == 1


async def test_prepare_during_an_answer_ends_it_and_starts_anew(make):
    stage = make(model=gated("write", n_pieces=50))
    client = stage.half_duplex()
    await prepared(client)
    client.send(chunk(1, TURN))
    await entered(stage, "write")
    client.send(PrepareTurns([TextPart("other")], VAD))
    await eventually(lambda: client.session.state is SessionState.PREPARING)
    stage.model.gates["write"].set()
    events = [await client.next(object) for _ in range(5)]

    assert kinds(events) == [Speaking, Speaking, Generating, TurnDone, Prepared]
    assert [prompt.system for prompt in stage.model.states[0].systems] == [
        ("be brief",), ("other",),
    ]  # fmt: skip


async def test_prepare_while_the_user_speaks_ends_the_turn(stage):
    client = stage.half_duplex()
    await prepared(client)
    client.send(chunk(1, speech(3)))
    assert await client.next(Speaking) == Speaking(True)
    client.send(PrepareTurns([], VAD))

    assert await client.next(Speaking) == Speaking(False)
    await client.next(Prepared)


# ---- mistakes of the client


async def test_audio_before_prepare_is_refused(stage):
    client = stage.half_duplex()
    client.send(chunk(7, TURN))
    failure = await client.until(Failure)

    assert (failure.slug, failure.seq, failure.close_code) == ("not_prepared", 7, None)


@pytest.mark.parametrize(
    ("command", "slug"),
    [
        (chunk(3, [np.nan]), "bad_audio"),
        (Input(3, b""), "bad_audio"),
        (chunk(3, np.zeros(31 * 16_000)), "bad_audio"),
        (chunk(3, TURN, frames=[b"jpeg"]), "bad_image"),
        (Pause(), "bad_message"),
        (Prepare("duplex"), "bad_message"),
        (Ask([ChatMessage("user", [TextPart("x")])]), "bad_message"),
        (PrepareTurns([TextPart("x" * 16_001)]), "bad_message"),
        (PrepareTurns([AudioPart(bytes(4 * 16_000 * 61))]), "bad_audio"),
        (PrepareTurns([], VadSettings(threshold=float("nan"))), "bad_message"),
        (PrepareTurns([], timeout_s=float("nan")), "bad_message"),
    ],
)
async def test_a_wrong_command_is_told_and_the_session_goes_on(stage, command, slug):
    client = stage.half_duplex()
    await prepared(client)
    client.send(command)
    failure = await client.next(Failure)
    client.send(chunk(4, TURN))
    done = await client.until(TurnDone)

    assert (failure.slug, failure.close_code) == (slug, None)
    assert failure.seq == (3 if isinstance(command, Input) else None)
    assert done.turn_index == 1


async def test_a_storm_of_prompts_is_refused(stage):
    client = stage.half_duplex()
    for _ in range(4):
        await prepared(client)
    client.send(PrepareTurns([], VAD))

    assert "too often" in (await client.until(Failure)).message


async def test_a_failed_prepare_can_be_tried_again(stage):
    client = stage.half_duplex()
    client.send(PrepareTurns([TextPart("fail")]))
    failure = await client.until(Failure)

    assert (failure.slug, failure.close_code) == ("model_fault", None)
    await prepared(client)


async def test_sound_that_comes_too_fast_is_dropped_with_a_notice(make, monkeypatch):
    monkeypatch.setattr(half_duplex, "MAX_WAITING_S", 2 * len(TURN) / 16_000)
    stage = make(model=gated("hear"))
    client = stage.half_duplex()
    client.send(PrepareTurns([], VAD))
    await client.until(Prepared)
    client.send(chunk(0, np.concatenate((SETTLING, silence(1)))))
    await entered(stage, "hear")
    client.send(*(chunk(seq, TURN) for seq in range(1, 4)))
    notice = await client.next(Notice)
    stage.model.gates["hear"].set()

    assert (notice.slug, notice.count) == ("input_dropped", 1)
    await client.until(TurnDone)


async def test_sound_that_waits_in_tiny_chunks_takes_the_room_of_its_samples(make):
    """Each was an array of its own: a minute of them, one sample each, took 300 MB."""
    stage = make(model=gated("hear"))
    client = stage.half_duplex()
    await prepared(client)
    client.send(chunk(0, silence(1)))
    await entered(stage, "hear")
    tiny = [chunk(seq, [0.0]) for seq in range(2000)]
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        client.send(*tiny)
        await eventually(client._commands.empty)
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert after - before < 50 * len(tiny)


async def test_much_sound_is_heard_in_ops_of_two_seconds(stage):
    client = stage.half_duplex()
    await prepared(client)
    client.send(chunk(1, np.zeros(5 * 16_000)))
    await eventually(lambda: stage.model.batches.count(("hear", 1)) == 3)
    await listening(client)

    assert stage.model.batches.count(("hear", 1)) == 3


# ---- faults of the model


async def test_a_failed_turn_is_told_and_the_session_goes_on(make):
    stage = make(model=FakeDuplexModel(fail_turns=frozenset({0})))
    client = stage.half_duplex()
    await prepared(client)
    client.send(chunk(1, TURN))
    events = [await client.next(object) for _ in range(5)]
    client.send(chunk(2, TURN))
    done = await client.until(TurnDone)

    assert kinds(events) == [Speaking, Speaking, Generating, Delta, Failure]
    assert (events[4].slug, events[4].close_code) == ("model_fault", None)
    assert done.turn_index == 1
    assert sample(stage, "answers_total", kind="failed") == 1


async def test_a_detector_that_fails_is_told_and_the_session_goes_on(stage, monkeypatch):
    client = stage.half_duplex()
    await prepared(client)
    await listening(client)
    hear = stage.model.detect_speech

    def fails(state, samples):
        monkeypatch.setattr(stage.model, "detect_speech", hear)
        yield from ()
        raise ValueError("secret")

    monkeypatch.setattr(stage.model, "detect_speech", fails)
    client.send(chunk(1, silence(1)))
    failure = await client.next(Failure)
    client.send(chunk(2, TURN))

    assert (failure.slug, failure.close_code) == ("model_fault", None)
    assert "secret" not in failure.message
    await client.until(TurnDone)


async def test_a_lost_device_ends_the_session(make):
    stage = make(model=FakeDuplexModel(fault_kinds={"write"}))
    client = stage.half_duplex()
    await prepared(client)
    client.send(chunk(1, TURN))
    failure = await client.until(Failure)

    assert (failure.slug, failure.close_code) == ("engine_fault", 1011)


# ---- limits


@pytest.mark.parametrize(
    ("asked", "granted"), [(300.0, 300.0), (0.0, 1.0), (-5.0, 1.0), (1e9, 3600.0)]
)
async def test_the_length_of_a_session_is_bounded(stage, asked, granted):
    client = stage.half_duplex()
    before = stage.host.engine.clock()
    await prepared(client, timeout_s=asked)

    assert client.session._ends_at - before == pytest.approx(granted, abs=0.5)


async def test_a_session_ends_after_its_time_even_during_an_answer(make, monkeypatch):
    monkeypatch.setattr(half_duplex, "MIN_SESSION_S", 0.2)
    stage = make(model=gated("write"))
    client = stage.half_duplex()
    await prepared(client, timeout_s=0.2)
    client.send(chunk(1, TURN))
    await entered(stage, "write")
    failure = await client.until(Failure)
    stage.model.gates["write"].set()

    assert failure == Failure("session_timeout", "Session timeout (0.2s)", 1000)
    assert await client.next(Closed) == Closed("timeout")


async def test_a_session_without_input_ends(make):
    stage = make(limits=SessionLimits(idle_timeout_s=0.05))
    client = stage.half_duplex()
    await prepared(client)

    assert (await client.until(Failure)).message == "Idle timeout (0.1s)"


async def test_an_answer_is_not_idle(make):
    stage = make(model=gated("write"), limits=SessionLimits(idle_timeout_s=0.1))
    client = stage.half_duplex()
    await prepared(client)
    client.send(chunk(1, TURN))
    await entered(stage, "write")
    await asyncio.sleep(0.2)
    stage.model.gates["write"].set()

    await client.until(TurnDone)
    assert "Idle" in (await client.until(Failure)).message


async def test_no_task_is_left_after_sessions_have_ended(stage):
    before = len(asyncio.all_tasks())
    for index in range(5):
        client = stage.half_duplex(f"h{index}")
        await prepared(client)
        client.send(chunk(1, TURN))
        await client.until(Generating)
        client.disconnect()
        await client.code()

    assert len(asyncio.all_tasks()) == before
    assert stage.host.sessions == {}
    assert stage.host.engine.n_programs == 0
