"""The values of G0 messages, checked one by one: JSON, numbers, base64 sound and pictures.

Every check raises BadMessage (BadAudio, BadImage) with the key, what came, and what is expected.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import orjson

from shared.audio import F32_BYTES, check_f32_length, decode_base64
from shared.errors import BadAudio, BadImage, BadMessage, NotJson
from shared.limits import INPUT_SAMPLE_RATE_HZ, MAX_REFERENCE_VOICE_S

MAX_SHOWN_CHARS = 40
"""Length to which a client's own words are cut inside an error text."""

MAX_COUNT = 1_000_000

MAX_MARKS = 300_000
"""Commas and opening brackets of one message, which bound its values: 128 MiB of `[],` would hold
the interpreter for half a minute. Those in texts count too, so it is above `MAX_CHAT_CHARS`."""

PIECE_CHARS = 1024 * 1024

Check = Callable[[str, Any], Any]


def json_object(frame: str | bytes | bytearray) -> dict[str, Any]:
    """Return a message.

    Raises:
        NotJson: it is no JSON.
        BadMessage: it is JSON that cannot be read, or no object, or too many values.
    """
    if len(frame) > MAX_MARKS and _n_marks(frame) > MAX_MARKS:
        raise BadMessage("the message holds too many values")
    try:
        body = orjson.loads(frame)
    except orjson.JSONDecodeError as error:
        if "limit" in error.msg:
            raise BadMessage("the message is nested too deeply") from error
        if "infinity" in error.msg:
            raise BadMessage("a number is too large") from error
        # JavaScript and Python write half an emoji (a text cut in the middle) as valid JSON.
        if error.msg.endswith("surrogate in string"):
            raise BadMessage("a text holds half of a surrogate pair") from error
        if not frame or "UTF-8" in error.msg:
            # The socket hands over an empty text in place of one that cannot be decoded.
            raise NotJson("not JSON: the text is empty or not valid UTF-8") from error
        raise NotJson(f"not JSON: {error.msg} at character {error.pos}") from error
    if not isinstance(body, dict):
        raise BadMessage(f"expected a JSON object, got {shown(body)}")
    return body


def _n_marks(frame: str | bytes | bytearray) -> int:
    """Count commas and opening brackets, piece by piece: other threads get their turns."""
    n = 0
    for begin in range(0, len(frame), PIECE_CHARS):
        piece = frame[begin : begin + PIECE_CHARS]
        data = piece.encode(errors="replace") if isinstance(piece, str) else piece
        codes = np.frombuffer(data, np.uint8)
        n += sum(int(np.count_nonzero(codes == mark)) for mark in b"[{,")
    return n


def shown(value: object) -> str:
    """A client's value in the words of JSON, short enough for an error text."""
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "an array"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    # Strings as Python writes them: it escapes what would break a line of a log.
    text = repr(value)
    return text if len(text) <= MAX_SHOWN_CHARS else text[:MAX_SHOWN_CHARS] + "…"


def word_of(kind: object) -> str:
    """An unknown type as the reference's errors name it: without quotes."""
    return kind[:MAX_SHOWN_CHARS] if isinstance(kind, str) else shown(kind)


def section(body: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return the object under a key; missing or null = an empty one."""
    value = body.get(key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise BadMessage(f"{key} is {shown(value)}, expected an object")
    return value


# ---- numbers and words


def flag(key: str, value: object, default: bool) -> bool:
    if value is None:
        return default
    if not isinstance(value, bool):
        raise BadMessage(f"{key} is {shown(value)}, expected true or false")
    return value


def switch(key: str, value: Any) -> bool:
    return flag(key, value, False)


def number(low: float, high: float = math.inf, *, exclusive: bool = False) -> Check:
    def check(key: str, value: Any) -> float:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not low <= value <= high or (exclusive and value == low):
            above = "above" if exclusive else "from"
            upper = "" if high == math.inf else f", at most {high:g}"
            raise BadMessage(f"{key} is {shown(value)}, expected a number {above} {low:g}{upper}")
        return float(value)

    return check


def integer(low: int, high: int) -> Check:
    def check(key: str, value: Any) -> int:
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise BadMessage(
                f"{key} is {shown(value)}, expected a whole number from {low} to {high}"
            )
        return value

    return check


def word(*words: str) -> Check:
    def check(key: str, value: Any) -> str:
        if value not in words:
            raise BadMessage(f"{key} is {shown(value)}, expected one of {', '.join(words)}")
        return str(value)

    return check


def checked(
    said: Mapping[str, Any], checks: Mapping[str, Check], within: str = ""
) -> dict[str, Any]:
    """Return the values that have a check and are said, checked. null = not said.

    Args:
        within: what stands before a key in an error, such as "vad.".
    """
    return {
        key: checks[key](within + key, value)
        for key, value in said.items()
        if key in checks and value is not None
    }


def unknown(said: Mapping[str, Any], known: Mapping[str, Any] | Sequence[str]) -> list[str]:
    """Return the names that have no effect here, short enough to be repeated."""
    return [key[:MAX_SHOWN_CHARS] for key in said if key not in known]


# ---- sound and pictures


def audio(text: object, what: str, max_s: float) -> bytes:
    """Return float32 16 kHz bytes; whether they are sound is for the worker to see."""
    if not isinstance(text, str):
        raise BadAudio(f"{what} is {shown(text)}, expected a base64 string")
    if len(text) // 4 * 3 > (max_s * INPUT_SAMPLE_RATE_HZ + 1) * F32_BYTES:
        raise BadAudio(f"{what} is too long, at most {max_s:g} s are accepted")
    data = decode_base64(text, what)
    check_f32_length(data, max_s, INPUT_SAMPLE_RATE_HZ)
    return data


def voice(body: Mapping[str, Any], key: str) -> bytes:
    """Return the voice under a key; empty = none."""
    text = body.get(key)
    return audio(text, key, MAX_REFERENCE_VOICE_S) if text else b""


def file_bytes(text: object, what: str) -> bytes:
    """Return a picture's or a film's file.

    Raises:
        BadImage: it is no base64.
    """
    if not isinstance(text, str):
        raise BadImage(f"{what} is {shown(text)}, expected a base64 string")
    try:
        return decode_base64(text, what)
    except BadAudio as error:
        raise BadImage(str(error)) from error


def chunk_audio(body: Mapping[str, Any], max_s: float) -> bytes:
    """Return the sound of an `audio_chunk`."""
    text = body.get("audio_base64")
    if text is None:
        raise BadMessage("Missing audio_base64")
    data = audio(text, "audio_base64", max_s)
    if not data:
        raise BadAudio("audio_base64 is empty")
    return data


def refuse_server_paths(body: Mapping[str, Any], *keys: str) -> None:
    """Raises BadMessage when a file of the service is named under one of the keys."""
    for key in keys:
        if body.get(key):
            raise BadMessage(
                f"{key} is not accepted: files of the service are not the client's to name; "
                "sound comes and goes as base64"
            )
