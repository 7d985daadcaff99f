"""Every trace of the golden set is reproduced, and nothing of it is left out.

`GOLDEN_DIR=<folder> python -m pytest tests/golden` runs the same on another set of that layout.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import pytest

from tests.golden.replays import REPLAYS, replayed

OURS = Path(__file__).parent / "data"
GOLDEN = Path(os.environ.get("GOLDEN_DIR", OURS)).resolve()

TRACES = sorted(path.stem for path in (GOLDEN / "traces").glob("*.json"))

pytestmark = pytest.mark.timeout(600)


@pytest.mark.parametrize("name", TRACES)
def test_trace_is_reproduced(name: str, record_property: pytest.RecordProperty) -> None:
    trace = replayed(name, GOLDEN)
    record_property("golden", trace.summary())
    assert not trace.problems(), "\n".join(trace.problems())


def test_every_trace_of_the_folder_has_a_replay() -> None:
    assert TRACES, f"{GOLDEN} holds no traces"
    assert set(TRACES) <= set(REPLAYS)
    if OURS.resolve() == GOLDEN:
        assert set(TRACES) == set(REPLAYS)


def test_the_files_are_those_of_the_manifest() -> None:
    manifest = json.loads((GOLDEN / "manifest.json").read_text(encoding="utf-8"))
    for name, entry in manifest.items():
        digest = hashlib.sha256((GOLDEN / name).read_bytes()).hexdigest()
        assert digest == entry["sha256"], name
