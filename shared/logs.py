"""Logging of gateway and worker: one event per line, the session's id from context, no content.

    2026-01-31 12:00:00,000 INFO worker0 worker.lifecycle session=- stage done name=load_model …

A fault that repeats with every unit must not fill a disk: the handler writes the traceback of one
cause once in `TRACE_WINDOW_S` and a bounded number of lines of one place in the code per
`LINE_WINDOW_S`; the others are counted. What a line says cannot begin another line: characters
that are not printable are escaped, and every line of a traceback begins with `TRACE_PREFIX`.
"""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Callable, Hashable, Iterator
from contextvars import ContextVar
from typing import TextIO

session_id_in_context: ContextVar[str] = ContextVar("session_id_in_context", default="-")

LINE_WINDOW_S = 60.0
MAX_LINES_PER_WINDOW = 50
"""Of one place in the code; below WARNING: of one place and one session."""

TRACE_WINDOW_S = 600.0
TRACE_PREFIX = "  | "
MAX_LINE_CHARS = 2000
MAX_ERROR_CHARS = 300
MAX_TRACE_LINES = 60
MAX_WINDOWS = 1000
"""Places that are counted at the same time; beyond it the oldest is forgotten."""

QUOTING_ERRORS = (ValueError, LookupError)
"""Their texts quote the value at fault (`KeyError: 'a word of the user'`), so the log says the
type and where it was raised, not the text."""

NOISY_LOGGERS = ("uvicorn.error", "websockets", "httpx", "httpcore")
"""uvicorn logs the whole path of each upgrade at INFO, and a path may carry an API key; httpx logs
every health poll; websockets logs frames."""


class Windows:
    """Counts events by key, each key in windows of its own."""

    def __init__(self, window_s: float, clock: Callable[[], float]) -> None:
        self._window_s = window_s
        self._clock = clock
        self._windows: dict[Hashable, tuple[float, int]] = {}

    def count(self, key: Hashable) -> tuple[int, int]:
        """Count one event.

        Returns:
            Its number in its window, from 1, and how many the window before had (0 unless this
            event begins a window).
        """
        now = self._clock()
        began_at, n = self._windows.get(key, (now, 0))
        if n and now - began_at < self._window_s:
            self._windows[key] = (began_at, n + 1)
            return n + 1, 0
        self._windows.pop(key, None)
        self._windows[key] = (now, 1)
        if len(self._windows) > MAX_WINDOWS:
            del self._windows[next(iter(self._windows))]
        return 1, n


class LineHandler(logging.StreamHandler[TextIO]):
    """Writes bounded lines of printable characters.

    Args:
        process: name of the process in every line.
        stream: where to; None = stderr.
    """

    def __init__(
        self,
        process: str,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(stream)
        self._process = process
        self._times = logging.Formatter()
        self._lines = Windows(LINE_WINDOW_S, clock)
        self._traces = Windows(TRACE_WINDOW_S, clock)
        self._n_held_back = 0

    def emit(self, record: logging.LogRecord) -> None:
        place = (record.pathname, record.lineno)
        if record.levelno >= logging.WARNING:
            n, n_before = self._lines.count(place)
        elif record.levelno >= logging.INFO:
            n, n_before = self._lines.count((*place, session_id_in_context.get()))
        else:
            n, n_before = 1, 0
        self._n_held_back = max(0, n_before - MAX_LINES_PER_WINDOW)
        if n <= MAX_LINES_PER_WINDOW:
            super().emit(record)

    def format(self, record: logging.LogRecord) -> str:
        session = session_id_in_context.get()
        head = f"{self._times.formatTime(record)} {record.levelname} {self._process} {record.name}"
        line = cut(printable(f"{head} session={session} {record.getMessage()}"), MAX_LINE_CHARS)
        if self._n_held_back:
            line += f" held_back={self._n_held_back}"
        error = record.exc_info[1] if record.exc_info else None
        if error is None:
            return line
        root = _root_of(error)
        n, _ = self._traces.count(_raised_at(root))
        if n > 1:
            return f"{line} error={type(root).__name__} repeat={n}"
        return "\n".join([line, *trace_lines(error)])


def set_up(process: str) -> None:
    """Log to stderr from now on.

    Args:
        process: name of this process in every line, such as `gateway` or `worker0`.
    """
    logging.basicConfig(level=logging.INFO, handlers=[LineHandler(process)], force=True)
    for noisy in NOISY_LOGGERS:
        logging.getLogger(noisy).setLevel(logging.WARNING)


def printable(text: str) -> str:
    """Return `text` with everything escaped that could end a line or move a cursor."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def cut(text: str, n_chars: int) -> str:
    return text if len(text) <= n_chars else text[:n_chars] + "…"


def trace_lines(error: BaseException) -> list[str]:
    """Return the lines that tell an exception and its causes, the last one in the chain first."""
    lines = []
    for i, each in enumerate(_chain(error)):
        text = str(each)
        if text and isinstance(each, QUOTING_ERRORS):
            text = f"(text of {len(text)} characters withheld)"
        lines.append(f"{'caused by ' if i else ''}{type(each).__qualname__}: {text}")
        # The innermost frames come last and say most.
        frames = "".join(traceback.format_tb(each.__traceback__)).splitlines()
        lines += frames[-MAX_TRACE_LINES:]
    shown = lines[: 2 * MAX_TRACE_LINES]
    return [TRACE_PREFIX + cut(printable(line), MAX_ERROR_CHARS) for line in shown]


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The exception, what a group holds, then what each was raised from; each one once."""
    waiting, seen = [error], set[int]()
    while waiting:
        each = waiting.pop(0)
        if id(each) in seen:
            continue
        seen.add(id(each))
        yield each
        if isinstance(each, BaseExceptionGroup):
            waiting += each.exceptions
        cause = each.__cause__
        if cause is None and not each.__suppress_context__:
            cause = each.__context__
        if cause is not None:
            waiting.append(cause)


def _root_of(error: BaseException) -> BaseException:
    *_, root = _chain(error)
    return root


def _raised_at(error: BaseException) -> Hashable:
    """What is equal for the same exception raised by the same line."""
    place = None
    for frame, lineno in traceback.walk_tb(error.__traceback__):
        place = (frame.f_code.co_filename, lineno)
    return type(error), place
