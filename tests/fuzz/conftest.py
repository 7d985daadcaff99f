from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from tests.fakes.fuzzed import Stage, stage_with


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    """One event loop for all examples of a module: what one leaves behind, the next one sees."""
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module", params=["scripted", "real"])
def stage(request, runner) -> Iterator[Stage]:
    opened = stage_with(request.param)
    stage = runner.run(opened.__aenter__())
    yield stage
    runner.run(opened.__aexit__(None, None, None))
