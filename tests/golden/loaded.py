"""The golden checkpoint as a whole model, as its traces were recorded: fp32, every quirk kept."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch

from shared.config import Compat
from tests.golden.compare import Trace
from worker.models.contract import Progress
from worker.models.minicpmo45 import weights
from worker.models.minicpmo45.config import CheckpointConfig
from worker.models.minicpmo45.loading import Loaded, LoadOptions, from_folder
from worker.models.minicpmo45.model import MiniCpmO45, ModelOptions
from worker.models.minicpmo45.token2wav import read_token2wav
from worker.models.minicpmo45.voice import VoiceFeatures
from worker.models.minicpmo45.window import WindowSettings

KEEP_ALL = WindowSettings(mode="off")
EVERY_QUIRK = Compat.reference()


def load_parts(folder: Path) -> weights.Parts:
    """Return all nets of a golden folder's checkpoint but token2wav, fp32 on the CPU."""
    checkpoint = folder / "checkpoint"
    return weights.load(checkpoint, CheckpointConfig.read(checkpoint))


def load_model(
    folder: Path,
    window: WindowSettings = KEEP_ALL,
    *,
    is_causal: bool = False,
    compat: Compat = EVERY_QUIRK,
    n_slots: int = 1,
) -> MiniCpmO45:
    """Return the model of a golden folder on the CPU, its caches allocated.

    Args:
        is_causal: take the newer generation of token2wav files.
    """
    kind = "causal" if is_causal else "legacy"
    checkpoint = folder / "checkpoint"
    assets = checkpoint / ("assets_causal" if is_causal else "assets") / "token2wav"
    voice = Trace(f"token2wav_{kind}", folder)
    options = LoadOptions(str(checkpoint), n_timesteps=voice.given("n_timesteps"))

    def load(progress: Progress) -> Loaded:
        loaded = from_folder(
            checkpoint,
            CheckpointConfig.read(checkpoint),
            options,
            torch.device("cpu"),
            torch.float32,
            progress,
            assets,
        )
        # The older generation was recorded with its way of cutting the encoder's cache.
        token2wav = read_token2wav(
            assets, options.n_timesteps, trim="intended" if is_causal else "packed"
        )
        noise = voice.take("in.sine_noise_table")[0] if is_causal else torch.zeros(1, 9)
        token2wav.set_noise(voice.take("in.rand_noise"), noise)
        features = VoiceFeatures(
            codes=voice.take("in.prompt_tokens")[0],
            mel24k=voice.take("in.prompt_mel")[0],
            speaker=voice.take("in.spk")[0],
        )
        return dataclasses.replace(loaded, token2wav=token2wav, default_voice=features)

    # The original's speech cache has no bound, so no turn of a trace may meet ours.
    model = MiniCpmO45(load, ModelOptions(window=window, compat=compat, n_speech_positions=8192))
    model.load_model(lambda share, note: None)
    model.init_unified(n_slots, lambda share, note: None)
    return model
