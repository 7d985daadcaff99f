"""Every trace of the golden set is reproduced, and nothing of it is left out.

`GOLDEN_DIR=<folder> python -m pytest tests/golden` runs the same on another set of that layout.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
from pathlib import Path

import pytest
import torch

from tests.golden.compare import Trace

OURS = Path(__file__).parent / "data"
GOLDEN = Path(os.environ.get("GOLDEN_DIR", OURS)).resolve()

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
TRACES = sorted(path.stem for path in (GOLDEN / "traces").glob("*.json"))

pytestmark = pytest.mark.timeout(600)


@pytest.mark.parametrize("name", TRACES)
def test_trace_is_reproduced(name: str, record_property: pytest.RecordProperty) -> None:
    trace = replayed(name, GOLDEN)
    record_property("golden", trace.summary())
    assert not trace.problems(), "\n".join(trace.problems())


def replayed(name: str, folder: Path) -> Trace:
    """Replay a trace of a golden folder; what is wrong with it is in its `problems`."""
    trace = Trace(name, folder)
    replay = importlib.import_module(f"tests.golden.replay_{REPLAYS[name]}").replay
    with torch.inference_mode():
        replay(trace, folder)
    return trace


def test_every_trace_of_the_folder_has_a_replay() -> None:
    assert TRACES, f"{GOLDEN} holds no traces"
    assert set(TRACES) <= set(REPLAYS)
    if OURS.resolve() == GOLDEN:
        assert set(TRACES) == set(REPLAYS)


def test_the_files_are_those_of_the_manifest() -> None:
    manifest = json.loads((GOLDEN / "manifest.json").read_text(encoding="utf-8"))
    for name, entry in manifest.items():
        digest = hashlib.sha256((GOLDEN / name).read_bytes()).hexdigest()
        assert digest == entry["sha256"], name
