"""Everything of MiniCPM-o 4.5 into memory: from a checkpoint's folder, or at random."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from shared.audio import read_wav
from shared.errors import BadAudio, ModelLoadError
from shared.limits import INPUT_SAMPLE_RATE_HZ
from worker.models.contract import Progress
from worker.models.minicpmo45 import weights
from worker.models.minicpmo45.checkpoint import find_folder
from worker.models.minicpmo45.config import FULL_SIZE, CheckpointConfig
from worker.models.minicpmo45.layout import published_shapes
from worker.models.minicpmo45.token2wav import Token2Wav, random_token2wav, read_token2wav
from worker.models.minicpmo45.tokenizer import Tokenizer
from worker.models.minicpmo45.voice import VoiceEncoder, VoiceFeatures, neutral_voice
from worker.models.minicpmo45.weights import Parts

TOKEN2WAV_SHARE = 0.95
"""Of the stage's time, when the language model and its senses are there."""

MAX_CPU_BYTES = 2_000_000_000
"""Weights (fp32) above this are not computed on a CPU: a second would take minutes."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a model is made of."""

    parts: Parts
    tokenizer: Tokenizer
    token2wav: Token2Wav | None
    """None: text only."""
    voice_encoder: VoiceEncoder | None
    """None: clients cannot bring voices."""
    default_heard: NDArray[np.float32]
    """16 kHz sample of the default voice for the language model; empty = none."""
    default_voice: VoiceFeatures
    device: torch.device
    dtype: torch.dtype

    @property
    def config(self) -> CheckpointConfig:
        return self.parts.config


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """What a configuration says about loading."""

    model_path: str | None = None
    """None = random weights at full size."""
    pt_path: Path | None = None
    has_voice: bool = True
    n_timesteps: int = 5
    reference_voice: Path | None = None
    """WAV file of the default voice; None = the checkpoint's own, if it has one."""
    seed: int = 0
    """Of random weights."""


def load(options: LoadOptions, progress: Progress) -> Loaded:
    """Load or make all parts on the device that is there: a GPU in bf16, else the CPU in fp32.

    Raises:
        ModelLoadError: in one sentence, before any weights are read where headers can tell.
    """
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    dtype = torch.bfloat16 if on_gpu else torch.float32
    if options.model_path is None:
        return _random(options, device, dtype, progress)
    folder = find_folder(options.model_path)
    config = CheckpointConfig.read(folder)
    if not on_gpu:
        _check_fits_a_cpu(folder, config)
    return from_folder(folder, config, options, device, dtype, progress)


def from_folder(
    folder: Path,
    config: CheckpointConfig,
    options: LoadOptions,
    device: torch.device,
    dtype: torch.dtype,
    progress: Progress,
    assets: Path | None = None,
) -> Loaded:
    """Load a checkpoint's folder.

    Args:
        assets: folder of the token2wav files; None = the checkpoint's own.
    """
    tokenizer = Tokenizer.read(folder)
    config.check_tokenizer(tokenizer.n_ids)
    if assets is None:
        assets = folder / "assets" / "token2wav"
    # What is small is read first: whatever is wrong with it is known at once.
    token2wav = None
    if options.has_voice:
        token2wav = read_token2wav(assets, options.n_timesteps, device)
    encoder = VoiceEncoder.for_assets(assets) if options.has_voice else None
    heard = _default_sample(options.reference_voice, folder)
    voice = _default_voice(encoder, heard)
    parts = weights.load(
        folder, config, device, dtype, options.pt_path, _shared(progress, 0.0, TOKEN2WAV_SHARE)
    )
    progress(1.0, "all weights in memory")
    return Loaded(parts, tokenizer, token2wav, encoder, heard, voice, device, dtype)


def _check_fits_a_cpu(folder: Path, config: CheckpointConfig) -> None:
    n_bytes = 4 * sum(math.prod(shape) for shape in published_shapes(config).values())
    if n_bytes > MAX_CPU_BYTES:
        raise ModelLoadError(
            f"{folder} is a model of {n_bytes / 4e9:.1f} billion parameters, which needs a GPU, "
            'and torch sees none; on a CPU set model.backend to "cascade"'
        )


def _random(
    options: LoadOptions, device: torch.device, dtype: torch.dtype, progress: Progress
) -> Loaded:
    if device.type == "cpu":
        raise ModelLoadError(
            "model.random_weights builds the model at full size, which needs a GPU; on a CPU set "
            'model.backend to "cascade"'
        )
    parts = weights.random_weights(
        FULL_SIZE, device, dtype, options.seed, _shared(progress, 0.0, TOKEN2WAV_SHARE)
    )
    token2wav = None
    if options.has_voice:
        progress(TOKEN2WAV_SHARE, "token2wav")
        token2wav = random_token2wav(options.n_timesteps, device, options.seed)
    heard = np.zeros(0, np.float32)
    tokenizer = Tokenizer.built_in()
    return Loaded(parts, tokenizer, token2wav, None, heard, neutral_voice(), device, dtype)


def _default_sample(reference: Path | None, folder: Path) -> NDArray[np.float32]:
    """Return the default voice's 16 kHz samples; empty if there is none."""
    own = folder / "assets" / "system_ref_audio.wav"
    if reference is None and not own.is_file():
        return np.zeros(0, np.float32)
    path = reference or own
    try:
        samples, rate_hz = read_wav(path)
    except (OSError, BadAudio) as error:
        raise ModelLoadError(f"the default voice {path} cannot be read: {error}") from error
    if rate_hz != INPUT_SAMPLE_RATE_HZ:
        raise ModelLoadError(
            f"the default voice {path} has {rate_hz} Hz, expected {INPUT_SAMPLE_RATE_HZ}: "
            "convert it first"
        )
    return samples


def _default_voice(encoder: VoiceEncoder | None, heard: NDArray[np.float32]) -> VoiceFeatures:
    if encoder is None or not heard.size:
        return neutral_voice()
    try:
        return encoder.encode(heard)
    except BadAudio as error:
        raise ModelLoadError(f"the default voice cannot be used: {error}") from error


def _shared(progress: Progress, start: float, end: float) -> Callable[[float, str], None]:
    """A progress that fills a part of another one."""
    return lambda share, note: progress(start + (end - start) * share, note)
