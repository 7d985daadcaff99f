"""What is valid in a configuration and may still not be what its owner means."""

from __future__ import annotations

import re

from shared.config import Config, is_loopback

COOKIE_SAFE = re.compile(r"[!#-+\--:<-\[\]-~]+")
"""Characters that a cookie's value may have; a key with others is not kept by a page."""

BEARER_SAFE = re.compile(r"[!-~]+( +[!-~]+)*")
"""What comes unchanged out of an Authorization header, whatever client has written it."""


def cautions(config: Config, host: str) -> list[str]:
    """Return a sentence for each key that not every client can send, and for each setting that
    is dangerous where the service listens.

    Args:
        host: address of the gateway, which a command line may set besides `service.bind`.
    """
    security = config.security
    found = []
    for setting, keys in (("api_keys", security.api_keys), ("admin_keys", security.admin_keys)):
        for number, key in enumerate(keys, 1):
            if not COOKIE_SAFE.fullmatch(key):
                ways = "cookie" if BEARER_SAFE.fullmatch(key) else "cookie or Authorization header"
                # Never the key itself: logs are read by more people than it.
                found.append(
                    f"security.{setting}: key {number} holds characters that no {ways} carries: "
                    "no page can be used with it; take printable ASCII without blanks, quotes, "
                    "commas, semicolons and backslashes"
                )
    if is_loopback(host):
        return found
    if not security.api_keys:
        found.append(f"{host} is open to the network without an API key (security.api_keys)")
    # No default number: behind a proxy on another machine all clients have one address.
    if not security.max_sessions_per_client:
        found.append(
            f"the service listens on {host} and security.max_sessions_per_client is 0: one client "
            "can take every slot and fill the queue"
        )
    return found
