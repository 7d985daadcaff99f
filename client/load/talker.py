"""Somebody who talks in turns: says a clip, hears the answer out, and says it again."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from client.half_duplex import HalfDuplexClient
from client.load.answers import Answers
from client.load.plan import Track
from client.paced import Sending
from shared.audio import Samples
from shared.limits import INPUT_SAMPLE_RATE_HZ

SETTLE_S = 0.5
"""Sound of a session's beginning that the server does not hear."""

ECHO_S = 0.8
"""How long a room may still ring after an answer; the microphone is off until then."""

ANSWER_LIMIT_S = 30.0
"""A question that was not answered by then is not waited for any longer."""

SIGN_OF_LIFE_EVERY = 60
"""Chunks that are not sent until one of silence says that somebody is still there: an answer may
play for longer than the server waits for a client."""


class Talker:
    """A microphone's chunks, as a page for loudspeakers sends them.

    Args:
        begin_at: when the microphone is opened, on the clock of the answers.
    """

    def __init__(
        self, session: HalfDuplexClient, track: Track, answers: Answers, begin_at: float
    ) -> None:
        self._session = session
        self._track = track
        self._answers = answers
        self._begin_at = begin_at
        self._rest: Samples | None = None
        """Of the clip that is being said."""
        self._speaks_from = begin_at + SETTLE_S

    def sendings(self, duration_s: float, chunk_s: float) -> Iterator[Sending | None]:
        """Yield what is sent of each chunk; None = nothing, an answer is being heard.

        No question is begun after `duration_s`, but each session asks once, and the last answer
        is waited for.
        """
        size = round(chunk_s * INPUT_SAMPLE_RATE_HZ)
        n_held, index = 0, 0
        while True:
            at = self._begin_at + index * chunk_s
            index += 1
            self._settle(at)
            if self._is_over(at, self._begin_at + duration_s):
                return
            if at < self._answers.played_until + ECHO_S:
                n_held += 1
                # What is left of the clip would not be heard.
                self._fall_silent(at)
                is_sign = n_held % SIGN_OF_LIFE_EVERY == 0
                silence = np.zeros(size, np.float32)
                yield partial(self._session.send_audio, silence) if is_sign else None
                continue
            n_held = 0
            yield partial(self._session.send_audio, self._next(at, size, chunk_s))

    def _settle(self, at: float) -> None:
        since = self._answers.awaited_since
        if since is not None and at - since > ANSWER_LIMIT_S:
            self._answers.give_up()

    def _is_over(self, at: float, end_at: float) -> bool:
        if self._rest is not None or self._answers.n_unanswered:
            return False
        has_asked = bool(self._answers.answers) or not self._track.speech_end_s
        return at >= end_at and has_asked

    def _next(self, at: float, size: int, chunk_s: float) -> Samples:
        is_free = self._rest is None and not self._answers.n_unanswered
        if is_free and self._track.speech_end_s and at >= self._speaks_from:
            self._rest = self._track.said
            self._answers.ask(at + self._track.speech_end_s)
        chunk = np.zeros(size, np.float32)
        if self._rest is not None:
            piece, self._rest = self._rest[:size], self._rest[size:]
            chunk[: piece.size] = piece
            if not self._rest.size:
                self._fall_silent(at + chunk_s)
        return chunk

    def _fall_silent(self, at: float) -> None:
        if self._rest is not None:
            self._rest = None
            self._speaks_from = at + self._track.pause_s
