"""A duplex session on the fake model: commands, rulings, limits, and how it ends."""

import asyncio
import threading

import numpy as np
import pytest

from shared.errors import NoFreeSlot, SlowReader
from shared.limits import MAX_INBOX_UNITS
from shared.protocol import (
    Closed,
    DuplexSettings,
    Failure,
    Interrupt,
    Interrupted,
    Notice,
    Open,
    Opened,
    Pause,
    Paused,
    Prepare,
    Prepared,
    Result,
    Resume,
    Resumed,
    Stop,
    Stopped,
)
from shared.states import SessionState
from tests.fakes.model import FakeDuplexModel
from tests.fakes.patience import PATIENCE_S
from tests.fakes.session import LOUD, SILENT, chunk, entered, eventually, gated
from worker.engine.slots import SlotState
from worker.sessions.duplex import DuplexSession
from worker.sessions.failures import WorkerStopping
from worker.sessions.host import SessionLimits

# ---- the ordinary life


async def test_a_session_goes_from_opened_to_closed(stage):
    client = stage.client()
    await client.next(Opened)
    client.send(Prepare("be brief", DuplexSettings(temperature=0.5)))
    assert await client.next(Prepared) == Prepared(8, 2, ["temperature"], "fake", ["en"])
    client.send(chunk(0, SILENT), chunk(1, LOUD))
    assert (await client.next(Result)).is_listen
    spoken = await client.next(Result)
    client.send(Stop("done"))
    await client.next(Stopped)

    assert await client.next(Closed) == Closed("done")
    assert await client.code() == 1000
    assert (spoken.text, spoken.unit_index, len(spoken.audio)) == ("u1 ", 2, 4 * 240)
    assert spoken.timings.total_ms > 0
    assert stage.model.named("end") == [("end", 0)]
    assert stage.host.slots.state(0) is SlotState.FREE


@pytest.mark.parametrize(("command", "last_word"), [(Stop(), Stopped), (Pause(0.05), Failure)])
async def test_closed_comes_only_after_the_slot_is_free(make, command, last_word):
    """W5: a pause that took too long set the worker idle before it was cleaned."""
    stage = make(model=gated("finalize"))
    client = stage.client()
    await client.prepared()
    client.send(chunk(0))
    await entered(stage, "finalize")
    client.send(command)
    await client.until(last_word)
    assert stage.host.slots.state(0) is not SlotState.FREE
    assert not any(isinstance(event, Closed) for event in client.rest())
    stage.model.gates["finalize"].set()
    await client.next(Closed)

    assert stage.host.slots.state(0) is SlotState.FREE


async def test_the_next_unit_waits_until_the_last_one_is_finalized(make):
    """The fake model fails a unit that begins before the last one's finalize."""
    stage = make(model=gated("finalize"))
    client = stage.client()
    await client.prepared()
    client.send(chunk(0), chunk(1))
    await client.next(Result)
    await entered(stage, "finalize")
    assert len(stage.model.states[0].units) == 1
    stage.model.gates["finalize"].set()
    await client.next(Result)

    assert len(stage.model.states[0].units) == 2


async def test_a_client_may_ask_for_results_after_finalize(make):
    stage = make(model=gated("finalize"))
    client = stage.client()
    await client.next(Opened)
    client.send(Prepare("x", deferred_finalize=False), chunk(0))
    await client.next(Prepared)
    await entered(stage, "finalize")
    assert client.rest() == []
    stage.model.gates["finalize"].set()

    assert (await client.next(Result)).seq == 0


async def test_a_unit_is_due_one_second_after_it_arrived(stage):
    client = stage.client()
    await client.prepared()
    client.send(chunk(0))
    await client.next(Result)

    (unit,) = stage.model.states[0].units
    assert unit.deadline - unit.arrived_at == pytest.approx(1.0)


async def test_prepare_again_gives_the_session_a_new_prompt(stage):
    client = stage.client()
    await client.prepared("first")
    client.send(chunk(0))
    await client.next(Result)
    await client.prepared("second")

    assert stage.model.states[0].prompts == ["first", "second"]


async def test_a_storm_of_prompts_is_refused_and_the_session_goes_on(stage):
    client = stage.client()
    for prompt in ["one", "fail", "two", "three"]:
        client.send(Prepare(prompt))
        await client.until(Failure if prompt == "fail" else Prepared)

    client.send(Prepare("four"))
    refusal = await client.until(Failure)
    client.send(chunk(0))
    answer = await client.until(Result)

    assert (refusal.slug, refusal.close_code) == ("bad_message", None)
    assert stage.model.states[-1].prompts == ["one", "two", "three"]
    assert answer.seq == 0


