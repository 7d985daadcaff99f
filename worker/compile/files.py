"""Trees of cache files: listed, measured, copied, and whether their place can be trusted.

What the compiler keeps are pickles and machine code: whoever can write there runs code in the
worker. So a directory that others can write to is refused, not mended.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import stat
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from shared.errors import CompileCacheError
from worker.compile.manifest import Files

TREES = ("inductor", "triton")
"""The directories of a cache: the compiler's `TORCHINDUCTOR_CACHE_DIR` and `TRITON_CACHE_DIR`."""

ROOT_UID = 0
"""Who may write anywhere anyway."""

NOWHERE = "@cache@"
"""Stands for the path of the directory in a shared cache, which is used nowhere but in copies."""

_NOT_CONTENT = frozenset({"locks", "__pycache__"})
"""Written also when everything is found; worth nothing to another process."""

NOEXEC = getattr(os, "ST_NOEXEC", 0)
"""Flag of a file system from which nothing is run; Linux alone tells."""

_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS})


def list_files(directory: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Yield path (relative, with slashes) and facts of every regular file of a cache, unordered.

    What goes while it is listed is left out.

    Raises:
        OSError: something cannot be read.
    """
    waiting = list(TREES)
    while waiting:
        at = waiting.pop()
        with contextlib.suppress(FileNotFoundError), os.scandir(directory / at) as entries:
            for entry in entries:
                path = f"{at}/{entry.name}"
                if entry.is_dir(follow_symlinks=False):
                    if entry.name not in _NOT_CONTENT:
                        waiting.append(path)
                elif entry.is_file(follow_symlinks=False):
                    with contextlib.suppress(FileNotFoundError):
                        yield path, entry.stat(follow_symlinks=False)


def count(directory: Path) -> tuple[int, int]:
    """Return number and total bytes of the files of a cache. Raises OSError."""
    sizes = [facts.st_size for _, facts in list_files(directory)]
    return len(sizes), sum(sizes)


def measure(directory: Path) -> Files:
    """Return the facts about the files of a cache, reading all of them. Raises OSError."""
    whole, n_files, n_bytes = hashlib.sha256(), 0, 0
    for path, facts in sorted(list_files(directory)):
        with (directory / path).open("rb") as file:
            content = hashlib.file_digest(file, "sha256").hexdigest()
        whole.update(f"{path} {content}\n".encode())
        n_files += 1
        n_bytes += facts.st_size
    return Files(n_files, n_bytes, whole.hexdigest())


def copy(source: Path, target: Path) -> None:
    """Copy the files of a cache, as files of our own. Raises OSError.

    Permissions are not taken along: from a read-only directory they would make one that the
    compiler cannot write to.
    """
    for path, _ in list_files(source):
        place = target / path
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / path, place)


def relocate(directory: Path, there: str, here: str) -> None:
    """Change where the files of a cache say that they are. Raises OSError.

    Triton names the parts of a kernel by their full paths, and compiles a kernel anew whose parts
    are not there.
    """
    for path, _ in list_files(directory):
        if path.startswith("triton/") and "/__grp__" in path:
            place = directory / path
            text = place.read_text(encoding="utf-8")
            place.write_text(text.replace(there, here), encoding="utf-8")


def sync_directory(directory: Path) -> None:
    """Have the names in a directory on the disk when this returns. Raises OSError."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def ensure_trusted(directory: Path, remedy: str) -> None:
    """Refuse a directory in which somebody else could have put something.

    Args:
        remedy: the end of the message: what to do about it.

    Raises:
        CompileCacheError: it is none, belongs to another user, or everybody may write to it.
    """
    facts = directory.lstat()
    if not stat.S_ISDIR(facts.st_mode):
        raise CompileCacheError(f"{directory} is no directory")
    if facts.st_uid not in (ROOT_UID, os.geteuid()):
        problem = f"belongs to another user (id {facts.st_uid})"
    elif facts.st_mode & stat.S_IWOTH:
        problem = f"may be written to by everybody (mode {stat.S_IMODE(facts.st_mode):o})"
    else:
        return
    raise CompileCacheError(f"{directory} {problem}, and what it holds is run as code; {remedy}")


def make_private(directory: Path) -> None:
    """Make a directory that is ours alone, or see that it is.

    Raises:
        CompileCacheError: somebody else has made it, or it cannot be made.
    """
    try:
        with contextlib.suppress(FileExistsError):
            directory.mkdir(mode=0o700)
        ensure_trusted(directory, "remove it, or set TMPDIR to another place")
    except OSError as error:
        raise unusable(directory, error, "set TMPDIR to a place that can be written to") from error


def ensure_usable(directory: Path, n_bytes: int) -> None:
    """See that compiled code can be kept in a directory and run from there.

    Raises:
        CompileCacheError: it cannot be written to, has less than `n_bytes` free, or is on a file
            system from which nothing may be run.
    """
    remedy = "set TMPDIR to another place"
    problem = write_problem(directory)
    if problem is not None:
        raise unusable(directory, problem, remedy)
    if os.statvfs(directory).f_flag & NOEXEC:
        raise CompileCacheError(f"{directory}: no code may be run from there (noexec); {remedy}")
    ensure_room(directory, n_bytes, remedy)


def ensure_room(directory: Path, n_bytes: int, remedy: str) -> None:
    """Raises CompileCacheError if less than `n_bytes` are free where the directory is."""
    free = shutil.disk_usage(directory).free
    if free < n_bytes:
        raise CompileCacheError(
            f"{directory}: {n_bytes / 1e6:.0f} MB are needed and {free / 1e6:.0f} MB are free; "
            f"free some, or {remedy}"
        )


def write_problem(directory: Path) -> OSError | None:
    """Return why no file can be made in a directory; None if one can."""
    try:
        # Permissions do not tell of a read-only mount, nor of a full disk.
        with tempfile.TemporaryFile(dir=directory) as probe:
            probe.write(b"probe")
    except OSError as error:
        return error
    return None


def is_out_of_room(error: OSError) -> bool:
    """Whether it was the place written to that failed, not the one read from."""
    return error.errno in _NO_ROOM


def unusable(directory: Path, error: OSError, remedy: str) -> CompileCacheError:
    """Return the error of a directory that cannot be used."""
    return CompileCacheError(f"{directory} cannot be used: {error.strerror}; {remedy}")


def remove(directories: Iterable[Path]) -> None:
    """Remove directories with all they hold, as far as that is possible."""
    for directory in directories:
        shutil.rmtree(directory, ignore_errors=True)


def is_alive(pid: int) -> bool:
    """Whether a process of this number runs here."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
