"""The files of a finished recording: sound as PCM16 WAV, pictures and videos as they came."""

from __future__ import annotations

import wave
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import numpy as np

from shared.audio import F32_BYTES, Samples
from shared.limits import MAX_SAMPLE_MAGNITUDE

IMAGE_KINDS: Final = (
    (b"\xff\xd8\xff", "jpg"),
    (b"\x89PNG\r\n", "png"),
    (b"GIF8", "gif"),
    (b"RIFF", "webp"),
)
FOLDERS: Final = ("user_audio", "user_frames", "user_images", "user_videos", "ai_audio")
WEBM_MAGIC: Final = b"\x1aE\xdf\xa3"


def samples_of(data: bytes) -> Samples:
    """Return the samples of float32 bytes that nobody has checked; what is no number is silence."""
    whole = len(data) // F32_BYTES * F32_BYTES
    samples = np.frombuffer(data[:whole], dtype="<f4").astype(np.float32)
    limit = MAX_SAMPLE_MAGNITUDE
    return np.nan_to_num(samples, nan=0.0, posinf=limit, neginf=-limit)


def pcm16(samples: Samples) -> bytes:
    return np.clip(np.round(samples * 32767.0), -32768, 32767).astype("<i2").tobytes()


class Assets:
    """Writes files into the folder of a recording; returns the path of each within it.

    All of them lie in `FOLDERS`; whatever a link there leads to is left alone.

    Raises:
        OSError: from every method.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def audio(self, name: str, data: Iterable[bytes], sample_rate_hz: int) -> tuple[str, float]:
        """Write float32 pieces as one WAV file; returns its path and its length in ms."""
        n_samples = 0
        with wave.open(str(self._place(name)), "wb") as writer:
            writer.setnchannels(1)
            writer.setsampwidth(2)
            writer.setframerate(sample_rate_hz)
            for piece in data:
                samples = samples_of(piece)
                writer.writeframesraw(pcm16(samples))
                n_samples += len(samples)
        return name, round(1000.0 * n_samples / sample_rate_hz, 1)

    def image(self, stem: str, data: bytes) -> str:
        kinds = (kind for magic, kind in IMAGE_KINDS if data.startswith(magic))
        return self._file(f"{stem}.{next(kinds, 'bin')}", data)

    def video(self, stem: str, data: bytes) -> str:
        return self._file(f"{stem}.{'webm' if data.startswith(WEBM_MAGIC) else 'mp4'}", data)

    def _file(self, name: str, data: bytes) -> str:
        self._place(name).write_bytes(data)
        return name

    def _place(self, name: str) -> Path:
        path = self.folder / name
        if path.parent.is_symlink():
            path.parent.unlink()
        path.parent.mkdir(mode=0o700, exist_ok=True)
        # An earlier run may have come so far; a link would be written through.
        path.unlink(missing_ok=True)
        return path


def read_wav(path: Path) -> Samples:
    """Return the samples of one of our own mono files. Raises OSError, wave.Error."""
    with wave.open(str(path), "rb") as reader:
        raw = reader.readframes(reader.getnframes())
    return np.frombuffer(raw, dtype="<i2").astype(np.float32) / 32767.0
