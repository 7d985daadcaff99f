"""Whole sessions without a socket: what warm-up plays before the worker takes clients."""

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
    Answered,
    Ask,
    AudioPart,
    ChatMessage,
    Command,
    Event,
    Failure,
    GenerationSettings,
    ImagePart,
    Input,
    Part,
    Prepare,
    Prepared,
    PrepareTurns,
    RequestType,
    Result,
    Stop,
    TextPart,
    Timings,
    TurnDone,
)
from worker.models.contract import CanTalk, Progress
from worker.sessions.chat import ChatSession
from worker.sessions.duplex import DuplexSession
from worker.sessions.half_duplex import MAX_DETECT_S, SETTLE_S, HalfDuplexSession
from worker.sessions.host import SessionHost, SessionLimits
from worker.sessions.session import Session

log = logging.getLogger(__name__)
E = TypeVar("E")

SHIPPED_CLIP = Path(__file__).parents[2] / "assets" / "warmup.mp4"

WARM_UP = "warm-up"
"""Id of the sessions that are played."""

ANSWER_S = 4
"""Seconds of silence after the clip: room for an answer, so that speaking is warm as well."""
TALK_S = 3
"""Units of the session that is made to speak: a turn that begins, goes on and ends."""
SHORT = GenerationSettings(max_new_tokens=4)
"""How long a chat answer and a turn's are: enough for every kind of op."""
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
    host = dataclasses.replace(
        host, limits=SessionLimits(idle_timeout_s=math.inf, prepare_timeout_s=math.inf)
    )
    diary = _Diary(len(inputs), progress)
    results = await _play(inputs, host, diary)
    if isinstance(host.model, CanTalk) and not any(result.audio for result in results):
        log.info("rehearsal was not answered: speaks by script")
        silence = samples_to_f32(np.zeros(host.model.unit_samples, np.float32))
        asked = [Input(seq, silence) for seq in range(TALK_S)]
        diary.n_units += len(asked)
        results += await _play(asked, host, diary, host.model.talkative_state)
    return results


async def rehearse_answers(inputs: Sequence[Input], host: SessionHost, progress: Progress) -> None:
    """Play a chat request with a picture and sound, and a turn: what a duplex session never does
    (whole clips, the chat template, the voice detector) is done once before a client waits for it.

    Args:
        inputs: of `rehearse`.

    Raises:
        RehearsalFailed: one of them failed.
    """
    limits = SessionLimits(
        idle_timeout_s=math.inf, prepare_timeout_s=math.inf, ask_timeout_s=math.inf
    )
    host = dataclasses.replace(host, limits=limits)
    heard = np.zeros(round(MAX_DETECT_S * INPUT_SAMPLE_RATE_HZ), np.float32)
    clip = np.frombuffer(b"".join(message.audio for message in inputs), np.float32)
    heard[: clip.size] = clip[: heard.size]
    sound = samples_to_f32(heard)

    progress(1.0, "a chat request")
    frames = [frame for message in inputs for frame in message.frames]
    parts: list[Part] = [ImagePart(frame) for frame in frames[:1]]
    parts += [AudioPart(sound), TextPart("What do you see and hear?")]
    # Without speech: not every server has a voice, and the turn speaks where there is one.
    asked = Ask([ChatMessage("user", parts)], SHORT)
    await _answer(ChatSession, host, "chat", (asked, Answered))

    progress(1.0, "a turn")
    settling = bytes(4 * round(SETTLE_S * INPUT_SAMPLE_RATE_HZ))
    await _answer(
        _AttentiveSession,
        host,
        "half_duplex_audio",
        (PrepareTurns([], generation=SHORT), Prepared),
        (Input(0, settling + sound), TurnDone),
    )


class _AttentiveSession(HalfDuplexSession):
    """Takes what it hears for a turn, whatever the detector says: a clip may hold no speech."""

    async def _hear(self, samples: Samples) -> None:
        await super()._hear(samples)
        if not self._n_turns:
            await self._answer_turn(samples)


async def _answer(
    make: type[ChatSession | HalfDuplexSession],
    host: SessionHost,
    request_type: RequestType,
    *script: tuple[Command, type[Event]],
) -> None:
    """Play a session: each command after the last one's answer. Raises RehearsalFailed."""
    told = _Told()

    async def commands() -> AsyncIterator[Command]:
        for command, answer in script:
            yield command
            await told.next(answer)
        yield Stop("rehearsed")

    await _run(make(host, WARM_UP, request_type, told.take), commands())
    # A chat session ends by itself, maybe before anybody has looked at its answer.
    if script[-1][1] not in told.kinds:
        raise RehearsalFailed(f"{request_type}: {told.why()}")


async def _play(
    inputs: Sequence[Input],
    host: SessionHost,
    diary: _Diary,
    new_state: Callable[[int], Any] | None = None,
) -> list[Result]:
    told = _Told()
    results: list[Result] = []

    async def commands() -> AsyncIterator[Command]:
        # Results come after the deferred work of their units, so that it is timed and, for the
        # last one, done.
        yield Prepare("You are a helpful assistant.", deferred_finalize=False)
        await told.next(Prepared)
        for message in inputs:
            yield message
            result = await told.next(Result)
            results.append(result)
            diary.unit_done(result)
        yield Stop("rehearsed")

    await _run(DuplexSession(host, WARM_UP, "omni_duplex", told.take, new_state), commands())
    if len(results) < len(inputs):
        raise RehearsalFailed(f"{len(results)} of {len(inputs)} chunks were answered: {told.why()}")
    return results


async def _run(session: Session, commands: AsyncIterator[Command]) -> None:
    token = session_id_in_context.set(WARM_UP)
    try:
        await session.run(commands)
    finally:
        session_id_in_context.reset(token)


class _Told:
    """What a session tells its client."""

    def __init__(self) -> None:
        self.kinds: set[type[Event]] = set()
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._failures: list[Failure] = []

    def take(self, event: Event) -> None:
        self.kinds.add(type(event))
        if isinstance(event, Failure):
            self._failures.append(event)
        self._events.put_nowait(event)

    async def next(self, kind: type[E]) -> E:
        """Wait for an event of this kind. Raises RehearsalFailed when a failure comes first."""
        while True:
            event = await self._events.get()
            if isinstance(event, kind):
                return event
            if isinstance(event, Failure):
                raise RehearsalFailed(f"{event.slug}: {event.message}")

    def why(self) -> str:
        """Why there was not more."""
        return self._failures[0].message if self._failures else "the session ended early"


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
