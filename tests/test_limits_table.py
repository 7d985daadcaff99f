"""The table of limits in docs/operations.md says what the code does."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from shared import errors, limits
from shared.config import Config

TEXT = (Path(__file__).parents[1] / "docs/operations.md").read_text().partition("## Limits")[2]
ROWS = re.findall(r"^\| [^|]+ \| (\d+)(?: (\w+))? \| `([\w.]+)` \| ([^|]*)\|$", TEXT, re.M)
UNITS = {"": 1, "s": 1, "KiB": 2**10, "MiB": 2**20}
NO_LIMITS = {"INPUT_SAMPLE_RATE_HZ", "OUTPUT_SAMPLE_RATE_HZ", "MIB", "IDLE_TIMEOUT_S"}
"""Of `shared.limits`: constants that bound nothing, and the default of a setting."""


def value_of(name: str) -> float:
    section, _, key = name.rpartition(".")
    if section in Config.model_fields:
        return getattr(getattr(Config(), section), key)
    return getattr(importlib.import_module(section), key)


@pytest.mark.parametrize(("number", "unit", "name", "beyond"), ROWS, ids=[row[2] for row in ROWS])
def test_a_row_has_the_codes_own_number(number, unit, name, beyond):
    assert value_of(name) == int(number) * UNITS[unit]


def test_every_limit_has_one_row():
    named = [name.removeprefix("shared.limits.") for _, _, name, _ in ROWS]
    constants = {name for name in vars(limits) if name.isupper() and name not in NO_LIMITS}

    assert constants - set(named) == set()
    assert len(named) == len(set(named))
    assert len(ROWS) == len(re.findall(r"^\| (?!limit )", TEXT, re.M))


def test_what_happens_beyond_a_limit_is_a_known_slug():
    slugs = {kind.slug for kind in vars(errors).values() if hasattr(kind, "slug")}
    said = {word for *_, beyond in ROWS for word in re.findall(r"`([a-z_]+)`", beyond)}

    assert said - slugs - {"dropped"} == set()
