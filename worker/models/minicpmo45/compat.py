"""Where this implementation may behave like the original in spite of itself.

Each field is one quirk of the original (ARCHITECTURE.md lists them with the reasons). True = as
the original does it. The defaults are ours; golden tests use `Compat.reference()`.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Compat:
    listen_settings_act_on_im_end: bool = False
    """`listen_prob_scale` and `listen_top_k` look at `<|im_end|>` instead of `<|listen|>`."""
    penalty_divides_negative_logits: bool = True
    """The text penalty divides negative logits too, which raises them. Shapes what is said."""
    turn_end_then_listen_is_silent: bool = False
    """`<|turn_eos|>` and then `<|listen|>` in one unit drops the unit's text and voice."""
    interrupt_keeps_speech_cache: bool = False
    """After a barge-in the speech head goes on from the old turn's positions."""
    voice_through_int16: bool = False
    """Samples are rounded to 16 bit on the way."""
    short_chunks_start_with_silence: bool = True
    """A non-final unit with less than one second of voice is filled up in front."""
    answer_strips_character_set: bool = False
    """Chat answers lose id 0 and all trailing characters of the set `<|tseo_>`."""
    window_registers_retokenised_text: bool = False
    """Half-duplex: a round of the window counts re-tokenised text, not what the cache holds."""

    @classmethod
    def reference(cls) -> Compat:
        """Every quirk as the original has it."""
        return cls(**{field.name: True for field in dataclasses.fields(cls)})
