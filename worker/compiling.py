"""What a worker compiles while it starts, and what it has to tell about it.

The lifecycle calls the steps in this order, all on the thread of the language lane: `look` before
any weights are read (is there a cache that fits?), `compile` when the model is there, `capture`,
`replay` after the rehearsal, `finish`. One worker compiles a cold cache, the others wait for it.
What goes wrong here makes a worker slower, never wrong: it serves eagerly, and says so.

`status` and its kin read memory only and may be asked by any thread at any time. This module
imports no torch: a worker's port is there before that.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from shared.errors import CompileCacheError
from shared.protocol import CacheState, CompileStatus, CompileSummary, StaleReason
from worker.compile import cache
from worker.compile.cache import DISABLED, CacheStatus, CompileCache
from worker.compile.warmup import ShapeProfile, load_shapes, replay
from worker.models.contract import Progress

if TYPE_CHECKING:
    from worker.compile.compiler import Compiler

log = logging.getLogger(__name__)

Apply = Callable[[Progress], Any]
"""A back end's `apply_torch_compile`."""

ON_COLD_EAGER = ", and compile.on_cold is eager"
"""End of the reason why a worker without a cache that fits does not make one."""

COMPILE_ERRORS = (RuntimeError, OSError, ValueError, LookupError, ImportError, SyntaxError)
"""What compilers raise: their own errors are all RuntimeErrors; damaged files of theirs, read as
libraries, sources or JSON, raise the others."""


@dataclass(frozen=True, slots=True)
class CompileParts:
    """What a configuration comes to on this machine; to be made late, since it needs torch."""

    compiler: Compiler
    cache: CompileCache | None = None
    """None: nothing is compiled."""
    on_cold: Literal["compile", "eager"] = "compile"
    profile: ShapeProfile | None = None
    """Where the shapes of real traffic are kept."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Of what compiles, and the GPU; for reports."""


