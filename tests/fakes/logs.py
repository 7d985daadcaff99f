"""What the loggers of this project write at DEBUG, through the handler of production."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator
from contextlib import contextmanager

from shared.logs import LineHandler

OURS = ("gateway", "worker", "shared")


@contextmanager
def written() -> Iterator[io.StringIO]:
    """Collect every line and every traceback until the end of the block."""
    stream = io.StringIO()
    handler = LineHandler("test", stream)
    loggers = [logging.getLogger(name) for name in OURS]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.addHandler(handler)
        logger.setLevel(logging.DEBUG)
    try:
        yield stream
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.removeHandler(handler)
            logger.setLevel(level)
