"""What the cascade says: phrases out of streaming text, and speech out of phrases (hibari TTS)."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shared.errors import BadMessage
from worker.models.cascade.weights import HIBARI

log = logging.getLogger(__name__)

SYNTHESIZE = "synthesize"
SAMPLE_RATE_HZ = 24_000
DEFAULT_VOICE = "heart"
"""The voice inside of the package; the others would have to be downloaded."""
NOISE_SEED = 0
"""Of the noise in unvoiced sounds: the same phrase always gives the same samples."""

# ---- phrases

FIRST_WORDS = 8
"""Longest first phrase: the sooner it ends, the sooner something is heard."""
LATER_WORDS = 20
MIN_CLAUSE_WORDS = 3
"""A shorter first clause ("Well,") would be over before the next phrase is ready."""

_WORD = re.compile(r"(\S+)(\s+)(?=(\S))")
_CLOSING = "\"'”’)]}*_"
_CLAUSE_ENDS = (",", ";", ":", "—", "–")
_ABBREVIATIONS = frozenset(
    ("dr", "mr", "mrs", "ms", "prof", "st", "sr", "jr", "vs", "etc", "e.g", "i.e", "approx", "est")
    + ("capt", "col", "gen", "gov", "lt", "sen", "rep", "rev", "inc", "ltd", "co", "corp", "fig")
)


class PhraseSplitter:
    """Cuts streaming text into phrases that can be spoken one after the other.

    The first phrase is short: it ends with the first sentence or clause, or after `FIRST_WORDS`
    words. Later ones are sentences, or at most `LATER_WORDS` words. Nothing is lost: the phrases
    of `push` and `flush` together are the text. Copy it with `copy.copy`.
    """

    def __init__(self) -> None:
        self._rest = ""
        self._is_first = True

    def push(self, delta: str) -> list[str]:
        """Take the next piece of text; return the phrases that are complete now."""
        self._rest += delta
        phrases = []
        while (cut := find_cut(self._rest, self._is_first)) is not None:
            phrases.append(self._rest[:cut])
            self._rest = self._rest[cut:]
            self._is_first = False
        return phrases

    def flush(self) -> list[str]:
        """Return what is left at the end of a turn, and start over."""
        rest, self._rest, self._is_first = self._rest, "", True
        return [rest] if rest else []


def find_cut(text: str, is_first: bool) -> int | None:
    """Return where the first phrase of the text ends, its white space included; None = not yet.

    A word counts when the next one has begun: before that "3." may still become "3.5".
    """
    clause = None
    for n_words, match in enumerate(_WORD.finditer(text), start=1):
        word, gap, following = match.groups()
        if "\n" in gap or ends_sentence(word, following, is_leading=n_words == 1):
            return match.end()
        if word.endswith(_CLAUSE_ENDS):
            clause = match.end()
            if is_first and n_words >= MIN_CLAUSE_WORDS:
                return clause
        if n_words == (FIRST_WORDS if is_first else LATER_WORDS):
            return clause or match.end()
    return None


def ends_sentence(word: str, following: str, is_leading: bool) -> bool:
    """Say whether a word closes a sentence.

    Args:
        following: first character of the next word.
        is_leading: the word opens its phrase, so "1." numbers a list.
    """
    bare = word.rstrip(_CLOSING)
    if bare.endswith(("!", "?", "…", "..")):
        return True
    if not bare.endswith(".") or following.islower():
        return False
    stem = bare[:-1].lstrip("\"'“‘([{*_")
    is_initial = len(stem) == 1 and stem.isupper() and stem != "I"
    is_list_number = is_leading and stem.isdecimal()
    is_number_word = stem.lower() == "no" and following.isdigit()
    return not (stem.lower() in _ABBREVIATIONS or is_initial or is_list_number or is_number_word)


# ---- speech


@dataclass(frozen=True, slots=True)
class SynthesizeRequest:
    """Result of the op: float32 24 kHz samples, empty when the text has nothing to say."""

    text: str
    voice: str = DEFAULT_VOICE


_MARKUP = re.compile(r"[*_`#~|<>\\]+")


class Speaker:
    """hibari: one network call per sentence, about 15 ms for a second of speech."""

    def __init__(self) -> None:
        HIBARI.locate()
        # Imported here, so that a missing package is a ModelLoadError with the way to install it.
        from hibari import Hibari  # noqa: PLC0415

        self._voice = Hibari(voice=DEFAULT_VOICE, threads=1)
        self._voice("Ready.")  # loads the pronunciation tables too

    def synthesize(self, request: SynthesizeRequest) -> NDArray[np.float32]:
        """Return the phrase as speech.

        Raises:
            BadMessage: the voice is not in the package.
        """
        if request.voice != DEFAULT_VOICE:
            raise BadMessage(f"voice is {request.voice!r}, the shipped one is {DEFAULT_VOICE!r}")
        text = _MARKUP.sub(" ", request.text)
        if not any(char.isalnum() for char in text):
            return np.zeros(0, np.float32)
        try:
            return np.asarray(self._voice(text, seed=NOISE_SEED), np.float32)
        except IndexError:
            # Numbers of more than about 40 digits are beyond its tables.
            log.warning("phrase cannot be spoken n_chars=%d", len(text))
            return np.zeros(0, np.float32)
