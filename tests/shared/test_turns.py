"""The first sound of each turn."""

from shared.turns import Turn


def take(turn, at, *, listen=False, audio=True, end=False):
    return turn.take(at, is_listen=listen, has_audio=audio, end_of_turn=end)


def test_the_first_result_with_audio_is_told_once_a_turn():
    turn = Turn()

    assert take(turn, 0.0, listen=True, audio=False) is None
    assert take(turn, 1.0) == 1.0
    assert take(turn, 2.0) is None
    assert take(turn, 3.0, end=True) is None
    assert take(turn, 4.0) == 4.0


def test_a_turn_begins_with_its_first_result_even_if_that_is_silent():
    turn = Turn()
    take(turn, 1.0, audio=False)

    assert take(turn, 2.0) == 1.0


def test_a_turn_ends_when_the_model_listens():
    turn = Turn()
    take(turn, 1.0)
    take(turn, 2.0, listen=True, audio=False)

    assert take(turn, 3.0) == 3.0


def test_a_turn_of_one_result_has_its_first_audio():
    turn = Turn()

    assert take(turn, 1.0, end=True) == 1.0
    assert take(turn, 2.0, end=True) == 2.0
