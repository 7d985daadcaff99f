"""Says at the end of a run how much of the golden data was compared."""

from __future__ import annotations

import pytest


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    lines = [
        text
        for report in terminalreporter.stats.get("passed", [])
        + terminalreporter.stats.get("failed", [])
        for key, text in report.user_properties
        if key == "golden"
    ]
    if lines:
        terminalreporter.section("golden data")
        for line in sorted(lines):
            terminalreporter.write_line(line)
