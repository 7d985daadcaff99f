"""What a lost `meta.json` must have said, as its log tells: a power failure may have emptied it."""

from __future__ import annotations

from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, get_args

from gateway.recording import journal
from gateway.recording.journal import LogDamaged
from gateway.recording.store import summary_of, title_of
from shared.protocol import Ask, Input, Prepare, PrepareTurns, RequestType


def is_whole(folder: Path, meta: dict[str, Any]) -> bool:
    """Whether `meta`, read from the folder, tells the kind of the session and when it began."""
    return meta.get("app_type") in get_args(RequestType) and summary_of(folder) is not None


def restored(folder: Path, meta: dict[str, Any]) -> dict[str, Any]:
    """Return the folder's `meta` with what the log and its file tell in place of what is lost.

    Raises:
        OSError: the log cannot be read.
    """
    log_file = folder / journal.NAME
    kind: RequestType | None = None
    length_s = 0.0
    with suppress(LogDamaged):
        for record in journal.read(log_file):
            length_s = max(length_s, record.at)
            match record.message:
                case Prepare() if kind is None:
                    kind = "audio_duplex"
                case Input() if kind == "audio_duplex" and record.message.frames:
                    kind = "omni_duplex"
                case PrepareTurns():
                    kind = "half_duplex_audio"
                case Ask():
                    kind = "chat"
    began_at = datetime.fromtimestamp(log_file.stat().st_mtime - length_s, tz=UTC)
    return {
        **meta,
        **({"app_type": kind} if kind else {}),
        "session_id": folder.name,
        "created_at": began_at.isoformat(),
        "title": title_of(began_at),
    }
