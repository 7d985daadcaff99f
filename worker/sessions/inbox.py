"""Chunks in, units out, and who is owed which answer. Pure: no clock, no loop, no model.

A chunk is what the client sent at once, a unit is what the model takes at once. A unit belongs
to the chunk that completes it, so each chunk is answered exactly once: with nothing new if it
completed no unit, with the merged results if it completed several. Answers leave in the order
of the chunks.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
from numpy.typing import NDArray

from shared.audio import Samples, samples_to_f32
from shared.errors import OmniError
from shared.limits import MAX_IMAGES_PER_CHUNK, MAX_INBOX_UNITS
from shared.protocol import Result, Timings
from worker.models.contract import Unit, UnitResult

Frame = NDArray[np.uint8]
"""RGB image `[H, W, 3]`."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """One decoded `Input`."""

    seq: int
    audio: Samples
    """16 kHz."""
    frames: tuple[Frame, ...] = ()
    force_listen: bool = False
    max_slice_nums: int | None = None


@dataclass(frozen=True, slots=True)
class FailedChunk:
    """The answer to a chunk whose unit failed."""

    seq: int
    error: OmniError


Answer = Result | FailedChunk


@dataclass(slots=True)
class _Owed:
    """A chunk that has not been answered yet."""

    seq: int
    n_open: int = 0
    """Units of it that are waiting or running."""
    n_dropped: int = 0
    results: list[UnitResult] = field(default_factory=list)
    error: OmniError | None = None


@dataclass(slots=True)
class _Waiting:
    owed: _Owed
    audio: Samples
    arrived_at: float
    frames: list[Frame] = field(default_factory=list)
    force_listen: bool = False
    max_slice_nums: int | None = None


class Inbox:
    """The input of one session, bounded: beyond `max_units` waiting units the oldest is dropped,
    unless they all came in one chunk.

    One unit runs at a time: `next_unit` hands it out, `resolve` or `fail` ends it.
    """

    def __init__(self, unit_samples: int, max_units: int = MAX_INBOX_UNITS) -> None:
        self._unit_samples = unit_samples
        self._max_units = max_units
        self._owed: deque[_Owed] = deque()
        self._waiting: deque[_Waiting] = deque()
        self._running: _Waiting | None = None
        self._next_index = 0
        # What has come in for the unit that is not complete yet.
        self._samples: Samples = np.zeros(0, np.float32)
        self._frames: list[Frame] = []
        self._force_listen = False
        self._max_slice_nums: int | None = None
        self.is_listen = True
        """The decision of the last unit."""
        self.n_completed = 0
        """Units that have run, failed ones included."""

    @property
    def n_waiting(self) -> int:
        return len(self._waiting)

    @property
    def is_running(self) -> bool:
        """A unit has been handed out and not been ended."""
        return self._running is not None

    def add(self, chunk: Chunk, now: float) -> int:
        """Take a chunk that arrived at `now`; returns how many units were dropped for it."""
        owed = _Owed(chunk.seq)
        self._owed.append(owed)
        samples = np.concatenate([self._samples, chunk.audio])
        size = self._unit_samples
        n_units = len(samples) // size
        units = [_Waiting(owed, samples[i * size : (i + 1) * size], now) for i in range(n_units)]
        self._samples = samples[n_units * size :].copy()
        if not units:
            self._keep_for_next(chunk)
            return 0
        units[0].frames += self._frames
        units[0].force_listen = self._force_listen
        units[0].max_slice_nums = self._max_slice_nums
        self._frames, self._force_listen, self._max_slice_nums = [], False, None
        for i, frame in enumerate(chunk.frames):
            units[i * n_units // len(chunk.frames)].frames.append(frame)
        for unit in units:
            unit.force_listen |= chunk.force_listen
            if chunk.max_slice_nums is not None:
                unit.max_slice_nums = chunk.max_slice_nums
        owed.n_open = n_units
        self._waiting.extend(units)
        return self._drop_oldest(owed)

    def refuse(self, seq: int, error: OmniError) -> None:
        """A chunk that is no input: its answer keeps the order of the chunks."""
        # A new one: the traceback holds the chunk, and the answer may wait for its turn.
        self._owed.append(_Owed(seq, error=type(error)(str(error))))

    def force_listen_waiting(self) -> None:
        """Have every unit that waits listen: what the user says now overtakes it."""
        for unit in self._waiting:
            unit.force_listen = True

    def next_unit(self, budget_s: float) -> Unit | None:
        """Hand out the oldest waiting unit, due `budget_s` after its arrival."""
        assert self._running is None, "one unit at a time"
        if not self._waiting:
            return None
        waiting = self._running = self._waiting.popleft()
        index = self._next_index
        self._next_index += 1
        return Unit(
            index=index,
            audio=waiting.audio,
            frames=tuple(waiting.frames),
            force_listen=waiting.force_listen,
            max_slice_nums=waiting.max_slice_nums,
            arrived_at=waiting.arrived_at,
            deadline=waiting.arrived_at + budget_s,
        )

    def resolve(self, result: UnitResult) -> None:
        """The running unit has its result."""
        self._end_running().results.append(result)
        self.is_listen = result.is_listen

    def fail(self, error: OmniError) -> None:
        """The running unit has failed; so has its chunk."""
        self._end_running().error = error

    def drop_speech(self) -> None:
        """Forget the sound of results that have not been taken yet."""
        silence = np.zeros(0, np.float32)
        for owed in self._owed:
            owed.results = [dataclasses.replace(r, audio=silence) for r in owed.results]

    def fail_waiting(self, error: OmniError) -> None:
        """Fail every unit that waits, and forget the one that is not complete."""
        for unit in self._waiting:
            unit.owed.n_open -= 1
            unit.owed.error = error
        self._waiting.clear()
        self._samples = np.zeros(0, np.float32)
        self._frames, self._force_listen, self._max_slice_nums = [], False, None

    def forget(self) -> None:
        """Drop everything: nobody is there any more to be answered."""
        self._owed.clear()
        self._waiting.clear()
        self._running = None
        self._samples = np.zeros(0, np.float32)
        self._frames = []

    def answers(self) -> list[Answer]:
        """Take the answers that are due now, in the order of their chunks."""
        due: list[Answer] = []
        while self._owed and self._owed[0].n_open == 0:
            due.append(self._answer(self._owed.popleft()))
        return due

    def _keep_for_next(self, chunk: Chunk) -> None:
        # Chunks of a few samples may bring a frame each: only the newest are worth looking at.
        self._frames = [*self._frames, *chunk.frames][-MAX_IMAGES_PER_CHUNK:]
        self._force_listen |= chunk.force_listen
        if chunk.max_slice_nums is not None:
            self._max_slice_nums = chunk.max_slice_nums

    def _drop_oldest(self, newest: _Owed) -> int:
        """Drop what is too old; a chunk is taken whole, however many units it holds."""
        n_dropped = 0
        while len(self._waiting) > self._max_units and self._waiting[0].owed is not newest:
            owed = self._waiting.popleft().owed
            owed.n_open -= 1
            owed.n_dropped += 1
            n_dropped += 1
        return n_dropped

    def _end_running(self) -> _Owed:
        assert self._running is not None, "no unit is running"
        owed = self._running.owed
        self._running = None
        owed.n_open -= 1
        self.n_completed += 1
        return owed

    def _answer(self, owed: _Owed) -> Answer:
        if owed.error is not None:
            return FailedChunk(owed.seq, owed.error)
        if owed.results:
            return merged(owed.seq, self.n_completed, owed.results, dropped=owed.n_dropped > 0)
        is_listen = True if owed.n_dropped else self.is_listen
        return Result(owed.seq, is_listen, self.n_completed, dropped=owed.n_dropped > 0)


def merged(seq: int, unit_index: int, results: Sequence[UnitResult], dropped: bool) -> Result:
    """Return the one result of a chunk that completed these units (at least one)."""
    last = results[-1]
    return Result(
        seq=seq,
        is_listen=last.is_listen,
        unit_index=unit_index,
        text="".join(r.text for r in results),
        audio=b"".join(samples_to_f32(r.audio) for r in results),
        end_of_turn=any(r.end_of_turn for r in results),
        interrupted=any(r.interrupted for r in results),
        dropped=dropped,
        heard=" ".join(r.heard for r in results if r.heard),
        timings=_summed([r.timings for r in results]),
        n_tokens=sum(r.n_tokens for r in results),
        n_speech_tokens=sum(r.n_speech_tokens for r in results),
        kv_tokens=last.kv_tokens,
        vision_slices=sum(r.vision_slices for r in results),
        vision_tokens=sum(r.vision_tokens for r in results),
    )


def _summed(timings: Sequence[Timings]) -> Timings:
    names = Timings.__struct_fields__
    total = Timings(**{name: sum(getattr(t, name) for t in timings) for name in names})
    # The units of one chunk are complete at the same instant: the last result counts.
    return msgspec.structs.replace(total, total_ms=max(t.total_ms for t in timings))
