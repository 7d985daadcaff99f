"""The rows of a worker's caches and who holds them. Used by one thread (the event loop)."""

from __future__ import annotations

from enum import StrEnum

from shared.errors import NoFreeSlot
from shared.states import StateMachine


class SlotState(StrEnum):
    FREE = "free"
    IN_USE = "in-use"
    CLEANING = "cleaning"


SLOT_EDGES = {
    SlotState.FREE: frozenset({SlotState.IN_USE}),
    SlotState.IN_USE: frozenset({SlotState.CLEANING}),
    SlotState.CLEANING: frozenset({SlotState.FREE}),
}


class SlotTable:
    """Leases slots 0..n-1: each to one session at a time, free again only once it is clean."""

    def __init__(self, n_slots: int) -> None:
        if n_slots < 1:
            raise ValueError(f"n_slots is {n_slots}, must be at least 1")
        self._slots = [StateMachine(f"slot{i}", SlotState.FREE, SLOT_EDGES) for i in range(n_slots)]

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def n_free(self) -> int:
        return sum(slot.state is SlotState.FREE for slot in self._slots)

    def state(self, slot: int) -> SlotState:
        return self._slots[slot].state

    def acquire(self, holder: str) -> int:
        """Lease the first free slot.

        Raises:
            NoFreeSlot: all are in use or being cleaned.
        """
        for index, slot in enumerate(self._slots):
            if slot.state is SlotState.FREE:
                slot.to(SlotState.IN_USE, f"session {holder}")
                return index
        raise NoFreeSlot(f"all {len(self)} slots of this worker are taken")

    def start_cleaning(self, slot: int) -> None:
        """The holder has ended. Raises IllegalTransition if the slot is not in use."""
        self._slots[slot].to(SlotState.CLEANING, "session ended")

    def release(self, slot: int) -> None:
        """The slot is clean. Raises IllegalTransition if it was not being cleaned."""
        self._slots[slot].to(SlotState.FREE, "cleaned")
