"""MiniCPM-o 4.5 as a `DuplexModel`: its parts, its caches, and the runner of its ops.

What a session does with the ops stands in `duplex.py`, `half_duplex.py` and `chat.py`; how
weights come into memory in `weights.py` and `token2wav.py`. One model serves all modes at once:
a mode is a program on a slot.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from shared.config import Compat
from shared.errors import OmniError, VoiceUnavailable
from worker.engine.contract import Op, Program
from worker.models.contract import Progress, Prompt, Unit
from worker.models.minicpmo45 import duplex, ops
from worker.models.minicpmo45.images import slice_image
from worker.models.minicpmo45.loading import Loaded
from worker.models.minicpmo45.ops import Choice, Fed, Feed, PreparedInput, Spoken, Step
from worker.models.minicpmo45.window import WindowSettings
from worker.nn.audio_encoder import AudioCache
from worker.nn.code_sampling import CodeSampling
from worker.nn.decoder import KvCache, Rows
from worker.nn.mel import clip_mel
from worker.nn.sampling import sample
from worker.nn.speech import SpeechRequest
from worker.nn.text_sampling import DuplexSampling, DuplexVocabulary, decide

UNIT_SAMPLES = 16_000
SPAN_STEP = 256
"""On an accelerator attention looks this much further than it has to, so that few shapes occur."""

MAX_VOICE_FRAMES = 500
"""Of a reference voice: 10 s at 50 Hz; longer ones are cut. A slot holds 0.65 MB a frame."""

HOST = "host"
LANGUAGE = "language"
LANES: Mapping[str, str] = {
    ops.PREPARE_INPUT: HOST,
    ops.PREPARE_VOICE: HOST,
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
    ops.PREFILL: 8,
    ops.DECODE: 64,
    ops.SPEAK: 32,
    ops.VOCODE: 32,
}
"""Of the ops that gain by it; the others run one by one."""


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """What a configuration decides about the model besides its weights."""

    window: WindowSettings = field(default_factory=WindowSettings)
    compat: Compat = field(default_factory=Compat)
    n_speech_positions: int = 2048
    """Of a slot's speech cache: 45 s of uninterrupted speech, then its older half goes."""


