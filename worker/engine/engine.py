"""Runs the programs of all sessions of one worker and batches their ops.

Two locks, always taken in this order. `_advancing` is held while programs, listeners and
conditions run, so programs of a session never run at once; it is taken by compute threads only.
`_mutex` guards the tables and is held for microseconds, so `spawn`, `cancel` and
`cancel_session` may be called from an event loop: they note what has to happen and wake a
compute thread that does it.

Without threads the engine is deterministic: `advance()` runs what needs no op, `step(lane)`
runs one batch.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

from shared.errors import EngineFault
from worker.engine.contract import Emit, Op, OpRunner, Program, Spawn, Until
from worker.engine.scheduler import Batch, Scheduler

log = logging.getLogger(__name__)
R = TypeVar("R")

Wake = Callable[[str | None], None]
"""Told the lane that has a new ready op, or None when `advance` has something to do."""

OnBatch = Callable[[str, int, float], None]
"""Told kind, number of ops and seconds of each batch that has run, on the thread that ran it."""


class ProgramCancelled(Exception):
    """The error of a program that was ended from outside."""


class Call(Generic[R]):
    """A function that some compute thread will run, and the future of its result."""

    def __init__(self, fn: Callable[[], R]) -> None:
        self.future: Future[R] = Future()
        self._fn = fn

    def run(self) -> None:
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            result = self._fn()
        except Exception as error:  # noqa: BLE001 - the caller gets it through the future
            self.future.set_exception(error)
        else:
            self.future.set_result(result)


class Task:
    """A running program: the engine's `TaskHandle`."""

    def __init__(
        self,
        engine: Engine,
        session: _Session,
        program: Program,
        name: str,
        on_emit: Callable[[Any], None] | None,
        on_done: Callable[[Task], None] | None,
    ) -> None:
        self.name = name
        self.value: Any = None
        """What the program returned; None until it is done."""
        self.error: BaseException | None = None
        self.done = False
        self._engine = engine
        self._session = session
        self._program = program
        self._on_emit = on_emit
        self._on_done = on_done
        self._ending: BaseException | None = None

    def cancel(self) -> None:
        """End the program: a waiting op is withdrawn, a running op's result is dropped."""
        self._engine.cancel(self)

    def __repr__(self) -> str:
        return f"<Task {self._session.key}/{self.name}>"


class _Session:
    def __init__(self, key: Hashable) -> None:
        self.key = key
        self.tasks: set[Task] = set()
        self.n_running_ops = 0
        self.quiet: Future[None] | None = None
        """Set once the session is being cancelled."""


