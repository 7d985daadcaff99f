"""The one place of a worker that turns an exception into what the client is told."""

from __future__ import annotations

import logging
from typing import ClassVar

from shared.errors import EngineFault, ModelFault, OmniError, WorkerLost
from shared.protocol import Failure

log = logging.getLogger(__name__)

CLOSE_NORMAL = 1000
CLOSE_INTERNAL = 1011


class WorkerStopping(WorkerLost):
    """The worker is being shut down in order: 1001 is "going away"."""

    ws_close: ClassVar[int] = 1001


def failure_for(error: BaseException, session_id: str, seq: int | None = None) -> Failure:
    """Return the failure that a client may see; an unexpected one is logged here, once.

    Args:
        seq: the chunk that the failure answers.
    """
    if isinstance(error, OmniError):
        return Failure(error.slug, str(error), error.ws_close, seq)
    log.error("unexpected error", exc_info=error)
    return Failure("internal", f"internal error in session {session_id}", CLOSE_INTERNAL, seq)


def program_failure(error: BaseException | None, what: str) -> OmniError:
    """Return the typed error of a program that failed; the cause is logged here, once.

    Its traceback is dropped then: it refers to the program, and with it to pictures and sound.
    """
    if isinstance(error, OmniError):
        level = logging.ERROR if isinstance(error, EngineFault) else logging.WARNING
        log.log(level, "%s failed slug=%s: %s", what, error.slug, error)
        _forget_frames(error)
        return error
    log.error("%s failed", what, exc_info=error)
    _forget_frames(error)
    return ModelFault(f"{what} failed in the model")


def _forget_frames(error: BaseException | None) -> None:
    while error is not None and error.__traceback__ is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__
