"""How the text of a half-duplex turn is chosen."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Final

import numpy as np

from worker.models.minicpmo45.draws import Draws
from worker.models.minicpmo45.ops import Choice
from worker.nn.sampling import Sampling

if TYPE_CHECKING:
    from worker.models.minicpmo45.half_duplex import HalfDuplexSettings
    from worker.models.minicpmo45.model import MiniCpmO45
    from worker.models.minicpmo45.tokenizer import Tokenizer

CHUNK_TOKENS: Final = 10
"""Text is emitted and spoken in chunks of so many tokens."""
PENALTY_WINDOW: Final = 128
"""Tokens of the turn, before the current chunk, that the repetition penalty looks at."""
UNSPEAKABLE: Final = (":", "#", "@", "*", "(", ")", "[", "]", "&", "/", "$")
"""Not to be chosen where the text is spoken. The original's list has full-width forms as well;
they are no single tokens, and all of them come out as `<unk>`, which is forbidden here, too."""


class Sampler:
    """How a turn's text tokens are chosen."""

    def __init__(self, model: MiniCpmO45, settings: HalfDuplexSettings, draws: Draws) -> None:
        ids = model.tokenizer.ids
        self.endings = frozenset((ids.tts_eos, ids.im_end, ids.eos_alt))
        self.said: list[int] = []
        self._draws = draws
        self._n_closed = 0
        is_spoken = settings.generate_audio and model.has_voice
        self._forbidden = unspeakable(model.tokenizer) if is_spoken else None
        self._sampling = Sampling(
            temperature=settings.temperature if settings.do_sample else 0.0,
            top_k=settings.top_k,
            top_p=settings.top_p,
            repetition_penalty=settings.repetition_penalty,
            window=PENALTY_WINDOW + CHUNK_TOKENS + 1,
            endings=tuple(sorted(self.endings)),
            length_penalty=settings.length_penalty,
        )

    def choice(self) -> Choice:
        first = max(0, self._n_closed - PENALTY_WINDOW)
        recent = np.array(self.said[first:], np.int64)
        return Choice(self._sampling, self._draws.text(), recent, self._forbidden)

    def close_chunk(self) -> None:
        # With the token that has been chosen already and begins the next chunk.
        self._n_closed = len(self.said) + 1


@lru_cache(maxsize=2)
def unspeakable(tokenizer: Tokenizer) -> frozenset[int]:
    """Return the ids that a spoken text must not contain."""
    found = (tokenizer.token_id(sign) for sign in UNSPEAKABLE)
    return tokenizer.bad_ids | {tokenizer.ids.unk} | {i for i in found if i is not None}
