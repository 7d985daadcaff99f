"""The tiny checkpoint as a whole model, once for all tests of this folder."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from shared.config import Config, ModelConfig
from shared.protocol import DuplexSettings
from tests.golden.driver import run_program
from worker.models.contract import Prompt, Unit
from worker.models.minicpmo45.build import build
from worker.models.minicpmo45.draws import SeededDraws
from worker.models.minicpmo45.duplex import Duplex
from worker.models.minicpmo45.model import MiniCpmO45

CHECKPOINT = Path(__file__).parents[2] / "golden" / "data" / "checkpoint"
N_SLOTS = 3


@pytest.fixture(scope="session")
def loaded() -> MiniCpmO45:
    model = build(Config(model=ModelConfig(model_path=str(CHECKPOINT))))
    model.load_model(lambda share, note: None)
    model.init_unified(N_SLOTS, lambda share, note: None)
    return model


@pytest.fixture
def tiny(loaded: MiniCpmO45) -> MiniCpmO45:
    """The model with every slot poisoned: whoever looks at what an earlier test left gets NaN."""
    for slot in range(N_SLOTS):
        loaded.poison_slot(slot)
    return loaded


def sound(k: int) -> np.ndarray:
    """Second `k` of a session's input, 16 kHz."""
    random = np.random.default_rng(k)
    return random.normal(0, 0.02 * (1 + k % 5), 16_000).astype(np.float32)


def picture(k: int, width: int = 320, height: int = 180) -> np.ndarray:
    random = np.random.default_rng(1000 + k)
    return random.integers(0, 256, (height, width, 3), dtype=np.uint8)


def start(
    model: MiniCpmO45,
    slot: int = 0,
    seed: int = 1,
    settings: DuplexSettings | None = None,
    system: str = "Streaming Omni Conversation.",
) -> Duplex:
    """Return a prepared session whose random numbers follow from `seed`."""
    state = model.new_state(slot)
    state.draws = SeededDraws(seed)
    none = np.zeros(0, np.float32)
    prompt = Prompt(system, settings or DuplexSettings(), none, none)
    run_program(model, model.prepare(state, prompt))
    return state


def unit(k: int, *frames: np.ndarray, force_listen: bool = False, **fields) -> Unit:
    return Unit(k, sound(k), frames, force_listen, **fields)


def play(model: MiniCpmO45, state: Duplex, k: int, *frames: np.ndarray, **fields):
    """Run unit `k`; return its result and every op that ran."""
    played = run_program(model, model.unit(state, unit(k, *frames, **fields)))
    (result,) = played.emitted
    return result, played
