"""A whole session without a socket: what warm-up plays before the worker takes clients."""

from __future__ import annotations

import asyncio
import dataclasses
import io
import logging
import math
import statistics
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
from PIL import Image

from shared.audio import Samples, samples_to_f32
from shared.clips import Clip, MediaError, read_clip
from shared.errors import ConfigError
from shared.limits import INPUT_SAMPLE_RATE_HZ
from shared.logs import session_id_in_context
from shared.protocol import (
    Command,
    Event,
    Failure,
    Input,
    Prepare,
    Prepared,
    Result,
    Stop,
    Timings,
)
from worker.models.contract import CanTalk, Progress
from worker.sessions.duplex import DuplexSession
from worker.sessions.host import SessionHost, SessionLimits

log = logging.getLogger(__name__)
E = TypeVar("E", Prepared, Result)

SHIPPED_CLIP = Path(__file__).parents[2] / "assets" / "warmup.mp4"

WARM_UP = "warm-up"
"""Id of the sessions that are played."""

ANSWER_S = 4
"""Seconds of silence after the clip: room for an answer, so that speaking is warm as well."""
TALK_S = 3
"""Units of the session that is made to speak: a turn that begins, goes on and ends."""
MAX_CLIP_S = 30.0
"""What is longer is cut: all shapes have occurred long before, and clients wait."""
MAX_TAIL_S = 0.1
"""Sound codecs fill up their last block: as much behind a whole second is no second of its own."""


async def rehearse(inputs: Sequence[Input], host: SessionHost, progress: Progress) -> list[Result]:
    """Play a session through the real path, each chunk after the last one's result.

    If not a single sample came back, a second session follows that is made to speak, where the
    back end can do that: no client may be the first one to hear it.

    Raises:
        RehearsalFailed: a session reported a failure or ended early.
    """
    # What has to be compiled first may take longer than any client would wait.
    host = dataclasses.replace(host, limits=SessionLimits(idle_timeout_s=math.inf))
    diary = _Diary(len(inputs), progress)
    results = await _play(inputs, host, diary)
    if isinstance(host.model, CanTalk) and not any(result.audio for result in results):
        log.info("rehearsal was not answered: speaks by script")
        silence = samples_to_f32(np.zeros(host.model.unit_samples, np.float32))
        asked = [Input(seq, silence) for seq in range(TALK_S)]
        diary.n_units += len(asked)
        results += await _play(asked, host, diary, host.model.talkative_state)
    return results


async def _play(
    inputs: Sequence[Input],
    host: SessionHost,
    diary: _Diary,
    new_state: Callable[[int], Any] | None = None,
) -> list[Result]:
    events: asyncio.Queue[Event] = asyncio.Queue()
    results: list[Result] = []
    failures: list[Failure] = []

    def take(event: Event) -> None:
        if isinstance(event, Failure):
            failures.append(event)
        events.put_nowait(event)

    async def commands() -> AsyncIterator[Command]:
        # Results come after the deferred work of their units, so that it is timed and, for the
        # last one, done.
        yield Prepare("You are a helpful assistant.", deferred_finalize=False)
        await _next(events, Prepared)
        for message in inputs:
            yield message
            result = await _next(events, Result)
            results.append(result)
            diary.unit_done(result)
        yield Stop("rehearsed")

    session = DuplexSession(host, WARM_UP, "omni_duplex", take, new_state)
    token = session_id_in_context.set(WARM_UP)
    try:
        await session.run(commands())
    finally:
        session_id_in_context.reset(token)
    if len(results) < len(inputs):
        text = failures[0].message if failures else "the session ended early"
        raise RehearsalFailed(f"{len(results)} of {len(inputs)} chunks were answered: {text}")
    return results


class RehearsalFailed(RuntimeError):
    """The scripted session met a failure: the worker must not take clients."""


