"""Speech probabilities in, utterances out. A window is 32 ms; S = speech, . = silence."""

import pytest

from worker.models.cascade.endpointing import (
    END_SILENCE_S,
    LISTENING,
    SPEAKING,
    WINDOW_S,
    Endpointer,
)


def hear(ears: Endpointer, pattern: str, sensitivity=LISTENING) -> bool:
    levels = {"S": 0.9, "s": 0.6, ".": 0.02, "-": 0.4}
    return ears.hear([levels[c] for c in pattern], sensitivity)


def test_silence_opens_no_utterance():
    ears = Endpointer()

    assert not hear(ears, "." * 60)
    assert not ears.in_utterance
    assert not ears.has_ended


def test_speech_opens_an_utterance_at_its_first_window():
    ears = Endpointer()

    assert hear(ears, ".....SSSSSS")
    assert ears.utterance_start == 5
    assert ears.last_speech == 11


def test_a_click_is_not_speech():
    ears = Endpointer()

    assert not hear(ears, "....SS.....S......SSS.....")
    assert not ears.in_utterance


def test_an_utterance_ends_after_half_a_second_of_silence():
    ears = Endpointer()
    hear(ears, "SSSSSSSS")
    n_windows = round(END_SILENCE_S / WINDOW_S)

    hear(ears, "." * (n_windows - 1))
    assert not ears.has_ended
    hear(ears, ".")
    assert ears.has_ended
    assert ears.silence_s == pytest.approx(END_SILENCE_S, abs=WINDOW_S)


def test_a_stop_consonant_does_not_split_a_run():
    ears = Endpointer()

    assert hear(ears, "SS...SS")
    assert ears.utterance_start == 0


def test_values_between_the_thresholds_keep_a_run_but_start_none():
    ears = Endpointer()

    assert not hear(ears, "-" * 20)
    assert hear(ears, "S---")
    assert ears.utterance_start == 20


def test_an_utterance_in_two_chunks_is_one():
    ears = Endpointer()
    hear(ears, "....SS")

    assert hear(ears, "SSS...")
    assert ears.utterance_start == 4


def test_a_short_last_word_keeps_the_utterance_open():
    ears = Endpointer()
    hear(ears, "SSSSSS" + "." * 12)

    assert hear(ears, "SS......")
    assert ears.last_speech == 20


def test_while_speaking_more_and_clearer_speech_is_asked_for():
    assert not hear(Endpointer(), "s" * 20, SPEAKING)
    assert not hear(Endpointer(), "SSSSS....", SPEAKING)
    assert hear(Endpointer(), "SSSSSS...", SPEAKING)


def test_300_ms_of_speech_at_the_end_of_a_chunk_count_while_speaking():
    """300 ms hold nine whole windows; the first two may still be unsure."""
    assert hear(Endpointer(), "." * 22 + "ss" + "S" * 7, SPEAKING)


def test_after_finish_the_same_silence_ends_nothing():
    ears = Endpointer()
    hear(ears, "SSSSSS" + "." * 20)

    ears.finish()

    assert not ears.in_utterance
    assert not ears.has_ended
    assert not hear(ears, "....")
