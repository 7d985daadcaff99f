"""MiniCPM-o 4.5 as a `DuplexModel` and a `TurnModel`: parts, caches, and the runner of its ops.

What a session does with the ops stands in `duplex.py`, `half_duplex.py` and `chat.py` (the latter
two as the contract has them: `turns.py`); how weights come into memory in `weights.py` and
`token2wav.py`. One model serves all modes at once: a mode is a program on a slot.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from shared.config import Compat
from shared.errors import EngineFault, ModelLoadError, VoiceUnavailable
from worker.compile.compiler import Compiler
from worker.engine.contract import Op, Program
from worker.models.batches import one_by_one
from worker.models.contract import ChatQuestion, Progress, Prompt, TurnPrompt, Unit
from worker.models.minicpmo45 import chat, duplex, half_duplex, ops, turns, voice_stages
from worker.models.minicpmo45.language import Language
from worker.models.minicpmo45.language_stages import MOST_FEEDS, MOST_STEPS
from worker.models.minicpmo45.loading import Loaded
from worker.models.minicpmo45.moving import Mover
from worker.models.minicpmo45.ops import PreparedInput, Spoken
from worker.models.minicpmo45.senses import Senses
from worker.models.minicpmo45.speech_stages import SpeechStages
from worker.models.minicpmo45.window import WindowSettings
from worker.models.packages import SILERO
from worker.models.voice_activity import DETECT_SPEECH, SpeechDetector
from worker.nn.code_sampling import CodeSampling
from worker.nn.decoder import KvCache
from worker.nn.mel import clip_mel
from worker.nn.speech import SpeechRequest

log = logging.getLogger(__name__)

UNIT_SAMPLES = 16_000
MAX_VOICE_FRAMES = 500
"""Of a reference voice: 10 s at 50 Hz; longer ones are cut. A slot holds 0.65 MB a frame."""

HOST = "host"
LANGUAGE = "language"
LANES: Mapping[str, str] = {
    ops.PREPARE_INPUT: HOST,
    ops.PREPARE_VOICE: HOST,
    DETECT_SPEECH: HOST,
    ops.ENCODE_IMAGES: LANGUAGE,
    ops.ENCODE_AUDIO: LANGUAGE,
    ops.ENCODE_CLIP: LANGUAGE,
    ops.PREFILL: LANGUAGE,
    ops.DECODE: LANGUAGE,
    ops.SPEAK: LANGUAGE,
    ops.SET_VOICE: LANGUAGE,
    ops.START_TURN: LANGUAGE,
    ops.VOCODE: LANGUAGE,
    ops.MOVE: LANGUAGE,
}
MAX_BATCH: Mapping[str, int] = {
    ops.ENCODE_AUDIO: 32,
    ops.PREFILL: MOST_FEEDS,
    ops.DECODE: MOST_STEPS,
    ops.SPEAK: 32,
    ops.VOCODE: voice_stages.MOST_ROWS,
}
"""Of the ops that gain by it; the others run one by one."""
ROUND_SPAN_S = 1.0
"""All live units are due within a second of each other; chat, which has no deadline, yields."""


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """What a configuration decides about the model besides its weights."""

    window: WindowSettings = field(default_factory=WindowSettings)
    compat: Compat = field(default_factory=Compat)
    n_speech_positions: int = 2048
    """Of a slot's speech cache: 45 s of uninterrupted speech, then its older half goes."""


@contextmanager
def enough_memory(purpose: str) -> Iterator[None]:
    """Turn a failed allocation into a ModelLoadError that says what it was for."""
    try:
        yield
    except RuntimeError as error:
        # A CPU's allocator has no error class of its own.
        if isinstance(error, torch.OutOfMemoryError) or "allocate memory" in str(error):
            raise ModelLoadError(f"there is not enough memory {purpose}") from error
        raise


