"""`--detach`: the launcher as a daemon, whose start the caller still sees.

The caller's process reads lines from a pipe until the daemon reports how its start ended.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from pathlib import Path

STATUS_MARK = "\x00"
EXIT_LOST = 1


class Background:
    """The daemon's side of the pipe. Lines go to its log as well."""

    def __init__(self, write_fd: int) -> None:
        self._pipe: int | None = write_fd

    def say(self, line: str) -> None:
        print(line, flush=True)
        self._send(line)

    def report(self, status: int) -> None:
        """Let the caller's process end with `status`; later reports have no effect."""
        self._send(f"{STATUS_MARK}{status}")
        if self._pipe is not None:
            os.close(self._pipe)
            self._pipe = None

    def _send(self, line: str) -> None:
        if self._pipe is None:
            return
        try:
            os.write(self._pipe, f"{line}\n".encode())
        except BrokenPipeError:
            # The caller has gone away; the service goes on without an audience.
            os.close(self._pipe)
            self._pipe = None


def go_to_background(log_path: Path) -> Background:
    """Return in the daemon; the calling process prints its lines and exits with its status.

    Raises:
        OSError: the log cannot be written; nothing has been started.
    """
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    read_fd, write_fd = os.pipe()
    if os.fork():
        os.close(write_fd)
        sys.exit(_follow(read_fd))
    os.close(read_fd)
    # A session of its own has no terminal; a second fork keeps it from ever getting one.
    os.setsid()
    if os.fork():
        os._exit(0)
    _redirect(log)
    os.write(write_fd, f"{os.getpid()}\n".encode())
    return Background(write_fd)


def _redirect(log: int) -> None:
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.close(null)
    os.close(log)


def _follow(read_fd: int) -> int:
    """Print the daemon's lines until its status comes; Ctrl-C ends the daemon as well."""
    with os.fdopen(read_fd, encoding="utf-8") as pipe:
        pid = int(pipe.readline() or 0)
        while True:
            try:
                for line in pipe:
                    if line.startswith(STATUS_MARK):
                        return int(line[len(STATUS_MARK) :])
                    print(line, end="", flush=True)
            except KeyboardInterrupt:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)
                continue
            print("error: the launcher ended without a word; see its log", file=sys.stderr)
            return EXIT_LOST
