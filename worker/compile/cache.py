"""One worker's compile cache: is there one that fits, and a copy of it to work in.

Workers never use the shared directory itself. The compiler writes into its cache even where
everything is found, several processes in one directory disturb each other, and a damaged kernel
is never mended; so each worker works in a private copy, which `close` removes.
"""

from __future__ import annotations

import enum
import logging
import os
import re
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from worker.compile import files
from worker.compile.manifest import DamagedCache, Key, Manifest, StaleField, diff
from worker.compile.master import Master, OnWait

log = logging.getLogger(__name__)

WARM_COMPILE_THREADS = 4
"""Where everything is found, a process per core would only cost memory, in every worker."""

ROOM_FACTOR = 2
"""Free space asked for, in sizes of the cache: the copy, and what a repair writes beside it."""

_COPY = re.compile(r"worker-(\d+)(?:\.\d+)?")


class CacheState(enum.StrEnum):
    """What a worker found when it looked for its cache; the words of the wire."""

    WARM = "warm"
    COLD = "cold"
    """There is none, of no fingerprint."""
    STALE = "stale"
    """There are only ones that were made from something else."""
    DAMAGED = "damaged"
    """There was one, but it is not whole."""
    DISABLED = "disabled"
    """Nothing is compiled."""


@dataclass(frozen=True, slots=True)
class CacheStatus:
    """What was found, with the reason in a sentence."""

    state: CacheState
    reason: str
    fingerprint: str = ""
    root: str = ""
    stale: tuple[StaleField, ...] = ()
    """Against the nearest other cache: the one with the fewest differences."""
    manifest: Manifest | None = None
    """Of the cache that is used."""

    @property
    def is_warm(self) -> bool:
        return self.state is CacheState.WARM


DISABLED = CacheStatus(CacheState.DISABLED, "nothing is compiled")


@dataclass(frozen=True, slots=True)
class Changes:
    """Paths in the private copy that are not as they were when it was made."""

    new: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()

    @property
    def written(self) -> tuple[str, ...]:
        """What the compiler had to make: a damaged kernel is written again under its old name,
        and counts as a hit all the same."""
        return self.new + self.changed

    def __len__(self) -> int:
        return len(self.new) + len(self.changed) + len(self.removed)


