from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.fakes.g0_server import Scenario, Service, serving


@pytest.fixture
def scenario() -> Scenario:
    return Scenario()


@pytest.fixture
def service(scenario: Scenario) -> Iterator[Service]:
    with serving(scenario) as running:
        yield running
