"""What tests on an accelerator share."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def waits_are(mode: str) -> Iterator[None]:
    """Have torch "warn" of, or raise ("error") at, every wait of the host for the device."""
    with warnings.catch_warnings():
        # It says that it does not know every kind of wait yet.
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode(mode)
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
