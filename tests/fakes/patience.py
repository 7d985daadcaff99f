"""How long a test waits for what comes at once on a quiet machine.

A bound that is itself what a test is about is a number of that test.
"""

from __future__ import annotations

from typing import Final

PATIENCE_S: Final = 15.0
"""A busy machine stands still for seconds. Shorter than a ping's time-out, which would bring about
in the end what should have come by itself."""
