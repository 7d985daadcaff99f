from __future__ import annotations

import math

import numpy as np
import pytest

from client.events import Delta, ErrorEvent, TimedOut
from client.half_duplex import Generating, Notice, TurnDone
from client.load.answers import Answers

NO_SOUND = np.zeros(0, np.float32)
SECOND = np.zeros(24_000, np.float32)
DONE = TurnDone(1, "It is Paris.", "")


def asked(at: float = 10.0) -> Answers:
    answers = Answers(buffer_s=0.25)
    answers.ask(at)
    return answers


def test_an_answer_is_timed_from_the_end_of_its_question() -> None:
    answers = asked(10.0)
    answers.take(Generating(900.0), 10.5)
    answers.take(Delta("It is ", NO_SOUND), 11.0)
    answers.take(Delta("", SECOND), 11.5)
    answers.take(Delta("Paris.", SECOND), 12.0)
    answers.take(DONE, 13.0)

    (answer,) = answers.answers
    assert (answer.first_text_s, answer.first_audio_s, answer.done_s) == (1.0, 1.5, 3.0)
    assert answer.gaps_s == []
    assert (answers.n_unanswered, answers.n_missing) == (0, 0)


def test_a_question_that_is_cut_short_is_complete_when_its_answer_begins() -> None:
    answers = asked(10.0)
    answers.take(Generating(400.0), 9.0)
    answers.take(Delta("Yes?", NO_SOUND), 9.5)

    assert answers.n_cut_short == 1
    assert answers.answers[0].first_text_s == 0.5


def test_sound_that_comes_after_the_last_was_played_makes_a_gap() -> None:
    answers = asked()
    answers.take(Delta("", SECOND), 11.0)
    answers.take(Delta("", SECOND), 12.75)

    assert answers.answers[0].gaps_s == [0.5]


def test_an_answer_is_heard_out_when_its_last_sound_has_been_played() -> None:
    answers = asked()
    assert answers.played_until == -math.inf
    answers.take(Delta("", SECOND), 11.0)
    assert answers.played_until == math.inf
    answers.take(DONE, 11.1)

    assert answers.played_until == pytest.approx(12.25)


def test_an_answer_in_text_alone_leaves_the_microphone_open() -> None:
    answers = asked()
    answers.take(Delta("Paris.", NO_SOUND), 11.0)

    assert answers.played_until == -math.inf


def test_a_failed_turn_is_missing_and_the_next_may_come() -> None:
    answers = asked()
    answers.take(ErrorEvent("the turn failed", "model_fault"), 11.0)
    answers.ask(20.0)
    answers.take(DONE, 21.0)

    assert answers.n_missing == 1
    assert [answer.done_s for answer in answers.answers] == [None, 1.0]
    assert [error.slug for error in answers.errors] == ["model_fault"]


def test_an_answer_that_nobody_asked_for_is_no_answer() -> None:
    answers = asked()
    answers.give_up()
    answers.take(Delta("late", SECOND), 50.0)
    answers.take(DONE, 51.0)

    assert answers.answers[0].first_text_s is None
    assert answers.n_missing == 1


def test_an_answer_that_was_given_up_does_not_count_for_the_next_question() -> None:
    """It came when the next question had been asked, and was timed from that one's end."""
    answers = asked(10.0)
    answers.take(Generating(900.0), 10.5)
    answers.give_up()
    answers.ask(45.0)
    answers.take(Delta("late", SECOND), 44.0)
    answers.take(DONE, 46.0)
    answers.take(Generating(900.0), 47.0)
    answers.take(Delta("It is Paris.", NO_SOUND), 48.0)
    answers.take(DONE, 49.0)

    late, answer = answers.answers
    assert (late.first_text_s, late.done_s) == (None, None)
    assert (answer.first_text_s, answer.first_audio_s, answer.done_s) == (3.0, None, 4.0)


def test_after_a_question_that_was_not_heard_the_next_has_its_answer() -> None:
    answers = asked(10.0)
    answers.give_up()
    answers.ask(45.0)
    answers.take(Generating(900.0), 45.5)
    answers.take(DONE, 46.0)

    assert [answer.done_s for answer in answers.answers] == [None, 1.0]


def test_what_was_dropped_and_why_it_ended_is_told() -> None:
    answers = asked()
    answers.take(Notice("input_dropped", "too fast", 3), 11.0)
    answers.take(TimedOut("Session timeout (60.0s)"), 12.0)

    assert answers.n_dropped == 3
    assert (answers.problem, answers.slug) == ("Session timeout (60.0s)", "timeout")