class _Diary:
    """Tells how the rehearsal goes on: one line a unit in the log, and the stage's progress."""

    def __init__(self, n_units: int, progress: Progress) -> None:
        self.n_units = n_units
        self._progress = progress
        self._began_at = self._last_at = time.monotonic()
        self._took_s: list[float] = []

    def unit_done(self, result: Result) -> None:
        now = time.monotonic()
        self._took_s.append(now - self._last_at)
        self._last_at = now
        n_done = len(self._took_s)
        decision = "listen" if result.is_listen else "speak"
        log.info(
            "unit rehearsed unit=%d/%d decision=%s %s elapsed_s=%.2f remaining_s=%.2f",
            n_done,
            self.n_units,
            decision,
            _shown(result.timings),
            now - self._began_at,
            # The first units may have to compile or load something; the others will not.
            statistics.median(self._took_s) * (self.n_units - n_done),
        )
        note = f"unit {n_done} of {self.n_units}: {decision}, {result.timings.total_ms:.0f} ms"
        self._progress(n_done / self.n_units, note)


def _shown(timings: Timings) -> str:
    stages = msgspec.structs.asdict(timings).items()
    return " ".join(f"{name}={ms:.1f}" for name, ms in stages if ms or name == "total_ms")


# ---- what is played


def warm_up_inputs(video: Path | None = None) -> list[Input]:
    """Return the session that is played: a clip second by second, then silence for the answer.

    Args:
        video: `compile.warmup_video`, any file with sound or pictures. None = the shipped clip;
            where that cannot be read a buzz and a stripe take its place, which warm everything
            except what only real speech and text reach.

    Raises:
        ConfigError: `video` is missing, unreadable or empty.
    """
    try:
        clip = read_clip(video or SHIPPED_CLIP, MAX_CLIP_S)
    except MediaError as error:
        if video is not None:
            raise ConfigError(f"compile.warmup_video: {error}") from error
        log.warning("warm-up plays a synthetic clip: %s", error)
        clip = synthetic_clip()
    if not clip.audio.size and not clip.frames:
        raise ConfigError(f"compile.warmup_video: {video}: holds neither sound nor pictures")
    return inputs_of(clip)


def inputs_of(clip: Clip) -> list[Input]:
    """Return what a client with microphone and camera sends: a second of sound and its picture."""
    rate = INPUT_SAMPLE_RATE_HZ
    n_heard = -(-(clip.audio.size - round(MAX_TAIL_S * rate)) // rate)
    n_chunks = max(n_heard, len(clip.frames)) + ANSWER_S
    padded = np.zeros(n_chunks * rate, np.float32)
    padded[: clip.audio.size] = clip.audio[: padded.size]
    return [
        Input(seq, samples_to_f32(second), list(clip.frames[seq : seq + 1]))
        for seq, second in enumerate(padded.reshape(n_chunks, rate))
    ]


def synthetic_clip() -> Clip:
    """Return two seconds of a buzz and a stripe, always the same."""
    return Clip(_buzz(), tuple(_stripe(index) for index in range(2)))


def _buzz() -> Samples:
    """Two seconds at a voice's pitch with a syllable's rhythm."""
    rate = INPUT_SAMPLE_RATE_HZ
    time_s = np.arange(2 * rate) / rate
    pitch_hz = 120.0 + 20.0 * np.sin(2 * np.pi * 0.7 * time_s)
    phase = 2 * np.pi * np.cumsum(pitch_hz) / rate
    voice = np.sum([np.sin(k * phase) / k for k in range(1, 20)], axis=0)
    rhythm = np.clip(np.sin(2 * np.pi * 4.0 * time_s), 0.0, None)
    return (0.2 * voice * rhythm).astype(np.float32)


def _stripe(index: int) -> bytes:
    """A camera's picture as a JPEG file: a light stripe that moves to the right."""
    image = Image.new("RGB", (640, 480), (60, 70, 80))
    image.paste((220, 210, 190), (100 + 80 * index, 0, 200 + 80 * index, 480))
    file = io.BytesIO()
    image.save(file, "JPEG")
    return file.getvalue()


async def _next(events: asyncio.Queue[Event], kind: type[E]) -> E:
    """Wait for an event of this kind. Raises RehearsalFailed when a failure comes first."""
    while True:
        event = await events.get()
        if isinstance(event, kind):
            return event
        if isinstance(event, Failure):
            raise RehearsalFailed(f"{event.slug}: {event.message}")
