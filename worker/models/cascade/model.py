"""The embedded back end: silero VAD -> Whisper -> SmolLM2 -> hibari, and OCR on frames.

A real conversation on a CPU without any download. This module loads the parts and runs their ops;
what a session does with them stands in `conversation.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from worker.compile.regions import compile_decode
from worker.engine.contract import Program
from worker.models.batches import one_by_one
from worker.models.cascade import conversation
from worker.models.cascade.hearing import (
    DETECT_SPEECH,
    ENCODE_SPEECH,
    TRANSCRIBE_STEP,
    SpeechDetector,
    Transcriber,
)
from worker.models.cascade.language import (
    DECODE,
    PREFILL,
    DecodeRequest,
    Language,
)
from worker.models.cascade.reading import READ_TEXT, Reader
from worker.models.cascade.speech import DEFAULT_VOICE, SYNTHESIZE, Speaker
from worker.models.cascade.weights import SILERO, WHISPER, load_smollm2, load_whisper
from worker.models.contract import Progress, Prompt, Unit
from worker.nn.sampling import Sampling

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
MAX_BATCH: Mapping[str, int] = {DECODE: 8, TRANSCRIBE_STEP: 8}
"""Of the ops that gain by it; alone, an op that fails takes no other with it."""


class CascadeModel:
    """The cascade as a `DuplexModel`. It keeps weights and caches; sessions keep their state.

    Args:
        data_dir: converted weights are kept in its `cache` folder.
        compile_regions: compile the language model's decode step.
        context_tokens: positions of every slot's language cache.
    """

    name = "cascade"
    unit_samples = UNIT_SAMPLES
    lanes = LANES
    max_batch = MAX_BATCH
    voice = DEFAULT_VOICE

    def __init__(
        self, data_dir: Path, compile_regions: bool = False, context_tokens: int = 2048
    ) -> None:
        self.context_tokens = context_tokens
        self._data_dir = data_dir
        self._compile_regions = compile_regions
        self._n_slots = 0
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
        self._n_slots = n_slots
        self.language.allocate(n_slots)
        progress(0.5, f"transcription caches of {n_slots} slots")
        self.transcriber.allocate(n_slots)
        progress(1.0, f"{n_slots} slots of {self.context_tokens} tokens")

    def apply_torch_compile(self, progress: Progress) -> str:
        """Compile the decode regions if asked to, and run them once per shape class."""
        if not self._compile_regions:
            progress(1.0, "off")
            return "off"
        n_regions = compile_decode(self.language.decoder)
        self.language.exact_rows = False
        batches = sorted({1, min(2, self._n_slots)})
        for index, n_rows in enumerate(batches):
            progress(index / len(batches), f"decode of {n_rows} rows")
            step = [DecodeRequest(slot, 0, 0, Sampling()) for slot in range(n_rows)]
            self.run(DECODE, None, step)
        progress(1.0, f"{n_regions} decode regions")
        return f"{n_regions} decode regions"

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
        conversation.end(self, state)
