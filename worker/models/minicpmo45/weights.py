"""The parts of MiniCPM-o 4.5 with weights in them: a checkpoint's, or random ones.

Both take the same way: a mapping of published names to tensors, which every part's `..._weights`
function renames and stacks. A checkpoint is first compared with `layout.published_shapes`, so that
all that is wrong with it comes out at once, before any weight is read.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from worker.models.contract import Progress
from worker.models.minicpmo45.checkpoint import TensorFiles
from worker.models.minicpmo45.config import FULL_SIZE, CheckpointConfig
from worker.models.minicpmo45.layout import (
    Shapes,
    check_tensors,
    may_be_left,
    published_shapes,
)
from worker.nn.audio_encoder import AudioEncoder, audio_encoder_weights
from worker.nn.decoder import Decoder, decoder_weights
from worker.nn.resampler import resampler_weights
from worker.nn.siglip import vision_weights
from worker.nn.speech import SpeechHead, speech_weights
from worker.nn.vision import VisionTower

Part = TypeVar("Part", bound=nn.Module)


@dataclass(frozen=True, slots=True)
class Parts:
    """All modules but token2wav, on one device, in one dtype, ready to run."""

    config: CheckpointConfig
    """What they were built from; it is settled which vision layers there are."""
    llm: Decoder
    vision: VisionTower
    """Vision transformer and resampler."""
    audio: AudioEncoder
    speech: SpeechHead


def ignore_progress(_share: float, _note: str) -> None:
    """A `Progress` that nobody watches."""


def load(
    folder: Path,
    config: CheckpointConfig,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    pt_path: Path | None = None,
    progress: Progress = ignore_progress,
) -> Parts:
    """Return the parts of a checkpoint folder.

    Args:
        config: of the same folder.
        dtype: of the weights in memory, whatever the files hold.
        pt_path: torch file whose tensors take the places of those of the same names.
        progress: called with the share of values that have been read.

    Raises:
        ModelLoadError: files are missing, short or damaged, or their tensors are not those that
            the configuration asks for. Nothing was read then but headers and `pt_path`.
    """
    source = TensorFiles(folder, device, dtype, pt_path)
    config = config.for_weights(source)
    check_tensors(
        source.entries, published_shapes(config), may_be_left(config), f"{folder / 'config.json'}"
    )
    return assemble(Watched(source, published_shapes(config), progress), config)


def random_weights(
    config: CheckpointConfig = FULL_SIZE,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    progress: Progress = ignore_progress,
) -> Parts:
    """Return parts with random weights, made on the device: as fast as it can write them.

    The same seed gives the same weights on the same kind of device.
    """
    shapes = published_shapes(config)
    source = RandomTensors(shapes, device, dtype, seed)
    return assemble(Watched(source, shapes, progress), config)


def assemble(source: Mapping[str, Tensor], config: CheckpointConfig) -> Parts:
    """Build the parts around the tensors of a source that has all of them."""
    vision_tower = {
        **prefixed("encoder.", vision_weights(Below(source, "vpm."), config.vision)),
        **prefixed("resampler.", resampler_weights(Below(source, "resampler."), config.resampler)),
    }
    return Parts(
        config=config,
        vision=fill(
            lambda: VisionTower(config.vision, config.resampler, config.vision_batch_size),
            vision_tower,
        ),
        audio=fill(lambda: AudioEncoder(config.audio), audio_encoder_weights(source, config.audio)),
        speech=fill(
            lambda: SpeechHead(config.speech),
            speech_weights(Below(source, "tts."), config.speech),
        ),
        llm=fill(lambda: Decoder(config.llm), decoder_weights(Below(source, "llm."), config.llm)),
    )


def fill(build: Callable[[], Part], weights: Mapping[str, Tensor]) -> Part:
    """Build a module without memory of its own, around given tensors."""
    with torch.device("meta"), NoInitialValues():
        module = build()
    module.load_state_dict(weights, strict=True, assign=True)
    return module.requires_grad_(False).eval()


class NoInitialValues(TorchFunctionMode):
    """Makes `torch.nn.init` do nothing: on the meta device it would only import the compiler."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) == "torch.nn.init":
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return func(*args, **kwargs)


def prefixed(prefix: str, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"{prefix}{name}": tensor for name, tensor in weights.items()}


class Below(Mapping[str, Tensor]):
    """The tensors of a source whose names begin with a prefix, without it."""

    def __init__(self, source: Mapping[str, Tensor], prefix: str) -> None:
        self._source, self._prefix = source, prefix

    def __getitem__(self, name: str) -> Tensor:
        return self._source[f"{self._prefix}{name}"]

    def __iter__(self) -> Iterator[str]:
        n = len(self._prefix)
        return (name[n:] for name in self._source if name.startswith(self._prefix))

    def __len__(self) -> int:
        return sum(1 for _ in self)


class Watched(Mapping[str, Tensor]):
    """A source that tells how much of it has been taken."""

    def __init__(self, source: Mapping[str, Tensor], shapes: Shapes, progress: Progress) -> None:
        self._source, self._progress = source, progress
        self._n_values = sum(math.prod(shape) for shape in shapes.values())
        self._n_taken = 0

    def __getitem__(self, name: str) -> Tensor:
        tensor = self._source[name]
        self._n_taken += tensor.numel()
        self._progress(min(1.0, self._n_taken / self._n_values), name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._source)

    def __len__(self) -> int:
        return len(self._source)


class RandomTensors(Mapping[str, Tensor]):
    """Random tensors of given names and shapes, each made when it is asked for.

    A tensor depends on the seed and its name only. Sizes are such that activations keep about the
    size of 1: norms are ones, biases zeros, a matrix divides by the root of its inputs. Logits get
    a spread of about 3, so that a draw is neither uniform nor certain.

    Args:
        constants: end of a name -> what its tensor is filled with instead.
    """

    def __init__(
        self,
        shapes: Shapes,
        device: torch.device | str,
        dtype: torch.dtype,
        seed: int,
        constants: Mapping[str, float] | None = None,
    ) -> None:
        self._shapes, self._dtype, self._seed = shapes, dtype, seed
        self._constants = {"bias": 0.0, **(constants or {})}
        self._device = torch.device(device)
        self._generator = torch.Generator(self._device)

    def __getitem__(self, name: str) -> Tensor:
        shape = self._shapes[name]
        made = torch.empty(shape, dtype=self._dtype, device=self._device)
        for end in reversed(self._constants):  # the caller's come before ours
            if name.endswith(end):
                return made.fill_(self._constants[end])
        if len(shape) == 1:
            return made.fill_(1.0)
        if name.endswith("original0"):  # lengths of the rows of a matrix with weight norm
            return made.fill_(LOGIT_SPREAD if name.startswith("tts.head") else 1.0)
        self._generator.manual_seed(zlib.crc32(name.encode(), self._seed))
        return made.normal_(0.0, spread(name, shape), generator=self._generator)

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)


LOGIT_SPREAD = 3.0
TABLES = (
    "embed_tokens.weight",
    "emb_text.weight",
    "emb_code.0.weight",
    "input_embedding.weight",
    "query",
)


def spread(name: str, shape: tuple[int, ...]) -> float:
    """Return the standard deviation of a random tensor."""
    if name.endswith(TABLES):
        return 1.0
    if "position" in name:  # added to an embedding: a part of its size
        return 0.1
    gain = LOGIT_SPREAD if name == "llm.lm_head.weight" else 1.0
    return gain / math.sqrt(math.prod(shape[1:]))