class Engine:
    """Advances programs, schedules their ops, hands results back.

    Args:
        runner: executes batches; see `OpRunner`.
        clock: seconds, monotonic; `Op.deadline` and `Until.deadline` are on it.
        on_fault: called once, on the thread that met it, when the device is lost.
        on_batch: called after every batch, failed ones included; has to be quick.
        round_span_s: see `Scheduler`.
    """

    def __init__(
        self,
        runner: OpRunner,
        clock: Callable[[], float] = time.monotonic,
        on_fault: Callable[[EngineFault], None] | None = None,
        on_batch: OnBatch | None = None,
        round_span_s: float = 0.0,
    ) -> None:
        self.clock = clock
        self.lanes = tuple(dict.fromkeys(runner.lanes.values()))
        self._runner = runner
        self._on_fault = on_fault
        self._on_batch = on_batch
        self._scheduler: Scheduler[Task] = Scheduler(runner.lanes, runner.max_batch, round_span_s)
        self._advancing = threading.RLock()
        self._mutex = threading.RLock()
        self._sessions: dict[Hashable, _Session] = {}
        self._todo: deque[Callable[[], None]] = deque()
        self._waits: dict[Task, Until] = {}
        self._touched: set[_Session] = set()
        self._fault: EngineFault | None = None
        self._wake: Wake = _nobody

    def subscribe(self, wake: Wake) -> None:
        """Have `wake` called, from any thread, whenever a lane or `advance` has work."""
        self._wake = wake

    @property
    def fault(self) -> EngineFault | None:
        return self._fault

    @property
    def n_programs(self) -> int:
        with self._mutex:
            return sum(len(session.tasks) for session in self._sessions.values())

    # ---- for the owners of sessions: any thread, never blocks on model work

    def spawn(
        self,
        session: Hashable,
        program: Program,
        on_emit: Callable[[Any], None] | None = None,
        on_done: Callable[[Task], None] | None = None,
        name: str = "",
    ) -> Task:
        """Start a program of a session; it advances on a compute thread.

        The listeners are called on compute threads between two ops: they have to be quick.
        `on_done` is called exactly once, also after a cancel or a fault.

        Raises:
            EngineFault: the device is lost.
            RuntimeError: the session is being cancelled.
        """
        with self._mutex:
            if self._fault is not None:
                raise self._fault
            record = self._sessions.setdefault(session, _Session(session))
            if record.quiet is not None:
                raise RuntimeError(f"session {session!r} is being cancelled")
            task = Task(self, record, program, name, on_emit, on_done)
            record.tasks.add(task)
            self._post(lambda: self._resume(task, None, None))
        return task

    def cancel(self, task: Task) -> None:
        """End one program; harmless when it has ended already."""
        with self._mutex:
            self._end(task, ProgramCancelled(f"{task!r} was cancelled"))

    def cancel_session(self, session: Hashable) -> Future[None]:
        """End all programs of a session.

        Returns:
            A future that is done once no program of it is left and no op of it is running:
            only then may its slot be cleaned. The key can be used again afterwards.
        """
        with self._mutex:
            record = self._sessions.get(session)
            if record is None:
                return _done_future()
            if record.quiet is None:
                record.quiet = Future()
                # From now on its waiters cannot cancel it under the thread that sets it.
                record.quiet.set_running_or_notify_cancel()
            for task in record.tasks:
                self._end(task, ProgramCancelled(f"session {session!r} was cancelled"))
            return record.quiet

    def between_steps(self, session: Hashable, fn: Callable[[], R]) -> Future[R]:
        """Run a quick `fn` while no program advances, as if a program of the session had.

        It may touch the session's state; conditions the session waits for are looked at after.
        """
        call = Call(fn)

        def step() -> None:
            call.run()
            self._touch(session)

        with self._mutex:
            self._post(step)
        return call.future

    def fail(self, fault: EngineFault) -> None:
        """The device is lost: every program ends with `fault`, nothing starts any more."""
        with self._mutex:
            if self._fault is not None:
                return
            self._fault = fault
            for session in list(self._sessions.values()):
                for task in session.tasks:
                    self._end(task, fault)
        if self._on_fault is not None:
            self._on_fault(fault)

    # ---- for compute threads (and tests)

    def advance(self) -> None:
        """Advance every program that can go on without an op."""
        with self._advancing:
            while self._do_next() or self._wake_waiting():
                pass

    def step(self, lane: str) -> bool:
        """Run one batch of a lane; False if nothing was ready."""
        self.advance()
        with self._mutex:
            batch = None if self._fault else self._scheduler.next_batch(lane)
            if batch is None:
                return False
            for task in batch.tasks:
                task._session.n_running_ops += 1
        began_at = self.clock()
        results = self._run(batch)
        took_s = self.clock() - began_at
        with self._mutex:
            self._scheduler.ran(lane, took_s)
        if self._on_batch is not None:
            self._on_batch(batch.kind, len(batch.ops), took_s)
        self._deliver(batch, results)
        self.advance()
        return True

    def next_deadline(self) -> float:
        """When `advance` has to be called at the latest for the sake of an `Until`."""
        with self._mutex:
            return min((until.deadline for until in self._waits.values()), default=math.inf)

    # ---- inside

    def _post(self, action: Callable[[], None]) -> None:
        self._todo.append(action)
        self._wake(None)

    def _end(self, task: Task, reason: BaseException) -> None:
        """With `_mutex` held: note that the program has to be closed, withdraw its op."""
        if task.done or task._ending is not None:
            return
        task._ending = reason
        self._scheduler.withdraw(task)
        self._waits.pop(task, None)
        self._post(lambda: self._close(task))

    def _do_next(self) -> bool:
        with self._mutex:
            action = self._todo.popleft() if self._todo else None
        if action is None:
            return False
        action()
        return True

    def _wake_waiting(self) -> bool:
        """Resume the first program whose condition holds or whose deadline has come."""
        now = self.clock()
        with self._mutex:
            touched, self._touched = self._touched, set()
            candidates = [
                (task, until)
                for task, until in self._waits.items()
                if task._session in touched or now >= until.deadline
            ]
        for task, until in candidates:
            holds, error = _evaluate(until)
            if holds or error is not None or now >= until.deadline:
                with self._mutex:
                    if self._waits.pop(task, None) is None:
                        continue
                    # The others have not been looked at yet.
                    self._touched |= touched
                self._resume(task, holds, error)
                return True
        return False

    def _touch(self, session: Hashable) -> None:
        with self._mutex:
            record = self._sessions.get(session)
            if record is not None:
                self._touched.add(record)

    def _resume(self, task: Task, value: Any, error: BaseException | None) -> None:
        """Advance a program up to its next op, its next wait or its end."""
        reply: tuple[Any, BaseException | None] | None = (value, error)
        # A task that is ending is left alone: its close is in `_todo`.
        while reply is not None and not task.done and task._ending is None:
            self._touch(task._session.key)
            value, error = reply
            try:
                if error is not None:
                    request = task._program.throw(error)
                else:
                    request = task._program.send(value)
            except StopIteration as stop:
                self._finish(task, stop.value, None)
                return
            except Exception as failure:  # noqa: BLE001 - it ends this program alone
                self._finish(task, None, failure)
                return
            reply = self._answer(task, request)

    def _answer(self, task: Task, request: Any) -> tuple[Any, BaseException | None] | None:
        """Do what a program asked for; its result, or None if the program has to wait."""
        if task._ending is not None:
            return None
        match request:
            case Op():
                error = self._submit(task, request)
                return None if error is None else (None, error)
            case Emit():
                if task._on_emit is not None:
                    task._on_emit(request.value)
                return (None, None)
            case Spawn():
                return (self._spawn_beside(task, request), None)
            case Until():
                return self._wait(task, request)
            case _:
                expected = "expected Op, Emit, Until or Spawn"
                return (None, TypeError(f"a program yielded {request!r}, {expected}"))

    def _wait(self, task: Task, until: Until) -> tuple[Any, BaseException | None] | None:
        holds, error = _evaluate(until)
        if holds or error is not None or self.clock() >= until.deadline:
            return (holds, error)
        with self._mutex:
            if task._ending is None:
                self._waits[task] = until
                self._wake(None)
        return None

    def _spawn_beside(self, task: Task, request: Spawn) -> Task:
        session = task._session
        beside = Task(self, session, request.program, request.name, None, _log_failure)
        with self._mutex:
            session.tasks.add(beside)
            self._post(lambda: self._resume(beside, None, None))
            if task._ending is not None:
                self._end(beside, task._ending)
        return beside

    def _submit(self, task: Task, request: Op) -> BaseException | None:
        with self._mutex:
            if task._ending is not None:
                return None
            try:
                lane = self._scheduler.submit(task, request)
            except ValueError as error:
                return error
            self._wake(lane)
        return None

    def _close(self, task: Task) -> None:
        if task.done:
            return
        try:
            task._program.close()
        except Exception:
            # Whatever a program's clean-up raises, the task has to end: its slot waits for that.
            log.exception("program failed while closing task=%r", task)
        self._finish(task, None, task._ending)

    def _finish(self, task: Task, value: Any, error: BaseException | None) -> None:
        task.value, task.error, task.done = value, error, True
        with self._mutex:
            task._session.tasks.discard(task)
            self._touched.add(task._session)
        # The listeners hold what the program was about, pictures too, and whoever waits holds the
        # task: only the collector would part them.
        on_done, task._on_done, task._on_emit = task._on_done, None, None
        if on_done is not None:
            on_done(task)
        self._settle([task._session])

    def _settle(self, sessions: Iterable[_Session]) -> None:
        """Forget the sessions that are quiet and tell those who wait for that."""
        quiet = []
        with self._mutex:
            for session in sessions:
                if session.tasks or session.n_running_ops:
                    continue
                if self._sessions.get(session.key) is session:
                    del self._sessions[session.key]
                    self._touched.discard(session)
                    if session.quiet is not None:
                        quiet.append(session.quiet)
        for future in quiet:
            future.set_result(None)

    def _run(self, batch: Batch[Task]) -> Sequence[Any]:
        payloads = [op.payload for op in batch.ops]
        try:
            results = self._runner.run(batch.kind, batch.bucket, payloads)
        except EngineFault as fault:
            log.exception("engine fault kind=%s lane=%s", batch.kind, batch.lane)
            self.fail(fault)
            return [fault] * len(payloads)
        except Exception as error:
            log.exception("batch failed kind=%s n_ops=%d", batch.kind, len(payloads))
            # One instance per op: raised in several programs, one would gather all tracebacks.
            return [_batch_error(batch.kind, error) for _ in payloads]
        if len(results) != len(payloads):
            log.error("runner broke its contract kind=%s n_results=%d", batch.kind, len(results))
            return [
                RuntimeError(f"{batch.kind}: {len(results)} results for {len(payloads)} ops")
                for _ in payloads
            ]
        return results

    def _deliver(self, batch: Batch[Task], results: Sequence[Any]) -> None:
        with self._mutex:
            for task, result in zip(batch.tasks, results, strict=True):
                task._session.n_running_ops -= 1
                if task._ending is None:
                    self._todo.append(self._resumption(task, result))
        self._settle({task._session for task in batch.tasks})

    def _resumption(self, task: Task, result: Any) -> Callable[[], None]:
        if isinstance(result, BaseException):
            return lambda: self._resume(task, None, result)
        return lambda: self._resume(task, result, None)


def _nobody(lane: str | None) -> None:
    """Nobody has to be woken: the owner calls `step` itself."""


def _evaluate(until: Until) -> tuple[bool, BaseException | None]:
    try:
        return bool(until.condition()), None
    except Exception as error:  # noqa: BLE001 - raised inside the program that waits
        return False, error


def _batch_error(kind: str, cause: Exception) -> RuntimeError:
    error = RuntimeError(f"batch of {kind} failed: {type(cause).__name__}")
    error.__cause__ = cause
    return error


def _log_failure(task: Task) -> None:
    """Programs that were started by programs have no other listener for their errors."""
    if task.error is not None and not isinstance(task.error, (ProgramCancelled, EngineFault)):
        log.error("spawned program failed task=%r", task, exc_info=task.error)


def _done_future() -> Future[None]:
    future: Future[None] = Future()
    future.set_result(None)
    return future
