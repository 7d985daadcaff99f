"""`python -m worker.doctor`: is this machine ready? A table; exit 1 if something is missing."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from shared.config import Config, load_config
from shared.errors import ConfigError, ModelLoadError
from worker.compile_findings import Finding, examine_compiling, expected_rate

EXIT_NOT_READY = 1
CONFIG_FILE = Path(__file__).parents[1] / "config.json"
MIN_PYTHON = (3, 11)

PACKAGES = (
    *("fastapi", "uvicorn", "websockets", "msgspec", "pydantic", "numpy", "pillow", "av"),
    *("onnxruntime", "safetensors", "tokenizers", "gguf", "filelock"),
)
MATMUL_SIZE = {"cpu": 1024, "cuda": 8192}
COPY_MIB = {"cpu": 64, "cuda": 1024}
MIN_MEASURE_S = 0.3
"""Repeat a measurement for this long, so that the clock's grain does not matter."""


def main(argv: Sequence[str] | None = None) -> int:
    """Print what was found; returns the exit code."""
    arguments = _parser().parse_args(argv)
    try:
        config = load_config(arguments.config or _default_config()).config
    except ConfigError as error:
        _show(Finding("configuration", str(error), is_ok=False))
        return EXIT_NOT_READY
    findings = []
    for finding in examine(config, arguments.explain):
        findings.append(finding)
        _show(finding)
    return verdict(findings)


def _show(finding: Finding) -> None:
    mark = "ok " if finding.is_ok else "BAD"
    sys.stdout.write(f"{mark}  {finding.what:<28} {finding.value}\n")
    sys.stdout.flush()


def _default_config() -> Path | None:
    return CONFIG_FILE if CONFIG_FILE.exists() else None


def verdict(findings: Sequence[Finding]) -> int:
    """0 if everything essential is there."""
    return 0 if all(finding.is_ok for finding in findings) else EXIT_NOT_READY


def examine(config: Config, explain: bool = False) -> Iterator[Finding]:
    """Look at the machine, one finding after the other; the measurements come last.

    Args:
        explain: also tell what was compiled in earlier starts, and what this GPU should reach.
    """
    environment = dict(os.environ)
    yield _python()
    yield Finding("cpu cores", str(os.cpu_count()))
    for name in PACKAGES:
        yield _package(name)
    try:
        # Late: without torch the lines above are what the reader needs.
        import torch  # noqa: PLC0415
    except ImportError as error:
        yield Finding("torch", f"cannot be imported: {error}", is_ok=False)
        return
    yield Finding("torch", f"{torch.__version__}, CUDA build {torch.version.cuda or 'none'}")
    yield from _gpus(torch)
    yield from _weights()
    yield from examine_compiling(config, environment, explain)
    yield from _rates(torch, explain)


def _rates(torch: Any, explain: bool) -> Iterator[Finding]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    name = torch.cuda.get_device_properties(0).name if device == "cuda" else ""
    rate = expected_rate(name) if explain else None
    for what, unit, value, expected in (
        ("matmul rate", "TFLOP/s", _matmul_tflops(torch, device), rate and rate.tflops),
        ("copy rate", "GB/s", _copy_gb_s(torch, device), rate and rate.gb_s),
    ):
        beside = f", expected {expected:g} ({rate.source})" if rate else ""
        yield Finding(f"{what} ({device})", f"{value:.2f} {unit}{beside}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m worker.doctor", description=__doc__)
    parser.add_argument(
        "--config", type=Path, help="configuration file; without it config.json if it is there"
    )
    parser.add_argument(
        "--explain",
        action="store_true",
        help="what earlier starts compiled, what workers say, what the GPU should reach",
    )
    return parser


def _python() -> Finding:
    is_ok = sys.version_info >= MIN_PYTHON
    need = "" if is_ok else f", need at least {MIN_PYTHON[0]}.{MIN_PYTHON[1]}"
    return Finding("python", platform.python_version() + need, is_ok)


def _package(name: str) -> Finding:
    try:
        return Finding(name, importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return Finding(name, "not installed", is_ok=False)


def _gpus(torch: Any) -> Iterator[Finding]:
    if not torch.cuda.is_available():
        yield Finding("GPU", "none: the cascade runs on the CPU")
        return
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        yield Finding(f"GPU {index}", f"{device.name}, {device.total_memory / 2**30:.0f} GiB")


def _weights() -> Iterator[Finding]:
    # Late: this imports torch.
    from worker.models import packages  # noqa: PLC0415
    from worker.models.cascade import weights  # noqa: PLC0415

    for package in (
        weights.SMOLLM2,
        weights.WHISPER,
        packages.SILERO,
        weights.HIBARI,
        weights.RAPIDOCR,
    ):
        what = f"weights {package.distribution}"
        try:
            size_mb = package.locate().stat().st_size / 1e6
        except ModelLoadError as error:
            yield Finding(what, str(error), is_ok=False)
        else:
            yield Finding(what, f"{package.version()}, {size_mb:.1f} MB")


def _matmul_tflops(torch: Any, device: str) -> float:
    n = MATMUL_SIZE[device]
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    a, b = (torch.ones(n, n, device=device, dtype=dtype) for _ in range(2))
    return 2.0 * n**3 / _seconds(lambda: a @ b, torch, device) / 1e12


def _copy_gb_s(torch: Any, device: str) -> float:
    """Bytes read plus bytes written per second."""
    source = torch.ones(COPY_MIB[device] * 2**20, device=device, dtype=torch.uint8)
    target = torch.empty_like(source)
    return 2.0 * source.numel() / _seconds(lambda: target.copy_(source), torch, device) / 1e9


def _seconds(work: Callable[[], object], torch: Any, device: str) -> float:
    """Mean time of one run, after one that does not count."""

    def wait() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    work()
    wait()
    n_runs = 0
    begun = time.perf_counter()
    while time.perf_counter() - begun < MIN_MEASURE_S:
        work()
        wait()
        n_runs += 1
    return (time.perf_counter() - begun) / n_runs


if __name__ == "__main__":
    sys.exit(main())