async def test_input_that_comes_during_prepare_is_answered_after_it(make):
    stage = make(model=gated("prefill"))
    client = stage.client()
    await client.next(Opened)
    client.send(Prepare("x"), chunk(0))
    await entered(stage, "prefill")
    stage.model.gates["prefill"].set()

    await client.next(Prepared)
    assert (await client.next(Result)).seq == 0


# ---- rulings on chunks


async def test_each_chunk_gets_exactly_one_result_whatever_its_length(stage):
    client = stage.client()
    await client.prepared()
    sizes = [80, 80, 1, 319, 400, 160]
    for seq, size in enumerate(sizes):
        client.send(chunk(seq, np.zeros(size)))
    results = [await client.next(Result) for _ in sizes]

    assert [result.seq for result in results] == list(range(len(sizes)))
    assert [result.unit_index for result in results] == [0, 1, 1, 3, 5, 6]
    assert client.rest() == []


async def test_input_that_comes_too_fast_is_dropped_with_a_count(make):
    stage = make(model=gated("think"))
    client = stage.client()
    await client.prepared()
    client.send(chunk(0))
    await entered(stage, "think")
    for seq in range(1, MAX_INBOX_UNITS + 3):
        client.send(chunk(seq))
    notices = [await client.next(Notice) for _ in range(2)]
    stage.model.gates["think"].set()
    results = [await client.next(Result) for _ in range(MAX_INBOX_UNITS + 3)]

    assert [(notice.slug, notice.count) for notice in notices] == [("input_dropped", 1)] * 2
    assert [result.seq for result in results if result.dropped] == [1, 2]
    assert all(result.is_listen for result in results if result.dropped)
    registry = stage.host.metrics.registry
    assert registry.get_sample_value("omni_worker_dropped_units_total") == 2


async def test_force_listen_silences_the_model_at_once(make):
    stage = make(model=gated("finalize"))
    stage.model.gates["finalize"].set()
    client = stage.client()
    await client.prepared()
    client.send(chunk(0, LOUD))
    assert not (await client.next(Result)).is_listen
    client.send(chunk(1, LOUD, force_listen=True))
    result = await client.next(Result)

    assert stage.model.named("interrupt") == [("interrupt", 0)]
    assert (result.is_listen, result.interrupted) == (True, True)


async def test_force_listen_overtakes_queued_audio(make):
    stage = make(model=gated("think"))
    client = stage.client()
    await client.prepared()
    client.send(chunk(0))
    await entered(stage, "think")
    client.send(chunk(1, LOUD))
    await eventually(lambda: client.session._inbox.n_waiting == 1)
    client.send(chunk(2, LOUD, force_listen=True))
    await eventually(lambda: client.session._inbox.n_waiting == 2)
    stage.model.gates["think"].set()

    assert [(await client.next(Result)).is_listen for _ in range(3)] == [True] * 3


# ---- mistakes of the client


async def test_input_before_prepare_is_refused_and_the_session_goes_on(stage):
    client = stage.client()
    await client.next(Opened)
    client.send(chunk(0))
    failure = await client.next(Failure)

    assert (failure.slug, failure.seq, failure.close_code) == ("not_prepared", 0, None)
    await client.prepared()


async def test_a_bad_chunk_fails_alone_between_good_neighbours(make):
    stage = make(n_slots=2)
    client, neighbour = stage.client("a"), stage.client("b")
    await client.prepared()
    await neighbour.prepared()
    client.send(chunk(0, LOUD), chunk(1, [np.nan] * 160), chunk(2, LOUD, frames=[b"junk"]))
    client.send(chunk(3, LOUD))
    neighbour.send(chunk(0, LOUD))
    answers = {}
    for _ in range(4):
        event = await client.next(object)
        answers[event.seq] = event

    assert [answers[seq].slug for seq in (1, 2)] == ["bad_audio", "bad_image"]
    assert [answers[seq].text for seq in (0, 3)] == ["u0 ", "u1 "]
    assert (await neighbour.next(Result)).text == "u0 "


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (Resume(), "resume without pause"),
        (Pause(), "pause before"),
        (Open("x", "duplex", "chat"), "open already"),
        (Prepare("x" * 20_000), "at most 16000"),
        (Prepare("x", reference_voice=b"123"), "multiple of 4"),
    ],
)
async def test_a_wrong_command_is_told_and_the_session_goes_on(stage, command, words):
    client = stage.client()
    await client.next(Opened)
    client.send(command)
    failure = await client.next(Failure)

    assert words in failure.message
    assert failure.close_code is None
    await client.prepared()


