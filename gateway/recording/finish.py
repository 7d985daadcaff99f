"""`python -m gateway.recording.finish FOLDER...`: logs of ended sessions -> recordings.

A process of its own with low priority: nothing of it runs beside live sessions in the gateway.
It may be ended at any moment; the next one begins the folder again from its log, which goes last.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import sys
import wave
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Final

import av

from gateway.recording import journal, replay
from gateway.recording.assets import FOLDERS, Assets
from gateway.recording.journal import END, LogDamaged
from gateway.recording.restored import is_whole, restored
from gateway.recording.store import META, RECORDING, read_json, write_atomically, write_json
from gateway.recording.turns import ChatTurns, SpokenTurns
from gateway.recording.units import Units
from shared import logs
from shared.errors import slugs

log = logging.getLogger(__name__)

NICENESS: Final = 10
EXIT_STOPPED: Final = 1
ATTEMPTS: Final = ".attempts"
MAX_ATTEMPTS: Final = 3
"""A log that ended this many runs of this program is not tried again."""

UNREADABLE: Final = f".{journal.NAME}.unreadable"
"""Where such a log stays, for whoever wants to find out why."""

INTERRUPTED: Final = "interrupted"
"""The end of a log that nobody has ended: the process or the disk did."""

DUPLEX_APPS: Final = ("omni_duplex", "audio_duplex")
FILMED_APP: Final = "omni_duplex"


def main(argv: Sequence[str]) -> int:
    """Finish folders one after the other; returns 0 once each has been tried."""
    logs.set_up("recording")
    os.nice(NICENESS)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(EXIT_STOPPED))
    # Its own warnings about pictures of clients are nobody's business here.
    av.logging.set_level(av.logging.PANIC)
    for name in argv:
        try:
            finish(Path(name))
        except OSError as error:
            why = error.strerror or type(error).__name__
            log.warning("not finished now recording=%s: %s", Path(name).name, why)
    return 0


def finish(folder: Path) -> None:
    """Turn the log of a recording into its files; nothing happens if there is none or it is in use.

    Raises:
        OSError: the disk does not take it; there is what was there before, the log too.
    """
    with journal.locked(folder) as is_ours:
        log_file = folder / journal.NAME
        if not is_ours or not log_file.exists():
            return
        if (folder / RECORDING).exists():
            # An earlier run came exactly this far.
            log_file.unlink()
        elif _count_attempt(folder) > MAX_ATTEMPTS:
            _give_up(folder)
            log_file.rename(folder / UNREADABLE)
        else:
            try:
                _make(folder)
            except (OSError, SystemExit) as error:
                # Neither says anything about the log.
                (folder / ATTEMPTS).unlink(missing_ok=True)
                if isinstance(error, OSError):
                    _clear(folder)
                raise
            log_file.unlink()
        (folder / ATTEMPTS).unlink(missing_ok=True)


def _make(folder: Path) -> None:
    meta, problems = read_json(folder / META), []
    if not is_whole(folder, meta):
        log.warning("meta.json is lost recording=%s", folder.name)
        meta = restored(folder, meta)
        problems.append("meta.json was lost: kind and time are what the log tells")
    app_type = str(meta.get("app_type", ""))
    assets = Assets(folder)
    builder: Units | SpokenTurns | ChatTurns
    if app_type in DUPLEX_APPS:
        builder, mode = Units(assets), "duplex"
    else:
        builder = ChatTurns(assets) if app_type == "chat" else SpokenTurns(assets)
        mode = app_type
    duration_s, reason = 0.0, INTERRUPTED
    try:
        for record in journal.read(folder / journal.NAME):
            duration_s = max(duration_s, record.at)
            if record.kind == END:
                reason = record.reason
            builder.take(record)
    except LogDamaged:
        log.warning("damaged log recording=%s at_s=%.1f", folder.name, duration_s)
        problems.append(f"The log is damaged behind {duration_s:.1f} s; the rest is lost")
    if reason in slugs():
        builder.fail(reason)
    body = {**_head(meta, mode), "end_reason": reason, **builder.body}
    if isinstance(builder, Units):
        replayed = _replay(folder, body["chunks"], app_type == FILMED_APP)
        problems += filter(None, [replayed.pop("problem", None)])
        body |= replayed
    if problems:
        body["problem"] = "; ".join(problems)
    _save(folder, meta, body, duration_s)


def _clear(folder: Path) -> None:
    """Remove what has been made: on a full disk the half of it would be in everybody's way."""
    for name in FOLDERS:
        shutil.rmtree(folder / name, ignore_errors=True)
    for name in (replay.WAV, replay.MP4):
        with suppress(OSError):
            (folder / name).unlink()


def _replay(folder: Path, chunks: list[dict[str, Any]], with_film: bool) -> dict[str, Any]:
    try:
        return replay.merge(folder, chunks, with_film)
    except replay.ReplayTooLong:
        return {"problem": f"merged replay: longer than {replay.MAX_REPLAY_S // 3600} hours"}
    except (av.error.FFmpegError, ValueError, wave.Error) as error:
        problem = f"merged replay: {type(error).__name__}"
        log.warning("replay failed recording=%s with_film=%s", folder.name, with_film)
        if not with_film:
            return {"problem": problem}
        return {**_replay(folder, chunks, with_film=False), "problem": problem}


def _give_up(folder: Path) -> None:
    """Leave what a reader can open and what says why there is no more."""
    meta = read_json(folder / META)
    is_duplex = meta.get("app_type") in DUPLEX_APPS
    head = _head(meta, "duplex" if is_duplex else str(meta.get("app_type", "")))
    problem = f"The log could not be read in {MAX_ATTEMPTS} attempts"
    log.error("given up recording=%s", folder.name)
    what = "chunks" if is_duplex else "turns"
    body = {**head, "end_reason": INTERRUPTED, what: [], "problem": problem}
    _save(folder, meta, body, 0.0)


def _head(meta: dict[str, Any], mode: str) -> dict[str, Any]:
    return {
        "session_id": meta.get("session_id"),
        "mode": mode,
        "worker_id": meta.get("worker_id"),
        "start_ts": meta.get("created_at"),
        "config": meta.get("config", {}),
    }


def _save(folder: Path, meta: dict[str, Any], body: dict[str, Any], duration_s: float) -> None:
    meta["duration_s"] = round(duration_s, 3)
    try:
        began_at = datetime.fromisoformat(meta["created_at"])
        meta["ended_at"] = (began_at + timedelta(seconds=duration_s)).isoformat()
    except (KeyError, TypeError, ValueError, OverflowError):
        log.warning("meta.json has no time of its begin recording=%s", folder.name)
    write_json(folder / META, meta)
    content = json.dumps(body, ensure_ascii=False).encode(errors="replace")
    write_atomically(folder / RECORDING, content)


def _count_attempt(folder: Path) -> int:
    """Return which attempt this is, the first being 1; counted before anything can go wrong."""
    with (folder / ATTEMPTS).open("ab") as file:
        file.write(b".")
        file.flush()
        return file.tell()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
