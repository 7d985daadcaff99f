"""The one place that turns an exception into what a client is told, and counts it."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from starlette.requests import HTTPConnection
from starlette.responses import JSONResponse, Response

from gateway import notices
from shared.errors import OmniError, http_statuses, slugs
from shared.logs import cut
from shared.metrics import OTHER

log = logging.getLogger(__name__)

RETRY_AFTER_S = 5
MAX_CLOSE_REASON_BYTES = 123
"""RFC 6455: a control frame holds 125 bytes, two of them the code."""

MAX_WHERE_CHARS = 200
UNKNOWN_FAILURE = 502
"""Status of a failure that a worker of another version has named."""


class WorkerFailure(OmniError):
    """A failure that a worker named; slug and close code are its own."""

    def __init__(self, slug: str, message: str, close_code: int) -> None:
        super().__init__(message)
        self.worker_slug = slug
        self.close_code = close_code


@dataclass(frozen=True, slots=True)
class Fault:
    """What a client is told: `ws_close` None means that its session goes on."""

    slug: str
    message: str
    ws_close: int | None
    http_status: int

    @property
    def close_reason(self) -> str:
        raw = self.message.encode()[:MAX_CLOSE_REASON_BYTES]
        return raw.decode(errors="ignore")

    @property
    def body(self) -> dict[str, str]:
        return {"detail": self.message, "slug": self.slug}

    @property
    def headers(self) -> Mapping[str, str]:
        if self.http_status in (429, 503):
            return {"Retry-After": str(RETRY_AFTER_S)}
        return {"WWW-Authenticate": "Bearer"} if self.http_status == 401 else {}


def fault_of(error: OmniError) -> Fault:
    if isinstance(error, WorkerFailure):
        status = http_statuses().get(error.worker_slug, UNKNOWN_FAILURE)
        return Fault(error.worker_slug, str(error), error.close_code, status)
    return Fault(error.slug, str(error), error.ws_close, error.http_status)


class FaultDesk:
    """Translates exceptions and keeps the number of each slug.

    Args:
        default_lang: of pages, "zh" or "en"; None = what the browser prefers.
    """

    def __init__(self, default_lang: str | None = None) -> None:
        self.counts: Counter[str] = Counter()
        self._default_lang = default_lang

    def translate(self, error: BaseException, where: str) -> Fault:
        """Return what the client is told; text of unknown exceptions stays in the log.

        Args:
            error: anything; an unknown one is logged with its traceback, once, here.
            where: session id or path, for the client to quote and for the log.
        """
        if isinstance(error, OmniError):
            fault = fault_of(error)
        else:
            # A path is the client's to choose.
            where = cut(where, MAX_WHERE_CHARS)
            log.error("unexpected failure where=%r", where, exc_info=error)
            fault = Fault("internal", f"Internal error ({where})", 1011, 500)
        self.count(fault.slug)
        return fault

    def answer(self, error: BaseException, connection: HTTPConnection) -> Response:
        """Translate what ended a request into the answer to it."""
        return self.reply(self.translate(error, connection.scope["path"]), connection)

    def reply(
        self, fault: Fault, connection: HTTPConnection, headers: Mapping[str, str] | None = None
    ) -> Response:
        """Return the answer to a request: JSON, or a page where a person reads it.

        Args:
            headers: of the answer; None = the fault's own.
        """
        headers = fault.headers if headers is None else headers
        if notices.is_wanted(connection):
            return notices.notice(
                connection, fault.http_status, fault.message, headers, self._default_lang
            )
        return JSONResponse(fault.body, fault.http_status, dict(headers))

    def count(self, slug: str) -> None:
        """Count a failure that a client is told."""
        self.counts[slug if slug in slugs() else OTHER] += 1
