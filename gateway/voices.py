"""Voices that clients have uploaded: kept as WAV files, listed in one registry beside them."""

from __future__ import annotations

import asyncio
import logging
import os
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec

from gateway.clock import Clock
from gateway.uploads import Uploads
from gateway.voice_files import VoiceClip, decode_voice, read_voice
from shared.audio import Samples, write_wav
from shared.errors import BadMessage, NoStorage
from shared.limits import INPUT_SAMPLE_RATE_HZ

log = logging.getLogger(__name__)

MAX_VOICES = 200
MAX_NAME_CHARS = 100
MAX_UPLOADS = 4
"""Bodies, of up to 32 MiB, that may be under way at the same time."""

REGISTRY = "registry.json"


class Voice(msgspec.Struct, frozen=True):
    """One row of the registry, in the wire's shape; `created_at`: local ISO date."""

    id: Annotated[str, msgspec.Meta(pattern="^[A-Za-z0-9_-]+$")]
    name: str
    filename: str
    source_type: str
    duration_ms: int
    sample_rate: int
    created_at: str


class Registry(msgspec.Struct, frozen=True):
    ref_audios: list[Voice]


@dataclass(frozen=True, slots=True)
class Upload:
    name: str
    file: bytes


class Voices:
    """The voices in one folder, which is made when the first one comes.

    What is in memory is what is on the disk: a change that the disk refuses is not made. One
    process at a time may write there.
    """

    def __init__(self, folder: Path, clock: Clock) -> None:
        self._folder = folder
        self._clock = clock
        self._decoding = asyncio.Lock()
        self._changing = asyncio.Lock()
        self.uploads = Uploads(MAX_UPLOADS)
        self._voices = {voice.id: voice for voice in _load(folder / REGISTRY)}

    def all(self) -> list[Voice]:
        """Every voice, the oldest first."""
        return list(self._voices.values())

    async def add(self, upload: Upload) -> Voice:
        """Decode and keep a voice.

        Raises:
            BadMessage: the name is empty, too long or not printable.
            BadVoiceFile: see `decode_voice`.
            NoStorage: `MAX_VOICES` are kept, or the disk takes no more.
        """
        name = upload.name.strip()
        if not 0 < len(name) <= MAX_NAME_CHARS or not name.isprintable():
            raise BadMessage(f"name: expected 1 to {MAX_NAME_CHARS} printable characters")
        self._check_room()
        async with self._decoding:
            samples = await asyncio.to_thread(decode_voice, upload.file)
        voice_id = str(uuid.uuid4())
        voice = Voice(
            id=voice_id,
            name=name,
            filename=f"{voice_id}.wav",
            source_type="upload",
            duration_ms=round(samples.size * 1000 / INPUT_SAMPLE_RATE_HZ),
            sample_rate=INPUT_SAMPLE_RATE_HZ,
            created_at=self._clock.date(),
        )
        async with self._changing:
            self._check_room()
            changed = {**self._voices, voice_id: voice}
            await self._change(self._store, voice, samples, changed)
            self._voices = changed
        log.info("voice kept voice=%s duration_ms=%d", voice_id, voice.duration_ms)
        return voice

    async def remove(self, voice_id: str) -> bool:
        """Delete a voice; whether there was one.

        Raises:
            NoStorage: the disk does not take the change.
        """
        async with self._changing:
            changed = {**self._voices}
            voice = changed.pop(voice_id, None)
            if voice is None:
                return False
            await self._change(self._delete, voice, changed)
            self._voices = changed
        log.info("voice deleted voice=%s", voice_id)
        return True

    async def read(self, voice_id: str) -> VoiceClip | None:
        """Return a voice's sound; None = there is no such voice.

        Raises:
            VoiceUnreadable: its file cannot be decoded.
        """
        voice = self._voices.get(voice_id)
        if voice is None:
            return None
        async with self._decoding:
            try:
                return await asyncio.to_thread(read_voice, self._path(voice), voice.name)
            except FileNotFoundError:
                log.warning("voice has no file voice=%s", voice_id)
                return None

    def _path(self, voice: Voice) -> Path:
        return self._folder / f"{voice.id}.wav"

    def _check_room(self) -> None:
        if len(self._voices) >= MAX_VOICES:
            raise NoStorage(f"There are {MAX_VOICES} voices already; delete one first")

    async def _change(self, change: Callable[..., None], *args: object) -> None:
        try:
            await asyncio.to_thread(change, *args)
        except OSError as error:
            log.warning("voices cannot be written folder=%s reason=%s", self._folder, error)
            raise NoStorage("The voices cannot be written at the moment") from error

    def _store(self, voice: Voice, samples: Samples, changed: dict[str, Voice]) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._path(voice)
        try:
            write_wav(path, samples, voice.sample_rate)
            self._save(changed)
        except OSError:
            # Nothing would ever name it again.
            path.unlink(missing_ok=True)
            raise

    def _delete(self, voice: Voice, changed: dict[str, Voice]) -> None:
        self._save(changed)
        self._path(voice).unlink(missing_ok=True)

    def _save(self, voices: dict[str, Voice]) -> None:
        """Write the registry in one step: a crash leaves the old one or the new one."""
        partial = self._folder / f"{REGISTRY}.partial"
        data = msgspec.json.format(msgspec.json.encode(Registry(list(voices.values()))))
        with partial.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(self._folder / REGISTRY)


def _load(path: Path) -> list[Voice]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Registry).ref_audios
    except FileNotFoundError:
        return []
    except (OSError, msgspec.MsgspecError) as error:
        log.error("registry of voices unreadable path=%s reason=%s", path, error)
    try:
        # The next upload would write over it.
        path.replace(path.with_suffix(".damaged.json"))
    except OSError as error:
        log.error("registry cannot be put aside path=%s reason=%s", path, error)
    return []