async def test_a_session_ends_when_its_context_is_full(make):
    stage = make(model=FakeDuplexModel(full_from=1))
    client = stage.client()
    await client.prepared()
    client.send(chunk(0))
    await client.next(Result)
    client.send(chunk(1))
    failure = await client.next(Failure)

    assert (failure.slug, failure.close_code) == ("context_full", 1000)
    assert (await client.next(Closed)).reason == "context full"


async def test_a_failed_prepare_can_be_tried_again(stage):
    client = stage.client()
    await client.next(Opened)
    client.send(Prepare("fail"))
    failure = await client.next(Failure)

    assert (failure.slug, failure.close_code) == ("model_fault", None)
    assert "prompt says fail" not in failure.message
    await client.prepared()


async def test_a_second_prepare_while_one_runs_is_refused(make):
    stage = make(model=gated("prefill"))
    client = stage.client()
    await client.next(Opened)
    client.send(Prepare("one"))
    await entered(stage, "prefill")
    client.send(Prepare("two"))
    failure = await client.next(Failure)
    stage.model.gates["prefill"].set()

    assert "still running" in failure.message
    await client.next(Prepared)


async def test_chunks_that_wait_for_a_prepare_that_fails_are_answered(make):
    stage = make(model=gated("prefill"))
    client = stage.client()
    await client.next(Opened)
    client.send(Prepare("fail"), chunk(0))
    await entered(stage, "prefill")
    await eventually(lambda: client.session._inbox.n_waiting == 1)
    stage.model.gates["prefill"].set()

    assert (await client.next(Failure)).seq is None
    failure = await client.next(Failure)
    assert (failure.slug, failure.seq) == ("not_prepared", 0)


# ---- faults of the model


async def test_a_failed_unit_fails_its_chunk_and_the_session_goes_on(make):
    stage = make(model=FakeDuplexModel(fail_units=frozenset({1})))
    client = stage.client()
    await client.prepared()
    client.send(chunk(0, LOUD), chunk(1, LOUD), chunk(2, LOUD))

    assert (await client.next(Result)).text == "u0 "
    failure = await client.next(Failure)
    assert (failure.slug, failure.seq, failure.close_code) == ("model_fault", 1, None)
    assert (await client.next(Result)).text == "u2 "


async def test_a_lost_device_ends_every_session_with_an_error(make):
    stage = make(model=FakeDuplexModel(fault_kinds={"think"}))
    talking, idle = stage.client("a"), stage.client("b")
    await talking.prepared()
    await idle.prepared()
    talking.send(chunk(0))

    for client in (talking, idle):
        failure = await client.until(Failure)
        assert (failure.slug, failure.close_code) == ("engine_fault", 1011)
        assert await client.code() == 1011


async def test_a_slot_that_cannot_be_cleaned_is_never_given_away(make):
    stage = make(model=FakeDuplexModel(fail_end=True), n_slots=1)
    client = stage.client()
    await client.prepared()
    client.send(Stop())
    await client.until(Stopped)
    failure = await client.next(Failure)
    await client.code()

    assert failure.slug == "engine_fault"
    assert client.rest() == []
    assert [str(fault) for fault in stage.broken] == ["slot 0 could not be cleaned: RuntimeError"]
    assert stage.host.slots.state(0) is SlotState.CLEANING


async def test_a_session_whose_device_hangs_ends_when_the_device_is_given_up(make):
    stage = make(model=gated("think"))
    client = stage.client()
    await client.prepared()
    client.send(chunk(0))
    await entered(stage, "think")
    client.send(Stop())
    await client.until(Stopped)
    stage.host.fault.set_result(WorkerStopping("given up"))

    await client.code()
    assert stage.host.slots.state(0) is SlotState.CLEANING


# ---- pause, resume, interrupt


async def test_input_while_paused_is_refused_until_resume(stage):
    client = stage.client()
    await client.prepared()
    client.send(Pause())
    assert (await client.next(Paused)).timeout_s == 60.0
    client.send(chunk(0))
    failure = await client.next(Failure)
    assert (failure.slug, failure.message, failure.seq) == ("paused", "Worker is paused", 0)
    client.send(Resume(), chunk(1))
    await client.next(Resumed)

    assert (await client.next(Result)).seq == 1


@pytest.mark.parametrize(
    ("asked", "granted"),
    [(None, 60.0), (5.0, 5.0), (0.0, 0.1), (-3.0, 0.1), (1e9, 3600.0), (float("nan"), 60.0)],
)
async def test_the_pause_timeout_is_bounded(stage, asked, granted):
    client = stage.client()
    await client.prepared()
    client.send(Pause(asked))

    assert (await client.next(Paused)).timeout_s == granted


