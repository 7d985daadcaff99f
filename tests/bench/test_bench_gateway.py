"""The bench itself works: a short run of it, whose figures say nothing about the gateway."""

from __future__ import annotations

import json

import pytest

from tests.bench.bench_gateway import main


@pytest.mark.slow
def test_the_bench_accounts_for_every_message(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--sessions", "2", "--seconds", "2", "--repeats", "1", "--cases", "speak"]

    report = main(options)

    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == report
    (run,) = report["cases"]["speak"]
    # The first chunk of each session warms up.
    assert run["through_ms"]["n"] == run["straight_ms"]["n"] == 2
    assert run["missing"] == 0
    assert 0 < run["through_ms"]["p50"] < 1000
    assert run["gateway_rss_mib"] > 10
    assert run["gateway_loop"] == "uvloop"
