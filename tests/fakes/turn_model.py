"""Answers the ops of turn-based programs without weights: scripted text, scripted codes.

It keeps a list per slot of what the context holds, and fails where a program is wrong about it.
Rows of an embedding are written as `("image", n)` or `("audio", n)`: the n-th one of its kind.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shared.config import Compat
from worker.models.minicpmo45 import ops
from worker.models.minicpmo45.config import FULL_SIZE, CheckpointConfig
from worker.models.minicpmo45.images import slice_image
from worker.models.minicpmo45.tokenizer import Tokenizer
from worker.nn.mel import CLIP_SAMPLES, HOP

N_IMAGE_ROWS = 4
IMAGE, AUDIO = 1.0, 2.0
SAMPLES_PER_CODE = 960
TOKENIZER = Tokenizer.built_in()


@dataclass
class TurnModel:
    """What programs ask of the model, and the runner of their ops, in one."""

    says: list[int] = field(default_factory=list)
    """Tokens that will be chosen, in order; `<|im_end|>` when there are no more."""
    speaks: list[int] = field(default_factory=list)
    """Codes until the end code of each condition; 3 when there are no more."""
    n_positions: int = 4096
    n_speech_positions: int = 2048
    compat: Compat = field(default_factory=Compat)
    config: CheckpointConfig = FULL_SIZE
    has_voice: bool = True
    can_learn_voices: bool = True
    voice_name: str = "default"
    n_image_tokens: int = N_IMAGE_ROWS
    context: dict[int, list[Any]] = field(default_factory=dict)
    speech: dict[int, int] = field(default_factory=dict)
    """Live positions of the speech head's cache."""
    tokenizer: Tokenizer = TOKENIZER
    now: float = 100.0

    def __post_init__(self) -> None:
        self.says, self.speaks = list(self.says), list(self.speaks)
        self.language = SimpleNamespace(llm=SimpleNamespace(head=lambda hidden: hidden))
        self._codes_left = 0
        self._n_codes = 0
        self._counts: Counter[str] = Counter()

    def clock(self) -> float:
        return self.now

    def learn_voice(self, samples: Any, deadline: float) -> Any:
        yield from ()
        return "default voice" if samples is None else "own voice"

    def run(self, kind: str, bucket: Any, payloads: list[Any]) -> list[Any]:
        return [getattr(self, f"_{kind}")(payload) for payload in payloads]

    # ---- senses

    def _prepare_input(self, request: ops.InputRequest) -> ops.PreparedInput:
        slices = tuple(
            slice_image(frame, limit, self.config.slices).slices
            for frame, limit in zip(request.frames, request.max_slice_nums, strict=True)
        )
        return ops.PreparedInput(None, slices)

    def _encode_images(self, slices: Any) -> Tensor:
        rows = [self._rows("image", IMAGE, N_IMAGE_ROWS) for _ in slices]
        return torch.stack(rows)

    def _encode_clip(self, request: ops.ClipRequest) -> Tensor:
        n_samples, n = len(request.samples), 0
        while n_samples > 0:
            n += self.config.audio.n_embeddings(-(-min(n_samples, CLIP_SAMPLES) // HOP))
            n_samples -= CLIP_SAMPLES
        return self._rows("audio", AUDIO, n)

    def _rows(self, kind: str, mark: float, n: int) -> Tensor:
        """`[n, 2]`: the kind, and which row of it."""
        first = self._counts[kind]
        self._counts[kind] += n
        return torch.tensor([[mark, float(i)] for i in range(first, first + n)])

    # ---- language

    def _prefill(self, request: ops.Feed) -> ops.Fed:
        assert 1 <= request.n_rows <= ops.MAX_FEED_ROWS
        rows: list[Any] = []
        for piece in request.pieces:
            if isinstance(piece, tuple):
                rows += piece
            else:
                rows += [("image" if row[0] == IMAGE else "audio", int(row[1])) for row in piece]
        return self._append(request.slot, request.start, rows, request.choice)

    def _decode(self, request: ops.Step) -> ops.Fed:
        return self._append(request.slot, request.start, [request.token], request.choice)

    def _append(self, slot: int, start: int, rows: list[Any], choice: Any) -> ops.Fed:
        context = self.context.setdefault(slot, [])
        assert start <= len(context), "a gap in the context"
        del context[start:]
        context += rows
        assert len(context) <= self.n_positions, "the context overflows"
        token = None
        if choice is not None:
            token = self.says.pop(0) if self.says else self.tokenizer.ids.im_end
        return ops.Fed(token, torch.tensor([float(len(context) - 1)]))

    def _move(self, request: ops.MoveRequest) -> None:
        assert request.target < request.start <= request.end
        if request.cache == "speech":
            assert request.end == self.speech[request.slot]
            self.speech[request.slot] += request.target - request.start
        else:
            context = self.context[request.slot]
            assert request.end == len(context)
            del context[request.target : request.start]

    # ---- voice

    def _speak(self, request: Any) -> ops.Spoken:
        live = 0 if request.start == 0 else self.speech[request.slot]
        assert request.start == live, "a gap in the speech head's cache"
        assert request.end <= self.n_speech_positions, "the speech head's cache overflows"
        self.speech[request.slot] = live + request.n_inputs
        if request.max_new == 0:
            return ops.Spoken((), False)
        assert request.sampling.is_greedy or len(request.draws) == request.max_new
        if request.last_code is None:
            self._codes_left = self.speaks.pop(0) if self.speaks else 3
        has_ended = self._codes_left < request.max_new
        n_most = request.max_new - request.drops_last
        n = self._codes_left if has_ended else n_most
        self._codes_left -= n
        codes = tuple(range(self._n_codes, self._n_codes + n))
        self._n_codes += n
        is_pending = not has_ended and not request.drops_last
        self.speech[request.slot] += n - is_pending
        return ops.Spoken(codes, has_ended)

    def _start_turn(self, request: ops.TurnRequest) -> None:
        assert request.voice is not None

    def _vocode(self, request: ops.VocodeRequest) -> Any:
        n = len(request.codes) - (0 if request.is_last else 3)
        return np.full(n * SAMPLES_PER_CODE, 0.5, np.float32)
