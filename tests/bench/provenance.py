"""What a benchmark's figures belong to: code and machine."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
CPU_INFO = Path("/proc/cpuinfo")


def provenance(commit: str | None = None) -> dict[str, Any]:
    """Return commit, machine and the cores this process may use, for a benchmark's JSON line.

    Args:
        commit: of this code, for machines without its repository.
    """
    return {
        "commit": commit or _git("rev-parse", "--short", "HEAD"),
        # Figures of code that is in no commit cannot be looked up later.
        "modified": bool(_git("status", "--porcelain", "--untracked-files=no")),
        "machine": _machine(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
    }


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        return ""
    return done.stdout.strip()


def _machine() -> str:
    if CPU_INFO.is_file():
        for line in CPU_INFO.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()
