"""What a configuration comes to: what is compiled, and which cache fits it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from shared.config import Config
from shared.errors import ModelLoadError
from worker import plan
from worker.compile.manifest import diff

CHECKPOINT = Path(__file__).parents[2] / "golden/data/checkpoint"
TINY = {"model_path": str(CHECKPOINT)}


def config(**sections) -> Config:
    return Config.model_validate({"service": {"compile": True}, **sections})


def key(n_slots=2, **sections):
    asked = config(**{"model": TINY, **sections})
    return plan.key_of(asked, plan.plan_of(asked), n_slots, {})


@pytest.mark.parametrize("wanted", ["auto", False])
def test_on_a_cpu_nothing_is_compiled_unless_asked_for(wanted):
    assert plan.plan_of(Config.model_validate({"service": {"compile": wanted}})) is None


def test_the_plan_follows_both_switches_of_modules():
    made = plan.plan_of(config(compile={"modules": ["llm", "vpm"], "encoders": False}))

    assert made.modules == {"llm"}


def test_settings_reach_the_plan():
    made = plan.plan_of(
        config(
            compile={
                "mode": "max-autotune",
                "dynamic": False,
                "cuda_graphs": False,
                "on_recompile": "fail",
            }
        )
    )

    assert (made.mode, made.dynamic, made.cuda_graphs) == ("max-autotune", False, False)
    assert made.on_recompile == "fail"


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"n_slots": 3}, "shape_plan.n_slots"),
        ({"duplex": {"basic_window_high_tokens": 4096}}, "shape_plan.n_positions"),
        ({"compile": {"modules": ["llm"]}}, "compile_plan.modules"),
        ({"compile": {"mode": "max-autotune"}}, "compile_plan.mode"),
        ({"audio": {"n_timesteps": 6}}, "model_config_sha"),
        ({"audio": {"enabled": False}}, "model_config_sha"),
    ],
)
def test_what_changes_the_compiled_code_changes_the_key(change, field):
    assert [one.name for one in diff(key(), key(**change))] == [field]


@pytest.mark.parametrize(
    "change",
    [
        {"compile": {"on_recompile": "fail", "on_cold": "eager", "cuda_graphs": False}},
        {"service": {"compile": True, "worker_base_port": 1234}},
        {"duplex": {"pause_timeout": 5}},
    ],
)
def test_what_does_not_leaves_the_key(change):
    assert key().fingerprint == key(**change).fingerprint


@pytest.mark.weights
def test_the_two_back_ends_have_different_caches():
    asked = config()
    cascade = plan.key_of(asked, plan.plan_of(asked), 2, {})

    assert cascade.fingerprint != key().fingerprint


def test_without_weights_there_is_no_key():
    asked = config(model={"backend": "minicpmo45"})

    with pytest.raises(ModelLoadError, match="there are no weights"):
        plan.key_of(asked, plan.plan_of(asked), 2, {})


def test_random_weights_need_no_checkpoint_for_their_key():
    asked = config(model={"random_weights": True})
    random = plan.key_of(asked, plan.plan_of(asked), 2, {})

    assert random.fields["model_config_sha"] != key().fields["model_config_sha"]


def test_the_cache_is_where_the_environment_said_before_torch_was_imported(tmp_path):
    """To import torch's compiler sets its cache directory: workers looked there."""
    code = """
import os
from pathlib import Path
before = dict(os.environ)
from worker import plan
from shared.config import Config
config = Config.model_validate({"service": {"compile": True}, "model": {"random_weights": True}})
print(plan.cache_of(config, plan.plan_of(config), 2, before).master.root)
"""
    environment = {"PATH": "/usr/bin", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path.cwd())}
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True, text=True, check=True, cwd=tmp_path, env=environment,
    )  # fmt: skip

    assert done.stdout.strip() == str(tmp_path / "torch_compile_cache")


def test_versions_are_plain_texts():
    told = plan.versions("cpu")

    assert all(type(value) is str for value in told.values())
    assert told["torch"]
    assert told["gpu"] == ""


def test_the_driver_is_read_of_the_kernel(tmp_path, monkeypatch):
    monkeypatch.setattr(plan, "DRIVER_FILE", tmp_path / "version")
    assert plan.driver_version() == ""
    (tmp_path / "version").write_text("580.159.04\n")
    assert plan.driver_version() == "580.159.04"
