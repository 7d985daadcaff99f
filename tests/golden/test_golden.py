"""Every trace of the golden set is reproduced, and nothing of it is left out.

`GOLDEN_DIR=<folder> python -m pytest tests/golden` runs the same on another set.
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

GOLDEN = Path(os.environ.get("GOLDEN_DIR", Path(__file__).parent / "data")).resolve()

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

pytestmark = pytest.mark.timeout(600)


@pytest.mark.parametrize("name", sorted(REPLAYS))
def test_trace_is_reproduced(name: str, record_property: pytest.RecordProperty) -> None:
    trace = Trace(name, GOLDEN)
    replay = importlib.import_module(f"tests.golden.replay_{REPLAYS[name]}").replay
    with torch.inference_mode():
        replay(trace, GOLDEN)
    record_property("golden", trace.summary())
    left = trace.left_over()
    assert not trace.mismatches, "\n".join(trace.mismatches)
    assert not left, f"{name}: {len(left)} tensors and fields were not compared: {left[:20]}"


def test_every_trace_of_the_folder_has_a_replay() -> None:
    there = {path.stem for path in (GOLDEN / "traces").glob("*.json")}
    assert there == set(REPLAYS)


def test_the_files_are_those_of_the_manifest() -> None:
    manifest = json.loads((GOLDEN / "manifest.json").read_text(encoding="utf-8"))
    for name, entry in manifest.items():
        digest = hashlib.sha256((GOLDEN / name).read_bytes()).hexdigest()
        assert digest == entry["sha256"], name
