"""Messages with text, pictures, sound and films, as they came -> decoded and checked.

Requests with films are decoded on a thread of their own: a film takes seconds, and the pictures of
live sessions cannot wait for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from shared.audio import Samples, check_f32_length, samples_from_f32
from shared.errors import BadAudio, BadImage, BadMessage
from shared.limits import (
    INPUT_SAMPLE_RATE_HZ,
    MAX_CHAT_CHARS,
    MAX_CHAT_PARTS,
    MAX_CLIP_S,
    MAX_IMAGE_PIXELS,
    MAX_PROMPT_CHARS,
    MAX_REFERENCE_VOICE_S,
)
from shared.protocol import AudioPart, ChatMessage, ImagePart, Part, TextPart, VideoPart
from worker.models.contract import Clip, MessagePart, Picture, TurnMessage, Video
from worker.sessions.media import MediaAccount, SessionMedia, decode_image
from worker.sessions.video import decode_video

IMAGE_FORMATS = ("JPEG", "PNG", "GIF", "WEBP")


async def read_messages(
    media: SessionMedia, messages: Sequence[ChatMessage]
) -> tuple[TurnMessage, ...]:
    """Return the messages of a chat request.

    Raises:
        BadMessage: nothing in it, or too much text or too many parts.
        BadAudio, BadImage: a part that is damaged or beyond its limit.
        MediaFull: there is no room for what was decoded.
    """
    _check_messages(messages)
    n_bytes = sum(_n_bytes(message.parts) for message in messages)

    def decode(account: MediaAccount) -> tuple[TurnMessage, ...]:
        parts = _PartDecoder(account, MAX_CLIP_S)
        return tuple(
            TurnMessage(message.role, tuple(map(parts.decode, message.parts)))
            for message in messages
        )

    takes_long = any(_has_film(message.parts) for message in messages)
    return await media.request(n_bytes, decode, takes_long=takes_long)


async def read_system(media: SessionMedia, parts: Sequence[Part]) -> tuple[MessagePart, ...]:
    """Return the system message of a session of turns, whose sound is a reference voice.

    Raises:
        BadMessage, BadAudio, BadImage, MediaFull: as `read_messages`.
    """
    if len(parts) > MAX_CHAT_PARTS:
        raise BadMessage(f"the system message has {len(parts)} parts, at most {MAX_CHAT_PARTS}")
    n_chars = _n_chars(parts)
    if n_chars > MAX_PROMPT_CHARS:
        raise BadMessage(f"the system message has {n_chars} characters, at most {MAX_PROMPT_CHARS}")

    def decode(account: MediaAccount) -> tuple[MessagePart, ...]:
        return tuple(map(_PartDecoder(account, MAX_REFERENCE_VOICE_S).decode, parts))

    return await media.request(_n_bytes(parts), decode, takes_long=_has_film(parts))


class _PartDecoder:
    """Decodes the parts of one request; its pictures share one limit of pixels."""

    def __init__(self, account: MediaAccount, max_clip_s: float) -> None:
        self._account = account
        self._max_clip_s = max_clip_s
        self._n_pixels_left = MAX_IMAGE_PIXELS

    def decode(self, part: Part) -> MessagePart:
        if self._account.is_closed:
            raise BadMessage("nobody waits for this request any more")
        match part:
            case TextPart():
                return part.text
            case ImagePart():
                return self._picture(part.data)
            case AudioPart():
                return Clip(self._clip(part.data))
            case VideoPart():
                return self._video(part)

    def _picture(self, data: bytes) -> Picture:
        pixels = decode_image(data, self._account, self._n_pixels_left, IMAGE_FORMATS)
        self._n_pixels_left -= pixels.shape[0] * pixels.shape[1]
        return Picture(pixels)

    def _clip(self, data: bytes) -> Samples:
        if not data:
            raise BadAudio("audio is empty, expected float32 samples at 16 kHz")
        check_f32_length(data, self._max_clip_s, INPUT_SAMPLE_RATE_HZ)
        with self._account.room(len(data)):
            samples = samples_from_f32(data)
        self._account.hold(samples, len(data))
        return samples

    def _video(self, part: VideoPart) -> Video:
        if not self._n_pixels_left:
            raise BadImage(
                f"the pictures before a video leave none of the {MAX_IMAGE_PIXELS} pixels for it"
            )
        video = decode_video(part.data, part.stack_frames, self._account, self._n_pixels_left)
        frames = (frame for second in video.seconds for frame in second)
        self._n_pixels_left -= sum(frame.shape[0] * frame.shape[1] for frame in frames)
        return video


def _check_messages(messages: Sequence[ChatMessage]) -> None:
    if not messages:
        raise BadMessage("messages is empty, expected at least one")
    if not all(message.parts for message in messages):
        raise BadMessage("a message is empty")
    n_parts = sum(len(message.parts) for message in messages)
    if n_parts > MAX_CHAT_PARTS:
        raise BadMessage(f"the messages have {n_parts} parts, at most {MAX_CHAT_PARTS}")
    n_chars = sum(_n_chars(message.parts) for message in messages)
    if n_chars > MAX_CHAT_CHARS:
        raise BadMessage(f"the messages have {n_chars} characters, at most {MAX_CHAT_CHARS}")


def _n_chars(parts: Iterable[Part]) -> int:
    return sum(len(part.text) for part in parts if isinstance(part, TextPart))


def _has_film(parts: Iterable[Part]) -> bool:
    return any(isinstance(part, VideoPart) for part in parts)


def _n_bytes(parts: Iterable[Part]) -> int:
    return sum(len(part.data) for part in parts if not isinstance(part, TextPart))
