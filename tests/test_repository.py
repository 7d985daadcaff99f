"""What is in the repository, and what must not be."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
KEY_SUFFIXES = {".pem", ".key", ".crt", ".cer", ".der", ".p12", ".pfx", ".jks"}
PRIVATE_KEY = re.compile(rb"-----BEGIN [A-Z ]*PRIVATE KEY-----")
MAX_KEY_BYTES = 100_000


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a clone")
def test_no_private_key_or_certificate_is_committed() -> None:
    """A key that everybody has protects nobody; those of HTTPS are made at the first start."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    files = [ROOT / name for name in listed.split("\0") if name]

    keys = [
        path
        for path in files
        if path.suffix.lower() in KEY_SUFFIXES
        or (
            path.is_file()
            and path.stat().st_size < MAX_KEY_BYTES
            and PRIVATE_KEY.search(path.read_bytes())
        )
    ]

    assert files
    assert keys == []
    ignored = subprocess.run(["git", "check-ignore", "-q", "certs/key.pem"], cwd=ROOT, check=False)
    assert ignored.returncode == 0
