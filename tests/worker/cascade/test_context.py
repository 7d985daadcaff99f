"""The token sequence and the part of it that the cache holds."""

from hypothesis import given
from hypothesis import strategies as st

from worker.models.cascade.context import Context

SYSTEM = (1, 2, 3)


def fed(context: Context) -> Context:
    while piece := context.unfed(2):
        context.mark_fed(context.n_fed, piece)
    return context


def test_a_new_context_has_to_be_fed_its_system_prompt():
    context = Context(SYSTEM)

    assert context.unfed(2) == (1, 2)
    context.mark_fed(0, (1, 2))
    assert context.unfed(2) == (3,)


def test_cutting_back_keeps_what_was_fed_before_the_cut():
    context = fed(Context(SYSTEM))
    start = context.begin_turn([10, 11])
    fed(context)

    context.truncate(start)

    assert context.tokens == SYSTEM
    assert context.n_fed == 3


def test_what_was_fed_for_a_sequence_that_changed_is_not_counted():
    context = fed(Context(SYSTEM))
    start = context.begin_turn([10, 11])
    piece = context.unfed(2)
    context.truncate(start)
    context.begin_turn([20, 21])

    context.mark_fed(start, piece)

    assert context.n_fed == 3
    assert context.unfed(2) == (20, 21)


def test_dropping_keeps_system_and_newest_whole_turns():
    context = Context(SYSTEM)
    for turn in (10, 20, 30):
        context.begin_turn([turn] * 4)
    fed(context)

    shift = context.drop_oldest(keep_tokens=9)

    assert context.tokens == (*SYSTEM, *[20] * 4, *[30] * 4)
    assert shift == -4
    assert context.n_fed == 0


def test_the_newest_turn_stays_even_if_it_is_longer_than_asked():
    context = Context(SYSTEM)
    context.begin_turn([10] * 4)
    context.begin_turn([20] * 50)

    context.drop_oldest(keep_tokens=9)

    assert context.tokens == (*SYSTEM, *[20] * 50)


def test_dropping_nothing_keeps_the_cache():
    context = Context(SYSTEM)
    context.begin_turn([10])
    fed(context)

    assert context.drop_oldest(keep_tokens=100) == 0
    assert context.n_fed == 4


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("turn"), st.lists(st.integers(0, 3), max_size=5)),
            st.tuples(st.just("append"), st.lists(st.integers(0, 3), max_size=5)),
            st.tuples(st.just("cut"), st.integers(3, 12)),
            st.tuples(st.just("drop"), st.integers(0, 12)),
            st.tuples(st.just("read"), st.integers(1, 4)),
            st.tuples(st.just("write"), st.none()),
        )
    )
)
def test_the_cache_always_holds_a_prefix_of_the_sequence(steps):
    """A model of the cache: writes may come late, after the sequence has changed."""
    context, cache, in_flight = Context(SYSTEM), [], None
    for kind, argument in steps:
        if kind == "turn":
            context.begin_turn(argument)
        elif kind == "append":
            context.append(argument)
        elif kind == "cut":
            context.truncate(argument)
        elif kind == "drop":
            context.drop_oldest(argument)
        elif kind == "read" and in_flight is None:
            in_flight = context.n_fed, context.unfed(argument)
        elif kind == "write" and in_flight is not None:
            start, piece = in_flight
            in_flight = None
            cache[start : start + len(piece)] = piece
            context.mark_fed(start, piece)

        assert tuple(cache[: context.n_fed]) == context.tokens[: context.n_fed]
