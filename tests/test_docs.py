"""The documents keep pace with the code."""

import json
import re
from pathlib import Path

import pytest

from gateway.app import create_app
from shared import errors
from shared.config import PENDING_KEYS, Config
from tests.fakes.worker import FakeWorker

ROOT = Path(__file__).parents[1]
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]


def config_keys():
    return [
        (f"{section}.{key}", field.default)
        for section, model in Config.model_fields.items()
        for key, field in model.annotation.model_fields.items()
    ]


@pytest.mark.parametrize(("key", "default"), config_keys())
def test_every_setting_is_documented_with_its_default(key, default):
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in (ROOT / "docs/configuration.md").read_text().splitlines()
        if line.startswith(f"| `{key}` |")
    ]

    assert len(rows) == 1, f"{key} needs exactly one row in docs/configuration.md"
    assert rows[0][1] == f"`{json.dumps(default)}`"


@pytest.mark.parametrize("key", sorted(PENDING_KEYS))
def test_a_setting_without_an_effect_says_so(key):
    rows = (ROOT / "docs/configuration.md").read_text().splitlines()

    (row,) = [line for line in rows if line.startswith(f"| `{key}` |")]
    assert "no effect yet" in row


def test_no_row_documents_a_setting_that_is_gone():
    rows = re.findall(r"^\| `([a-z0-9_.]+)` \|", (ROOT / "docs/configuration.md").read_text(), re.M)

    assert sorted(rows) == sorted(key for key, _ in config_keys())


def test_every_error_slug_is_documented():
    text = (ROOT / "docs/protocol.md").read_text()
    slugs = {
        kind.slug
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, errors.OmniError)
    }

    assert {slug for slug in slugs if f"`{slug}`" not in text} == set()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_between_files_resolve(document):
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", document.read_text())

    assert [link for link in links if not (document.parent / link).exists()] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_files_named_in_code_marks_exist(document):
    """Paths such as `worker/engine/scheduler.py`, written from the project's root."""
    named = re.findall(
        r"`((?:shared|gateway|worker|client|scripts|tests|docs|constraints)/[\w./-]+\.\w+)`",
        document.read_text(),
    )

    assert [name for name in named if not (ROOT / name).exists()] == []


def test_every_route_is_documented():
    text = (ROOT / "docs/http.md").read_text()
    routes = create_app(Config(), []).openapi()["paths"]

    missing = [
        f"{method.upper()} {path}"
        for path, methods in routes.items()
        for method in methods
        if f"`{method.upper()} {path}`" not in text
    ]

    assert missing == []


def exported(registry):
    """Name as in the answer -> type."""
    return {
        family.name + ("_total" if family.type == "counter" else ""): family.type
        for family in registry.collect()
    }


async def test_the_tables_of_metrics_are_what_is_exported():
    rows = re.findall(
        r"^\| `((?:omni|process)_\w+)` \| (\w+) \|", (ROOT / "docs/operations.md").read_text(), re.M
    )
    gateway = create_app(Config(), []).state.gateway
    worker = await FakeWorker().start()
    try:
        found = {
            **exported(gateway.metrics.registry),
            **exported(worker.lifecycle.metrics.registry),
        }
    finally:
        await worker.close()

    assert dict(rows) == found
    assert len(rows) == len(found)