async def test_pause_overtakes_queued_audio(make):
    stage = make(model=gated("think"))
    client = stage.client()
    await client.prepared()
    client.send(chunk(0), chunk(1))
    await entered(stage, "think")
    client.send(Pause())
    await client.next(Paused)
    stage.model.gates["think"].set()
    await client.next(Result)
    assert client.session.state is SessionState.PAUSED
    client.send(Resume())
    await client.next(Resumed)

    assert (await client.next(Result)).seq == 1


async def test_a_pause_that_lasts_too_long_ends_the_session(stage):
    client = stage.client()
    await client.prepared()
    client.send(Pause(0.1))
    await client.next(Paused)
    failure = await client.next(Failure)

    assert (failure.slug, failure.message) == ("session_timeout", "Pause timeout (0.1s)")
    await client.next(Closed)
    assert stage.host.slots.n_free == 2


async def test_interrupt_drops_what_is_being_said(stage):
    client = stage.client()
    await client.prepared()
    client.send(chunk(0, LOUD))
    await client.next(Result)
    client.send(Interrupt())
    await client.next(Interrupted)
    client.send(chunk(1, SILENT))

    assert (await client.next(Result)).interrupted


async def test_interrupt_before_prepare_is_harmless(stage):
    client = stage.client()
    await client.next(Opened)
    client.send(Interrupt(), Interrupt())
    await client.next(Interrupted)
    await client.next(Interrupted)

    assert stage.model.named("interrupt") == []


# ---- limits


async def test_a_session_without_input_ends(make):
    stage = make(limits=SessionLimits(idle_timeout_s=0.05))
    client = stage.client()
    await client.next(Opened)
    failure = await client.next(Failure)

    assert (failure.slug, failure.message) == ("session_timeout", "Idle timeout (0.1s)")
    assert await client.code() == failure.close_code


async def test_a_place_that_nobody_prepares_is_given_to_others(make):
    stage = make(limits=SessionLimits(prepare_timeout_s=0.05))
    client = stage.client()
    await client.next(Opened)
    failure = await client.next(Failure)

    assert (failure.slug, failure.message) == ("session_timeout", "Idle timeout (0.1s)")
    assert await client.code() == failure.close_code


async def test_a_session_that_is_too_long_ends(make):
    stage = make(limits=SessionLimits(max_session_s=0.05))
    client = stage.client()
    await client.next(Opened)

    assert (await client.until(Failure)).message == "Session limit (0.1s)"


async def test_bad_chunks_do_not_keep_a_session_alive(make):
    stage = make(limits=SessionLimits(idle_timeout_s=0.2))
    client = stage.client()
    await client.prepared()
    begun = asyncio.get_running_loop().time()
    while client.session.state is SessionState.LIVE:
        client.send(chunk(0, [np.inf]))
        await asyncio.sleep(0.01)
        assert asyncio.get_running_loop().time() - begun < 3


# ---- endings


async def test_stop_overtakes_queued_audio(make):
    stage = make(model=gated("think"))
    client = stage.client()
    await client.prepared()
    for seq in range(4):
        client.send(chunk(seq))
    await entered(stage, "think")
    client.send(Stop())
    await client.next(Stopped)
    stage.model.gates["think"].set()

    await client.next(Closed)
    assert len(stage.model.states[0].units) == 1


async def test_a_unit_that_ends_together_with_its_session_is_no_failure(make, caplog):
    """Its result came too late to be sent, which was then told as a fault of the model."""
    done = threading.Event()

    class Model(FakeDuplexModel):
        def unit(self, state, unit):
            yield from super().unit(state, unit)
            done.set()

    gate = threading.Event()
    stage = make(model=Model(gates={"think": gate}, entered={"think": threading.Event()}))
    events = []

    def send(event):
        events.append(event)
        if isinstance(event, Stopped):
            # Held here, the loop finds the end of the unit beside that of the session.
            gate.set()
            assert done.wait(PATIENCE_S)

    async def commands():
        yield Prepare("be brief")
        await eventually(lambda: any(isinstance(event, Prepared) for event in events))
        yield chunk(0)
        await entered(stage, "think")
        yield Stop()

    await DuplexSession(stage.host, "s", "omni_duplex", send).run(commands())

    assert [type(event) for event in events] == [Opened, Prepared, Stopped, Closed]
    assert "failed" not in caplog.text


async def test_a_reason_that_would_forge_a_log_line_is_not_kept(stage):
    client = stage.client()
    await client.next(Opened)
    client.send(Stop("bye\nERROR forged"))
    await client.next(Stopped)

    assert await client.next(Closed) == Closed("stopped")


