"""What the engine asks of a model, and what a program may yield. No model knowledge here.

A *program* is a plain generator: it yields requests and is resumed with their results. One
program serves one unit, one turn or one chat request; all programs of a session share that
session's state object and never run at the same instant, so they need no locks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Op:
    """One piece of model work. Ops of equal kind and bucket may run as one batched call.

    Resumed with the runner's result; a result that is an exception is raised inside the program.
    """

    kind: str
    payload: Any
    bucket: Hashable = None
    deadline: float = math.inf
    """Engine clock, seconds. What is due much later than others waits for them: see `Scheduler`."""


@dataclass(frozen=True, slots=True)
class Emit:
    """Hand a value to the program's listener at once; resumed with None."""

    value: Any


@dataclass(frozen=True, slots=True)
class Until:
    """Wait for the session: resumed with True as soon as `condition()` holds, False at `deadline`.

    The condition is looked at whenever a program of the same session has advanced.
    """

    condition: Callable[[], bool]
    deadline: float


@dataclass(frozen=True, slots=True)
class Spawn:
    """Start another program of the same session beside this one; resumed with its `TaskHandle`."""

    program: Program
    name: str = ""


class TaskHandle(Protocol):
    """A running program, as other programs of its session see it."""

    @property
    def done(self) -> bool: ...

    @property
    def error(self) -> BaseException | None: ...

    def cancel(self) -> None:
        """End the program: pending ops are withdrawn, a running op's result is dropped."""


Request = Op | Emit | Until | Spawn
Program = Generator[Request, Any, Any]


class OpRunner(Protocol):
    """The model's side: executes one batch of ops. Each lane is one thread."""

    @property
    def lanes(self) -> Mapping[str, str]:
        """Op kind -> lane name. Kinds of different lanes may run at the same time."""

    @property
    def max_batch(self) -> Mapping[str, int]:
        """Op kind -> most ops in one call; a kind that is missing runs one by one."""

    def run(self, kind: str, bucket: Hashable, payloads: Sequence[Any]) -> Sequence[Any]:
        """Return one result per payload, in order; an exception instance fails that op alone.

        Raises:
            EngineFault: the device is lost; the worker fails.
            Exception: anything else fails every op of this batch, and nothing more.
        """
