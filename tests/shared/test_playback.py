"""The player that tells gaps apart from pauses."""

from __future__ import annotations

import pytest

from shared.playback import Player


def test_audio_that_comes_within_the_buffer_leaves_no_gap() -> None:
    player = Player(0.2)
    assert [player.receive(at, 1.0) for at in (10.0, 11.15, 12.2)] == [0.0, 0.0, 0.0]


def test_audio_that_comes_after_the_buffer_ran_dry_leaves_a_gap_of_the_lateness() -> None:
    player = Player(0.2)
    player.receive(10.0, 1.0)
    assert player.receive(11.5, 1.0) == pytest.approx(0.3)


def test_after_a_gap_the_player_goes_on_without_a_new_buffer() -> None:
    player = Player(0.2)
    player.receive(10.0, 1.0)
    player.receive(11.5, 1.0)
    assert player.receive(12.6, 1.0) == pytest.approx(0.1)


def test_a_pause_between_two_turns_is_no_gap() -> None:
    player = Player(0.2)
    player.receive(10.0, 1.0)
    player.end_turn()
    assert player.receive(60.0, 1.0) == 0.0


def test_the_lead_is_what_has_arrived_and_is_not_played() -> None:
    player = Player(0.2)
    assert player.lead_s(10.0) == 0.0
    player.receive(10.0, 3.0)
    assert player.lead_s(11.0) == pytest.approx(2.2)
    assert player.lead_s(20.0) == 0.0
