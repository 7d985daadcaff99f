"""Session hosts around the fake model, and whatever is left on them ended."""

from __future__ import annotations

import asyncio

import pytest

from tests.fakes.patience import PATIENCE_S
from tests.fakes.session import Stage
from worker.sessions.failures import WorkerStopping


@pytest.fixture
async def make():
    stages: list[Stage] = []

    def make(**fields) -> Stage:
        stages.append(Stage(**fields))
        return stages[-1]

    yield make
    for stage in stages:
        for session in list(stage.host.sessions.values()):
            session.end("test over", WorkerStopping("test over"))
        for gate in stage.model.gates.values():
            gate.set()
        closing = [s.closed.wait() for s in list(stage.host.sessions.values())]
        await asyncio.wait_for(asyncio.gather(*closing), PATIENCE_S)
        await stage.close()


@pytest.fixture
async def stage(make) -> Stage:
    return make()
