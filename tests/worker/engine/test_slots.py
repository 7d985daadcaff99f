"""The slot table: by example, and as a machine that hypothesis drives."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from shared.errors import NoFreeSlot
from shared.states import IllegalTransition
from worker.engine.slots import SLOT_EDGES, SlotState, SlotTable


def slot_in(state: SlotState) -> SlotTable:
    table = SlotTable(1)
    if state is not SlotState.FREE:
        table.acquire("s")
    if state is SlotState.CLEANING:
        table.start_cleaning(0)
    return table


@pytest.mark.parametrize("old", list(SlotState))
@pytest.mark.parametrize("new", list(SlotState))
def test_slot_changes_along_its_edges_only(old, new):
    table = slot_in(old)
    change = {
        SlotState.FREE: lambda: table.release(0),
        SlotState.IN_USE: lambda: table.acquire("t"),
        SlotState.CLEANING: lambda: table.start_cleaning(0),
    }[new]

    if new in SLOT_EDGES[old]:
        change()
        assert table.state(0) is new
    else:
        with pytest.raises((IllegalTransition, NoFreeSlot)):
            change()
        assert table.state(0) is old


def test_a_slot_being_cleaned_is_not_leased():
    with pytest.raises(NoFreeSlot, match="all 1 slots"):
        slot_in(SlotState.CLEANING).acquire("next")


def test_a_table_without_slots_is_refused():
    with pytest.raises(ValueError, match="at least 1"):
        SlotTable(0)


class SlotMachine(RuleBasedStateMachine):
    @initialize(n=st.integers(1, 4))
    def start(self, n):
        self.table = SlotTable(n)
        self.in_use: set[int] = set()
        self.cleaning: set[int] = set()

    @rule()
    def acquire(self):
        if len(self.in_use) + len(self.cleaning) == len(self.table):
            with pytest.raises(NoFreeSlot):
                self.table.acquire("s")
            return
        slot = self.table.acquire("s")
        assert slot not in self.in_use | self.cleaning, "a slot was leased twice"
        self.in_use.add(slot)

    @rule(pick=st.integers(0, 3))
    def start_cleaning(self, pick):
        if pick in self.in_use:
            self.table.start_cleaning(pick)
            self.in_use.remove(pick)
            self.cleaning.add(pick)
        elif pick < len(self.table):
            with pytest.raises(IllegalTransition):
                self.table.start_cleaning(pick)

    @rule(pick=st.integers(0, 3))
    def release(self, pick):
        if pick in self.cleaning:
            self.table.release(pick)
            self.cleaning.remove(pick)
        elif pick < len(self.table):
            with pytest.raises(IllegalTransition):
                self.table.release(pick)

    @invariant()
    def free_slots_are_counted(self):
        if hasattr(self, "table"):
            assert self.table.n_free == len(self.table) - len(self.in_use) - len(self.cleaning)


TestSlotMachine = SlotMachine.TestCase
TestSlotMachine.settings = settings(max_examples=40, stateful_step_count=25)