class CompileCache:
    """The cache of this process. One per process: the compiler is told by the environment.

    Args:
        root: where caches are shared, see `cache_root`.
        key: what is going to be compiled.
        private: where copies may be made, such as `/tmp`.
    """

    def __init__(self, root: Path, key: Key, private: Path) -> None:
        self.key = key
        self.master = Master(root.resolve(), key.fingerprint)
        self.status = CacheStatus(CacheState.COLD, "not opened yet")
        """What `open` or `repair` found last."""
        self.copy: Path | None = None
        """The private copy; None before `open` and after `close`."""
        self._parent = private.absolute() / f"omni-compile-{os.geteuid()}"
        self._n_copies = 0
        self._is_repaired = False
        self._before: dict[str, tuple[int, int]] = {}
        self._environment: dict[str, str | None] = {}

    def examine(self) -> CacheStatus:
        """Look whether there is a cache that fits; changes nothing.

        Every file is read, which takes little beside the compiler's imports: once damaged code has
        been loaded it is too late to make a whole cache in this process.

        Raises:
            CompileCacheError: others could have put something into the root.
        """
        master = self.master
        master.ensure_trusted()
        if master.exists():
            try:
                manifest = master.check()
            except DamagedCache as error:
                return self._found(CacheState.DAMAGED, f"the cache is not whole: {error}")
            return self._found(CacheState.WARM, "the cache fits", manifest=manifest)
        others = [(diff(self.key, Key(other.key)), other) for other in master.others()]
        if not others:
            return self._found(CacheState.COLD, f"there is no cache in {master.root}")
        stale, nearest = min(others, key=lambda pair: len(pair[0]))
        reason = f"the nearest cache, {nearest.fingerprint}, was made from something else: "
        return self._found(CacheState.STALE, reason + "; ".join(map(str, stale)), stale=stale)

    def open(self) -> CacheStatus:
        """Make a private copy of what fits, or an empty one, and point the compiler there.

        To be called before the compiler runs for the first time; again after a wait for `lock`.

        Returns:
            What was found. Everything but warm means that the compiler has to work.

        Raises:
            CompileCacheError: others could have put something into one of the directories, or
                there is no room or no place for the copy.
        """
        self._remove_copy()
        status = self.examine()
        files.make_private(self._parent)
        self._remove_leftovers()
        n_bytes = status.manifest.files.bytes if status.manifest else 0
        files.ensure_usable(self._parent, ROOM_FACTOR * n_bytes)
        self.copy = self._new_copy()
        if status.is_warm:
            self.master.lease()
            status = self._filled(self.copy, status)
        self._point_the_compiler_at(self.copy, status.is_warm)
        self._before = self._snapshot()
        self.status = status
        log.info("compile cache state=%s fingerprint=%s: %s", status.state, status.fingerprint,
                 status.reason)  # fmt: skip
        return status

    def lock(self, on_wait: OnWait | None = None) -> AbstractContextManager[None]:
        """Be the only process that makes this cache; `open` again inside, it may be there by now.

        Args:
            on_wait: called again and again while another process makes it.

        Raises:
            CompileCacheError: the lock cannot be had.
        """
        return self.master.lock(on_wait)

    def publish(self, info: Mapping[str, Any]) -> Manifest:
        """Share what is in the private copy, for every later start; needs the lock.

        Args:
            info: what is good to know: seconds of the build and its stages, the driver.

        Raises:
            CompileCacheError: the root cannot be written to, or is full.
        """
        assert self.copy is not None, "there is nothing to publish before `open`"
        built_at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        manifest = self.master.publish(self.copy, self.key, {"built_at": built_at, **info})
        self.master.lease()
        self._before = self._snapshot()
        log.info("compile cache published fingerprint=%s n_files=%d n_bytes=%d",
                 manifest.fingerprint, manifest.files.count, manifest.files.bytes)  # fmt: skip
        return manifest

    def repair(self) -> bool:
        """Take another copy in another place, after what was read from this one was no use.

        What is compiled from then on is not fit to be published: what this process has in memory
        already, it does not write again.

        Returns:
            True: try once more, after `torch._dynamo.reset()`; `status` says from what. False: it
            was repaired before, and that did not help.

        Raises:
            CompileCacheError: as `open`.
        """
        if self._is_repaired:
            return False
        self._is_repaired = True
        log.warning("compile cache is copied anew fingerprint=%s", self.key.fingerprint)
        self.open()
        return True

    def changes(self) -> Changes:
        """Return what the compiler wrote since `open` or `publish`; reads names, no content."""
        now, before = self._snapshot(), self._before
        return Changes(
            new=tuple(sorted(now.keys() - before.keys())),
            changed=tuple(sorted(p for p in now.keys() & before.keys() if now[p] != before[p])),
            removed=tuple(sorted(before.keys() - now.keys())),
        )

    def close(self) -> None:
        """Remove the private copy; the compiler is not to be used afterwards."""
        self._remove_copy()
        self.master.release()
        for name, value in self._environment.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        self._environment = {}

    def _found(
        self,
        state: CacheState,
        reason: str,
        stale: tuple[StaleField, ...] = (),
        manifest: Manifest | None = None,
    ) -> CacheStatus:
        root = str(self.master.root)
        return CacheStatus(state, reason, self.key.fingerprint, root, stale, manifest)

    def _new_copy(self) -> Path:
        # A new name each time: modules loaded from an earlier copy are remembered by their path.
        suffix = f".{self._n_copies}" if self._n_copies else ""
        self._n_copies += 1
        copy = self._parent / f"worker-{os.getpid()}{suffix}"
        for directory in (copy, *(copy / tree for tree in files.TREES)):
            files.make_private(directory)
        return copy

    def _filled(self, copy: Path, status: CacheStatus) -> CacheStatus:
        """Copy the shared directory; one that goes away meanwhile counts as damaged."""
        assert status.manifest is not None
        expected = status.manifest.files
        try:
            files.copy(self.master.directory, copy)
            if files.count(copy) == (expected.count, expected.bytes):
                files.relocate(copy, files.NOWHERE, str(copy))
                return status
            problem = "it changed while it was copied"
        except OSError as error:
            if files.is_out_of_room(error):
                self._remove_copy()
                raise files.unusable(copy, error, "free some, or set TMPDIR") from error
            problem = f"it cannot be copied: {error.strerror}"
        for tree in files.TREES:
            files.remove([copy / tree])
            files.make_private(copy / tree)
        return self._found(CacheState.DAMAGED, f"the cache is not whole: {problem}")

    def _point_the_compiler_at(self, copy: Path, is_warm: bool) -> None:
        wanted = dict(
            zip(("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"), files.TREES, strict=True)
        )
        for name, tree in wanted.items():
            self._set(name, str(copy / tree))
        if is_warm and "TORCHINDUCTOR_COMPILE_THREADS" not in os.environ:
            n_threads = min(WARM_COMPILE_THREADS, os.cpu_count() or 1)
            self._set("TORCHINDUCTOR_COMPILE_THREADS", str(n_threads))

    def _set(self, name: str, value: str) -> None:
        self._environment.setdefault(name, os.environ.get(name))
        os.environ[name] = value

    def _snapshot(self) -> dict[str, tuple[int, int]]:
        if self.copy is None:
            return {}
        return {
            path: (facts.st_size, facts.st_mtime_ns) for path, facts in files.list_files(self.copy)
        }

    def _remove_copy(self) -> None:
        if self.copy is not None:
            files.remove([self.copy])
            self.copy = None

    def _remove_leftovers(self) -> None:
        """Of workers that were killed; one of them may have had the number of this process."""
        for path in self._parent.iterdir():
            found = _COPY.fullmatch(path.name)
            if found and (int(found[1]) == os.getpid() or not files.is_alive(int(found[1]))):
                files.remove([path])
