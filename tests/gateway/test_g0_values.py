"""Messages as a whole: what is JSON, and how much of it one may bring."""

from __future__ import annotations

import pytest

from gateway.dialects.g0_values import MAX_MARKS, json_object
from shared.errors import BadMessage
from shared.limits import MAX_CHAT_CHARS

MANY = '{"messages": [' + "[]," * MAX_MARKS + "[]]}"


@pytest.mark.parametrize("frame", [MANY, MANY.encode(), bytearray(MANY.encode())])
def test_a_message_of_too_many_values_is_not_even_parsed(frame, monkeypatch):
    def parse(_):
        raise AssertionError("parsed")

    monkeypatch.setattr("gateway.dialects.g0_values.orjson.loads", parse)

    with pytest.raises(BadMessage, match="too many values"):
        json_object(frame)


def test_the_longest_text_and_large_media_are_no_values():
    text, media = "," * MAX_CHAT_CHARS, "A" * 3_000_000

    assert json_object(f'{{"text": "{text}", "data": "{media}", "smile": "😀"}}') == {
        "text": text,
        "data": media,
        "smile": "😀",
    }
