"""Which module replays a trace, and how a trace is replayed."""

from __future__ import annotations

import importlib
from pathlib import Path

import torch

from tests.golden.compare import Trace

REPLAYS = {
    "audio": "audio",
    "chat": "chat",
    "duplex_forced": "duplex",
    "duplex_greedy_audio": "duplex",
    "duplex_greedy_omni": "duplex",
    "duplex_hd": "duplex",
    "duplex_sampled": "duplex",
    "duplex_window_basic": "duplex",
    "duplex_window_context": "duplex",
    "half_duplex": "half_duplex",
    "llm_tts": "llm_tts",
    "prompt_features": "prompt_features",
    "sampler": "sampler",
    "token2wav_causal": "token2wav",
    "token2wav_legacy": "token2wav",
    "vision": "vision",
}
"""Trace -> module `tests.golden.replay_<name>`."""


def replayed(name: str, folder: Path) -> Trace:
    """Replay a trace of a golden folder; what is wrong with it is in its `problems`."""
    trace = Trace(name, folder)
    replay = importlib.import_module(f"tests.golden.replay_{REPLAYS[name]}").replay
    with torch.inference_mode():
        replay(trace, folder)
    return trace
