"""The threads that compute: one per lane, and a pacer that wakes programs whose time has come.

A lane's thread is the only one that runs that lane's ops and everything handed to it by `call`,
in the order it came: compile, warm-up, capture, serving and cleaning share one thread, as the
compiler and CUDA graphs ask for. The pacer never runs ops. It starts and ends programs and
keeps `Until` deadlines even while all lanes are busy.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from shared.errors import EngineFault
from worker.engine.engine import Call, Engine

log = logging.getLogger(__name__)
R = TypeVar("R")

PACER = "pacer"


class ComputeThread:
    """A thread that turns until it is stopped; each turn does what is there, then it sleeps.

    Args:
        turn: does some work; returns whether there may be more and how long to sleep (seconds)
            if there is none and nobody wakes the thread.
        on_crash: called when a turn raised, which is always a mistake of ours.
    """

    def __init__(
        self,
        name: str,
        turn: Callable[[], tuple[bool, float]],
        clock: Callable[[], float],
        on_crash: Callable[[Exception], None],
    ) -> None:
        self._turn = turn
        self._clock = clock
        self._on_crash = on_crash
        self._wake = threading.Event()
        self._stopping = False
        self._busy_since: float | None = None
        # A daemon: a thread stuck in the device must not keep a failed process alive.
        self._thread = threading.Thread(target=self._loop, name=f"omni-{name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wake(self) -> None:
        self._wake.set()

    def stop(self) -> None:
        """Have the thread end after its current turn."""
        self._stopping = True
        self._wake.set()

    def join(self, timeout_s: float) -> bool:
        """Wait for the end; False if the thread is still there."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def stuck_for(self, now: float) -> float:
        """Seconds that the current turn has lasted; 0.0 while idle."""
        since = self._busy_since
        return 0.0 if since is None else max(0.0, now - since)

    def _loop(self) -> None:
        while not self._stopping:
            # Cleared before looking: work that comes during the turn sets it again.
            self._wake.clear()
            self._busy_since = self._clock()
            try:
                more, sleep_s = self._turn()
            except Exception as error:
                log.exception("compute thread died thread=%s", self._thread.name)
                self._on_crash(error)
                return
            finally:
                self._busy_since = None
            if not more:
                self._wake.wait(None if math.isinf(sleep_s) else max(0.0, sleep_s))


class LaneThreads:
    """All compute threads of a worker.

    Before `serve`, `call` runs functions on the thread of any lane (it starts on demand): the
    stages of the start. After it the same threads run the engine's ops as well.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._engine: Engine | None = None
        self._threads: dict[str, ComputeThread] = {}
        self._calls: dict[str, deque[Call]] = {}
        self._lock = threading.Lock()
        self._stopped = False

    def call(self, lane: str, fn: Callable[[], R]) -> Future[R]:
        """Run `fn` on the lane's thread, after the ops and calls it is at."""
        call = Call(fn)
        with self._lock:
            if self._stopped:
                raise RuntimeError("the compute threads have been stopped")
            thread = self._ensure(lane)
            self._calls[lane].append(call)
        thread.wake()
        return call.future

    def serve(self, engine: Engine) -> None:
        """Run the engine's lanes from now on."""
        with self._lock:
            self._engine = engine
            for lane in engine.lanes:
                self._ensure(lane)
            pacer = ComputeThread(PACER, self._pace, self._clock, self._crashed)
            self._threads[PACER] = pacer
            pacer.start()
        engine.subscribe(self._wake)
        for thread in list(self._threads.values()):
            thread.wake()

    def stop(self) -> None:
        """Have all threads end after what they are at; calls that wait are cancelled."""
        with self._lock:
            self._stopped = True
            threads = list(self._threads.values())
            waiting = [call for calls in self._calls.values() for call in calls]
        for call in waiting:
            call.future.cancel()
        for thread in threads:
            thread.stop()

    def join(self, timeout_s: float) -> bool:
        """Wait for the threads; False if one is still running (a stuck device)."""
        give_up_at = time.monotonic() + timeout_s
        threads = list(self._threads.values())
        joined = [thread.join(max(0.0, give_up_at - time.monotonic())) for thread in threads]
        return all(joined)

    def stuck_for(self) -> float:
        """Seconds that the longest-running op, call or program step has been running."""
        now = self._clock()
        return max((t.stuck_for(now) for t in list(self._threads.values())), default=0.0)

    def _ensure(self, lane: str) -> ComputeThread:
        thread = self._threads.get(lane)
        if thread is None:
            self._calls[lane] = deque()
            thread = ComputeThread(lane, lambda: self._turn(lane), self._clock, self._crashed)
            self._threads[lane] = thread
            thread.start()
        return thread

    def _turn(self, lane: str) -> tuple[bool, float]:
        calls = self._calls[lane]
        called = bool(calls)
        if called:
            calls.popleft().run()
        engine = self._engine
        ran = engine is not None and lane in engine.lanes and engine.step(lane)
        return called or ran, math.inf

    def _pace(self) -> tuple[bool, float]:
        engine = self._engine
        assert engine is not None
        engine.advance()
        return False, engine.next_deadline() - engine.clock()

    def _wake(self, lane: str | None) -> None:
        # An op that became ready while its own lane was delivering is found by that lane's
        # next turn; waking it again costs one empty turn at most.
        self._threads[PACER if lane is None else lane].wake()

    def _crashed(self, error: Exception) -> None:
        if self._engine is not None:
            self._engine.fail(EngineFault(f"a compute thread died: {type(error).__name__}"))
