"""Chunks, units and the answers owed: one per chunk, in order."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import BadAudio, ModelFault
from shared.protocol import Result, Timings
from worker.models.contract import UnitResult
from worker.sessions.inbox import Chunk, FailedChunk, Inbox

SIZE = 10


def samples(n: int, value: float = 0.0) -> np.ndarray:
    return np.full(n, value, np.float32)


def frame(value: int) -> np.ndarray:
    return np.full((1, 1, 3), value, np.uint8)


def speak(text: str, **fields) -> UnitResult:
    return UnitResult(False, text, np.full(2, 0.5, np.float32), **fields)


@pytest.fixture
def inbox() -> Inbox:
    return Inbox(SIZE, max_units=3)


def run_all(inbox: Inbox) -> list[int]:
    indices = []
    while unit := inbox.next_unit(1.0):
        inbox.resolve(speak(f"u{unit.index}"))
        indices.append(unit.index)
    return indices


def test_a_chunk_of_one_unit_becomes_that_unit(inbox):
    inbox.add(Chunk(0, samples(SIZE, 0.25)), now=7.0)

    unit = inbox.next_unit(1.0)

    assert unit is not None
    assert (unit.index, unit.arrived_at, unit.deadline) == (0, 7.0, 8.0)
    assert unit.audio.tolist() == [0.25] * SIZE
    assert inbox.is_running


def test_a_chunk_that_completes_no_unit_is_answered_with_the_current_state(inbox):
    inbox.add(Chunk(0, samples(SIZE)), 0.0)
    inbox.next_unit(1.0)
    inbox.resolve(speak("hello"))
    inbox.answers()
    inbox.add(Chunk(1, samples(SIZE - 1)), 1.0)

    assert inbox.answers() == [Result(seq=1, is_listen=False, unit_index=1)]


def test_a_session_listens_before_its_first_unit(inbox):
    inbox.add(Chunk(0, samples(3)), 0.0)

    assert inbox.answers() == [Result(seq=0, is_listen=True, unit_index=0)]


def test_samples_of_several_chunks_make_one_unit_of_the_last(inbox):
    inbox.add(Chunk(0, samples(6, 0.1)), 0.0)
    inbox.add(Chunk(1, samples(6, 0.2)), 1.0)

    unit = inbox.next_unit(1.0)
    assert unit is not None
    assert unit.audio.tolist() == pytest.approx([0.1] * 6 + [0.2] * 4)
    inbox.resolve(speak("x"))
    first, second = inbox.answers()
    assert (first.text, second.text) == ("", "x")


def test_several_units_of_a_chunk_are_merged_into_one_result(inbox):
    inbox.add(Chunk(0, samples(2 * SIZE)), 0.0)
    inbox.next_unit(1.0)
    inbox.resolve(
        speak(
            "a",
            end_of_turn=True,
            heard="one",
            timings=Timings(decode_ms=3.0, total_ms=10.0),
            n_tokens=2,
            kv_tokens=5,
        )
    )
    assert inbox.answers() == []
    inbox.next_unit(1.0)
    inbox.resolve(
        UnitResult(
            True,
            "b",
            np.full(1, 0.25, np.float32),
            interrupted=True,
            heard="two",
            timings=Timings(decode_ms=4.0, total_ms=20.0),
            n_tokens=3,
            kv_tokens=9,
        )
    )

    (result,) = inbox.answers()

    assert result == Result(
        seq=0,
        is_listen=True,
        unit_index=2,
        text="ab",
        audio=np.array([0.5, 0.5, 0.25], "<f4").tobytes(),
        end_of_turn=True,
        interrupted=True,
        heard="one two",
        timings=Timings(decode_ms=7.0, total_ms=20.0),
        n_tokens=5,
        kv_tokens=9,
    )


def test_answers_leave_in_the_order_of_their_chunks(inbox):
    inbox.add(Chunk(0, samples(SIZE)), 0.0)
    inbox.add(Chunk(1, samples(2)), 0.1)

    assert inbox.answers() == []
    run_all(inbox)
    assert [answer.seq for answer in inbox.answers()] == [0, 1]


def test_beyond_the_bound_the_oldest_unit_is_dropped_and_its_chunk_told(inbox):
    n_dropped = [inbox.add(Chunk(seq, samples(SIZE, seq / 10)), 0.0) for seq in range(5)]

    assert n_dropped == [0, 0, 0, 1, 1]
    assert inbox.n_waiting == 3
    dropped = inbox.answers()
    assert dropped == [
        Result(seq=0, is_listen=True, unit_index=0, dropped=True),
        Result(seq=1, is_listen=True, unit_index=0, dropped=True),
    ]
    unit = inbox.next_unit(1.0)
    assert unit is not None
    assert (unit.index, unit.audio[0]) == (0, pytest.approx(0.2))


def test_a_chunk_is_taken_whole_however_long_it_is(inbox):
    """A chunk of 30 s lost all but its last 8 s."""
    assert inbox.add(Chunk(0, samples(10 * SIZE)), 0.0) == 0
    assert inbox.n_waiting == 10

    assert inbox.add(Chunk(1, samples(SIZE)), 0.0) > 0


def test_the_answer_to_a_refused_chunk_keeps_the_order(inbox):
    inbox.add(Chunk(0, samples(SIZE)), 0.0)
    inbox.refuse(1, BadAudio("odd"))
    assert inbox.answers() == []

    inbox.next_unit(1.0)
    inbox.resolve(UnitResult(is_listen=True))

    assert [answer.seq for answer in inbox.answers()] == [0, 1]


def test_a_chunk_that_lost_some_of_its_units_says_so(inbox):
    inbox.add(Chunk(0, samples(3 * SIZE)), 0.0)
    inbox.add(Chunk(1, samples(2 * SIZE)), 0.0)
    run_all(inbox)

    results = inbox.answers()

    assert [(r.dropped, r.text) for r in results] == [(True, "u0"), (False, "u1u2")]


def test_frames_wait_for_their_unit(inbox):
    inbox.add(Chunk(0, samples(4), (frame(1),)), 0.0)
    inbox.add(Chunk(1, samples(6), (frame(2),)), 0.0)

    unit = inbox.next_unit(1.0)

    assert unit is not None
    assert [f[0, 0, 0] for f in unit.frames] == [1, 2]


def test_frames_of_a_long_chunk_are_spread_over_its_units(inbox):
    inbox.add(Chunk(0, samples(2 * SIZE), (frame(1), frame(2), frame(3))), 0.0)

    units = []
    while unit := inbox.next_unit(1.0):
        units.append([int(f[0, 0, 0]) for f in unit.frames])
        inbox.resolve(speak(""))

    assert units == [[1, 2], [3]]


def test_frames_without_audio_to_go_with_are_bounded(inbox):
    for seq in range(40):
        inbox.add(Chunk(seq, samples(0), (frame(seq),)), 0.0)
    inbox.add(Chunk(40, samples(SIZE)), 0.0)

    unit = inbox.next_unit(1.0)

    assert unit is not None
    assert [int(f[0, 0, 0]) for f in unit.frames] == list(range(24, 40))


def test_force_listen_holds_for_the_units_of_its_chunk_only(inbox):
    inbox.add(Chunk(0, samples(SIZE), force_listen=True), 0.0)
    inbox.add(Chunk(1, samples(SIZE)), 0.0)

    flags = []
    while unit := inbox.next_unit(1.0):
        flags.append(unit.force_listen)
        inbox.resolve(speak(""))

    assert flags == [True, False]


def test_force_listen_of_a_short_chunk_holds_for_the_unit_it_is_part_of(inbox):
    inbox.add(Chunk(0, samples(4), force_listen=True, max_slice_nums=2), 0.0)
    inbox.add(Chunk(1, samples(16)), 0.0)

    first = inbox.next_unit(1.0)
    inbox.resolve(speak(""))
    second = inbox.next_unit(1.0)

    assert first is not None
    assert second is not None
    assert (first.force_listen, first.max_slice_nums) == (True, 2)
    assert (second.force_listen, second.max_slice_nums) == (False, None)


def test_force_listen_overtakes_the_units_that_wait(inbox):
    inbox.add(Chunk(0, samples(SIZE)), 0.0)
    inbox.force_listen_waiting()

    unit = inbox.next_unit(1.0)

    assert unit is not None
    assert unit.force_listen


def test_speech_that_was_interrupted_before_it_left_is_dropped(inbox):
    inbox.add(Chunk(0, samples(2 * SIZE)), 0.0)
    inbox.next_unit(1.0)
    inbox.resolve(speak("old "))
    inbox.drop_speech()
    inbox.next_unit(1.0)
    inbox.resolve(speak("new"))

    (result,) = inbox.answers()

    assert (result.text, len(result.audio)) == ("old new", 2 * 4)


def test_a_failed_unit_fails_its_chunk_alone(inbox):
    error = ModelFault("unit 0 failed")
    inbox.add(Chunk(0, samples(SIZE)), 0.0)
    inbox.add(Chunk(1, samples(SIZE)), 0.0)
    inbox.next_unit(1.0)
    inbox.fail(error)
    run_all(inbox)

    first, second = inbox.answers()

    assert first == FailedChunk(0, error)
    assert (second.text, second.unit_index) == ("u1", 2)


def test_failing_what_waits_answers_every_chunk(inbox):
    error = ModelFault("no")
    for seq in range(2):
        inbox.add(Chunk(seq, samples(SIZE + 1)), 0.0)
    inbox.fail_waiting(error)

    assert inbox.answers() == [FailedChunk(0, error), FailedChunk(1, error)]
    assert inbox.next_unit(1.0) is None


@given(
    st.lists(st.tuples(st.integers(0, 35), st.sampled_from(["wait", "run", "fail"])), max_size=30)
)
def test_every_chunk_is_answered_exactly_once_and_in_order(steps):
    inbox = Inbox(SIZE, max_units=3)
    answers = []
    total = 0
    for seq, (n, then) in enumerate(steps):
        total += n
        inbox.add(Chunk(seq, samples(n)), 0.0)
        # The bound, or the units of one chunk with what was left of the last.
        assert inbox.n_waiting <= 4
        if then != "wait" and inbox.next_unit(1.0):
            if then == "run":
                inbox.resolve(speak("x"))
            else:
                inbox.fail(ModelFault("x"))
        answers += inbox.answers()
    run_all(inbox)
    answers += inbox.answers()

    assert [answer.seq for answer in answers] == list(range(len(steps)))
    assert inbox.n_completed <= total // SIZE
