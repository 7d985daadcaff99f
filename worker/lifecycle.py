"""The life of a worker process: its stages, its state, its health, its end.

`Lifecycle` owns the worker's state. The stages of the start run on the thread that serves the
language lane afterwards (what the compiler makes is bound to its thread), while the event loop
answers `/health`. The model is built inside the first stage, so a worker's port is there before
anything heavy has been imported.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal

from shared.errors import EngineFault, OmniError
from shared.protocol import CompileStatus, RequestType, WorkerHealth
from shared.states import WORKER_EDGES, StateMachine, WorkerState
from worker.compiling import Compiling
from worker.engine.engine import Engine
from worker.engine.gpu_thread import LaneThreads
from worker.engine.slots import SlotTable
from worker.metrics import WorkerMetrics
from worker.models.contract import Model, Progress
from worker.sessions.failures import WorkerStopping
from worker.sessions.host import SessionHost, SessionLimits
from worker.sessions.media import MediaDecoder
from worker.sessions.session import Session
from worker.stages import Stages, part_of

log = logging.getLogger(__name__)

LANGUAGE_LANE = "language"
"""Lane of the stages, of cleaning, and of each back end's language ops."""

EXIT_STOPPED = 0
EXIT_START_FAILED = 1
EXIT_FAULT = 70

DRAIN_TIMEOUT_S = 5.0
"""How long the sessions of a stopping worker may take to end."""

FAULT_TIMEOUT_S = 2.0
"""The same after a fault: the process has to be gone soon, so that it is started again."""

FILES_INTERVAL_S = 60.0
"""How often somebody looks whether the compiler has written anything after the start."""

CAPTURE_SHARE, REHEARSAL_SHARE = 0.3, 0.6
"""Of the last stage, where there is something to capture."""

GIVE_UP_FACTOR = 2.0
"""A compute thread stuck for this many times `stuck_after_s` is taken for lost."""

_BUSY_WORDS: dict[RequestType, str] = {
    "omni_duplex": "duplex_active",
    "audio_duplex": "duplex_active",
    "half_duplex_audio": "busy_half_duplex",
    "chat": "busy_chat",
}

WarmUp = Callable[[SessionHost, Progress], Awaitable[object]]
"""Plays a real session through the host; raises if it does not go through."""


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """The few values of the configuration that a worker's life depends on."""

    backend: str
    n_slots: int
    gpu_id: int | None = None
    stuck_after_s: float = 30.0
    drain_timeout_s: float = 300.0
    """How long the sessions of a retiring worker may go on."""
    limits: SessionLimits = field(default_factory=SessionLimits)


