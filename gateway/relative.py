"""Relative addresses of this service: a proxy may serve it below a path, which it cuts off.

They are made of what was asked for as it came, and lead to the same host whatever that is.
"""

from __future__ import annotations

from starlette.types import Scope


def way_up(scope: Scope) -> str:
    """Return the way from the address that was asked for to the root; "" = it is beside it."""
    return "../" * (_path(scope).count("/") - 1)


def without_slash(scope: Scope) -> str:
    """Return the way to the same address without slashes at its end, "" where it has none."""
    path = _path(scope)
    bare = path.rstrip("/")
    name = bare.rpartition("/")[2]
    return "../" * (len(path) - len(bare)) + name if bare not in ("", path) else ""


def query(scope: Scope) -> str:
    """Return what the address says beside the path, with its question mark; "" = nothing."""
    asked: bytes = scope["query_string"]
    return f"?{asked.decode('latin-1')}" if asked else ""


def _path(scope: Scope) -> str:
    # As it came: what is escaped is part of a name, no slash.
    raw: bytes = scope.get("raw_path") or scope["path"].encode()
    return raw.decode("latin-1")
