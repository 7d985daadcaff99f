from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.launch import Launch


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    launch = Launch(tmp_path)
    yield launch
    launch.run("stop")
    for process in launch.processes:
        if process.poll() is None:
            process.kill()
        process.communicate()
