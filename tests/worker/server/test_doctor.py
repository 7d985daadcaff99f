"""The doctor's table and verdict."""

import sys

import pytest

from worker import doctor
from worker.doctor import Finding, main, verdict


def test_everything_there_is_a_clean_exit():
    assert verdict([Finding("a", "1"), Finding("b", "2")]) == 0


def test_something_essential_missing_is_exit_one():
    assert verdict([Finding("a", "1"), Finding("b", "gone", is_ok=False)]) == 1


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr(doctor, "PACKAGES", ("no-such-package",))

    first = [finding for _, finding in zip(range(3), doctor.examine(), strict=False)]

    assert first[2] == Finding("no-such-package", "not installed", is_ok=False)


def test_without_torch_the_table_still_says_what_is_wrong(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "torch", None)

    assert main() == 1
    assert "BAD  torch" in capsys.readouterr().out


@pytest.mark.weights
def test_a_machine_with_everything_is_measured(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "MIN_MEASURE_S", 0.01)

    assert main() == 0
    out = capsys.readouterr().out
    assert "TFLOP/s" in out
    assert "GB/s" in out
    assert "weights silero-vad" in out
