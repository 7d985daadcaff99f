"""Sound files -> the voices that pages and sessions take: float32, 16 kHz, mono."""

from __future__ import annotations

import asyncio
import io
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import av
import numpy as np

from gateway.uploads import MIN_SOUND_S
from shared.audio import Samples, encode_base64, samples_to_f32
from shared.errors import BadVoiceFile, VoiceUnreadable
from shared.limits import INPUT_SAMPLE_RATE_HZ, MAX_REFERENCE_VOICE_S

log = logging.getLogger(__name__)

FORMATS = "aac,aiff,amr,asf,au,caf,flac,matroska,webm,mov,mp4,m4a,3gp,3g2,mj2,mp3,ogg,w64,wav"
"""Containers that hold their own sound. FFmpeg knows playlists too, which would have it open files
of this machine and addresses of its network."""

MAX_SAMPLES = round(MAX_REFERENCE_VOICE_S * INPUT_SAMPLE_RATE_HZ)
TOO_LONG = f"The voice is longer than {MAX_REFERENCE_VOICE_S:g} s"


@dataclass(frozen=True, slots=True)
class VoiceClip:
    """`data`: base64 of little-endian float32 samples, 16 kHz mono."""

    name: str
    n_samples: int
    data: str

    @property
    def duration_s(self) -> float:
        return round(self.n_samples / INPUT_SAMPLE_RATE_HZ, 1)

    @property
    def row(self) -> dict[str, Any]:
        """The clip in the wire's shape."""
        return {"data": self.data, "name": self.name, "duration": self.duration_s}


def decode_voice(file: bytes) -> Samples:
    """Return the sound of a file; blocks for some 10 ms per minute of it.

    Raises:
        BadVoiceFile: no format of `FORMATS`, damaged, or its sound is shorter than
            `MIN_SOUND_S` or longer than `MAX_REFERENCE_VOICE_S`.
    """
    try:
        formats = {"format_whitelist": FORMATS}
        with av.open(io.BytesIO(file), mode="r", container_options=formats) as container:
            samples = _decode(container)
    except (av.error.FFmpegError, OSError, ValueError) as error:
        # ValueError: a stream that changes its rate or its channels on the way.
        raise BadVoiceFile("The voice cannot be read as a sound file") from error
    if samples.size < MIN_SOUND_S * INPUT_SAMPLE_RATE_HZ:
        held_ms = 1000 * samples.size / INPUT_SAMPLE_RATE_HZ
        least = f"at least {1000 * MIN_SOUND_S:g} ms are needed"
        raise BadVoiceFile(f"The voice holds {held_ms:.1f} ms of sound; {least}")
    if not np.isfinite(samples).all():
        raise BadVoiceFile("The voice holds values that are not finite (NaN or infinity)")
    return samples


def _decode(container: av.container.InputContainer) -> Samples:
    if not container.streams.audio:
        return np.zeros(0, np.float32)
    resampler = av.AudioResampler(format="flt", layout="mono", rate=INPUT_SAMPLE_RATE_HZ)
    pieces: list[Samples] = []
    n_samples = 0
    for frame in container.decode(container.streams.audio[0]):
        # A file may claim one sample per second; a frame of it would become gigabytes.
        if frame.samples * INPUT_SAMPLE_RATE_HZ > MAX_SAMPLES * frame.sample_rate:
            raise BadVoiceFile(TOO_LONG)
        for out in resampler.resample(frame):
            pieces.append(out.to_ndarray()[0])
            n_samples += pieces[-1].size
        if n_samples > MAX_SAMPLES:
            raise BadVoiceFile(TOO_LONG)
    if pieces:
        pieces += [out.to_ndarray()[0] for out in resampler.resample(None)]
    return np.concatenate(pieces)[:MAX_SAMPLES] if pieces else np.zeros(0, np.float32)


def read_voice(path: Path, name: str) -> VoiceClip:
    """Return the voice in a file; blocks.

    Raises:
        FileNotFoundError: there is none.
        VoiceUnreadable: it is there and cannot be read or decoded.
    """
    try:
        samples = decode_voice(path.read_bytes())
    except FileNotFoundError:
        raise
    except (OSError, BadVoiceFile) as error:
        log.error("voice unreadable path=%s reason=%s", path, error)
        raise VoiceUnreadable(f"The voice {name} cannot be read") from error
    return VoiceClip(name, samples.size, encode_base64(samples_to_f32(samples)))


class VoiceFile:
    """A voice that does not change while the gateway runs; decoded when it is first asked for."""

    def __init__(self, path: Path, shown_path: str) -> None:
        self._path = path
        self.shown_path = shown_path
        """The path as clients may see it."""
        self._clip: VoiceClip | None = None
        self._lock = asyncio.Lock()

    @property
    def name(self) -> str:
        return self._path.name

    async def read(self) -> VoiceClip:
        """Return the voice, decoded off the event loop.

        Raises:
            FileNotFoundError, VoiceUnreadable: as `read_voice`; it is tried again next time.
        """
        async with self._lock:
            if self._clip is None:
                self._clip = await asyncio.to_thread(read_voice, self._path, self.name)
            return self._clip
