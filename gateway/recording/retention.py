"""Which recordings have to go: by age, then by the size of all."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta
from typing import Final

from gateway.recording.store import Store, Summary
from shared.config import RecordingConfig
from shared.errors import RecordingInUse

log = logging.getLogger(__name__)

GIB: Final = 2**30


def is_on(config: RecordingConfig) -> bool:
    """Whether any rule is set; 0 is no rule."""
    return config.session_retention_days > 0 or config.max_storage_gb > 0


def clean(store: Store, config: RecordingConfig, now: datetime) -> int:
    """Remove what has to go; returns how many recordings that were. Waits for the disk.

    What is no recording of ours is not touched. Nor is one whose session lives, or that is being
    finished, downloaded or uploaded to: it counts towards the size of all.
    """
    n_removed = 0
    for summary in doomed(store.summaries(), config, now):
        try:
            n_removed += store.delete(summary.recording_id)
        except RecordingInUse:
            continue
        except OSError as error:
            log.warning("not removed recording=%s: %s", summary.recording_id, error.strerror)
    if n_removed:
        log.info("removed recordings=%d", n_removed)
    return n_removed


def doomed(
    newest_first: Sequence[Summary], config: RecordingConfig, now: datetime
) -> Iterator[Summary]:
    """Yield what is too old, then the oldest of the rest until it fits; oldest first."""
    left = sum(summary.n_bytes for summary in newest_first)
    days, most = config.session_retention_days, config.max_storage_gb * GIB
    for summary in reversed(newest_first):
        is_old = days > 0 and summary.created_at < now - timedelta(days=days)
        is_too_much = most > 0 and left > most
        if is_old or is_too_much:
            left -= summary.n_bytes
            yield summary
