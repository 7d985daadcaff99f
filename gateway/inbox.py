"""What one client has sent and its worker has not taken yet, and the order of the answers."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from shared.audio import F32_BYTES
from shared.errors import BadMessage, MediaFull
from shared.limits import INPUT_SAMPLE_RATE_HZ, MAX_FRAME_BYTES, MAX_INBOX_UNITS, MIB
from shared.protocol import (
    Ask,
    AudioPart,
    Command,
    ImagePart,
    Input,
    Part,
    Prepare,
    PrepareTurns,
    VideoPart,
)

MAX_HELD_AUDIO_S = MAX_INBOX_UNITS
"""As much audio as a worker's own inbox holds: a replay of more would be dropped there."""

MAX_HELD_AUDIO_BYTES = MAX_HELD_AUDIO_S * INPUT_SAMPLE_RATE_HZ * F32_BYTES

MAX_HELD_BYTES = 16 * MIB
"""Frames, voices and audio of one client; one single chunk may be larger."""

MAX_HELD_COMMANDS = 256
MAX_UNANSWERED = 4096
"""Chunks of a few samples fit into any bound of bytes or seconds, here and in the worker."""

MAX_HELD_BYTES_IN_ALL = 4 * MAX_FRAME_BYTES
OWN_SHARE_BYTES = MIB
"""A client that holds no more is served however much the others hold: a live session's chunks
pass through here too, and must not be refused because hostile clients wait."""


MEDIA_PARTS = (ImagePart, AudioPart, VideoPart)


class HeldBytes:
    """What all inboxes, and all bodies of chat requests, of the process hold together."""

    def __init__(self) -> None:
        self.total = 0

    def check(self, own: int, n_bytes: int) -> None:
        """Raises MediaFull when somebody who holds `own` bytes may not hold so many more."""
        if self.total + n_bytes > MAX_HELD_BYTES_IN_ALL and own + n_bytes > OWN_SHARE_BYTES:
            raise MediaFull("The service holds as much input as it can; send it again later")


@dataclass(slots=True, eq=False)
class Chunk:
    """One accepted audio chunk, from its arrival to its answer."""

    arrived_at: float
    seq: int | None = None
    """Its number on the worker's leg; None = not sent yet."""
    is_dropped: bool = False
    refusal: BadMessage | None = None
    """Why it never went to the worker."""


@dataclass(frozen=True, slots=True)
class Entry:
    command: Command
    arrived_at: float
    n_bytes: int
    n_audio_bytes: int
    chunk: Chunk | None


