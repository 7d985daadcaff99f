"""Lines of the log: bounded, unforgeable, with the session's id."""

import io
import logging
from contextvars import copy_context

import pytest

from shared import logs
from shared.logs import (
    MAX_LINE_CHARS,
    MAX_LINES_PER_WINDOW,
    MAX_TRACE_LINES,
    MAX_WINDOWS,
    TRACE_PREFIX,
    LineHandler,
    Windows,
    session_id_in_context,
)


class Log:
    """A logger with a handler of ours, at every level, and what has been written."""

    def __init__(self) -> None:
        self.now = 0.0
        self._stream = io.StringIO()
        self._logger = logging.Logger("gateway.test")
        self._logger.addHandler(LineHandler("gateway", self._stream, lambda: self.now))
        self.info = self._logger.info
        self.warning = self._logger.warning
        self.debug = self._logger.debug

    def error(self, error: BaseException) -> None:
        self._logger.error("unit failed", exc_info=error)

    @property
    def lines(self) -> list[str]:
        return self._stream.getvalue().splitlines()


@pytest.fixture
def log() -> Log:
    return Log()


def raised(error: Exception) -> Exception:
    try:
        raise error
    except Exception as caught:  # noqa: BLE001 - whatever it is
        return caught


def raised_from(cause: Exception) -> Exception:
    try:
        raise RuntimeError("batch of think failed") from raised(cause)
    except RuntimeError as caught:
        return caught


def test_a_line_says_process_logger_and_session(log):
    def in_session() -> None:
        session_id_in_context.set("omni_1")
        log.info("unit done index=%d", 3)

    copy_context().run(in_session)
    log.info("listening")

    assert log.lines[0].endswith(" INFO gateway gateway.test session=omni_1 unit done index=3")
    assert log.lines[1].endswith(" INFO gateway gateway.test session=- listening")


@pytest.mark.parametrize("end", ["\n", "\r", "\r\n", "\x0b", "\x85", "\u2028", "\x1b[2K\r"])
def test_no_text_begins_another_line(log, end):
    forged = f"bye{end}2026-01-01 00:00:00,000 ERROR gateway root session=- all is lost"

    log.warning("state changed reason=%s", forged)
    log.error(raised(RuntimeError(forged)))
    copy_context().run(lambda: (session_id_in_context.set(forged), log.info("session opened")))

    own = [line for line in log.lines if not line.startswith(TRACE_PREFIX)]
    assert len(own) == 3
    assert all("gateway gateway.test session=" in line for line in own)


def test_half_an_emoji_can_be_written(log):
    log.info("id=%s", "\ud83d")

    assert log.lines[0].endswith(r"id=\ud83d")


def test_a_long_line_is_cut(log):
    log.warning("text=%s", "x" * 1_000_000)

    assert len(log.lines[0]) <= MAX_LINE_CHARS + 1


def test_a_fault_of_every_unit_is_traced_once_and_then_counted(log):
    """A model that failed on every unit wrote three tracebacks a second and session."""
    for _ in range(40):
        log.now += 1.0
        log.error(raised_from(KeyError("x")))
    traces = [line for line in log.lines if line.startswith(TRACE_PREFIX)]
    lines = [line for line in log.lines if not line.startswith(TRACE_PREFIX)]

    assert sum("Error: " in line for line in traces) == 2
    assert len(lines) == 40
    assert lines[-1].endswith("unit failed error=KeyError repeat=40")


def test_the_cause_of_one_failure_is_traced_once_wherever_it_is_logged(log):
    cause = raised(KeyError("x"))
    log.error(cause)
    log.error(raised_from(cause))

    assert log.lines[-1].endswith("error=KeyError repeat=2")


def test_another_fault_is_traced_as_well(log):
    log.error(raised(RuntimeError("a")))
    log.error(raised(OSError("b")))

    assert any(line == f"{TRACE_PREFIX}RuntimeError: a" for line in log.lines)
    assert any(line == f"{TRACE_PREFIX}OSError: b" for line in log.lines)


def test_a_fault_that_goes_on_is_traced_again_after_a_while(log):
    for at in (0.0, logs.TRACE_WINDOW_S - 1.0, logs.TRACE_WINDOW_S):
        log.now = at
        log.error(raised(RuntimeError("a")))

    assert log.lines.count(f"{TRACE_PREFIX}RuntimeError: a") == 2


def warn(log: Log, n: int) -> None:
    for _ in range(n):
        log.warning("worker answered no chunk of ours")


def test_a_storm_is_cut_off_and_its_size_told_later(log):
    warn(log, MAX_LINES_PER_WINDOW + 1000)
    n_written = len(log.lines)
    log.now = logs.LINE_WINDOW_S
    warn(log, 2)

    assert n_written == MAX_LINES_PER_WINDOW
    assert log.lines[-2].endswith("held_back=1000")
    assert log.lines[-1].endswith("worker answered no chunk of ours")


def test_a_storm_hides_no_other_line(log):
    warn(log, 10 * MAX_LINES_PER_WINDOW)
    log.warning("something else")

    assert log.lines[-1].endswith("something else")


def test_one_session_that_pauses_all_the_time_hides_no_other_session(log):
    def change(session_id: str, n: int) -> None:
        session_id_in_context.set(session_id)
        for _ in range(n):
            log.info("state changed")

    copy_context().run(change, "a", 10 * MAX_LINES_PER_WINDOW)
    copy_context().run(change, "b", 1)

    assert "session=b" in log.lines[-1]


def test_what_is_counted_at_the_same_time_is_bounded():
    windows = Windows(60.0, lambda: 0.0)
    for key in range(3 * MAX_WINDOWS):
        windows.count(key)

    assert len(windows._windows) == MAX_WINDOWS


@pytest.mark.parametrize("kind", [ValueError, KeyError, UnicodeError, IndexError])
def test_the_text_of_an_error_that_quotes_its_value_is_withheld(log, kind):
    log.error(raised_from(kind("what the user said")))

    assert not any("what the user said" in line for line in log.lines)
    assert any(f"caused by {kind.__name__}: (text of" in line for line in log.lines)
    assert any("test_logs.py" in line for line in log.lines)


def test_a_group_of_errors_is_traced_with_its_members(log):
    log.error(ExceptionGroup("pollers", [raised(OSError("no route"))]))

    assert any("OSError: no route" in line for line in log.lines)


def test_a_deep_recursion_is_traced_with_its_innermost_frames(log):
    def fall(depth: int) -> None:
        if not depth:
            raise RuntimeError("the bottom")
        fall(depth - 1)

    try:
        fall(500)
    except RuntimeError as error:
        log.error(error)

    assert len(log.lines) <= MAX_TRACE_LINES + 2
    assert 'raise RuntimeError("the bottom")' in log.lines[-1]


def test_lines_below_info_are_not_counted(log):
    for _ in range(2 * MAX_LINES_PER_WINDOW):
        log.debug("unit done")

    assert len(log.lines) == 2 * MAX_LINES_PER_WINDOW
