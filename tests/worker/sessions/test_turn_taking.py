"""When a turn begins and ends, from lists of numbers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import BadMessage
from shared.protocol import VadSettings
from worker.sessions import turn_taking
from worker.sessions.turn_taking import WINDOW, TurnBegan, TurnEnded, TurnTaker, check_settings

WINDOW_MS = 32.0
PLAIN = VadSettings(
    threshold=0.7, min_speech_ms=2 * WINDOW_MS, min_silence_ms=3 * WINDOW_MS, speech_pad_ms=0.0
)


def windows(n: int, first: int = 0) -> np.ndarray:
    """Sound that tells where it is from: window `i` has the value `i`."""
    return np.repeat(np.arange(first, first + n, dtype=np.float32), WINDOW)


def hear(probabilities: list[float], settings: VadSettings = PLAIN) -> list:
    return TurnTaker(settings).hear(windows(len(probabilities)), probabilities)


def told(events) -> list:
    """`began`, `dropped`, or the numbers of the turn's windows."""
    return [
        "began"
        if isinstance(event, TurnBegan)
        else "dropped"
        if event.samples is None
        else [int(value) for value in event.samples[::WINDOW]]
        for event in events
    ]


def test_a_turn_holds_its_trailing_silence():
    assert told(hear([0, 0.9, 0.9, 0, 0, 0, 0.9])) == ["began", [1, 2, 3, 4, 5]]


def test_the_threshold_itself_begins_a_turn():
    assert told(hear([0.69])) == []
    assert told(hear([0.7])) == ["began"]


def test_between_the_two_thresholds_it_stays_as_it_was():
    assert told(hear([0.9, 0.6, 0.6, 0.6, 0.6])) == ["began"]
    assert told(hear([0.9, 0.9, 0.5, 0.6, 0.6])) == ["began", [0, 1, 2, 3, 4]]


def test_a_pause_that_is_shorter_than_the_silence_goes_on():
    assert told(hear([0.9, 0, 0, 0.9, 0, 0, 0])) == ["began", [0, 1, 2, 3, 4, 5, 6]]


def test_a_turn_that_is_too_short_is_dropped_and_the_next_one_is_heard():
    assert told(hear([0.9, 0, 0, 0, 0.9, 0.9, 0, 0, 0])) == [
        "began",
        "dropped",
        "began",
        [4, 5, 6, 7, 8],
    ]


def test_what_follows_a_turn_in_the_same_sound_is_not_heard():
    events = hear([0.9, 0.9, 0, 0, 0, 0.9, 0.9, 0, 0, 0])

    assert told(events) == ["began", [0, 1, 2, 3, 4]]


def test_padding_is_the_sound_from_before_the_turn():
    settings = VadSettings(0.7, 0.0, WINDOW_MS, speech_pad_ms=40.0)
    (_, ended) = hear([0, 0, 0, 0.9, 0], settings)

    assert len(ended.samples) == 2 * WINDOW + 640
    assert list(np.unique(ended.samples[:640])) == [1.0, 2.0]
    assert (ended.samples[:640] == 2.0).sum() == WINDOW


def test_there_is_no_more_padding_than_there_was_sound():
    settings = VadSettings(0.7, 0.0, WINDOW_MS, speech_pad_ms=500.0)
    (_, ended) = hear([0, 0.9, 0], settings)

    assert len(ended.samples) == 3 * WINDOW


def test_a_turn_without_end_is_cut(monkeypatch):
    monkeypatch.setattr(turn_taking, "MAX_TURN_S", 4 * WINDOW / 16_000)

    assert told(hear([0.9] * 5)) == ["began", [0, 1, 2, 3]]


def test_a_turn_that_is_cut_is_no_longer_than_the_limit_with_its_padding():
    """One sample more would be a clip of its own to a model that hears 30 s at once."""
    settings = VadSettings(0.7, 0.0, WINDOW_MS, speech_pad_ms=1000.0)
    (_, ended) = hear([*[0] * 40, *[0.9] * 940], settings)

    assert 30 * 16_000 - WINDOW < len(ended.samples) <= 30 * 16_000


def test_a_turn_ends_although_no_silence_is_asked_for():
    settings = VadSettings(0.7, 0.0, min_silence_ms=0.0, speech_pad_ms=0.0)

    assert told(hear([0.9, 0.9, 0.1], settings)) == ["began", [0, 1, 2]]


@pytest.mark.parametrize("threshold", [0.06, 0.1, 0.15, 0.2])
def test_silence_ends_a_turn_at_the_lowest_thresholds_too(threshold):
    """The slider of the demo's page begins at 0.1, and nothing is 0.15 below that."""
    settings = VadSettings(threshold, 0.0, min_silence_ms=64.0, speech_pad_ms=0.0)
    check_settings(settings)

    assert told(hear([0.9, 0.9, 0.04, 0.04, 0.04], settings)) == ["began", [0, 1, 2, 3]]


def test_the_sound_between_two_turns_is_in_neither():
    taker = TurnTaker(PLAIN)
    taker.hear(windows(5), [0.9, 0.9, 0, 0, 0])
    second = taker.hear(windows(6, first=5), [0, 0.9, 0.9, 0, 0, 0])

    assert told(second) == ["began", [6, 7, 8, 9, 10]]


@given(st.lists(st.integers(1, 3 * WINDOW), max_size=20))
def test_pieces_of_any_length_give_the_same_turn(sizes):
    """The detector's windows are not the client's chunks."""
    probabilities = [0, 0.9, 0.9, 0.9, 0, 0, 0, 0]
    sound = np.arange(len(probabilities) * WINDOW, dtype=np.float32)
    whole = TurnTaker(PLAIN).hear(sound, probabilities)
    taker, events, at, n_told = TurnTaker(PLAIN), [], 0, 0
    for size in [*sizes, len(sound)]:
        end = min(at + size, len(sound))
        events += taker.hear(sound[at:end], probabilities[n_told : end // WINDOW])
        at, n_told = end, end // WINDOW

    (turn,) = [event.samples for event in events if isinstance(event, TurnEnded)]
    assert np.array_equal(turn, whole[1].samples)


@pytest.mark.parametrize(
    "settings",
    [
        VadSettings(threshold=0.0),
        # What begins a turn would end it.
        VadSettings(threshold=0.05),
        VadSettings(threshold=float("nan")),
        VadSettings(threshold=1.1),
        VadSettings(min_speech_ms=-1.0),
        VadSettings(min_silence_ms=float("nan")),
        VadSettings(speech_pad_ms=1e9),
    ],
)
def test_impossible_settings_are_refused(settings):
    with pytest.raises(BadMessage, match="expected"):
        check_settings(settings)


def test_the_window_is_the_detectors():
    from worker.models.voice_activity import VAD_WINDOW  # noqa: PLC0415

    assert WINDOW == VAD_WINDOW