class Inbox:
    """A bounded line of commands. Too much audio drops the oldest chunk, never a command.

    Args:
        answers_chunks: whether each chunk gets an answer of its own.
    """

    def __init__(self, held: HeldBytes, *, answers_chunks: bool = True) -> None:
        self._held = held
        self._answers_chunks = answers_chunks
        self._entries: deque[Entry] = deque()
        self._n_bytes = 0
        self._n_audio_bytes = 0
        self._filled = asyncio.Event()
        self._unanswered: deque[Chunk] = deque()
        self._next_seq = 0

    @property
    def n_unanswered(self) -> int:
        return len(self._unanswered)

    def put(self, command: Command, arrived_at: float) -> None:
        """Add a command at the end.

        Raises:
            BadMessage: too much is held already and nothing of it may be dropped, or too many
                chunks wait for their answer.
        """
        if isinstance(command, Input) and len(self._unanswered) >= MAX_UNANSWERED:
            raise BadMessage("too many chunks wait for their answer")
        entry = _entry(command, arrived_at)
        self._make_room(entry)
        self._entries.append(entry)
        self._account(entry, 1)
        if entry.chunk is not None and self._answers_chunks:
            self._unanswered.append(entry.chunk)
        self._filled.set()

    async def get(self) -> tuple[Command, float]:
        """Remove and return the oldest command, and when it arrived.

        Chunks are numbered as they leave.
        """
        while not self._entries:
            self._filled.clear()
            await self._filled.wait()
        entry = self._entries.popleft()
        self._account(entry, -1)
        if entry.chunk is None or not isinstance(entry.command, Input):
            return entry.command, entry.arrived_at
        entry.chunk.seq = self._next_seq
        self._next_seq += 1
        return msgspec.structs.replace(entry.command, seq=entry.chunk.seq), entry.arrived_at

    def answered(self, seq: int) -> Chunk | None:
        """Take the chunk that the worker has answered; None = it never got such a chunk."""
        for chunk in self._unanswered:
            if chunk.seq == seq:
                self._unanswered.remove(chunk)
                return chunk
        return None

    def refuse(self, error: BadMessage, arrived_at: float) -> None:
        """Have a chunk that cannot be used answered in its turn.

        Raises:
            BadMessage: the error itself, to be answered now: too many wait for their turn.
        """
        if len(self._unanswered) >= MAX_UNANSWERED:
            raise error
        self._unanswered.append(Chunk(arrived_at, refusal=error))

    def due(self) -> list[Chunk]:
        """Take the dropped and the refused chunks whose turn to be answered has come."""
        due = []
        while self._unanswered and (self._unanswered[0].is_dropped or self._unanswered[0].refusal):
            due.append(self._unanswered.popleft())
        return due

    def close(self) -> None:
        """Forget everything that is held."""
        self._held.total -= self._n_bytes
        self._n_bytes = self._n_audio_bytes = 0
        self._entries.clear()

    def _make_room(self, new: Entry) -> None:
        while self._is_over(new):
            oldest = next((e for e in self._entries if e.chunk is not None), None)
            if oldest is None:
                break
            assert oldest.chunk is not None
            oldest.chunk.is_dropped = True
            if not self._answers_chunks:
                # Nothing is before it: what has become of it is said at once.
                self._unanswered.append(oldest.chunk)
            self._entries.remove(oldest)
            self._account(oldest, -1)
        self._held.check(self._n_bytes, new.n_bytes)
        # A question is all that its client ever sends.
        may_be_large = new.chunk is not None or isinstance(new.command, Ask)
        is_lone = may_be_large and self._n_bytes + new.n_bytes <= MAX_FRAME_BYTES
        if self._is_over(new) and not is_lone:
            raise BadMessage("too much input is waiting already; send it again after queue_done")

    def _is_over(self, new: Entry) -> bool:
        return (
            self._n_bytes + new.n_bytes > MAX_HELD_BYTES
            or (
                new.chunk is not None
                and self._n_audio_bytes + new.n_audio_bytes > MAX_HELD_AUDIO_BYTES
            )
            or len(self._entries) >= MAX_HELD_COMMANDS
        )

    def _account(self, entry: Entry, sign: int) -> None:
        self._n_bytes += sign * entry.n_bytes
        self._n_audio_bytes += sign * entry.n_audio_bytes
        self._held.total += sign * entry.n_bytes


def _entry(command: Command, arrived_at: float) -> Entry:
    n_bytes = n_bytes_of(command)
    if isinstance(command, Input):
        return Entry(command, arrived_at, n_bytes, len(command.audio), Chunk(arrived_at))
    return Entry(command, arrived_at, n_bytes, 0, None)


def n_bytes_of(command: Command) -> int:
    """Return the bytes of media that a command carries."""
    match command:
        case Input():
            return len(command.audio) + sum(map(len, command.frames))
        case Prepare():
            return len(command.reference_voice) + len(command.tts_reference_voice)
        case PrepareTurns():
            return _n_bytes_of_parts(command.system)
        case Ask():
            n_media = sum(_n_bytes_of_parts(message.parts) for message in command.messages)
            return n_media + len(command.voice)
    return 0


def _n_bytes_of_parts(parts: Sequence[Part]) -> int:
    return sum(len(part.data) for part in parts if isinstance(part, MEDIA_PARTS))
