"""The tables of limits in docs/operations.md and docs/chat.md say what the code does."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from shared import errors, limits
from shared.config import Config

DOCS = Path(__file__).parents[1] / "docs"


def limits_of(document: str) -> str:
    return (DOCS / document).read_text().partition("## Limits")[2]


def rows(text: str) -> list[tuple[str, str, str, str]]:
    """Return number, unit, name and what happens beyond it."""
    return re.findall(r"^\| [^|]+ \| (\d+)(?: (\w+))? \| `([\w.]+)` \| ([^|]*)\|$", text, re.M)


TEXT = limits_of("operations.md")
ROWS = rows(TEXT)
CHAT = rows(limits_of("chat.md").partition("\n## ")[0])
UNITS = {"": 1, "s": 1, "ms": 1e-3, "KiB": 2**10, "MiB": 2**20}
NO_LIMITS = {"INPUT_SAMPLE_RATE_HZ", "OUTPUT_SAMPLE_RATE_HZ", "MIB", "IDLE_TIMEOUT_S"}
"""Of `shared.limits`: constants that bound nothing, and the default of a setting."""


def value_of(name: str) -> float:
    section, _, key = name.rpartition(".")
    if section in Config.model_fields:
        return getattr(getattr(Config(), section), key)
    return getattr(importlib.import_module(section), key)


@pytest.mark.parametrize(("number", "unit", "name", "beyond"), sorted({*ROWS, *CHAT}))
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
    said = {word for *_, beyond in ROWS + CHAT for word in re.findall(r"`([a-z_]+)`", beyond)}

    assert said - slugs - {"dropped"} == set()


def test_the_table_for_clients_of_chat_has_all_that_a_request_may_meet():
    in_chat = {
        name for _, _, name, beyond in ROWS if "chat" in name or "ends the request" in beyond
    }
    shared = {"MAX_IMAGE_PIXELS", "MAX_REFERENCE_VOICE_S", "MAX_SAMPLE_MAGNITUDE"}
    shared |= {"MAX_FRAME_BYTES", "MAX_CHAT_BODY_BYTES", "MAX_SESSION_MEDIA_BYTES"}

    assert {row[2] for row in CHAT} >= in_chat | {f"shared.limits.{name}" for name in shared}