class Compiling:
    """The compiling part of one worker's start.

    Args:
        make: called by `look`, on the thread that compiles. None: there is nothing to look at,
            and all steps do nothing (a back end that knows no compiler).
        completes: what a warm start had to add to the cache is shared as well. (Some kernels are
            built another way when their code comes from a cache than when it was just made.)
    """

    def __init__(
        self,
        make: Callable[[], CompileParts] | None = None,
        clock: Callable[[], float] = time.monotonic,
        completes: bool = False,
    ) -> None:
        self._make = make
        self._completes = completes
        self._clock = clock
        self._parts: CompileParts | None = None
        self._found: CacheStatus | None = None
        self._reason = ""
        self._turn = contextlib.ExitStack()
        """Holds the cache's lock while this worker is the one that makes it."""
        self._is_maker = False
        self._is_cancelled = False
        self._began_at = 0.0
        self._n_new_files = 0
        """At the last look: since the copy was made, or since it was shared."""
        self._n_shared_files = 0
        self._files_lock = threading.Lock()

    @property
    def is_on(self) -> bool:
        """Whether something is compiled."""
        return self._parts is not None and self._parts.compiler.plan is not None

    @property
    def captures(self) -> bool:
        """Whether something is going to be captured."""
        return self._parts is not None and self._parts.compiler.can_capture

    @property
    def versions(self) -> Mapping[str, str]:
        """Of torch, Triton, CUDA, driver and GPU; empty until `look`."""
        return self._parts.versions if self._parts else {}

    # ---- the steps of a start

    def look(self) -> Compiler:
        """Look for the cache and return the compiler that the model is built with.

        Raises:
            CompileCacheError: a directory must not or cannot be used.
        """
        assert self._make is not None
        parts = self._parts = self._make()
        if parts.cache is None:
            self._found = DISABLED
            return parts.compiler
        self._found = parts.cache.examine()
        if self._found.is_warm or parts.on_cold == "compile":
            # Also an empty one: kernels that are compiled while the model loads belong there too.
            self._found = parts.cache.open()
        else:
            log.info("compile cache %s", _told(self._found))
            self._stay_eager(f"{self._found.reason}{ON_COLD_EAGER}")
        return parts.compiler

    def compile(self, apply: Apply, progress: Progress) -> None:
        """Compile what the model has declared, from the cache if it is there.

        Where that fails, a damaged copy of the cache is replaced once; after that the worker stays
        eager. Where the cache is not there, this worker makes it, or waits for the one that does.
        """
        self._began_at = self._clock()
        if not self.is_on:
            apply(progress)
            return
        self._take_turn(progress)
        try:
            apply(progress)
        except COMPILE_ERRORS as error:
            if not self._is_repaired(error, progress):
                self.give_up(error)
                return
            try:
                apply(progress)
            except COMPILE_ERRORS as again:
                self.give_up(again)

    def capture(self, progress: Progress) -> None:
        """Capture what was compiled; where that fails, it runs uncaptured."""
        if not self.captures:
            return
        compiler = self._compiler
        try:
            compiler.capture(progress)
        except RuntimeError as error:
            log.exception("capture failed: runs uncaptured")
            compiler.drop_graphs()
            self._degrade(f"nothing is captured: {_first_line(error)}")

    def replay(self, progress: Progress) -> None:
        """Compile and capture the shapes that earlier traffic had and no plan names."""
        parts = self._parts
        if not self.is_on or parts is None or parts.profile is None:
            return
        shapes = replay(load_shapes(parts.profile.path), self._accepts)
        try:
            parts.compiler.add(shapes, progress)
        except COMPILE_ERRORS as error:
            # They were eager before, and still are.
            log.warning("shapes of earlier traffic are not compiled: %s", _first_line(error))

    def finish(self, stage_seconds: Mapping[str, float]) -> None:
        """Share what was made, and let nothing be compiled from now on.

        Args:
            stage_seconds: of the start so far, for the manifest.
        """
        self.check_files()
        self._publish(stage_seconds)
        parts = self._parts
        if parts is None:
            return
        if self._found is not None and self._found.is_warm and self._n_new_files:
            files = self._cache.changes().written
            log.warning("a warm start has compiled n_new_files=%d: %s", len(files), files[:40])
            if self._completes:
                self._complete(stage_seconds)
        parts.compiler.seal()
        if parts.profile is not None:
            parts.profile.open()
            for stage in parts.compiler.stages.values():
                stage.on_shape = parts.profile.record

    def give_up(self, error: Exception) -> bool:
        """Serve eagerly from now on; False if nothing was compiled anyway."""
        if not self.is_on:
            return False
        log.error("compiled code is of no use: runs eagerly", exc_info=error)
        self._compiler.undo()
        self._stay_eager(f"nothing is compiled: {_first_line(error)}")
        return True

    def cancel(self) -> None:
        """Wait for no other worker any more; from any thread."""
        self._is_cancelled = True

    def close(self) -> None:
        """Remove the private copy of the cache; nothing may be compiled or run afterwards."""
        self._end_turn()
        parts = self._parts
        if parts is not None and parts.profile is not None:
            parts.profile.close()
        if parts is not None and parts.cache is not None:
            with self._files_lock:
                parts.cache.close()

    # ---- what there is to tell

    def check_files(self) -> None:
        """Count the files that the compiler has written besides those of the cache."""
        used = self._parts.cache if self._parts else None
        with self._files_lock:
            if used is None or used.copy is None:
                return
            try:
                changes = used.changes()
            except OSError as error:
                # A file that went away in the moment it was looked at.
                log.warning("compile cache not looked at: %s", error.strerror)
                return
        if len(changes.written) > self._n_new_files and self._compiler.report.is_sealed:
            log.error("the compiler has written after the start files=%s", changes.written[:5])
        self._n_new_files = len(changes.written)

    def summary(self) -> CompileSummary:
        """The part of `/health`."""
        found = self._found
        fingerprint = found.fingerprint if found else ""
        return CompileSummary(self._state, bool(self._reason), fingerprint)

    def status(self, stage_seconds: Mapping[str, float]) -> CompileStatus:
        """Body of `/api/compile`."""
        found = self._found
        counts = self._parts.compiler.report.counts() if self._parts else {}
        # Other names in it are for metrics.
        counted = msgspec.convert(counts, CompileStatus)
        stale = found.stale if found else ()
        is_damaged = found is not None and found.state is cache.CacheState.DAMAGED
        return msgspec.structs.replace(
            counted,
            state=self._state,
            degraded=bool(self._reason),
            fingerprint=found.fingerprint if found else "",
            stale_fields=[StaleReason(one.name, one.here, one.there) for one in stale],
            new_files=self._n_shared_files + self._n_new_files,
            stage_seconds=dict(stage_seconds),
            reason=self._reason or (found.reason if found and is_damaged else ""),
        )

    @property
    def _state(self) -> CacheState | None:
        return self._found.state.value if self._found else None

    # ---- parts of the steps

    @property
    def _compiler(self) -> Compiler:
        assert self._parts is not None
        return self._parts.compiler

    @property
    def _cache(self) -> CompileCache:
        assert self._parts is not None
        assert self._parts.cache is not None
        return self._parts.cache

    def _take_turn(self, progress: Progress) -> None:
        """Unless the cache is warm: wait until it is, or until this worker may make it."""
        assert self._found is not None
        if self._found.is_warm:
            return

        def on_wait(waited_s: float) -> None:
            if self._is_cancelled:
                raise CompileCacheError("the worker ends")
            progress(0.0, f"another worker compiles, waiting for {waited_s:.0f} s")

        self._turn.enter_context(self._cache.lock(on_wait))
        self._is_maker = True
        if self._cache.examine().is_warm:
            self._found = self._cache.open()
        if self._found.is_warm:
            self._end_turn()

    def _end_turn(self) -> None:
        self._is_maker = False
        self._turn.close()

    def _is_repaired(self, error: Exception, progress: Progress) -> bool:
        """Try to get files that are not damaged, after those of a warm cache were of no use."""
        assert self._found is not None
        if not self._found.is_warm:
            return False
        log.warning("compiling from the cache failed: %s", _first_line(error))
        self._compiler.undo()
        try:
            if not self._cache.repair():
                return False
        except CompileCacheError as problem:
            log.error("compile cache cannot be repaired: %s", problem)
            return False
        self._found = self._cache.status
        # If that is damaged by now, too, a start that has loaded nothing of it will replace it.
        return self._found.is_warm or (self._parts is not None and self._parts.on_cold == "compile")

    def _publish(self, stage_seconds: Mapping[str, float]) -> None:
        if not self._is_maker:
            return
        info = {
            "build_s": round(self._clock() - self._began_at, 1),
            "stage_seconds": dict(stage_seconds),
            "driver": self.versions.get("driver", ""),
            "plan": self._compiler.planned(),
            "compiled": self._compiler.report.counts(),
        }
        try:
            self._cache.publish(info)
            self._n_shared_files, self._n_new_files = self._n_new_files, 0
        except CompileCacheError as error:
            log.error("compile cache is not shared, the next start compiles again: %s", error)
        finally:
            self._end_turn()

    def _complete(self, stage_seconds: Mapping[str, float]) -> None:
        """Share a warm cache together with what was missing in it."""
        n_added = self._n_new_files
        try:
            self._turn.enter_context(self._cache.lock(lambda waited_s: None))
            self._cache.master.discard()
        except CompileCacheError as error:
            log.error("what was missing in the compile cache is not shared: %s", error)
            self._end_turn()
            return
        self._is_maker = True
        self._publish(stage_seconds)
        self._n_shared_files = n_added

    def _stay_eager(self, reason: str) -> None:
        self._compiler.plan = None
        self._degrade(reason)
        self._end_turn()

    def _degrade(self, reason: str) -> None:
        log.error("worker is degraded: %s", reason)
        self._reason = reason

    def _accepts(self, name: str, bucket: Any) -> bool:
        stage = self._compiler.stages.get(name)
        return stage is not None and any(_is_like(bucket, one) for one in stage.buckets)


def _is_like(bucket: Any, planned: Any) -> bool:
    """Whether two buckets are made of the same kinds of values."""
    if isinstance(bucket, tuple) and isinstance(planned, tuple):
        return len(bucket) == len(planned) and all(map(_is_like, bucket, planned))
    return type(bucket) is type(planned)


def _told(found: CacheStatus) -> str:
    return f"state={found.state} fingerprint={found.fingerprint}: {found.reason}"


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
