"""Every pair of states of every table: an edge is taken, anything else refused."""

import itertools

import pytest

from shared.states import (
    SESSION_EDGES,
    WORKER_EDGES,
    IllegalTransition,
    SessionState,
    StateMachine,
    WorkerState,
)

PAIRS = [
    *((WORKER_EDGES, old, new) for old, new in itertools.product(WorkerState, repeat=2)),
    *((SESSION_EDGES, old, new) for old, new in itertools.product(SessionState, repeat=2)),
]


@pytest.mark.parametrize(("edges", "old", "new"), PAIRS)
def test_only_listed_edges_can_be_taken(edges, old, new):
    machine = StateMachine("m", old, edges)

    if new in edges[old]:
        assert machine.can(new)
        machine.to(new, "test")
        assert machine.state is new
    else:
        assert not machine.can(new)
        with pytest.raises(IllegalTransition, match=f"{old} -> {new}"):
            machine.to(new, "test")
        assert machine.state is old


def test_a_change_is_logged_with_old_new_and_reason(caplog):
    machine = StateMachine("worker", WorkerState.LOADING, WORKER_EDGES)

    with caplog.at_level("INFO", logger="shared.states"):
        machine.to(WorkerState.READY, "all stages done")

    assert "machine=worker old=loading new=ready reason=all stages done" in caplog.text


def test_a_change_notes_its_time():
    times = iter([10.0, 12.5])
    machine = StateMachine("w", WorkerState.LOADING, WORKER_EDGES, clock=lambda: next(times))

    machine.to(WorkerState.READY, "test")

    assert machine.since == 12.5
