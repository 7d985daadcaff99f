"""The shared directory of one fingerprint: looked at, locked, published, removed.

`<root>/<fingerprint>/{manifest.json, inductor/, triton/}` appears at once, by a rename, and is
never written to afterwards besides its manifest: workers copy it. Beside it are
`<root>/<fingerprint>.lock`, held by whoever makes it, and in `<root>/leases` a file for each
worker that may want to copy it again.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
from filelock import FileLock, Timeout

from worker.compile import files
from worker.compile.manifest import DamagedCache, Key, Manifest

log = logging.getLogger(__name__)

MANIFEST = "manifest.json"
KEPT_FINGERPRINTS = 2
WAIT_STEP_S = 0.5

OnWait = Callable[[float], None]
"""Called about twice a second with the seconds waited so far; may raise to wait no longer."""

_FINGERPRINT = re.compile(r"[0-9a-f]{16}")
_UNFINISHED = re.compile(r"\.(?:build|old)-[0-9a-f]{16}-(\d+)")
_LEASE = re.compile(r"([0-9a-f]{16})-(\d+)")
_REMEDY = "set compile.cache_dir to a directory of your own"


def cache_root(cache_dir: str | None, environment: Mapping[str, str]) -> Path:
    """Return where caches are shared: as configured, else inherited, else `torch_compile_cache`."""
    named = cache_dir or environment.get("TORCHINDUCTOR_CACHE_DIR") or "torch_compile_cache"
    return Path(named).expanduser().absolute()


class Master:
    """One fingerprint's directory under a root. No method needs torch or the key."""

    def __init__(self, root: Path, fingerprint: str) -> None:
        self.root = root
        self.fingerprint = fingerprint
        self.directory = root / fingerprint
        self._is_locked = False

    # ---- looking

    def exists(self) -> bool:
        return self.directory.is_dir()

    def ensure_trusted(self) -> None:
        """Raises CompileCacheError if others could have put something there."""
        for directory in (self.root, self.directory):
            if directory.exists():
                files.ensure_trusted(directory, f"take that right away (chmod o-w), or {_REMEDY}")

    def manifest(self) -> Manifest:
        """Raises DamagedCache, also where there is none."""
        path = self.directory / MANIFEST
        try:
            found = Manifest.read(path)
        except FileNotFoundError as error:
            raise DamagedCache(f"{path} is missing") from error
        if found.fingerprint != self.fingerprint:
            raise DamagedCache(f"{path} is of {found.fingerprint}")
        return found

    def check(self) -> Manifest:
        """Return the manifest of a directory that is whole; reads every file.

        Raises:
            DamagedCache: something is missing, or not as it was made.
        """
        manifest = self.manifest()
        expected = manifest.files
        try:
            n_files, n_bytes = files.count(self.directory)
            if (n_files, n_bytes) != (expected.count, expected.bytes):
                raise DamagedCache(
                    f"{self.directory} holds {n_files} files with {n_bytes} bytes, "
                    f"{expected.count} with {expected.bytes} were made"
                )
            if files.measure(self.directory).tree_sha != expected.tree_sha:
                raise DamagedCache(f"a file in {self.directory} has another content than was made")
        except OSError as error:
            raise DamagedCache(f"{self.directory} cannot be read: {error.strerror}") from error
        return manifest

    def others(self) -> list[Manifest]:
        """Return the readable manifests of other fingerprints."""
        found = []
        for other in _fingerprints(self.root):
            if other != self.fingerprint:
                with contextlib.suppress(DamagedCache):
                    found.append(Master(self.root, other).manifest())
        return found

    # ---- one at a time

    @contextlib.contextmanager
    def lock(self, on_wait: OnWait | None = None) -> Iterator[None]:
        """Be the only one who changes this directory; the kernel ends that when the process dies.

        After a wait somebody else may have made it: look again. In a root that cannot be written
        to nobody can make anything, and nobody is waited for.

        Raises:
            CompileCacheError: the lock cannot be had.
        """
        if self._write_problem() is not None:
            yield
            return
        # It may be taken on one thread and given back on another.
        lock = FileLock(self.root / f"{self.fingerprint}.lock", thread_local=False)
        began_at = time.monotonic()
        while not self._acquired(lock):
            if on_wait is not None:
                on_wait(time.monotonic() - began_at)
        self._is_locked = True
        try:
            yield
        finally:
            self._is_locked = False
            lock.release()

    def publish(self, made: Path, key: Key, info: Mapping[str, Any]) -> Manifest:
        """Make a copy of `made` the directory of this fingerprint, at once; needs the lock.

        A whole one that is there already is kept, a damaged one replaced. Older fingerprints are
        removed besides the newest two, unless a living worker holds a lease on them.

        Returns:
            The manifest of what is there now.

        Raises:
            CompileCacheError: the root cannot be written to, or is full; it is as before then.
        """
        self.ensure_writable()
        assert self._is_locked, "whoever publishes holds the lock"
        self._remove_leftovers()
        with contextlib.suppress(DamagedCache):
            return self.check()
        build = self._beside("build")
        try:
            files.remove([build])
            build.mkdir(mode=0o700)
            files.ensure_room(build, files.count(made)[1], _REMEDY)
            files.copy(made, build)
            files.relocate(build, str(made), files.NOWHERE)
            manifest = Manifest(key=key.fields, info=dict(info), files=files.measure(build))
            manifest.write(build / MANIFEST)
            files.sync_directory(build)
            self._take_place(build)
        except OSError as error:
            raise files.unusable(self.root, error, _REMEDY) from error
        finally:
            files.remove([build])
        self._remove_older()
        return manifest

    def record(self, verify: Mapping[str, Any]) -> None:
        """Write the figures of a second start into the manifest; needs the lock.

        Raises:
            CompileCacheError: the root cannot be written to.
            DamagedCache: there is no manifest to write to.
        """
        manifest = msgspec.structs.replace(self.manifest(), verify=dict(verify))
        try:
            manifest.write(self.directory / MANIFEST)
        except OSError as error:
            raise files.unusable(self.root, error, _REMEDY) from error

    def set_aside(self) -> Path:
        """Take the directory out of use and return where it is now. Raises CompileCacheError."""
        aside = self._beside("old")
        try:
            files.remove([aside])
            self.directory.rename(aside)
        except OSError as error:
            raise files.unusable(self.root, error, _REMEDY) from error
        return aside

    def put_back(self, aside: Path) -> None:
        """Undo `set_aside`, unless there is a new one by now."""
        # A directory takes the place of an empty one at most.
        with contextlib.suppress(OSError):
            aside.rename(self.directory)
        files.remove([aside])

    def discard(self) -> None:
        """Remove the directory; whoever reads it in this moment sees it go at once."""
        if self.exists():
            files.remove([self.set_aside()])

    # ---- who uses it

    def lease(self) -> None:
        """Note that this process may want to copy the directory again."""
        # In a root that cannot be written to nothing is removed either.
        with contextlib.suppress(OSError):
            leases = self.root / "leases"
            leases.mkdir(mode=0o700, exist_ok=True)
            (leases / f"{self.fingerprint}-{os.getpid()}").touch()

    def release(self) -> None:
        """Take the lease back."""
        with contextlib.suppress(OSError):
            (self.root / "leases" / f"{self.fingerprint}-{os.getpid()}").unlink()

    def _acquired(self, lock: FileLock) -> bool:
        try:
            lock.acquire(timeout=WAIT_STEP_S)
        except Timeout:
            return False
        except OSError as error:
            raise files.unusable(self.root, error, _REMEDY) from error
        return True

    def ensure_writable(self) -> None:
        """See that a cache can be shared here. Raises CompileCacheError."""
        problem = self._write_problem()
        if problem is not None:
            raise files.unusable(self.root, problem, _REMEDY)

    def _write_problem(self) -> OSError | None:
        try:
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            return error
        return files.write_problem(self.root)

    def _beside(self, what: str) -> Path:
        return self.root / f".{what}-{self.fingerprint}-{os.getpid()}"

    def _take_place(self, build: Path) -> None:
        aside = self.set_aside() if self.exists() else None
        try:
            build.rename(self.directory)
        except OSError:
            if aside is not None:
                aside.rename(self.directory)
            raise
        files.sync_directory(self.root)
        if aside is not None:
            files.remove([aside])

    def _remove_leftovers(self) -> None:
        """Of processes that were killed while they built or removed."""
        for path in self.root.iterdir():
            found = _UNFINISHED.fullmatch(path.name)
            if found and not files.is_alive(int(found[1])):
                log.info("unfinished cache removed path=%s", path)
                files.remove([path])

    def _remove_older(self) -> None:
        leased = self._leased()
        by_age = sorted(_fingerprints(self.root), key=self._written_at, reverse=True)
        for fingerprint in by_age[KEPT_FINGERPRINTS:]:
            if fingerprint != self.fingerprint and fingerprint not in leased:
                log.info("older cache removed fingerprint=%s", fingerprint)
                Master(self.root, fingerprint).discard()

    def _leased(self) -> set[str]:
        """Return the fingerprints that living processes use; forget the dead ones."""
        alive = set()
        for path in (self.root / "leases").glob("*"):
            found = _LEASE.fullmatch(path.name)
            if found and files.is_alive(int(found[2])):
                alive.add(found[1])
            else:
                path.unlink(missing_ok=True)
        return alive

    def _written_at(self, fingerprint: str) -> float:
        """When a cache was made; 0 for one without a manifest."""
        try:
            return (self.root / fingerprint / MANIFEST).stat().st_mtime
        except OSError:
            return 0.0


def _fingerprints(root: Path) -> list[str]:
    """Return the names of the caches in a root; other things may be there as well."""
    try:
        names = [path.name for path in root.iterdir() if path.is_dir()]
    except OSError:
        return []
    return sorted(name for name in names if _FINGERPRINT.fullmatch(name))
