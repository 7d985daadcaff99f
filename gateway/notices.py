"""An error as a page, for a person whose browser has opened an address.

The page is whole in itself: its reader may have no key yet, with which it could load a file.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from html import escape
from pathlib import Path
from string import Template

from starlette.requests import HTTPConnection
from starlette.responses import HTMLResponse

from gateway.relative import way_up

PAGE = Template((Path(__file__).parent / "static" / "notice.html").read_text(encoding="utf-8"))
RECORDINGS = "/s/"
HEADERS = {
    "Cache-Control": "no-store",
    # A wrong key may stand in the address.
    "Referrer-Policy": "no-referrer",
    "Vary": "Accept",
}


def is_wanted(connection: HTTPConnection) -> bool:
    """Whether an answer to this request is read by a person."""
    # A socket's upgrade has no method, and no reader.
    is_read_only = connection.scope.get("method") in ("GET", "HEAD")
    return is_read_only and prefers_html(connection.headers.get("accept", ""))


def prefers_html(accept: str) -> bool:
    """Whether an Accept header asks for HTML rather than JSON; who does not care gets JSON."""
    return _quality(accept, "text/html") > _quality(accept, "application/json")


def notice(
    connection: HTTPConnection,
    status: int,
    detail: str,
    headers: Mapping[str, str],
    default_lang: str | None,
) -> HTMLResponse:
    """Return the page for an error.

    Args:
        detail: the service's own sentence.
        headers: of the answer, besides the page's own.
        default_lang: "zh" or "en"; None = what the browser prefers.
    """
    path = connection.scope["path"]
    page = PAGE.substitute(
        lang="zh-CN" if _is_chinese(connection, default_lang) else "en",
        kind=_kind(status, path),
        detail=escape(detail),
        home=way_up(connection.scope) or "./",
    )
    return HTMLResponse(page, status, {**headers, **HEADERS})


def _kind(status: int, path: str) -> str:
    if status == 401:
        return "key"
    if status == 404:
        return "recording" if path.startswith(RECORDINGS) else "missing"
    return "failed"


def _is_chinese(connection: HTTPConnection, default_lang: str | None) -> bool:
    asked = default_lang or connection.headers.get("accept-language", "")
    return asked.strip().lower().startswith("zh")


def _quality(accept: str, media_type: str) -> float:
    """The weight of a media type: that of the range that names it most closely; 0 = unwanted."""
    wanted = ("*/*", f"{media_type.partition('/')[0]}/*", media_type)
    closest, quality = -1, 0.0
    for entry in accept.lower().split(","):
        name, *parameters = (part.strip() for part in entry.split(";"))
        if name in wanted and wanted.index(name) > closest:
            closest, quality = wanted.index(name), _weight(parameters)
    return quality


def _weight(parameters: list[str]) -> float:
    given = next((p.removeprefix("q=") for p in parameters if p.startswith("q=")), "1")
    try:
        weight = float(given)
    except ValueError:
        return 0.0
    return weight if math.isfinite(weight) else 0.0
