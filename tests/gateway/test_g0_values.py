"""Messages as a whole: what is JSON, and how much of it one may bring."""

from __future__ import annotations

import pytest

from gateway.dialects.g0_values import MAX_MARKS, json_object, section, shown, word_of
from shared.errors import BadMessage, NotJson
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


@pytest.mark.parametrize("word", ["null", "true", "false"])
def test_an_error_names_what_came_in_the_words_of_json(word):
    """They were named as Python does: None, True, False."""
    value = json_object(f'{{"x": {word}}}')["x"]

    assert shown(value) == word
    assert word_of(value) == word
    with pytest.raises(BadMessage, match=f"got {word}$"):
        json_object(word)


@pytest.mark.parametrize("frame", ["", b"", b'{"text": "caf\xe9"}', '{"text": "\udce9"}'])
def test_a_text_that_cannot_be_decoded_is_said_to_be_so(frame):
    """It was called empty, or wrong at its first character."""
    with pytest.raises(NotJson, match=r"^not JSON: the text is empty or not valid UTF-8$"):
        json_object(frame)


def test_a_number_of_any_size_is_named():
    assert shown(10**30) == "1" + "0" * 30


def test_a_section_that_is_a_flag_is_named_so():
    with pytest.raises(BadMessage, match="^tts is true, expected an object$"):
        section({"tts": True}, "tts")
