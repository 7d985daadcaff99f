"""Logging: one event per line, the session's id taken from context. Never any content."""

from __future__ import annotations

import logging
from contextvars import ContextVar

session_id_in_context: ContextVar[str] = ContextVar("session_id_in_context", default="-")

FORMAT = "%(asctime)s %(levelname)s %(name)s session=%(session)s %(message)s"


class SessionField(logging.Filter):
    """Adds the field `session` to every record."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.session = session_id_in_context.get()
        return True


def set_up(level: int = logging.INFO) -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(FORMAT))
    handler.addFilter(SessionField())
    logging.basicConfig(level=level, handlers=[handler], force=True)
    # uvicorn logs the whole path of each upgrade at INFO, and a path may carry an API key; httpx
    # logs every health poll.
    for noisy in ("uvicorn.error", "httpx", "httpcore"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
