"""A whole session without a socket: what warm-up plays before the worker takes clients."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np

from shared.audio import Samples, read_wav, samples_to_f32
from shared.errors import BadAudio
from shared.limits import INPUT_SAMPLE_RATE_HZ
from shared.logs import session_id_in_context
from shared.protocol import Command, Event, Failure, Input, Prepare, Prepared, Result, Stop
from worker.models.contract import Progress
from worker.sessions.duplex import DuplexSession, SessionHost

E = TypeVar("E", Prepared, Result)

WARM_UP = "warm-up"
"""Id of the session that is played."""

ANSWER_S = 4
"""Seconds of silence after the clip: room for an answer, so that speaking is warm as well."""


class RehearsalFailed(RuntimeError):
    """The scripted session met a failure: the worker must not take clients."""


async def rehearse(
    chunks: Sequence[Samples], host: SessionHost, progress: Progress
) -> list[Result]:
    """Play a session through the real path: prepare, each chunk after the last one's result.

    Raises:
        RehearsalFailed: the session reported a failure or ended early.
    """
    events: asyncio.Queue[Event] = asyncio.Queue()
    results: list[Result] = []
    failures: list[Failure] = []

    def take(event: Event) -> None:
        if isinstance(event, Failure):
            failures.append(event)
        events.put_nowait(event)

    async def commands() -> AsyncIterator[Command]:
        yield Prepare("You are a helpful assistant.")
        await _next(events, Prepared)
        for seq, samples in enumerate(chunks):
            yield Input(seq, samples_to_f32(samples))
            result = await _next(events, Result)
            results.append(result)
            progress((seq + 1) / len(chunks), f"unit {seq + 1} of {len(chunks)}")
        yield Stop("rehearsed")

    session = DuplexSession(host, WARM_UP, "omni_duplex", take)
    token = session_id_in_context.set(WARM_UP)
    try:
        await session.run(commands())
    finally:
        session_id_in_context.reset(token)
    if len(results) < len(chunks):
        text = failures[0].message if failures else "the session ended early"
        raise RehearsalFailed(f"{len(results)} of {len(chunks)} chunks were answered: {text}")
    return results


def warm_up_chunks(clip: Path) -> list[Samples]:
    """Return the one-second chunks of the warm-up session, 16 kHz: sound, then silence.

    Args:
        clip: a question as 16 kHz WAV; without such a file a synthetic sound takes its place,
            which warms everything except what only real speech reaches.

    Raises:
        BadAudio: the file is no 16 kHz WAV.
    """
    rate = INPUT_SAMPLE_RATE_HZ
    sound = _read_clip(clip) if clip.exists() else synthetic_sound()
    n_chunks = -(-len(sound) // rate) + ANSWER_S
    padded = np.zeros(n_chunks * rate, np.float32)
    padded[: len(sound)] = sound
    return list(padded.reshape(n_chunks, rate))


def synthetic_sound() -> Samples:
    """Return two seconds that buzz at a voice's pitch with a syllable's rhythm, always the same."""
    rate = INPUT_SAMPLE_RATE_HZ
    time_s = np.arange(2 * rate) / rate
    pitch_hz = 120.0 + 20.0 * np.sin(2 * np.pi * 0.7 * time_s)
    phase = 2 * np.pi * np.cumsum(pitch_hz) / rate
    voice = np.sum([np.sin(k * phase) / k for k in range(1, 20)], axis=0)
    rhythm = np.clip(np.sin(2 * np.pi * 4.0 * time_s), 0.0, None)
    return (0.2 * voice * rhythm).astype(np.float32)


def _read_clip(clip: Path) -> Samples:
    samples, rate_hz = read_wav(clip)
    if rate_hz != INPUT_SAMPLE_RATE_HZ:
        raise BadAudio(f"{clip.name} has {rate_hz} Hz, expected {INPUT_SAMPLE_RATE_HZ}")
    return samples


async def _next(events: asyncio.Queue[Event], kind: type[E]) -> E:
    """Wait for an event of this kind. Raises RehearsalFailed when a failure comes first."""
    while True:
        event = await events.get()
        if isinstance(event, kind):
            return event
        if isinstance(event, Failure):
            raise RehearsalFailed(f"{event.slug}: {event.message}")
