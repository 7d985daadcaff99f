from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

SESSIONS = Path(__file__).parents[1] / "data" / "sessions"


def recorded() -> set[str]:
    """Names in the folder in which a gateway that is told nothing else records."""
    return {path.name for path in SESSIONS.iterdir()} if SESSIONS.is_dir() else set()


@pytest.fixture(scope="session", autouse=True)
def _nothing_is_recorded_in_the_working_tree() -> Iterator[None]:
    """Recordings are big and private, and those that are there are a user's own."""
    before = recorded()
    yield
    added = sorted(recorded() - before)
    assert not added, (
        f"{SESSIONS} has got {added}: a gateway of a test (or a service beside this run) records "
        "there. Give it a `service.data_dir` of its own, or switch `recording.enabled` off."
    )
