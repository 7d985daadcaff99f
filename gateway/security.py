"""Who may use the service: API keys, browser origins, sessions per client."""

from __future__ import annotations

import hmac
import ipaddress
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from urllib.parse import urlsplit

from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.faults import FaultDesk
from shared.cautions import COOKIE_SAFE
from shared.config import SecurityConfig, is_loopback
from shared.errors import Forbidden, ForbiddenOrigin, OmniError, TooManySessions, Unauthorized

COOKIE = "omni_api_key"
QUERY_NAMES = ("api_key", "token")
OPEN_PATHS = frozenset({"/health", "/ready"})
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
CLIENT_PREFIX_BITS = 64
DEFAULT_PORTS = {"http": 80, "https": 443, "ws": 80, "wss": 443}


class Guard:
    """Checks every connection against `security.*`.

    Args:
        is_local: the service listens on loopback only.
    """

    def __init__(self, config: SecurityConfig, is_local: bool) -> None:
        self._is_local = is_local
        self._keys = tuple(key.encode() for key in (*config.api_keys, *config.admin_keys))
        self._admin_keys = tuple(key.encode() for key in config.admin_keys)
        self._origins = frozenset(origin.rstrip("/").lower() for origin in config.allowed_origins)
        self._max_sessions = config.max_sessions_per_client
        self._sessions: Counter[str] = Counter()

    def check_key(self, connection: HTTPConnection) -> None:
        """Raises Unauthorized when keys are configured and none of them was given."""
        if self._keys and not any(map(self.accepts, given_keys(connection))):
            raise Unauthorized(
                "An API key is needed: Authorization: Bearer <key>, "
                "or for a page ?api_key=<key> in its address"
            )

    def accepts(self, key: str) -> bool:
        return _is_one_of(self._keys, key)

    def check_admin(self, connection: HTTPConnection) -> None:
        """Raises Forbidden when admin keys are configured and the key is none of them."""
        given = given_keys(connection)
        if self._admin_keys and not any(_is_one_of(self._admin_keys, key) for key in given):
            raise Forbidden("This takes a key of an administrator, one of security.admin_keys")

    def check_origin(self, connection: HTTPConnection) -> None:
        """Raises ForbiddenOrigin for a browser page that is neither ours nor allowed.

        Programs send no Origin header and pass.
        """
        origin = connection.headers.get("origin")
        if origin is None or "*" in self._origins or origin.lower() in self._origins:
            return
        host = connection.headers.get("host", "")
        page = _same_origin_host(origin, host, connection.url.scheme)
        # A foreign name that resolves to loopback is a page that was lured here (DNS rebinding);
        # behind a proxy the name belongs into `security.allowed_origins`.
        if page is None or (self._is_local and not is_loopback(page)):
            raise ForbiddenOrigin("Pages of this origin may not use the service")

    @contextmanager
    def count_session(self, connection: HTTPConnection) -> Iterator[None]:
        """Hold one of the client's sessions.

        Raises:
            TooManySessions: the client, told by its key or else its network, has all it may.
        """
        client = self._client(connection)
        if self._max_sessions and self._sessions[client] >= self._max_sessions:
            raise TooManySessions(f"At most {self._max_sessions} sessions per client")
        self._sessions[client] += 1
        try:
            yield
        finally:
            self._sessions[client] -= 1
            if not self._sessions[client]:
                del self._sessions[client]

    def _client(self, connection: HTTPConnection) -> str:
        # A wrong key beside the right one must not make another client of the same.
        key = next(filter(self.accepts, given_keys(connection)), None)
        if key is not None:
            return f"key:{key}"
        return network_of(connection.client.host) if connection.client else "unknown"


class GuardMiddleware:
    """Applies the guard to HTTP routes. WebSocket routes ask it themselves, after accepting,
    so that the client can be told why."""

    def __init__(self, app: ASGIApp, guard: Guard, desk: FaultDesk) -> None:
        self._app = app
        self._guard = guard
        self._desk = desk

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        connection = HTTPConnection(scope)
        try:
            if scope["method"] not in SAFE_METHODS:
                self._guard.check_origin(connection)
            self._guard.check_key(connection)
        except OmniError as error:
            await self._desk.answer(error, connection)(scope, receive, send)
            return
        await self._app(scope, receive, self._with_cookie(connection, send))

    def _with_cookie(self, connection: HTTPConnection, send: Send) -> Send:
        """A page that was opened with the key in its address loads its parts without it."""
        asked = (connection.query_params.get(name, "") for name in QUERY_NAMES)
        key = next((key for key in asked if self._guard.accepts(key)), None)
        if key is None or not COOKIE_SAFE.fullmatch(key):
            return send
        secure = "; Secure" if connection.url.scheme == "https" else ""
        cookie = f"{COOKIE}={key}; HttpOnly; SameSite=Strict; Path=/{secure}".encode()

        async def send_with_cookie(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"set-cookie", cookie)]
            await send(message)

        return send_with_cookie


def network_of(address: str) -> str:
    """Return what counts as one client: an IPv4 address, or the /64 network of an IPv6 one.

    A network of that size is what one customer or one machine gets, and may use at will.
    """
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(parsed, ipaddress.IPv4Address):
        return str(parsed)
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(ipaddress.IPv6Network((parsed, CLIENT_PREFIX_BITS), strict=False))


def given_keys(connection: HTTPConnection) -> tuple[str, ...]:
    """Return every key the client gave, the most explicit first."""
    keys = []
    scheme, _, token = connection.headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and token.strip():
        keys.append(token.strip())
    keys += [connection.query_params[n] for n in QUERY_NAMES if connection.query_params.get(n)]
    if connection.cookies.get(COOKIE):
        keys.append(connection.cookies[COOKIE])
    return tuple(keys)


def _is_one_of(valid: Sequence[bytes], key: str) -> bool:
    raw = key.encode(errors="surrogateescape")
    found = False
    for candidate in valid:
        # No early exit: the time must not tell how many keys were compared.
        found |= hmac.compare_digest(candidate, raw)
    return found


def _same_origin_host(origin: str, host: str, scheme: str) -> str | None:
    """Return the page's host name if the page came from this very address."""
    try:
        page = urlsplit(origin)
        own = urlsplit(f"//{host}")
        page_port = page.port or DEFAULT_PORTS.get(page.scheme)
        # A proxy may end TLS in front of us, so the page's scheme decides what "no port" means.
        own_port = own.port or DEFAULT_PORTS.get(page.scheme) or DEFAULT_PORTS.get(scheme)
    except ValueError:
        return None
    return page.hostname if (page.hostname, page_port) == (own.hostname, own_port) else None