class Lifecycle:
    """Starts a worker, keeps its state, ends it. Lives on the event loop.

    Args:
        build: makes the back end; called on the language lane's thread, may import what it
            likes there.
        warm_up: the last stage, handed in so that this module knows no script.
        compiling: what the start compiles; `build` has it look for its cache.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        build: Callable[[], Model],
        warm_up: WarmUp,
        clock: Callable[[], float] = time.monotonic,
        compiling: Compiling | None = None,
    ) -> None:
        self.settings = settings
        self.compiling = compiling or Compiling()
        self.start_ended = asyncio.Event()
        """Set once the worker is ready, or will never be."""
        self.host: SessionHost | None = None
        """Where sessions run; None until the model is there."""
        self.metrics = WorkerMetrics()
        """Of the sessions that are served; the warm-up's is not one of them."""
        self._build = build
        self._warm_up = warm_up
        self._clock = clock
        self._machine = StateMachine("worker", WorkerState.LOADING, WORKER_EDGES, clock)
        self._threads = LaneThreads(clock)
        self._engine: Engine | None = None
        self._media = MediaDecoder(settings.n_slots)
        self.stages = Stages(clock)
        self._started_at = clock()
        self._reason = ""
        self._retirement = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._fault: asyncio.Future[EngineFault] = self._loop.create_future()
        self._exit: asyncio.Future[int] = self._loop.create_future()

    @property
    def state(self) -> WorkerState:
        return self._machine.state

    @property
    def busy_for_s(self) -> float:
        """How long the longest-running op, call or program step has been running."""
        return self._threads.stuck_for()

    @property
    def accepts_sessions(self) -> bool:
        return self.state is WorkerState.READY and not self._is_stuck()

    async def run(self) -> int:
        """Start the worker and keep it until it is stopped or fails; returns the exit code."""
        parts = [
            self._loop.create_task(self._start()),
            self._loop.create_task(self._watch_threads()),
            self._loop.create_task(self._retire()),
            self._loop.create_task(self._watch_files()),
        ]
        try:
            code = await self._exit
            await self._sessions_gone(DRAIN_TIMEOUT_S if code == EXIT_STOPPED else FAULT_TIMEOUT_S)
        finally:
            for part in parts:
                part.cancel()
            await asyncio.wait(parts, timeout=FAULT_TIMEOUT_S)
            if not self._fault.done():
                # A clean-up that waits for a hanging thread would keep the process from ending.
                self._fault.set_result(EngineFault("the worker has ended"))
            await asyncio.gather(*parts, return_exceptions=True)
            self._threads.stop()
            self._media.close()
        is_ended = await asyncio.to_thread(self._threads.join, FAULT_TIMEOUT_S)
        if is_ended:
            # A thread that still runs may need it; the next worker removes what is left.
            await asyncio.to_thread(self.compiling.close)
        log.info("worker ends exit_code=%d threads_ended=%s", code, is_ended)
        return code

    def request_stop(self) -> None:
        """Take no new sessions, end the ones there are, then exit with 0."""
        if not self._machine.can(WorkerState.DRAINING):
            return
        self._machine.to(WorkerState.DRAINING, "asked to stop")
        self.compiling.cancel()
        for session in self._sessions():
            session.end("draining", WorkerStopping("The worker is shutting down"))
        self._leave(EXIT_STOPPED)

    def request_retirement(self) -> None:
        """Take no new sessions and let the ones there are end by themselves, then exit with 0.

        Those that have not ended after `drain_timeout_s` are told to, as by `request_stop`, which
        may also be called meanwhile. While loading there is nobody to wait for.
        """
        if self.state is WorkerState.LOADING:
            self.request_stop()
        elif self._machine.can(WorkerState.RETIRING):
            self._machine.to(WorkerState.RETIRING, "asked to retire")
            self._retirement.set()

    def on_fault(self, fault: EngineFault) -> None:
        """The device is lost, or a slot cannot be cleaned; may be called from any thread."""
        self._loop.call_soon_threadsafe(self._fail, fault)

    def health(self) -> WorkerHealth:
        """What `/health` says; reads only what is in memory."""
        stage, now = self.stages.last, self._clock()
        loading = self.state is WorkerState.LOADING
        sessions = self._sessions()
        newest = sessions[-1] if sessions else None
        is_ready = self.state is WorkerState.READY
        is_going = self.state in (WorkerState.RETIRING, WorkerState.DRAINING)
        status, worker_status = self._words()
        return WorkerHealth(
            status=status,
            worker_status=worker_status,
            gpu_id=self.settings.gpu_id,
            model_loaded=is_ready or is_going,
            current_session_id=newest.session_id if newest else None,
            total_requests=self.metrics.n_requests,
            avg_inference_time_ms=round(self.metrics.mean_unit_ms, 1),
            kv_cache_length=newest.kv_tokens if newest else 0,
            slots_total=self.settings.n_slots,
            slots_free=self.host.slots.n_free if self.host and is_ready else 0,
            backend=self.settings.backend,
            stage=stage.name if stage and loading else None,
            stage_progress=(stage.progress if stage else 0.0) if loading else 1.0,
            stage_elapsed_s=round(stage.elapsed_s(now), 2) if stage and loading else 0.0,
            eta_s=stage.eta_s(now) if stage and loading else None,
            stages=self.stages.reports(),
            reason=self._reason or self._stuck_reason(),
            pid=os.getpid(),
            compile=self.compiling.summary(),
        )

    def compile_status(self) -> CompileStatus:
        """What `/api/compile` says; reads only what is in memory."""
        return self.compiling.status(self.stages.seconds())

    # ---- start

    async def _start(self) -> None:
        try:
            await self._start_or_fail()
        finally:
            self.start_ended.set()

    async def _start_or_fail(self) -> None:
        try:
            await self._run_stages()
        except Exception as error:
            if self.state is WorkerState.LOADING:
                stage = self.stages.last.name if self.stages.last else "start"
                # What is expected to go wrong says all in its text; the rest needs a traceback.
                trace = None if isinstance(error, OmniError) else error
                log.error("start failed stage=%s: %s", stage, error, exc_info=trace)
                self._reason = f"{stage}: {error}"
                self._machine.to(WorkerState.FAILED, f"stage {stage} failed")
                self._leave(EXIT_START_FAILED)
            return
        if self.state is WorkerState.LOADING:
            self._machine.to(
                WorkerState.READY, f"started in {self._clock() - self._started_at:.1f} s"
            )

    async def _run_stages(self) -> None:
        n_slots = self.settings.n_slots
        model = await self.stages.run("load_model", self._load)

        def init(progress: Progress) -> None:
            model.init_unified(n_slots, progress)

        await self.stages.run("init_unified", lambda progress: self._on_lane(init, progress))
        await self.stages.run(
            "apply_torch_compile",
            lambda progress: self._on_lane(
                lambda report: self.compiling.compile(model.apply_torch_compile, report), progress
            ),
        )
        host = self._serve(model)
        await self.stages.run("warmup_compile", lambda progress: self._warm(host, progress))
        # What was played so far is in a set of metrics of its own, which nobody reads.
        host.metrics = self.metrics

    async def _warm(self, host: SessionHost, progress: Progress) -> None:
        """Capture, play a session, and leave slots as if nobody had been there."""
        compiling = self.compiling
        captured = CAPTURE_SHARE if compiling.captures else 0.0
        rehearsed = captured + REHEARSAL_SHARE if captured else 1.0
        await self._on_lane(compiling.capture, part_of(progress, 0.0, captured))
        try:
            await self._warm_up(host, part_of(progress, captured, rehearsed))
        except RuntimeError as error:
            # What was compiled may be the reason; if it was not, this fails as well.
            failure = error
            if not await self._on_lane(lambda _: compiling.give_up(failure), progress):
                raise
            await self._warm_up(host, part_of(progress, captured, rehearsed))
        await self._on_lane(compiling.replay, part_of(progress, rehearsed, 1.0))
        await self._on_lane(lambda _: self._finish(host.model), progress)

    def _finish(self, model: Model) -> None:
        if self.compiling.is_on:
            # Compiling and capturing have written to slots that no session has cleaned.
            for slot in range(self.settings.n_slots):
                model.end(model.new_state(slot))
        self.compiling.finish(self.stages.seconds())

    async def _load(self, progress: Progress) -> Model:
        def build_and_load(progress: Progress) -> Model:
            model = self._build()
            model.load_model(progress)
            return model

        return await self._on_lane(build_and_load, progress)

    def _serve(self, model: Model) -> SessionHost:
        self._engine = Engine(
            model, self._clock, self.on_fault, self._batch_done, model.round_span_s
        )
        self._threads.serve(self._engine)
        self.host = SessionHost(
            model=model,
            engine=self._engine,
            slots=SlotTable(self.settings.n_slots),
            media=self._media,
            call=self._call,
            on_broken=self.on_fault,
            fault=self._fault,
            limits=self.settings.limits,
        )
        return self.host

    def _batch_done(self, kind: str, n_ops: int, took_s: float) -> None:
        assert self.host is not None
        self.host.metrics.batch_done(kind, n_ops, took_s)

    def _call(self, fn: Callable[[], Any]) -> Future[Any]:
        return self._threads.call(LANGUAGE_LANE, fn)

    async def _on_lane(self, fn: Callable[[Progress], Any], progress: Progress) -> Any:
        return await asyncio.wrap_future(self._call(lambda: fn(progress)))

    # ---- end

    def _fail(self, fault: EngineFault) -> None:
        if self._fault.done() or not self._machine.can(WorkerState.FAILED):
            return
        self._reason = str(fault)
        self._machine.to(WorkerState.FAILED, str(fault))
        self._fault.set_result(fault)
        self._leave(EXIT_FAULT)

    async def _retire(self) -> None:
        await self._retirement.wait()
        await self._sessions_gone(self.settings.drain_timeout_s)
        self.request_stop()

    def _leave(self, code: int) -> None:
        if not self._exit.done():
            self._exit.set_result(code)

    async def _sessions_gone(self, timeout_s: float) -> None:
        closing = [self._loop.create_task(s.closed.wait()) for s in self._sessions()]
        if not closing:
            return
        try:
            _, late = await asyncio.wait(closing, timeout=timeout_s)
        finally:
            for task in closing:
                task.cancel()
        if late:
            log.warning("sessions did not end in time n_sessions=%d", len(late))

    # ---- watching

    async def _watch_threads(self) -> None:
        """Say when a compute thread hangs, and take it for lost when it hangs for too long."""
        was_stuck = False
        while True:
            await asyncio.sleep(min(1.0, self.settings.stuck_after_s / 4))
            stuck = self._is_stuck()
            if stuck and not was_stuck:
                log.error("compute thread stuck for_s=%.1f", self._threads.stuck_for())
            was_stuck = stuck
            give_up_s = GIVE_UP_FACTOR * self.settings.stuck_after_s
            if stuck and self._engine is not None and self._threads.stuck_for() > give_up_s:
                self._engine.fail(EngineFault(self._stuck_reason()))

    async def _watch_files(self) -> None:
        while True:
            await asyncio.sleep(FILES_INTERVAL_S)
            if self.state is WorkerState.READY:
                await asyncio.to_thread(self.compiling.check_files)

    def _is_stuck(self) -> bool:
        # While loading, one call is one stage and takes minutes.
        serves = self.state in (WorkerState.READY, WorkerState.RETIRING, WorkerState.DRAINING)
        return serves and self._threads.stuck_for() > self.settings.stuck_after_s

    def _stuck_reason(self) -> str:
        if not self._is_stuck():
            return ""
        return f"a compute thread has been stuck for {self._threads.stuck_for():.0f} s"

    def _words(self) -> tuple[Literal["healthy", "initializing", "error"], str]:
        """`status` and `worker_status` of the wire."""
        if self.state is WorkerState.FAILED or self._is_stuck():
            return "error", "error"
        if self.state is WorkerState.LOADING:
            return "initializing", "loading"
        if self.state in (WorkerState.RETIRING, WorkerState.DRAINING):
            return "healthy", "draining"
        sessions = self._sessions()
        if not sessions or (self.host and self.host.slots.n_free):
            return "healthy", "idle"
        return "healthy", _BUSY_WORDS[sessions[-1].request_type]

    def _sessions(self) -> list[Session]:
        return list(self.host.sessions.values()) if self.host else []
