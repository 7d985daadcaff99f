"""Ops that gain nothing by company."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from shared.errors import OmniError


def one_by_one(runner: Callable[[Any], Any]) -> Callable[[Sequence[Any]], list[Any]]:
    """Return a batch runner that runs each op alone; an op's expected error is its result."""

    def run(payloads: Sequence[Any]) -> list[Any]:
        results: list[Any] = []
        for payload in payloads:
            try:
                results.append(runner(payload))
            except (ValueError, OmniError) as error:
                results.append(error)
        return results

    return run
