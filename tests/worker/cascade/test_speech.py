import copy

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import BadMessage
from worker.models.cascade.speech import (
    FIRST_WORDS,
    LATER_WORDS,
    SAMPLE_RATE_HZ,
    SYNTHESIZE,
    PhraseSplitter,
    SynthesizeRequest,
)


def phrases(text, step=3):
    """Phrases of a text that arrives a few characters at a time."""
    splitter = PhraseSplitter()
    out = []
    for start in range(0, len(text), step):
        out += splitter.push(text[start : start + step])
    return out + splitter.flush()


WRITTEN = st.text(
    st.one_of(st.sampled_from("ab .,!?;:\n-3\"')"), st.characters(codec="utf-8")), max_size=200
)


@given(WRITTEN, st.integers(1, 9))
def test_phrases_together_are_the_text(text, step):
    assert "".join(phrases(text, step)) == text


@given(WRITTEN, st.integers(1, 9))
def test_phrases_do_not_depend_on_how_the_text_arrives(text, step):
    assert phrases(text, step) == phrases(text, max(len(text), 1))


@given(WRITTEN)
def test_phrase_is_short_enough_to_speak(text):
    counts = [len(phrase.split()) for phrase in phrases(text)]

    assert all(n <= LATER_WORDS for n in counts)
    assert counts[:1] <= [FIRST_WORDS]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Yes. It is. ", ["Yes. ", "It is. "]),
        (
            "The capital of France, as you know, is Paris. Anything else?",
            ["The capital of France, ", "as you know, is Paris. ", "Anything else?"],
        ),
        ("Well, it depends.", ["Well, it depends."]),
        ("It is 3.5 metres, or 1,000 feet.", ["It is 3.5 metres, ", "or 1,000 feet."]),
        ("Ask Dr. Smith now. Bye.", ["Ask Dr. Smith now. ", "Bye."]),
        ("I met J. K. Rowling. Bye.", ["I met J. K. Rowling. ", "Bye."]),
        ("So am I. Bye.", ["So am I. ", "Bye."]),
        ("Fruit e.g. apples. Bye.", ["Fruit e.g. apples. ", "Bye."]),
        ("See No. 5 there. Bye.", ["See No. 5 there. ", "Bye."]),
        ("1. Apples\n2. Pears", ["1. Apples\n", "2. Pears"]),
        ('"Stop!" he said. "No." Then', ['"Stop!" ', "he said. ", '"No." ', "Then"]),
        ("Hmm... Let me see.", ["Hmm... ", "Let me see."]),
        (
            "one two three four five six seven eight nine ten",
            ["one two three four five six seven eight ", "nine ten"],
        ),
    ],
)
def test_text_is_cut_where_a_speaker_would_pause(text, expected):
    assert phrases(text) == expected


def test_later_phrase_without_sentence_end_is_cut_at_its_last_clause():
    words = [f"W{n}" for n in range(30)]
    words[11] += ","

    cut = phrases("Yes. " + " ".join(words))

    assert [len(phrase.split()) for phrase in cut] == [1, 12, 18]


def test_first_phrase_comes_before_the_sentence_ends():
    splitter = PhraseSplitter()

    assert splitter.push("Once upon a time, there") == ["Once upon a time, "]


def test_flush_starts_over_with_a_short_first_phrase():
    splitter = PhraseSplitter()
    splitter.push("Yes. And then")
    splitter.flush()

    assert splitter.push("Once upon a time, there") == ["Once upon a time, "]


def test_copied_splitter_goes_its_own_way():
    splitter = PhraseSplitter()
    splitter.push("Half a ")
    saved = copy.copy(splitter)
    splitter.push("loaf. X")

    assert saved.push("mile. X") == ["Half a mile. "]


def say(model, *texts):
    return model.run(SYNTHESIZE, None, [SynthesizeRequest(text) for text in texts])


@pytest.mark.weights
def test_same_phrase_gives_the_same_samples(cascade):
    first, other, second = say(cascade, "Hello there.", "Something else.", "Hello there.")

    assert first.dtype == np.float32
    assert 0.5 < len(first) / SAMPLE_RATE_HZ < 3.0
    assert 0.05 < np.abs(first).max() <= 1.0
    assert np.array_equal(first, second)
    assert not np.array_equal(first[: len(other)], other[: len(first)])


@pytest.mark.weights
@pytest.mark.parametrize("text", ["", " \n", "…", "**", "- !"])
def test_text_with_nothing_to_say_is_silent(cascade, text):
    assert len(say(cascade, text)[0]) == 0


@pytest.mark.weights
@pytest.mark.parametrize(
    "text", ["日本語 🙂", "naïve café", "x" * 500, "1" * 60, "1/2 & 3% <b>bold</b>"]
)
def test_odd_text_does_not_fail(cascade, text):
    assert np.isfinite(say(cascade, text)[0]).all()


@pytest.mark.weights
def test_markup_is_not_spoken(cascade):
    marked, plain = say(cascade, "This is **bold**.", "This is  bold .")

    assert np.array_equal(marked, plain)


@pytest.mark.weights
def test_unknown_voice_fails_its_op_only(cascade):
    requests = [SynthesizeRequest("Hi.", voice="nobody"), SynthesizeRequest("Hi.")]

    results = cascade.run(SYNTHESIZE, None, requests)

    assert isinstance(results[0], BadMessage)
    assert len(results[1]) > 0
