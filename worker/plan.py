"""What a configuration comes to on this machine: what is compiled, for which sizes, from where.

Imports torch, so it is imported late.
"""

from __future__ import annotations

import importlib.metadata
import platform
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch

from shared.config import Config
from worker.compile.cache import CompileCache
from worker.compile.compiler import Compiler
from worker.compile.manifest import Key, collect_key
from worker.compile.master import cache_root
from worker.compile.regions import GPU_MATMUL_PRECISION, CompilePlan
from worker.compile.warmup import ShapeProfile
from worker.compiling import CompileParts

Device = Literal["cpu", "cuda"]

DRIVER_FILE = Path("/sys/module/nvidia/version")


def device_of(config: Config) -> Device:
    """Where the configured back end computes what may be compiled."""
    on_gpu = config.backend == "minicpmo45" and torch.cuda.is_available()
    return "cuda" if on_gpu else "cpu"


def plan_of(config: Config) -> CompilePlan | None:
    """Return what is to be compiled; None if nothing is."""
    wanted = config.service.compile
    if wanted is False or (wanted == "auto" and device_of(config) == "cpu"):
        return None
    asked = config.compile
    return CompilePlan(
        mode="max-autotune" if asked.mode == "max-autotune" else "default",
        modules=frozenset(asked.chosen_modules),
        dynamic=asked.dynamic,
        on_recompile=asked.on_recompile,
        cuda_graphs=asked.cuda_graphs,
    )


def key_of(config: Config, plan: CompilePlan, n_slots: int, environment: Mapping[str, str]) -> Key:
    """Return what a cache for this configuration has to be made from.

    Args:
        environment: as the process found it: torch adds to it.

    Raises:
        ModelLoadError: the model's files do not say what its sizes are.
    """
    device = device_of(config)
    sizes, shapes = _sizes_of(config)
    return collect_key(
        device=device,
        model_config=sizes,
        dtype="bfloat16" if device == "cuda" else "float32",
        compile_plan={
            "mode": plan.mode,
            "modules": sorted(plan.modules),
            "dynamic": plan.dynamic,
            "backend": plan.backend,
        },
        shape_plan={"n_slots": n_slots, **shapes},
        n_threads=1,
        matmul_precision=GPU_MATMUL_PRECISION
        if device == "cuda"
        else torch.get_float32_matmul_precision(),
        environment=environment,
    )


def cache_of(
    config: Config, plan: CompilePlan, n_slots: int, environment: Mapping[str, str]
) -> CompileCache:
    """Return the cache of this process for this configuration; nothing is looked at yet.

    Arguments and errors as of `key_of`.
    """
    root = cache_root(config.compile.cache_dir, environment)
    key = key_of(config, plan, n_slots, environment)
    return CompileCache(root, key, Path(tempfile.gettempdir()))


def parts_of(config: Config, n_slots: int, environment: Mapping[str, str]) -> CompileParts:
    """Return what a worker of this configuration compiles with.

    Arguments and errors as of `key_of`.
    """
    plan, asked = plan_of(config), config.compile
    return CompileParts(
        compiler=Compiler(plan),
        cache=cache_of(config, plan, n_slots, environment) if plan else None,
        on_cold=asked.on_cold,
        profile=ShapeProfile(Path(asked.shape_profile)) if plan and asked.shape_profile else None,
        versions=versions(device_of(config)),
    )


def versions(device: Device) -> Mapping[str, str]:
    """Return what a report has to name; "" for what is not there."""
    on_gpu = device == "cuda"
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "triton": _triton_version(),
        "cuda": torch.version.cuda or "",
        "driver": driver_version(),
        "gpu": torch.cuda.get_device_properties(0).name if on_gpu else "",
    }


def driver_version() -> str:
    """Version of the NVIDIA kernel module; "" without one."""
    try:
        return DRIVER_FILE.read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _triton_version() -> str:
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return ""


def _sizes_of(config: Config) -> tuple[dict[str, Any], dict[str, Any]]:
    """Sizes of the model, and of what depends on the configuration."""
    # Late: of the two back ends only the configured one is imported.
    if config.backend == "minicpmo45":
        from worker.models.minicpmo45 import build  # noqa: PLC0415

        shapes = {"n_positions": build.window_of(config).n_positions}
        return build.sizes_of(config), shapes
    from worker.models.cascade import weights  # noqa: PLC0415

    return {"language": [weights.SMOLLM2.distribution, weights.SMOLLM2.version()]}, {}
