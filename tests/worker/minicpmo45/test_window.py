"""Which units stay in a session's context, and what has to move for it."""

import pytest

from shared.errors import ContextFull
from worker.models.minicpmo45.window import MAX_UNIT_TOKENS, KeptUnit, Window, WindowSettings

MARKER = (1, 2)
SUFFIX = (8, 9)


def window(mode, n_units, n_tokens=10, words=(), **settings):
    made = WindowSettings(mode=mode, **settings)
    kept = Window(made, made.n_positions, MARKER, n_prefix=20, suffix=SUFFIX)
    for index in range(n_units):
        kept.add(KeptUnit(index, n_tokens, words if index % 2 else ()))
    return kept, kept.n_preserved + n_units * n_tokens


def indices(kept):
    return [unit.index for unit in kept.units]


def test_basic_drops_whole_units_down_to_the_low_mark():
    kept, n_tokens = window("basic", 10, high_tokens=100, low_tokens=65)

    assert kept.is_due(n_tokens)
    kept, cut = kept.cut(n_tokens)

    assert indices(kept) == [6, 7, 8, 9]
    assert (cut.start, cut.target, cut.rewritten) == (22 + 60, 22, ())
    assert kept.n_dropped_tokens == 60
    assert not kept.is_due(n_tokens - 60)


def test_basic_is_due_above_the_high_mark_only():
    kept, _ = window("basic", 10, high_tokens=100, low_tokens=65)

    assert not kept.is_due(100)
    assert kept.is_due(101)


@pytest.mark.parametrize("mode", ["basic", "context"])
def test_the_newest_unit_stays_above_the_marks_while_another_one_fits(mode):
    kept, n_tokens = window(
        mode, 2, n_tokens=100, high_tokens=122, low_tokens=65, max_units=1, max_tokens=1024
    )

    kept, cut = kept.cut(n_tokens)

    assert indices(kept) == [1]
    assert not kept.is_due(cut.target + 100)
    kept.check_room(cut.target + 100)


@pytest.mark.parametrize("mode", ["basic", "context"])
def test_a_unit_behind_which_none_fits_goes_although_it_is_the_only_one(mode):
    """A small window must not end the session: the largest unit alone is longer than its marks."""
    settings = {"high_tokens": 256, "low_tokens": 128, "max_tokens": 1024}
    kept, n_tokens = window(mode, 1, n_tokens=MAX_UNIT_TOKENS, **settings)

    assert kept.is_due(n_tokens)
    kept, cut = kept.cut(n_tokens)

    assert not kept.units
    kept.check_room(cut.target)


def test_carried_words_leave_room_for_units_however_many_are_allowed():
    kept, n_tokens = window("context", 0, max_units=2, max_tokens=1024, previous_max_tokens=8192)
    for index in range(200):
        kept.add(KeptUnit(index, 40, tuple(range(20))))
        n_tokens += 40
        if kept.is_due(n_tokens):
            kept, cut = kept.cut(n_tokens)
            n_tokens += cut.target - cut.start
        kept.check_room(n_tokens)

    assert len(kept.previous) > 200
    assert len(kept.units) == 2


def test_a_cut_that_does_not_happen_leaves_the_window_as_it_was():
    kept, n_tokens = window("context", 5, words=(70, 71), max_units=3)

    kept.cut(n_tokens)

    assert indices(kept) == [0, 1, 2, 3, 4]
    assert kept.previous == ()


def test_context_carries_the_words_of_dropped_units_along():
    kept, n_tokens = window("context", 5, words=(70, 71), max_units=3, previous_max_tokens=3)

    kept, first = kept.cut(n_tokens)

    assert indices(kept) == [2, 3, 4]
    assert kept.previous == (*MARKER, 70, 71)
    assert first.rewritten == (*MARKER, 70, 71, *SUFFIX)
    assert (first.rewritten_at, first.start, first.target) == (20, 42, 26)

    kept.add(KeptUnit(5, 10, (72,)))
    kept.add(KeptUnit(6, 10, ()))
    kept, second = kept.cut(26 + 50)

    assert kept.previous == (*MARKER, 70, 71)[:2] + (71, 70, 71)
    assert second.rewritten == (*kept.previous, *SUFFIX)


def test_context_without_words_only_moves():
    kept, n_tokens = window("context", 5, max_units=3)

    kept, cut = kept.cut(n_tokens)

    assert cut.rewritten == ()
    assert kept.previous == ()
    assert cut.target == 22


def test_no_words_are_carried_if_none_may_be():
    kept, n_tokens = window("context", 5, words=(70,), max_units=3, previous_max_tokens=0)

    kept, _ = kept.cut(n_tokens)

    assert kept.previous == MARKER


def test_context_drops_large_units_before_the_cache_is_full():
    kept, n_tokens = window("context", 5, n_tokens=300, max_units=24, max_tokens=1024)

    assert kept.is_due(n_tokens)
    kept, _ = kept.cut(n_tokens)

    assert indices(kept) == [2, 3, 4]


def test_off_keeps_everything_and_says_when_it_is_full():
    kept, n_tokens = window("off", 90, max_tokens=1024)

    assert not kept.is_due(n_tokens)
    kept.check_room(kept.n_positions - MAX_UNIT_TOKENS)
    with pytest.raises(ContextFull, match="sliding_window_mode"):
        kept.check_room(kept.n_positions - MAX_UNIT_TOKENS + 1)


@pytest.mark.parametrize("mode", ["off", "basic", "context"])
def test_the_cache_holds_what_is_kept_and_one_largest_unit(mode):
    settings = WindowSettings(mode=mode, high_tokens=4000, max_tokens=4000)

    assert settings.n_positions >= 4000 + MAX_UNIT_TOKENS
    assert settings.n_positions % 64 == 0
