"""The page about faults names tests that exist, and leaves no kind of fault out."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/faults.md").read_text(encoding="utf-8")
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.splitlines()
    if line.startswith("| ") and not line.startswith("| |")
]
NAMED = sorted(set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE)))

# fmt: off
FAULTS = (
    1, 2, 4, 5, 7, 8, 10, 11, 13, 14, 16, 17, 19, 20, 22, 23, 25, 26, 28, 29, 31, 32, 34, 35, 37,
    38, 40, 41, 43, 44, 46, 47, 49, 50, 52, 53, 55, 56, 58, 59, 61, 62, 64, 65, 67, 68, 70, 71, 73,
    74,
)
WEAKNESSES = range(1, 33)
# fmt: on


@pytest.mark.parametrize(("file", "name"), NAMED, ids=lambda part: part)
def test_a_test_that_is_named_exists(file: str, name: str) -> None:
    text = (ROOT / file).read_text(encoding="utf-8")

    assert re.search(rf"^ *(?:async )?def {name}\(", text, re.M), f"{file} has no {name}"


def test_every_kind_of_fault_has_one_row() -> None:
    labels = [row[0] for row in ROWS if row[0]]

    wanted = [f"B{number:02}" for number in FAULTS] + [f"W{number}" for number in WEAKNESSES]
    assert sorted(labels) == sorted(wanted)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0] or row[1][:30])
def test_a_row_has_a_proof_or_says_that_it_is_not_yet(row: list[str]) -> None:
    assert "::test_" in row[3] or "not yet" in row[2]
