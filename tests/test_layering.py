"""Who may import whom, looked at in fresh interpreters."""

from __future__ import annotations

import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

LIST_MODULES = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
print("\\n".join(sorted(sys.modules)))
"""


def modules_of(package: str) -> list[str]:
    names = [package]
    for module in pkgutil.walk_packages([str(ROOT / package)], prefix=f"{package}."):
        names.append(module.name)
    # Importing a `__main__` is what running it does; its imports are those of the rest.
    return [name for name in names if not name.endswith("__main__")]


def loaded_by(*names: str) -> set[str]:
    """Return the top-level packages that a fresh interpreter has after importing `names`."""
    done = subprocess.run(
        [sys.executable, "-c", LIST_MODULES, *names],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return set(done.stdout.split())


FORBIDDEN = {
    "shared": ("torch", "fastapi", "starlette", "gateway", "worker", "client"),
    "gateway": ("torch", "worker", "client", "transformers", "onnxruntime"),
    "client": ("torch", "worker", "gateway", "fastapi", "transformers", "onnxruntime"),
}


@pytest.mark.parametrize("package", FORBIDDEN)
def test_a_package_loads_only_what_its_layer_may(package):
    loaded = loaded_by(*modules_of(package))

    assert package in loaded
    assert not loaded & set(FORBIDDEN[package])


@pytest.mark.parametrize(
    ("package", "forbidden"),
    [
        ("worker.engine", ("worker.nn", "worker.models", "worker.sessions", "fastapi")),
        ("worker.nn", ("worker.engine", "worker.models", "worker.sessions", "fastapi")),
    ],
)
def test_the_bottom_of_the_worker_knows_nothing_above_it(package, forbidden):
    folder = ROOT.joinpath(*package.split("."))
    names = [
        package,
        *(module.name for module in pkgutil.iter_modules([str(folder)], prefix=f"{package}.")),
    ]

    assert not loaded_by(*names) & set(forbidden)


COLLECT_WITHOUT_MODELS = """
import sys
import pytest
sys.modules.update(dict.fromkeys(("torch", "transformers", "onnxruntime")))
sys.exit(pytest.main(["--collect-only", "-q", "-p", "no:cacheprovider", *sys.argv[1:]]))
"""


@pytest.mark.parametrize("folder", ["tests/gateway", "tests/client", "tests/shared"])
def test_the_front_is_tested_without_model_libraries(folder):
    """None in `sys.modules` makes an import fail as if nothing were installed."""
    done = subprocess.run(
        [sys.executable, "-c", COLLECT_WITHOUT_MODELS, folder],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stdout
