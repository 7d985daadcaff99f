"""The model as a configuration asks for it."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

from shared.config import Config
from shared.errors import ModelLoadError
from worker.compile.compiler import Compiler
from worker.models.minicpmo45.checkpoint import find_folder
from worker.models.minicpmo45.config import FULL_SIZE, CheckpointConfig
from worker.models.minicpmo45.loading import LoadOptions, load
from worker.models.minicpmo45.model import MiniCpmO45, ModelOptions
from worker.models.minicpmo45.token2wav import find_generation
from worker.models.minicpmo45.voice_config import read_flow_config, read_hift_config
from worker.models.minicpmo45.window import WindowSettings
from worker.nn.flow import FlowConfig


def build(config: Config, compiler: Compiler | None = None) -> MiniCpmO45:
    """Return the model, not loaded yet.

    Raises:
        ModelLoadError: the configuration does not say where the weights are.
    """
    model, audio = config.model, config.audio
    _check_has_weights(config)
    options = LoadOptions(
        # Random weights win: who asks for them wants the full size, whatever else is set.
        model_path=None if model.random_weights else model.model_path,
        pt_path=Path(model.pt_path) if model.pt_path else None,
        has_voice=audio.enabled,
        n_timesteps=audio.n_timesteps,
        reference_voice=Path(audio.ref_audio_path) if audio.ref_audio_path else None,
    )
    return MiniCpmO45(
        functools.partial(load, options),
        ModelOptions(window=window_of(config), compat=config.compat),
        compiler=compiler,
    )


def window_of(config: Config) -> WindowSettings:
    """Return what of a long session is kept."""
    duplex = config.duplex
    return WindowSettings(
        mode=duplex.sliding_window_mode,
        high_tokens=duplex.basic_window_high_tokens,
        low_tokens=duplex.basic_window_low_tokens,
        max_units=duplex.context_max_units,
        previous_max_tokens=duplex.context_previous_max_tokens,
        max_tokens=duplex.max_context_tokens,
    )


def sizes_of(config: Config) -> dict[str, Any]:
    """Return the sizes of all parts, as JSON values: what compiled code depends on besides sources.

    Random weights have the sizes of the published checkpoint, and so its compiled code.

    Raises:
        ModelLoadError: there is no such checkpoint, or its files of sizes are damaged.
    """
    _check_has_weights(config)
    n_timesteps = config.audio.n_timesteps
    if config.model.random_weights or config.model.model_path is None:
        flow = dataclasses.replace(FlowConfig(), n_timesteps=n_timesteps)
        return {
            "parts": dataclasses.asdict(FULL_SIZE),
            "voice": _voice(flow) if config.audio.enabled else None,
        }
    folder = find_folder(config.model.model_path)
    assets, voice = folder / "assets" / "token2wav", None
    if config.audio.enabled:
        is_causal = find_generation(assets)
        voice = _voice(read_flow_config(assets / "flow.yaml", n_timesteps, "intended"))
        if is_causal:
            voice["vocoder"] = dataclasses.asdict(read_hift_config(assets / "config.yaml"))
    return {"parts": dataclasses.asdict(CheckpointConfig.read(folder)), "voice": voice}


def _voice(flow: FlowConfig) -> dict[str, Any]:
    # The older kind of vocoder has no file that says its sizes; there is one size of it.
    return {"flow": dataclasses.asdict(flow), "vocoder": "older"}


def _check_has_weights(config: Config) -> None:
    if config.model.model_path is None and not config.model.random_weights:
        raise ModelLoadError(
            "model.backend is minicpmo45, but there are no weights: set model.model_path to a "
            "checkpoint of MiniCPM-o 4.5, or model.random_weights to true"
        )
