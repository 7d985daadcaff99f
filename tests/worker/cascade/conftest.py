"""The real cascade, loaded once per test run; tests that need it carry the mark `weights`."""

import importlib.util
from pathlib import Path

import pytest

from shared.audio import read_wav
from worker.models.cascade.model import CascadeModel
from worker.models.cascade.weights import HIBARI, RAPIDOCR, SMOLLM2, WHISPER
from worker.models.packages import SILERO

ASSETS = Path(__file__).parents[2] / "assets"


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory):
    """A data folder whose weight cache is filled by the first test that needs it."""
    for package in (SMOLLM2, WHISPER, SILERO, HIBARI, RAPIDOCR):
        if importlib.util.find_spec(package.module) is None:
            pytest.skip(f"package {package.distribution} is not installed")
    return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="session")
def cascade(data_dir):
    """A loaded model with three slots, every one of them poisoned."""
    model = CascadeModel(data_dir, context_tokens=256)
    model.load_model(lambda share, note: None)
    model.init_unified(3, lambda share, note: None)
    for slot in range(3):
        model.poison_slot(slot)
    return model


@pytest.fixture
def clip():
    """Read one of the shipped 16 kHz clips by name."""

    def read(name):
        samples, rate = read_wav(ASSETS / f"{name}.wav")
        assert rate == 16_000
        return samples

    return read
