"""The apps that people may open, and which of them are switched off."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass

from shared.errors import AppDisabled

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class App:
    """`route`: the path of its page."""

    app_id: str
    name: str
    route: str


APPS = (
    App("turnbased", "Turn-based Chat", "/turnbased"),
    App("half_duplex_audio", "Half-Duplex Audio", "/half_duplex"),
    App("omni", "Omni Full-Duplex", "/omni"),
    App("audio_duplex", "Audio Full-Duplex", "/audio_duplex"),
)
"""In the order in which pages show them."""


class Apps:
    """Which apps are enabled. In memory: a gateway starts with all of them.

    A switch decides about sessions and pages that begin; what runs already goes on.
    """

    def __init__(self) -> None:
        self._by_id = {app.app_id: app for app in APPS}
        self._disabled: set[str] = set()

    def __iter__(self) -> Iterator[App]:
        return iter(APPS)

    def find(self, app_id: str) -> App | None:
        return self._by_id.get(app_id)

    def is_enabled(self, app_id: str) -> bool:
        return app_id not in self._disabled

    def switch(self, app: App, *, enabled: bool) -> None:
        if enabled == self.is_enabled(app.app_id):
            return
        (self._disabled.discard if enabled else self._disabled.add)(app.app_id)
        log.info("app switched app=%s enabled=%s", app.app_id, enabled)

    def require(self, app_id: str) -> None:
        """Raises AppDisabled when this app (one of `APPS`) has been switched off."""
        if not self.is_enabled(app_id):
            raise AppDisabled(f"{self._by_id[app_id].name} is currently disabled")
