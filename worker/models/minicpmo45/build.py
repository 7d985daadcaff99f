"""The model as a configuration asks for it."""

from __future__ import annotations

import functools
from pathlib import Path

from shared.config import Config
from shared.errors import ModelLoadError
from worker.models.minicpmo45.loading import LoadOptions, load
from worker.models.minicpmo45.model import MiniCpmO45, ModelOptions
from worker.models.minicpmo45.window import WindowSettings


def build(config: Config) -> MiniCpmO45:
    """Return the model, not loaded yet.

    Raises:
        ModelLoadError: the configuration does not say where the weights are.
    """
    model, audio, duplex = config.model, config.audio, config.duplex
    if model.model_path is None and not model.random_weights:
        raise ModelLoadError(
            "model.backend is minicpmo45, but there are no weights: set model.model_path to a "
            "checkpoint of MiniCPM-o 4.5, or model.random_weights to true"
        )
    window = WindowSettings(
        mode=duplex.sliding_window_mode,
        high_tokens=duplex.basic_window_high_tokens,
        low_tokens=duplex.basic_window_low_tokens,
        max_units=duplex.context_max_units,
        previous_max_tokens=duplex.context_previous_max_tokens,
        max_tokens=duplex.max_context_tokens,
    )
    options = LoadOptions(
        # Random weights win: who asks for them wants the full size, whatever else is set.
        model_path=None if model.random_weights else model.model_path,
        pt_path=Path(model.pt_path) if model.pt_path else None,
        has_voice=audio.enabled,
        n_timesteps=audio.n_timesteps,
        reference_voice=Path(audio.ref_audio_path) if audio.ref_audio_path else None,
    )
    return MiniCpmO45(
        functools.partial(load, options), ModelOptions(window=window, compat=config.compat)
    )
