"""Works that run beside each other until one of them ends."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


async def first_to_end(*works: Coroutine[Any, Any, object]) -> None:
    """Run all until one ends, end the others, and raise what the first one raised.

    Where several have ended at once, the earlier argument is believed.
    """
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        ended = [task for task in tasks if task.done()]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    ended[0].result()
