"""Messages of text, pictures, sound and films, and how an answer to them is made (G0).

An item that names its kind and brings nothing is left out, as the reference does it: its pages
send `data: null` for a preset's sound that they have not loaded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast, get_args

import msgspec

from gateway.dialects.g0_values import (
    MAX_COUNT,
    Check,
    audio,
    checked,
    file_bytes,
    integer,
    number,
    shown,
    switch,
    word_of,
)
from shared.errors import BadMessage
from shared.limits import (
    INPUT_SAMPLE_RATE_HZ,
    MAX_CHAT_CHARS,
    MAX_CHAT_PARTS,
    MAX_CLIP_S,
    MAX_STACK_FRAMES,
)
from shared.protocol import (
    AudioPart,
    ChatMessage,
    GenerationSettings,
    ImagePart,
    Part,
    Role,
    TextPart,
    VideoPart,
)

GENERATION: Mapping[str, Check] = {
    "max_new_tokens": integer(1, 4096),
    "min_new_tokens": integer(0, 4096),
    "do_sample": switch,
    "temperature": number(0, 2),
    "top_p": number(0, 1),
    "top_k": integer(0, MAX_COUNT),
    "repetition_penalty": number(1, 10),
    "length_penalty": number(0.1, 5),
    "max_inp_length": integer(1, MAX_COUNT),
}
"""`generation`: key -> check of its bounds."""

ROLES = get_args(Role)
MEDIA = ("image", "audio", "video")


def generation(said: Mapping[str, Any], max_new_tokens: int) -> GenerationSettings:
    """Return checked settings.

    Args:
        said: the client's object; names that are not in `GENERATION` are left out.
        max_new_tokens: of a client that does not say it.
    """
    values = {"max_new_tokens": max_new_tokens, **checked(said, GENERATION, "generation.")}
    if values.get("min_new_tokens", 0) > values["max_new_tokens"]:
        raise BadMessage(
            f"generation.min_new_tokens is {values['min_new_tokens']}, more than "
            f"generation.max_new_tokens ({values['max_new_tokens']})"
        )
    if "max_inp_length" in values:
        values["max_input_tokens"] = values.pop("max_inp_length")
    return msgspec.convert(values, GenerationSettings)


def messages(value: object) -> list[ChatMessage]:
    """Return a request's messages without those that hold nothing; there is at least one."""
    if not isinstance(value, list) or not value:
        raise BadMessage("messages has to be a list of at least one message")
    found: list[ChatMessage] = []
    n_parts = 0
    for index, one in enumerate(value):
        where = f"messages[{index}]"
        if not isinstance(one, dict):
            raise BadMessage(f"{where} is {shown(one)}, expected an object")
        role = one.get("role")
        if role not in ROLES:
            raise BadMessage(
                f"{where}.role is {shown(role)}, expected one of {', '.join(map(str, ROLES))}"
            )
        content = one.get("content")
        message = ChatMessage(cast("Role", role), parts(content, f"{where}.content"))
        n_parts += 1 if isinstance(content, str) else 1 + len(message.parts)
        if n_parts > MAX_CHAT_PARTS:
            raise BadMessage(
                f"messages and the items of their lists are more than {MAX_CHAT_PARTS}"
            )
        if message.parts:
            found.append(message)
    if not found:
        raise BadMessage("messages holds nothing: no text, no sound, no picture")
    n_chars = sum(text_chars(message.parts) for message in found)
    if n_chars > MAX_CHAT_CHARS:
        raise BadMessage(
            f"messages has {n_chars} characters of text, at most {MAX_CHAT_CHARS} are accepted"
        )
    return found


def parts(content: object, where: str, kinds: Sequence[str] = ("text", *MEDIA)) -> list[Part]:
    """Return the items of one message that bring something.

    Args:
        content: a text, or a list of items.
        where: how an error names it.
        kinds: the kinds of items that may stand here.
    """
    if content is None:
        return []
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise BadMessage(f"{where} is {shown(content)}, expected a text or a list of items")
    if len(content) > MAX_CHAT_PARTS:
        raise BadMessage(f"{where} has {len(content)} items, at most {MAX_CHAT_PARTS} are accepted")
    found = (_part(item, f"{where}[{i}]", kinds) for i, item in enumerate(content))
    return [part for part in found if part is not None]


def text_chars(parts: Sequence[Part]) -> int:
    return sum(len(part.text) for part in parts if isinstance(part, TextPart))


def _part(item: object, where: str, kinds: Sequence[str]) -> Part | None:
    if not isinstance(item, dict):
        raise BadMessage(f"{where} is {shown(item)}, expected an object with a type")
    kind = item.get("type")
    if kind not in kinds:
        raise BadMessage(f"{where}.type is {word_of(kind)}, expected one of {', '.join(kinds)}")
    if kind == "text":
        text = item.get("text")
        if text is not None and not isinstance(text, str):
            raise BadMessage(f"{where}.text is {shown(text)}, expected a string")
        return TextPart(text) if text else None
    data = item.get("data")
    if not data:
        return None
    what = f"{where}.data"
    if kind == "image":
        return ImagePart(file_bytes(data, what))
    if kind == "audio":
        rate = item.get("sample_rate")
        if rate is not None and rate != INPUT_SAMPLE_RATE_HZ:
            raise BadMessage(
                f"{where}.sample_rate is {shown(rate)}, expected {INPUT_SAMPLE_RATE_HZ}"
            )
        return AudioPart(audio(data, what, MAX_CLIP_S))
    frames = item.get("stack_frames")
    return VideoPart(
        file_bytes(data, what),
        1 if frames is None else _frames_per_s(f"{where}.stack_frames", frames),
    )


_frames_per_s = integer(1, MAX_STACK_FRAMES)
