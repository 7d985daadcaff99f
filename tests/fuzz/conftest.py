from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    """One event loop for all examples of a module: what one leaves behind, the next one sees."""
    with asyncio.Runner() as runner:
        yield runner
