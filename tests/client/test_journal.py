from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from client.events import ErrorEvent, Result
from client.journal import Journal, Sent, percentiles


def result(audio_s: float = 0.0, **fields: Any) -> Result:
    values: dict[str, Any] = {
        "is_listen": not audio_s,
        "text": "",
        "audio": np.zeros(round(audio_s * 24_000), np.float32),
        "end_of_turn": False,
        "heard": "",
        "interrupted": False,
        "dropped": False,
        "unit_index": 0,
        "wall_clock_ms": None,
        "kv_cache_length": None,
        "n_tokens": None,
        "n_tts_tokens": None,
    }
    return Result(**values | fields)


def journal(*answers: tuple[float, Result]) -> Journal:
    """A chunk leaves at each whole second from 0; its answer comes at the given time."""
    written = Journal()
    for second, (at, answer) in enumerate(answers):
        written.send(Sent(float(second), 0.0))
        written.take(answer, at)
    return written


def test_the_latency_is_from_a_chunk_to_its_own_result() -> None:
    written = Journal()
    for second in (0.0, 1.0):
        written.send(Sent(second, 0.0))
    written.take(result(), 1.25)
    written.take(result(), 1.5)

    assert written.latencies_s() == [1.25, 0.5]
    assert written.n_unanswered == 0


def test_a_result_that_does_not_come_is_missing() -> None:
    written = journal((0.1, result()))
    written.send(Sent(1.0, 0.0))

    assert written.n_unanswered == 1


def test_an_error_takes_the_place_of_its_chunks_result() -> None:
    written = Journal()
    for second in (0.0, 1.0):
        written.send(Sent(second, 0.0))
    written.take(ErrorEvent("damaged", "bad_audio"), 0.25)
    written.take(result(), 1.25)

    assert written.latencies_s() == [0.25]
    assert written.n_unanswered == 0


def test_a_result_without_a_chunk_is_a_problem() -> None:
    written = journal((0.1, result()))
    written.take(result(), 0.2)

    assert written.slug == "extra_result"


def test_no_audio_is_kept() -> None:
    written = journal((0.1, result(1.0)))

    assert written.replies[0].result.audio.size == 0
    assert written.replies[0].n_samples == 24_000


def test_audio_within_the_players_buffer_makes_no_gap() -> None:
    written = journal((0.1, result(1.0)), (1.25, result(1.0)))

    assert written.gaps_s(0.2) == []


def test_audio_after_the_players_buffer_makes_a_gap() -> None:
    written = journal((0.1, result(1.0)), (1.4, result(1.0)), (2.4, result(1.0)))

    assert written.gaps_s(0.2) == pytest.approx([0.1])


@pytest.mark.parametrize("last", [result(1.0, end_of_turn=True), result(interrupted=True)])
def test_the_pause_between_two_turns_is_no_gap(last: Result) -> None:
    written = journal((0.1, result(1.0)), (1.1, last), (9.0, result(1.0)))

    assert written.gaps_s(0.2) == []


def test_dropped_input_within_a_turn_does_not_hide_the_gap() -> None:
    written = journal((0.1, result(1.0)), (1.1, result(dropped=True)), (2.3, result(1.0)))

    assert written.gaps_s(0.2) == pytest.approx([1.0])
    assert written.n_dropped == 1


def test_the_lead_is_the_audio_that_was_still_unplayed() -> None:
    written = journal((0.0, result(2.0)), (1.0, result(1.0)))

    assert [piece.lead_s for piece in written.pieces(0.25)] == [1.25]


def test_the_first_audio_of_a_turn_counts_from_the_chunk_that_began_it() -> None:
    thinking = result(is_listen=False)
    written = journal(
        (0.1, result()),
        (1.1, thinking),
        (2.5, result(1.0)),
        (3.1, result(1.0, end_of_turn=True)),
        (4.25, result(1.0)),
    )

    assert written.first_audio_s() == [1.5, 0.25]


def test_the_first_audio_after_a_moment_is_later_than_it() -> None:
    written = journal((0.5, result(1.0)), (1.5, result()), (2.5, result(1.0)))

    assert written.first_audio_after(0.5) == 2.0
    assert written.first_audio_after(2.5) is None


def test_percentiles_of_nothing_are_no_zeros() -> None:
    assert percentiles([]) == {"n": 0}
    assert percentiles([0.5, 0.25], 1000)["max"] == 500.0