class MiniCpmO45:
    """The model of all modes. It keeps weights and caches; sessions keep their state.

    Args:
        load: makes the parts; called in the `load_model` stage.
    """

    name = "minicpmo45"
    unit_samples = UNIT_SAMPLES
    lanes = LANES
    max_batch = MAX_BATCH

    def __init__(
        self,
        load: Callable[[Progress], Loaded],
        options: ModelOptions = ModelOptions(),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.clock = clock
        self.compat = options.compat
        self.window = options.window
        self.n_speech_positions = options.n_speech_positions
        self._load = load
        self._runners: dict[str, Callable[[Sequence[Any]], Sequence[Any]]] = {}
        self._id_sets: dict[frozenset[int], Tensor] = {}

    # ---- start

    def load_model(self, progress: Progress) -> None:
        """Read the weights. Raises ModelLoadError."""
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
        ids = self.tokenizer.ids
        self._vocabulary = DuplexVocabulary.build(
            self.config.llm.vocab_size,
            tuple(self.tokenizer.bad_ids),
            tts_pad=ids.tts_pad,
            chunk_eos=ids.chunk_eos,
            turn_eos=ids.turn_eos,
            listen=ids.listen,
            im_end=ids.im_end,
            device=self.device,
        )

    @torch.inference_mode()
    def init_unified(self, n_slots: int, progress: Progress) -> None:
        """Allocate the caches of `n_slots` sessions."""
        progress(0.0, f"caches of {n_slots} slots")
        where = {"dtype": self.dtype, "device": self.device}
        llm, speech = self.config.llm, self.config.speech
        self.context = KvCache.allocate(llm, n_slots, self.n_positions, **where)
        self.audio_cache = AudioCache.allocate(self.config.audio, n_slots, **where)
        self.logits = torch.zeros(n_slots, llm.vocab_size, device=self.device)
        """Of each slot's last fed row, fp32 `[slots, V]`."""
        self.default_voice: Any = None
        if self.token2wav is not None:
            progress(0.5, "voice")
            self.speech_cache = KvCache.allocate(
                speech.decoder, n_slots, self.n_speech_positions, **where
            )
            self.token2wav.allocate(n_slots, MAX_VOICE_FRAMES)
            self.default_voice = self.token2wav.set_voice(self._default_features)
        self._runners = self._all_runners()
        progress(1.0, f"{n_slots} slots of {self.n_positions} positions")

    def apply_torch_compile(self, progress: Progress) -> str:
        """Say that nothing is compiled."""
        progress(1.0, "off")
        return "off"

    # ---- what programs ask about

    @property
    def n_positions(self) -> int:
        """Size of every slot's context."""
        return self.window.n_positions

    @property
    def has_voice(self) -> bool:
        return self.token2wav is not None

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
        if not self.has_voice:
            return ""
        return "default" if self.default_heard.size else "neutral"

    def learn_voice(self, samples: NDArray[np.float32] | None) -> Program:
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
        features = yield Op(ops.PREPARE_VOICE, ops.VoiceRequest(samples), deadline=self.clock())
        return (yield Op(ops.SET_VOICE, features, deadline=self.clock()))

    # ---- ops

    @torch.inference_mode()
    def run(self, kind: str, bucket: Hashable, payloads: Sequence[Any]) -> Sequence[Any]:
        """Run one batch of ops; one result per payload, errors of single ops among them."""
        return self._runners[kind](payloads)

    def _all_runners(self) -> dict[str, Callable[[Sequence[Any]], Sequence[Any]]]:
        return {
            ops.PREPARE_INPUT: one_by_one(self._prepare_input),
            ops.PREPARE_VOICE: one_by_one(self._prepare_voice),
            ops.ENCODE_IMAGES: one_by_one(self.parts.vision.encode),
            ops.ENCODE_AUDIO: self._encode_audio,
            ops.ENCODE_CLIP: one_by_one(self._encode_clip),
            ops.PREFILL: self._prefill,
            ops.DECODE: self._decode,
            ops.SPEAK: self._speak,
            ops.SET_VOICE: one_by_one(self._set_voice),
            ops.START_TURN: one_by_one(self._start_turn),
            ops.VOCODE: self._vocode,
            ops.MOVE: one_by_one(self._move),
        }

    def _prepare_input(self, request: ops.InputRequest) -> PreparedInput:
        # Pictures first: a bad one leaves the sound's state as it was.
        slices = tuple(
            slice_image(frame, limit, self.config.slices).slices
            for frame, limit in zip(request.frames, request.max_slice_nums, strict=True)
        )
        mel = None if request.samples is None else request.mel.push(request.samples)
        return PreparedInput(mel, slices)

    def _prepare_voice(self, request: ops.VoiceRequest) -> Any:
        assert self.voice_encoder is not None
        return self.voice_encoder.encode(request.samples)

    def _encode_audio(self, requests: Sequence[ops.AudioRequest]) -> list[Tensor]:
        mel = torch.stack([request.mel for request in requests]).to(self.device)
        is_first = requests[0].is_first
        slots = tuple(request.slot for request in requests)
        n_new = self.config.audio.stream_frames(mel.shape[-1], is_first)
        reach = self._reach(slots, tuple(request.past + n_new for request in requests))
        encoded = self.parts.audio.stream(
            self.audio_cache,
            mel,
            self._ints(slots),
            self._ints([request.past for request in requests]),
            is_first,
            reach if isinstance(reach, Rows) else min(reach, self.config.audio.max_positions),
        )
        return list(encoded)

    def _encode_clip(self, request: ops.ClipRequest) -> Tensor:
        mel, lens = clip_mel(request.samples)
        n_missing = max(0, request.padded_frames - mel.shape[2])
        return self.parts.audio.encode_clip(
            functional.pad(mel, (0, n_missing)).to(self.device),
            lens,
            request.is_chunked,
            hears_padding=request.padded_frames > 0,
        )

    def _prefill(self, requests: Sequence[Feed]) -> Sequence[Fed | Exception]:
        if self.device.type == "cpu":
            return [fed for request in requests for fed in self._feed([request])]
        width = max(request.n_rows for request in requests)
        if not requests[0].is_inside:
            width = max(int(request.bucket) for request in requests)  # type: ignore[call-overload]
        if any(request.start + width > self.n_positions for request in requests):
            # No room for padding behind one of them: each alone, without any.
            return [fed for request in requests for fed in self._feed([request])]
        return self._feed(requests, width)

    def _feed(self, requests: Sequence[Feed], width: int | None = None) -> list[Fed]:
        """Feed rows of several slots, padded to a width."""
        counts = [request.n_rows for request in requests]
        width = width or max(counts)
        x = torch.stack([self._rows(request, width) for request in requests])  # [B, N, D]
        starts = self._ints([request.start for request in requests])
        positions = starts[:, None] + torch.arange(width, device=self.device)
        slots = tuple(request.slot for request in requests)
        ends = tuple(request.start + width for request in requests)
        hidden = self.parts.llm.feed(
            self.context, x, self._ints(slots), positions, self._reach(slots, ends)
        )
        last = hidden[torch.arange(len(requests), device=self.device), self._ints(counts) - 1]
        return self._fed(last, slots, [request.choice for request in requests])

    def _rows(self, request: Feed, width: int) -> Tensor:
        """Embeddings of a request's rows, `[N, D]`, zeros behind them."""
        llm = self.parts.llm
        parts = [
            piece.to(self.dtype) if isinstance(piece, Tensor) else llm.embed(self._ints(piece))
            for piece in request.pieces
        ]
        n_missing = width - request.n_rows
        if n_missing:
            parts.append(parts[0].new_zeros(n_missing, self.config.llm.hidden_size))
        return torch.cat(parts)

    def _decode(self, requests: Sequence[Step]) -> Sequence[Fed | Exception]:
        slots = tuple(request.slot for request in requests)
        starts = tuple(request.start for request in requests)
        hidden = self.parts.llm.decode(
            self.context,
            self._ints([request.token for request in requests]),
            self._ints(slots),
            self._ints(starts),
            self._reach(slots, tuple(start + 1 for start in starts)),
        )
        return self._fed(hidden, slots, [request.choice for request in requests])

    def _fed(
        self, hidden: Tensor, slots: Sequence[int], choices: Sequence[Choice | None]
    ) -> list[Fed]:
        """Logits of the last rows `[B, D]`, and what is chosen from them: one read-back."""
        logits = self.parts.llm.head(hidden).float()  # [B, V]
        self.logits[self._ints(slots)] = logits
        tokens: list[int | None] = [None] * len(choices)
        duplex_rows = [
            row for row, c in enumerate(choices) if c and isinstance(c.sampling, DuplexSampling)
        ]
        text_rows = [
            row for row, c in enumerate(choices) if c and not isinstance(c.sampling, DuplexSampling)
        ]
        chosen: list[Tensor] = []
        if duplex_rows:
            chosen.append(self._decided(logits, choices, duplex_rows))
        if text_rows:
            chosen.append(self._sampled(logits, choices, text_rows))
        if chosen:
            ids = torch.cat(chosen).tolist()
            for row, token in zip([*duplex_rows, *text_rows], ids, strict=True):
                tokens[row] = token
        return [Fed(token, state) for token, state in zip(tokens, hidden, strict=True)]

    def _decided(
        self, logits: Tensor, choices: Sequence[Choice | None], rows: Sequence[int]
    ) -> Tensor:
        taken = [choice for choice in (choices[row] for row in rows) if choice is not None]
        return decide(
            logits[self._ints(rows)],
            [choice.sampling for choice in taken if isinstance(choice.sampling, DuplexSampling)],
            [choice.recent for choice in taken],
            [choice.draws for choice in taken],
            self._vocabulary,
            listen_is_im_end=self.compat.listen_settings_act_on_im_end,
            divide_negative=self.compat.penalty_divides_negative_logits,
        )

    def _sampled(
        self, logits: Tensor, choices: Sequence[Choice | None], rows: Sequence[int]
    ) -> Tensor:
        taken = [choice for choice in (choices[row] for row in rows) if choice is not None]
        logits = logits[self._ints(rows)]
        for row, choice in enumerate(taken):
            if choice.forbidden:
                logits[row, self._forbidden(choice.forbidden)] = -torch.inf
        return sample(
            logits,
            [choice.sampling for choice in taken],  # type: ignore[misc]
            [choice.recent.tolist() for choice in taken],
            [choice.draws[1] for choice in taken],
        )

    def _forbidden(self, ids: frozenset[int]) -> Tensor:
        """Ids as a tensor, which is kept: the programs know two such sets, thousands of ids."""
        if ids not in self._id_sets:
            self._id_sets[ids] = self._ints(sorted(ids))
        return self._id_sets[ids]

    def _speak(self, requests: Sequence[SpeechRequest]) -> list[Spoken]:
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
        cache, config = self.context, self.config.llm
        if request.cache == "speech":
            cache, config = self.speech_cache, self.config.speech.decoder
        cache.move(
            request.slot, request.start, request.end, request.target, theta=config.rope_theta
        )

    def _reach(self, slots: tuple[int, ...], ends: tuple[int, ...]) -> Rows | int:
        if self.device.type == "cpu":
            return Rows(slots, ends)
        return min(-(-max(ends) // SPAN_STEP) * SPAN_STEP, self.n_positions)

    def _ints(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)

    # ---- sessions

    def new_state(self, slot: int) -> Any:
        return duplex.new_state(self, slot, seed=secrets.randbits(63))

    def prepare(self, state: Any, prompt: Prompt) -> Program:
        return duplex.prepare(self, state, prompt)

    def unit(self, state: Any, unit: Unit) -> Program:
        return duplex.unit(self, state, unit)

    def interrupt(self, state: Any) -> None:
        duplex.interrupt(state)

    def end(self, state: Any) -> None:
        """Forget the session; what its caches hold is overwritten before anybody looks at it."""
        state.voice = None

    @torch.inference_mode()
    def poison_slot(self, slot: int) -> None:
        """Make everything that the slot holds unreadable: whoever still looks at it gets NaN."""
        self.context.poison(slot)
        self.audio_cache.poison(slot)
        self.logits[slot] = torch.nan
        if self.token2wav is not None:
            self.speech_cache.poison(slot)
            self.token2wav.poison(slot)


def one_by_one(runner: Callable[[Any], Any]) -> Callable[[Sequence[Any]], list[Any]]:
    """Return a batch runner that runs each op alone; an op's expected error is its result."""

    def run(payloads: Sequence[Any]) -> list[Any]:
        results: list[Any] = []
        for payload in payloads:
            try:
                results.append(runner(payload))
            except (ValueError, OmniError) as error:
                results.append(error)
        return results

    return run
