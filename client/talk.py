"""`python -m client.talk`: stream a file to a session in real time and save the spoken answer.

The file is sent at the pace of a microphone, then silence until the turn has ended and two more
seconds have passed. Each unit is printed as it comes; the saved answer holds what a listener
would have heard spoken, without the pauses. At the end stands where the recording can be seen, if
the server made one.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import numpy as np

from client.duplex import (
    DEFAULT_SYSTEM_PROMPT,
    Closed,
    DuplexClient,
    ErrorEvent,
    Event,
    Queued,
    QueueUpdate,
    Result,
    SessionError,
    Stopped,
    TimedOut,
)
from client.media import audible_span, read_audio
from shared.audio import Samples, write_wav
from shared.clips import MediaError, read_clip
from shared.limits import INPUT_SAMPLE_RATE_HZ, MAX_CHUNK_S, OUTPUT_SAMPLE_RATE_HZ

LINGER_S = 2.0
"""Silence that is still sent after the turn has ended: the model may have more to say."""

MAX_SILENCE_S = 60.0
"""Silence that is sent after the file at most."""

GOODBYE_S = 5.0
"""How long the server may take to confirm the end."""


@dataclass(frozen=True, slots=True)
class Job:
    """What one run sends. `interruption` is mixed in `after_s` after the answer has begun."""

    question: Samples
    frames: Sequence[bytes]
    chunk_s: float
    interruption: Samples | None
    after_s: float


class Microphone:
    """The input timeline, cut into chunks: the file first, then silence."""

    def __init__(self, question: Samples, frames: Sequence[bytes], chunk_s: float) -> None:
        self._track = question
        self._frames = frames
        self._chunk = round(chunk_s * INPUT_SAMPLE_RATE_HZ)
        self._at = 0

    @property
    def position_s(self) -> float:
        return self._at / INPUT_SAMPLE_RATE_HZ

    @property
    def silence_s(self) -> float:
        """Seconds of silence that have been sent after the file."""
        return max(0, self._at - self._track.size) / INPUT_SAMPLE_RATE_HZ

    @property
    def sound_end_s(self) -> float:
        """Where the last audible sample is; files often end with silence of their own."""
        return audible_span(self._track)[1] / INPUT_SAMPLE_RATE_HZ

    def say(self, samples: Samples) -> None:
        """Lay a second clip onto what comes next."""
        end = self._at + samples.size
        track = np.zeros(max(end, self._track.size), np.float32)
        track[: self._track.size] = self._track
        track[self._at : end] += samples
        self._track = track

    def next_chunk(self) -> tuple[Samples, Sequence[bytes]]:
        """Return the next chunk, padded with silence, and the frames of its seconds."""
        start, end = self._at, self._at + self._chunk
        self._at = end
        chunk = np.zeros(self._chunk, np.float32)
        piece = self._track[start:end]
        chunk[: piece.size] = piece
        first, last = start // INPUT_SAMPLE_RATE_HZ, end // INPUT_SAMPLE_RATE_HZ
        return chunk, self._frames[first:last]


@dataclass
class Answer:
    """What a listener hears: pieces play back to back, an interruption drops what is unplayed."""

    pieces: list[Samples] = field(default_factory=list)
    _free_at: float = 0.0

    def add(self, samples: Samples, now: float) -> None:
        self.pieces.append(samples)
        self._free_at = max(self._free_at, now) + samples.size / OUTPUT_SAMPLE_RATE_HZ

    def flush(self, now: float) -> None:
        unplayed = max(0, round((self._free_at - now) * OUTPUT_SAMPLE_RATE_HZ))
        while unplayed and self.pieces:
            piece = self.pieces.pop()
            if piece.size > unplayed:
                self.pieces.append(piece[: piece.size - unplayed])
            unplayed -= min(unplayed, piece.size)
        self._free_at = min(self._free_at, now)

    def samples(self) -> Samples:
        return np.concatenate(self.pieces) if self.pieces else np.zeros(0, np.float32)


class Conversation:
    """Follows the results of one run: prints them, collects the answer, knows when it is over."""

    def __init__(self, mic: Microphone, job: Job, clock: Callable[[], float]) -> None:
        self.answer = Answer()
        self.problem: str | None = None
        self._mic = mic
        self._interruption = job.interruption
        self._after_s = job.after_s
        self._clock = clock
        self._n_results = 0
        self._is_speaking = False
        self._answer_began_s: float | None = None
        self._turn_ended_s: float | None = None

    @property
    def over(self) -> bool:
        """Whether nothing more is worth waiting for."""
        if self.problem is not None or self._mic.silence_s >= MAX_SILENCE_S:
            return True
        if self._turn_ended_s is None or self._interruption is not None:
            return False
        # A turn that ended while the file still spoke was no answer to all of it.
        answered = self._turn_ended_s >= self._mic.sound_end_s
        quiet_s = min(self._mic.silence_s, self._mic.position_s - self._turn_ended_s)
        return answered and quiet_s >= LINGER_S

    def before_chunk(self) -> None:
        """Start the interruption when its time has come."""
        began = self._answer_began_s
        if self._interruption is None or began is None:
            return
        if self._mic.position_s >= began + self._after_s:
            self._mic.say(self._interruption)
            self._interruption = None

    def take(self, event: Event) -> None:
        match event:
            case Result():
                self._take_result(event)
            case ErrorEvent():
                print(f"error: {event.message}", file=sys.stderr)
            case TimedOut():
                self.problem = f"the server ended the session: {event.reason}"
            case Closed():
                reason = event.reason or f"code {event.code}"
                self.problem = self.problem or f"the connection ended: {reason}"
            case _:
                pass

    def _take_result(self, result: Result) -> None:
        print(unit_line(self._n_results, result))
        self._n_results += 1
        if result.interrupted:
            self.answer.flush(self._clock())
        if result.audio.size:
            self.answer.add(result.audio, self._clock())
        if not result.is_listen:
            self._turn_ended_s = None
            if self._answer_began_s is None:
                self._answer_began_s = self._mic.position_s
        if result.end_of_turn or (result.is_listen and self._is_speaking):
            self._turn_ended_s = self._mic.position_s
        self._is_speaking = not result.is_listen and not result.end_of_turn


def unit_line(index: int, result: Result) -> str:
    """Return the printed form of one result."""
    state = "listen" if result.is_listen else "speak "
    ms = f"{result.wall_clock_ms:6.0f} ms" if result.wall_clock_ms is not None else "     - ms"
    parts = [f"{index:4d}  {state}  {ms}"]
    if result.heard:
        parts.append(f"heard: {result.heard.strip()}")
    if result.text:
        parts.append(f"says: {result.text.strip()}")
    marks = {
        "interrupted": result.interrupted,
        "input dropped": result.dropped,
        "end of turn": result.end_of_turn,
    }
    parts += [f"[{mark}]" for mark, is_set in marks.items() if is_set]
    return "  ".join(parts)


async def converse(
    session: DuplexClient,
    job: Job,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> Conversation:
    """Stream one job over a prepared session until it is over; returns what came back."""
    mic = Microphone(job.question, job.frames, job.chunk_s)
    conversation = Conversation(mic, job, clock)
    reader = asyncio.create_task(_follow(session, conversation))
    try:
        due = clock()
        while not conversation.over and not reader.done():
            # A microphone hands out a chunk when its last sample has been recorded.
            due += job.chunk_s
            await sleep(max(0.0, due - clock()))
            conversation.before_chunk()
            samples, frames = mic.next_chunk()
            await session.send_audio(samples, frames=frames)
        await session.stop()
        await asyncio.wait([reader], timeout=GOODBYE_S)
    except SessionError as error:
        # The reader knows why the connection ended; its reason is the better one.
        await asyncio.wait([reader], timeout=GOODBYE_S)
        conversation.problem = conversation.problem or str(error)
    finally:
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)
    return conversation


async def _follow(session: DuplexClient, conversation: Conversation) -> None:
    try:
        async for event in session:
            if isinstance(event, Stopped):
                return
            conversation.take(event)
    except SessionError as error:
        conversation.problem = str(error)


async def run(arguments: argparse.Namespace) -> int:
    """Run one conversation; returns the exit status."""
    frames = read_clip(arguments.video).frames if arguments.video else ()
    job = Job(
        question=read_audio(arguments.question),
        frames=frames,
        chunk_s=arguments.chunk_s,
        interruption=read_audio(arguments.interrupt) if arguments.interrupt else None,
        after_s=arguments.after,
    )
    async with DuplexClient(
        arguments.url,
        arguments.api_key,
        mode="omni" if frames else "audio",
        ca_file=arguments.ca,
    ) as session:
        prepared = await session.prepare(arguments.system_prompt, on_wait=_print_wait)
        if prepared.ignored:
            print(f"this server ignores: {', '.join(prepared.ignored)}", file=sys.stderr)
        conversation = await converse(session, job)
        recording_id = prepared.recording_session_id
        recording = recording_address(session.url, recording_id) if recording_id else None
    answer = conversation.answer.samples()
    if answer.size:
        write_wav(arguments.out, answer, OUTPUT_SAMPLE_RATE_HZ)
        print(f"answer: {answer.size / OUTPUT_SAMPLE_RATE_HZ:.1f} s in {arguments.out}")
    if recording:
        print(f"recording: {recording}")
    if conversation.problem:
        raise SessionError(conversation.problem)
    if not answer.size:
        raise SessionError("no spoken answer came")
    return 0


def recording_address(session_url: str, recording_id: str) -> str:
    """Return the page of a recorded session, given the complete address of its socket."""
    parts = urlsplit(session_url)
    scheme = "https" if parts.scheme == "wss" else "http"
    # What stands in front of the socket's own path is where a proxy has the service.
    service, _, _ = parts.path.rpartition("/ws/")
    return urlunsplit((scheme, parts.netloc, f"{service}/s/{recording_id}", "", ""))


def _print_wait(place: Queued | QueueUpdate) -> None:
    what = "the service is starting" if place.state == "starting" else f"place {place.position}"
    print(f"waiting: {what}, about {place.estimated_wait_s:.0f} s")


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m client.talk", description=__doc__)
    parser.add_argument("question", type=Path, help="WAV or any audio or video file")
    parser.add_argument(
        "--url",
        default="ws://127.0.0.1:8006",
        help="server, with the path of the site that it is below (default: %(default)s)",
    )
    parser.add_argument("--out", type=Path, default=Path("answer.wav"), help="answer (WAV, 24 kHz)")
    parser.add_argument("--video", type=Path, help="file whose picture is sent, a frame a second")
    parser.add_argument("--system-prompt", default=DEFAULT_SYSTEM_PROMPT)
    parser.add_argument("--api-key")
    parser.add_argument("--ca", type=Path, help="certificate to trust, such as certs/cert.pem")
    parser.add_argument("--chunk-s", type=float, default=1.0, help="seconds per chunk")
    parser.add_argument("--interrupt", type=Path, help="second file, spoken into the answer")
    parser.add_argument(
        "--after", type=float, default=2.0, help="seconds into the answer at which it starts"
    )
    arguments = parser.parse_args(argv)
    if not 0.05 <= arguments.chunk_s <= MAX_CHUNK_S:
        parser.error(f"--chunk-s is {arguments.chunk_s}, must be in 0.05..{MAX_CHUNK_S:g}")
    if not arguments.out.parent.is_dir():
        parser.error(f"--out is {arguments.out}, but there is no folder {arguments.out.parent}")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point: 0 with an answer, 1 without one."""
    arguments = parse_arguments(argv)
    try:
        return asyncio.run(run(arguments))
    except (SessionError, MediaError) as error:
        print(f"error: {error}", file=sys.stderr)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
