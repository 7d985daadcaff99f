"""Dialect G0, the reference's own protocol: what its three session sockets have in common.

JSON text frames. Audio is base64 of little-endian float32: 16 kHz towards the model, 24 kHz from
it. The base64 ends here; everything behind these modules handles bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import orjson

from gateway.tickets import Place


class G0:
    """Words of a session about itself: its place in the queue, its recording, its end."""

    def __init__(self) -> None:
        self._ignored: tuple[str, ...] = ()
        """What the client has said and has no effect here."""
        self._recording_id: str | None = None

    def recorded(self, recording_id: str) -> None:
        self._recording_id = recording_id

    def queued(self, ticket_id: str, place: Place) -> str | None:
        return dump({"type": "queued", "ticket_id": ticket_id, **_place(place)})

    def queue_update(self, place: Place) -> str | None:
        return dump({"type": "queue_update", **_place(place)})

    def queue_done(self, sent_at: float) -> str | None:
        return dump({"type": "queue_done"})

    def stopped(self) -> str:
        return dump({"type": "stopped"})

    def failure(self, slug: str, message: str, sent_at: float) -> str:
        return dump({"type": "error", "error": message, "slug": slug})

    def _recording(self) -> dict[str, str]:
        """The field that names the recording, where there is one."""
        return {} if self._recording_id is None else {"recording_session_id": self._recording_id}

    def _all_ignored(self, by_worker: Iterable[str]) -> list[str]:
        return sorted({*self._ignored, *by_worker})


def dump(message: Mapping[str, Any]) -> str:
    return orjson.dumps(message).decode()


def _place(place: Place) -> dict[str, Any]:
    return {
        "position": place.position,
        "estimated_wait_s": place.estimated_wait_s,
        "queue_length": place.queue_length,
        "state": "starting" if place.is_starting else "waiting",
    }