class MiniCpmO45:
    """The model of all modes. It keeps weights and caches; sessions keep their state.

    Args:
        load: makes the parts; called in the `load_model` stage.
    """

    name = "minicpmo45"
    unit_samples = UNIT_SAMPLES
    lanes = LANES
    max_batch = MAX_BATCH
    round_span_s = ROUND_SPAN_S

    def __init__(
        self,
        load: Callable[[Progress], Loaded],
        options: ModelOptions = ModelOptions(),
        clock: Callable[[], float] = time.monotonic,
        compiler: Compiler | None = None,
    ) -> None:
        self.clock = clock
        self.compiler = compiler or Compiler()
        self.compat = options.compat
        self.window = options.window
        self.n_speech_positions = options.n_speech_positions
        self._load = load
        self._runners: dict[str, Callable[[Sequence[Any]], Sequence[Any]]] = {}

    # ---- start

    def load_model(self, progress: Progress) -> None:
        """Read the weights. Raises ModelLoadError."""
        # What is small is read first: whatever is wrong with it is known at once.
        self._detector = SpeechDetector(SILERO.locate())
        with enough_memory("for the weights of the model"):
            loaded = self._load(progress)
        self.config = loaded.config
        self.tokenizer = loaded.tokenizer
        self.parts = loaded.parts
        self.token2wav = loaded.token2wav
        self.voice_encoder = loaded.voice_encoder
        self.default_heard: NDArray[np.float32] = loaded.default_heard
        """16 kHz sample of the default voice, heard by the language model; may be empty."""
        self._default_features = loaded.default_voice
        self.device, self.dtype = loaded.device, loaded.dtype
        n_trained = self.config.max_positions
        if self.n_positions > n_trained:
            log.warning("context n_positions=%d n_trained=%d", self.n_positions, n_trained)

    @torch.inference_mode()
    def init_unified(self, n_slots: int, progress: Progress) -> None:
        """Allocate the caches of `n_slots` sessions. Raises ModelLoadError if memory is short."""
        progress(0.0, f"caches of {n_slots} slots")
        self.compiler.prepare(self.device)
        too_many = f"for {n_slots} slots: set service.sessions_per_worker to a lower number"
        with enough_memory(too_many):
            self._allocate(n_slots, progress)
        self._runners = self._all_runners()
        note = f"{n_slots} slots of {self.n_positions} positions"
        if self.device.type == "cuda":
            gib = torch.cuda.memory_allocated(self.device) / 2**30
            note += f", {gib:.1f} GiB of tensors"
        progress(1.0, note)

    def _allocate(self, n_slots: int, progress: Progress) -> None:
        dtype, device = self.dtype, self.device
        self.language = Language(
            self.parts.llm, self.tokenizer, self.compat, n_slots, self.n_positions, self.compiler
        )
        self.senses = Senses(
            self.parts.vision, self.parts.audio, self.config.slices, n_slots, self.compiler
        )
        self.audio_cache = self.senses.cache
        self.default_voice: Any = None
        self.speech_stages: SpeechStages | None = None
        if self.token2wav is not None:
            progress(0.5, "voice")
            self.speech_cache = KvCache.allocate(
                self.config.speech.decoder, n_slots, self.n_speech_positions, dtype, device
            )
            theta = self.config.speech.decoder.rope_theta
            self.speech_mover = Mover("tts.move", self.speech_cache, theta, self.compiler)
            if self.uses_stages:
                n_rows = min(n_slots, MAX_BATCH[ops.SPEAK])
                self.speech_stages = SpeechStages(
                    self.parts.speech, self.speech_cache, self.compiler, n_rows
                )
            self.token2wav.allocate(n_slots, MAX_VOICE_FRAMES)
            self.token2wav.declare(self.compiler)
            self.default_voice = self.token2wav.set_voice(self._default_features)

    def apply_torch_compile(self, progress: Progress) -> str:
        """Compile what the parts have declared; returns a note."""
        return self.compiler.compile(progress)

    # ---- what programs ask about

    @property
    def uses_stages(self) -> bool:
        return self.compiler.uses_stages(self.device)

    @property
    def n_positions(self) -> int:
        """Size of every slot's context."""
        return self.window.n_positions

    @property
    def has_voice(self) -> bool:
        return self.token2wav is not None

    @property
    def can_learn_voices(self) -> bool:
        """Whether clients can bring a voice."""
        return self.has_voice and self.voice_encoder is not None

    @property
    def n_image_tokens(self) -> int:
        """Rows of one image slice."""
        return self.config.resampler.n_queries

    @property
    def code_sampling(self) -> CodeSampling:
        """How a unit's speech tokens are drawn."""
        return self.config.speech.unit_sampling()

    @property
    def voice_name(self) -> str:
        """Of the default voice, as clients are told."""
        if not self.has_voice:
            return ""
        # Without an encoder nothing could be learnt of the sample that the language model hears.
        return "default" if self.default_heard.size and self.voice_encoder else "neutral"

    def learn_voice(self, samples: NDArray[np.float32] | None, deadline: float) -> Program:
        """Program that makes a voice of 16 kHz samples; None = the default voice.

        Raises:
            VoiceUnavailable: the files that encode voices are missing.
        """
        if self.token2wav is None:
            return None
        if samples is None:
            return self.default_voice
        if self.voice_encoder is None:
            raise VoiceUnavailable(
                "this server has no voice encoder (campplus.onnx, speech_tokenizer_v2_25hz.onnx): "
                "leave the reference voice away to get the default one"
            )
        features = yield Op(ops.PREPARE_VOICE, ops.VoiceRequest(samples), deadline=deadline)
        return (yield Op(ops.SET_VOICE, features, deadline=deadline))

    # ---- ops

    @torch.inference_mode()
    def run(self, kind: str, bucket: Hashable, payloads: Sequence[Any]) -> Sequence[Any]:
        """Run one batch of ops; one result per payload, errors of single ops among them.

        Raises:
            EngineFault: the accelerator has failed, and what it holds is lost.
        """
        try:
            return self._runners[kind](payloads)
        except torch.AcceleratorError as error:
            raise EngineFault(f"the accelerator failed in {kind}") from error

    def _all_runners(self) -> dict[str, Callable[[Sequence[Any]], Sequence[Any]]]:
        return {
            ops.PREPARE_INPUT: one_by_one(self._prepare_input),
            ops.PREPARE_VOICE: one_by_one(self._prepare_voice),
            DETECT_SPEECH: one_by_one(self._detector.detect),
            ops.ENCODE_IMAGES: self.senses.encode_images,
            ops.ENCODE_AUDIO: self.senses.encode_audio,
            ops.ENCODE_CLIP: one_by_one(self._encode_clip),
            ops.PREFILL: self.language.prefill,
            ops.DECODE: self.language.decode,
            ops.SPEAK: self._speak,
            ops.SET_VOICE: one_by_one(self._set_voice),
            ops.START_TURN: one_by_one(self._start_turn),
            ops.VOCODE: self._vocode,
            ops.MOVE: one_by_one(self._move),
        }

    def _prepare_input(self, request: ops.InputRequest) -> PreparedInput:
        # Pictures first: a bad one leaves the sound's state as it was.
        slices = tuple(
            self.senses.slice(frame, limit)
            for frame, limit in zip(request.frames, request.max_slice_nums, strict=True)
        )
        if request.mel is None or request.samples is None:
            return PreparedInput(None, slices)
        return PreparedInput(request.mel.push(request.samples), slices)

    def _prepare_voice(self, request: ops.VoiceRequest) -> Any:
        assert self.voice_encoder is not None
        return self.voice_encoder.encode(request.samples)

    def _encode_clip(self, request: ops.ClipRequest) -> Tensor:
        mel, lens = clip_mel(request.samples)
        n_missing = max(0, request.padded_frames - mel.shape[2])
        return self.parts.audio.encode_clip(
            functional.pad(mel, (0, n_missing)).to(self.device),
            lens,
            request.is_chunked,
            hears_padding=request.padded_frames > 0 or self.compat.long_clips_hear_padding,
        )

    def _speak(self, requests: Sequence[SpeechRequest]) -> list[Spoken]:
        if self.speech_stages is not None:
            spoken = self.speech_stages.speak(requests)
        else:
            spoken = self.parts.speech.speak(self.speech_cache, requests)
        return [Spoken(codes, has_ended) for codes, has_ended in spoken]

    def _set_voice(self, features: Any) -> Any:
        assert self.token2wav is not None
        return self.token2wav.set_voice(features)

    def _start_turn(self, request: ops.TurnRequest) -> None:
        assert self.token2wav is not None
        self.token2wav.start_turn([request.slot], request.voice)

    def _vocode(self, requests: Sequence[ops.VocodeRequest]) -> Sequence[NDArray[np.float32]]:
        assert self.token2wav is not None
        return self.token2wav.stream(
            [request.slot for request in requests],
            [request.codes for request in requests],
            requests[0].is_last,
        )

    def _move(self, request: ops.MoveRequest) -> None:
        if request.cache == "context":
            self.language.move(request)
        else:
            self.speech_mover.move(request)

    # ---- sessions

    def new_state(self, slot: int) -> Any:
        return duplex.new_state(self, slot, seed=secrets.randbits(63))

    def talkative_state(self, slot: int) -> Any:
        return duplex.talkative_state(self, slot)

    def prepare(self, state: Any, prompt: Prompt) -> Program:
        return duplex.prepare(self, state, prompt)

    def unit(self, state: Any, unit: Unit) -> Program:
        return duplex.unit(self, state, unit)

    def interrupt(self, state: Any) -> None:
        duplex.interrupt(state)

    def chat_state(self, slot: int) -> Any:
        return chat.new_state(slot, seed=secrets.randbits(63))

    def chat(self, state: Any, question: ChatQuestion) -> Program:
        return turns.answer(self, state, question)

    def turn_state(self, slot: int) -> Any:
        return half_duplex.new_state(slot, seed=secrets.randbits(63))

    def prepare_turns(self, state: Any, prompt: TurnPrompt) -> Program:
        return turns.prepare(self, state, prompt)

    def detect_speech(self, state: Any, samples: NDArray[np.float32]) -> Program:
        return turns.detect_speech(self, state, samples)

    def turn(self, state: Any, samples: NDArray[np.float32]) -> Program:
        return turns.turn(self, state, samples)

    def end(self, state: Any) -> None:
        """Forget the session: nothing of it can be read any more."""
        state.voice = None
        self.poison_slot(state.slot)

    @torch.inference_mode()
    def poison_slot(self, slot: int) -> None:
        """Make everything that the slot holds unreadable: whoever still looks at it gets NaN."""
        self.language.poison(slot)
        self.senses.poison(slot)
        if self.token2wav is not None:
            self.speech_cache.poison(slot)
            self.token2wav.poison(slot)
