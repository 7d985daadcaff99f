"""The embedded back end: silero VAD -> Whisper -> SmolLM2 -> hibari, and OCR on frames.

A real conversation on a CPU without any download. This module loads the parts and runs their ops;
what a session does with them stands in `conversation.py` (full duplex), `turns.py` and `chat.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from worker.compile.compiler import Compiler
from worker.engine.contract import Program
from worker.models.batches import one_by_one
from worker.models.cascade import chat, conversation, turns
from worker.models.cascade.hearing import (
    ENCODE_SPEECH,
    TRANSCRIBE_STEP,
    Transcriber,
)
from worker.models.cascade.language import DECODE, MAX_DECODE_ROWS, PREFILL, Language
from worker.models.cascade.reading import READ_TEXT, Reader
from worker.models.cascade.speech import DEFAULT_VOICE, SYNTHESIZE, Speaker
from worker.models.cascade.weights import WHISPER, load_smollm2, load_whisper
from worker.models.contract import ChatQuestion, Progress, Prompt, TurnPrompt, Unit
from worker.models.packages import SILERO
from worker.models.voice_activity import DETECT_SPEECH, SpeechDetector

UNIT_SAMPLES = 16_000

LANES: Mapping[str, str] = {
    PREFILL: "language",
    DECODE: "language",
    DETECT_SPEECH: "senses",
    ENCODE_SPEECH: "senses",
    TRANSCRIBE_STEP: "senses",
    SYNTHESIZE: "senses",
    READ_TEXT: "senses",
}
MAX_BATCH: Mapping[str, int] = {DECODE: MAX_DECODE_ROWS, TRANSCRIBE_STEP: 8}
"""Of the ops that gain by it; alone, an op that fails takes no other with it."""


class CascadeModel:
    """The cascade as a `DuplexModel` and a `TurnModel`, of all kinds of sessions at once.

    It keeps weights and caches; sessions keep their state.

    Args:
        data_dir: converted weights are kept in its `cache` folder.
        compiler: compiles the language model's decode step, if its plan says so.
        context_tokens: positions of every slot's language cache.
    """

    name = "cascade"
    unit_samples = UNIT_SAMPLES
    lanes = LANES
    max_batch = MAX_BATCH
    round_span_s = 0.0
    voice = DEFAULT_VOICE

    def __init__(
        self, data_dir: Path, compiler: Compiler | None = None, context_tokens: int = 2048
    ) -> None:
        self.context_tokens = context_tokens
        self.compiler = compiler or Compiler()
        self._data_dir = data_dir
        self._runners: dict[str, Callable[[Sequence[Any]], Sequence[Any]]] = {}

    # ---- start

    def load_model(self, progress: Progress) -> None:
        """Read the weights; the first start converts them (about 10 s). Raises ModelLoadError."""
        # More threads are slower here: decoding waits for memory, and spinning threads of two
        # lanes on two cores made a step ten times as long.
        torch.set_num_threads(1)
        progress(0.0, "SmolLM2")
        self.language = Language(load_smollm2(self._data_dir), self.context_tokens)
        progress(0.6, "Whisper tiny.en")
        self.transcriber = Transcriber(
            load_whisper(self._data_dir), WHISPER.locate("model/config.json")
        )
        progress(0.7, "silero VAD")
        detector = SpeechDetector(SILERO.locate())
        progress(0.75, "hibari TTS")
        speaker = Speaker()
        progress(0.9, "rapidocr")
        reader = Reader()
        language, transcriber = self.language, self.transcriber
        self._runners = {
            PREFILL: one_by_one(language.prefill),
            DECODE: language.decode,
            DETECT_SPEECH: one_by_one(detector.detect),
            ENCODE_SPEECH: one_by_one(transcriber.encode),
            TRANSCRIBE_STEP: transcriber.step,
            SYNTHESIZE: one_by_one(speaker.synthesize),
            READ_TEXT: one_by_one(reader.read),
        }
        progress(1.0, "all weights in memory")

    def init_unified(self, n_slots: int, progress: Progress) -> None:
        """Allocate the caches of `n_slots` sessions."""
        progress(0.0, f"language caches of {n_slots} slots")
        self.compiler.prepare(torch.device("cpu"))
        self.language.allocate(n_slots, self.compiler)
        progress(0.5, f"transcription caches of {n_slots} slots")
        self.transcriber.allocate(n_slots)
        progress(1.0, f"{n_slots} slots of {self.context_tokens} tokens")

    def apply_torch_compile(self, progress: Progress) -> str:
        """Compile the decode step, if the configuration asks for it; returns a note."""
        return self.compiler.compile(progress)

    # ---- ops

    @torch.inference_mode()
    def run(self, kind: str, bucket: Hashable, payloads: Sequence[Any]) -> Sequence[Any]:
        """Run one batch of ops; one result per payload, errors of single ops among them."""
        return self._runners[kind](payloads)

    def poison_slot(self, slot: int) -> None:
        """Make everything that the slot holds unreadable; the next session writes over it."""
        with torch.inference_mode():
            self.language.cache.poison(slot)
            self.transcriber.cache.poison(slot)

    # ---- sessions

    def new_state(self, slot: int) -> Any:
        return conversation.new_state(self, slot)

    def prepare(self, state: Any, prompt: Prompt) -> Program:
        return conversation.prepare(self, state, prompt)

    def unit(self, state: Any, unit: Unit) -> Program:
        return conversation.unit(self, state, unit)

    def interrupt(self, state: Any) -> None:
        conversation.interrupt(state)

    def end(self, state: Any) -> None:
        self.poison_slot(state.slot)

    # ---- turns and chat

    def chat_state(self, slot: int) -> Any:
        return chat.new_state(slot)

    def chat(self, state: Any, question: ChatQuestion) -> Program:
        return chat.chat(self, state, question)

    def turn_state(self, slot: int) -> Any:
        return turns.new_state(slot)

    def prepare_turns(self, state: Any, prompt: TurnPrompt) -> Program:
        return turns.prepare(self, state, prompt)

    def detect_speech(self, state: Any, samples: NDArray[np.float32]) -> Program:
        return turns.detect_speech(state, samples)

    def turn(self, state: Any, samples: NDArray[np.float32]) -> Program:
        return turns.turn(self, state, samples)
