"""Whole workers around the fake model."""

import pytest

from tests.fakes.worker import FakeWorker


@pytest.fixture
async def make():
    workers: list[FakeWorker] = []

    async def make(ready: bool = True, **fields) -> FakeWorker:
        workers.append(FakeWorker(**fields))
        return await workers[-1].start(ready)

    yield make
    for worker in workers:
        await worker.close()
