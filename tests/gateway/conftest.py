from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager

import pytest

from tests.fakes.gateway import Running, Talker, run_gateway, wait_until

Serve = Callable[..., AbstractAsyncContextManager[Running]]


@pytest.fixture
def until() -> Callable[..., Awaitable[None]]:
    return wait_until


@pytest.fixture
def serve() -> Serve:
    return run_gateway


@pytest.fixture
def talker() -> type[Talker]:
    return Talker
