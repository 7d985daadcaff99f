"""The first of several works to end decides."""

from __future__ import annotations

import asyncio

import pytest

from gateway.race import first_to_end


async def succeed() -> None:
    """End at once."""


async def fail() -> None:
    raise LookupError("lost")


async def test_of_two_that_end_at_once_the_earlier_is_believed():
    await first_to_end(succeed(), fail())
    with pytest.raises(LookupError):
        await first_to_end(fail(), succeed())


async def test_the_others_have_ended_too_when_it_returns():
    ended = []

    async def wait() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append("wait")

    await first_to_end(wait(), asyncio.sleep(0))

    assert ended == ["wait"]
