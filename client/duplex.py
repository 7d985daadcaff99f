"""`DuplexClient`: one full-duplex session over the G0 dialect (`/ws/duplex/{session_id}`).

    async with DuplexClient("ws://127.0.0.1:8006") as session:
        await session.prepare("You are a helpful assistant.")
        await session.send_audio(samples)            # one chunk, float32 16 kHz
        async for event in session:                  # one Result per chunk, among other events
            ...

Sending and iterating may run in two tasks; `prepare` reads from the socket itself, so it is not
to be called while another task iterates.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from client.connection import OnWait, SessionClient, new_session_id
from client.events import (
    Closed,
    ErrorEvent,
    Event,
    Interrupted,
    Paused,
    Prepared,
    Queued,
    QueueDone,
    QueueUpdate,
    Result,
    Resumed,
    SessionError,
    Stopped,
    TimedOut,
    parse_event,
)
from shared.audio import Samples, encode_base64, samples_to_f32

# The library's one front door: a program needs no other module of it for a session.
__all__ = [
    "Closed",
    "DuplexClient",
    "ErrorEvent",
    "Event",
    "Interrupted",
    "Paused",
    "Prepared",
    "QueueDone",
    "QueueUpdate",
    "Queued",
    "Result",
    "Resumed",
    "SessionError",
    "Stopped",
    "TimedOut",
]

DEFAULT_SYSTEM_PROMPT = "You are a helpful assistant."


class DuplexClient(SessionClient[Event]):
    """One session; what all clients have is in `SessionClient`.

    Args:
        mode: "omni" accepts frames beside the audio, "audio" does not.
    """

    def __init__(
        self,
        url: str,
        api_key: str | None = None,
        *,
        mode: Literal["omni", "audio"] = "omni",
        ca_file: Path | None = None,
    ) -> None:
        self.session_id = new_session_id("omni" if mode == "omni" else "adx")
        super().__init__(url, f"/ws/duplex/{self.session_id}", parse_event, api_key, ca_file)

    async def prepare(
        self,
        system_prompt: str = DEFAULT_SYSTEM_PROMPT,
        *,
        settings: dict[str, Any] | None = None,
        reference_voice: Samples | None = None,
        max_slice_nums: int | None = None,
        on_wait: OnWait | None = None,
    ) -> Prepared:
        """Set prompt and voice and wait until the session is ready, however long the queue is.

        Args:
            settings: sampling settings by their wire names, such as `{"temperature": 0.7}`.
            reference_voice: float32 16 kHz.
            on_wait: called with each report about the place in the queue.

        Raises:
            SessionError: the server answered with an error or closed the connection.
        """
        voice = None if reference_voice is None else samples_to_f32(reference_voice)
        optional = {
            "config": settings,
            "ref_audio_base64": encode_base64(voice) if voice else None,
            "max_slice_nums": max_slice_nums,
        }
        said = {name: value for name, value in optional.items() if value is not None}
        await self._send({"type": "prepare", "system_prompt": system_prompt, **said})
        return await self._until(Prepared, on_wait)

    async def send_audio(
        self,
        samples: NDArray[np.float32],
        *,
        frames: Sequence[bytes] = (),
        force_listen: bool = False,
        max_slice_nums: int | None = None,
    ) -> None:
        """Send one chunk; the server answers each with exactly one `Result`.

        Args:
            samples: float32 16 kHz `[n_samples]`, nominally one second.
            frames: JPEG files seen during the chunk.
            force_listen: make the model stop speaking for this unit.

        Raises:
            SessionError: the connection is gone.
        """
        message: dict[str, Any] = {
            "type": "audio_chunk",
            "audio_base64": encode_base64(samples_to_f32(samples)),
        }
        if frames:
            message["frame_base64_list"] = [encode_base64(frame) for frame in frames]
        if force_listen:
            message["force_listen"] = True
        if max_slice_nums is not None:
            message["max_slice_nums"] = max_slice_nums
        await self._send(message)

    async def pause(self, timeout_s: float | None = None) -> None:
        """Hold the session; its place on the worker is kept for `timeout_s`."""
        await self._send({"type": "pause"} | ({} if timeout_s is None else {"timeout": timeout_s}))

    async def resume(self) -> None:
        await self._send({"type": "resume"})

    async def interrupt(self) -> None:
        await self._send({"type": "interrupt"})

    async def stop(self) -> None:
        """Ask for the end; `Stopped` and `Closed` follow as events."""
        await self._send({"type": "stop"})