async def test_stop_and_open_again_fifty_times_on_one_slot(make):
    """A client that saw `closed` and reopened at once was refused, for clean-up was not over."""
    stage = make(n_slots=1)
    for i in range(50):
        client = stage.client(f"s{i}")
        await client.prepared()
        client.send(chunk(0, LOUD), Stop())
        await client.until(Closed)

    assert len(stage.model.named("end")) == 50
    assert stage.host.engine.n_programs == 0


@pytest.mark.parametrize("kind", ["prefill", "think", "speak", "finalize"])
async def test_a_client_that_vanishes_during_an_op_leaves_a_clean_slot(make, kind):
    stage = make(model=gated(kind), n_slots=1)
    client = stage.client()
    client.send(Prepare("x"), chunk(0, LOUD))
    await entered(stage, kind)
    client.disconnect()
    stage.model.gates[kind].set()
    await client.code()

    assert client.rest()[-1] == Closed("disconnected")
    again = stage.client("again")
    await again.prepared()


@pytest.mark.parametrize("kind", ["prefill", "think", "finalize"])
async def test_cancelling_the_connection_never_costs_a_slot(make, kind):
    """Cancellation skipped the roll-back, so each cancelled open burned one slot."""
    stage = make(model=gated(kind), n_slots=1)
    for _ in range(3):
        client = stage.client()
        client.send(Prepare("x"), chunk(0, LOUD))
        await entered(stage, kind)
        client.task.cancel()
        await asyncio.sleep(0)
        client.task.cancel()
        assert stage.host.slots.n_free == 0
        stage.model.gates[kind].set()
        with pytest.raises(asyncio.CancelledError):
            await client.task
        assert stage.host.slots.n_free == 1
        stage.model.gates[kind].clear()
        stage.model.entered[kind].clear()


async def test_cancelling_while_the_state_is_made_never_costs_a_slot(make):
    stage = make(n_slots=1)
    gate, inside = threading.Event(), threading.Event()

    def hold() -> None:
        inside.set()
        gate.wait(PATIENCE_S)

    stage.threads.call("language", hold)
    assert await asyncio.to_thread(inside.wait, PATIENCE_S)
    client = stage.client()
    await asyncio.sleep(0)
    client.task.cancel()
    gate.set()
    with pytest.raises(asyncio.CancelledError):
        await client.task

    assert stage.host.slots.n_free == 1


async def test_a_full_worker_refuses_without_touching_anything(make):
    stage = make(n_slots=1)
    first = stage.client("a")
    await first.prepared()
    second = stage.client("b")

    with pytest.raises(NoFreeSlot):
        await second.task
    assert second.rest() == []
    first.send(chunk(0))
    await first.next(Result)


async def test_a_slow_reader_is_let_go(stage):
    """The outbox refuses; the session ends by itself and its slot is free."""
    room = [3]

    def send(event: object) -> None:
        room[0] -= 1
        if room[0] < 0:
            raise SlowReader("full")

    async def commands():
        yield Prepare("x")
        for seq in range(20):
            yield chunk(seq, LOUD)
            await asyncio.sleep(0.01)

    session = DuplexSession(stage.host, "slow", "omni_duplex", send)
    code = await asyncio.wait_for(session.run(commands()), PATIENCE_S)

    assert code == 1008
    assert stage.host.slots.n_free == 2


async def test_a_reader_too_slow_for_the_refusals_of_its_frames_is_counted_as_one(stage):
    """The connection answers what is no command before the session sees it."""

    async def commands():
        yield Prepare("x")
        raise SlowReader("full")

    session = DuplexSession(stage.host, "slow", "omni_duplex", lambda event: None)
    code = await asyncio.wait_for(session.run(commands()), PATIENCE_S)

    ended = stage.host.metrics.registry.get_sample_value
    assert code == 1008
    assert ended("omni_worker_sessions_ended_total", {"reason": "slow_reader"}) == 1


async def test_a_session_ended_from_outside_tells_its_client_why(stage):
    client = stage.client()
    await client.prepared()
    client.session.end("draining", WorkerStopping("The worker is shutting down"))
    failure = await client.next(Failure)

    assert (failure.slug, failure.close_code) == ("worker_lost", 1001)
    assert await client.next(Closed) == Closed("draining")


async def test_no_task_is_left_after_sessions_have_ended(stage):
    before = len(asyncio.all_tasks())
    for i in range(5):
        client = stage.client(f"s{i}")
        await client.prepared()
        client.send(chunk(0, LOUD))
        client.disconnect()
        await client.code()

    assert len(asyncio.all_tasks()) == before
    assert stage.host.sessions == {}
