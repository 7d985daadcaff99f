"""What a compile cache was made from and what it holds: `manifest.json` beside its files.

A cache fits a worker if the two were made from the same `Key`. The key names everything that
changes what is compiled and is not in the compiler's own keys, above all the plan of regions and
shapes. Where two keys differ, `diff` says in which fields, so that a slow start has a reason. What
is good to know but changes nothing (driver, dates, seconds) is `Manifest.info` and never compared.

This module imports no torch, so that a program may read a manifest without it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

SCHEMA: Literal[1] = 1
FINGERPRINT_DIGITS = 16
MAX_VALUE_CHARS = 60

CODE_PACKAGES = ("nn", "models", "compile")
"""Of the worker: whose sources define what is compiled, or are inlined into it."""

_ENVIRONMENT = ("TORCHINDUCTOR_", "TORCHDYNAMO_", "TORCH_COMPILE_", "TRITON_")
_ENVIRONMENT_OF_NO_EFFECT = frozenset(
    {
        *("TORCHINDUCTOR_CACHE_DIR", "TORCHINDUCTOR_COMPILE_THREADS"),
        *("TRITON_CACHE_DIR", "TRITON_HOME", "TRITON_DUMP_DIR", "TORCH_COMPILE_DEBUG_DIR"),
    }
)
"""They say where files are and how many processes work, not what is compiled."""


class DamagedCache(ValueError):
    """A cache that is not as it was made; the text says what is wrong with it."""


@dataclass(frozen=True, slots=True)
class Key:
    """What a cache depends on: names and JSON values, in the order in which they are told."""

    fields: dict[str, Any]

    def __post_init__(self) -> None:
        # As a file gives it back: tuples are lists there, and every name is a string.
        object.__setattr__(self, "fields", json.loads(_canonical(self.fields, sort_keys=False)))

    @property
    def fingerprint(self) -> str:
        """Sixteen hexadecimal digits: the name of the cache's directory."""
        return digest(self.fields)[:FINGERPRINT_DIGITS]


@dataclass(frozen=True, slots=True)
class StaleField:
    """A part of the key that differs; a part of a nested field is `shape_plan.kv_len`."""

    name: str
    here: Any
    there: Any

    def __str__(self) -> str:
        return f"{self.name} is {_shown(self.here)} here, {_shown(self.there)} there"


class Files(msgspec.Struct, frozen=True):
    """The files of a cache: enough to see that one is gone or cut short."""

    count: int
    bytes: int
    tree_sha: str
    """SHA-256 over every name and content."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `manifest.json`."""

    schema: Literal[1] = SCHEMA
    key: dict[str, Any]
    info: dict[str, Any]
    """Driver, date and seconds of the build; never compared."""
    files: Files
    verify: dict[str, Any] = {}
    """Figures of the second start; empty until there was one."""
    accuracy: dict[str, Any] | None = None

    @property
    def fingerprint(self) -> str:
        return Key(self.key).fingerprint

    @classmethod
    def read(cls, path: Path) -> Manifest:
        """Raises DamagedCache, FileNotFoundError."""
        try:
            return msgspec.json.decode(path.read_bytes(), type=cls)
        except FileNotFoundError:
            raise
        except (msgspec.MsgspecError, OSError, RecursionError) as error:
            raise DamagedCache(f"{path}: {error}") from error

    def write(self, path: Path) -> None:
        """Write the file at once or not at all, and on the disk when this returns.

        Raises:
            OSError: it cannot be written.
        """
        text = msgspec.json.format(msgspec.json.encode(self), indent=2)
        part = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            with part.open("wb") as file:
                file.write(text + b"\n")
                file.flush()
                os.fsync(file.fileno())
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)


def digest(value: Any) -> str:
    """Return the SHA-256 of a JSON value, the same for every order of its names."""
    return hashlib.sha256(_canonical(value, sort_keys=True).encode()).hexdigest()


def diff(here: Key, there: Key) -> tuple[StaleField, ...]:
    """Return the fields in which two keys differ; one that is missing on a side is null there."""
    ours, theirs = dict(_leaves(here.fields)), dict(_leaves(there.fields))
    return tuple(
        StaleField(name, ours.get(name), theirs.get(name))
        for name in dict.fromkeys((*ours, *theirs))
        if ours.get(name) != theirs.get(name)
    )


def collect_key(
    *,
    device: Literal["cpu", "cuda"],
    model_config: Mapping[str, Any],
    dtype: str,
    compile_plan: Mapping[str, Any],
    shape_plan: Mapping[str, Any],
    n_threads: int,
    matmul_precision: str,
    environment: Mapping[str, str],
) -> Key:
    """Return the key of what this process is going to compile. Imports torch.

    Args:
        device: where the regions compute; of several GPUs the first visible one counts.
        model_config: sizes of the model, everything its modules are built from.
        dtype: of the weights, such as "bfloat16".
        compile_plan: modules, mode and whatever else decides what becomes a graph.
        shape_plan: every size that is compiled or captured.
        n_threads: of the thread that compiles and serves; compiled CPU code depends on it.
        matmul_precision: "highest", "high" or "medium", as set in that thread.
        environment: of this process; settings of the compiler count.

    The plans are JSON values.
    """
    # Late: who reads manifests only needs no torch.
    import torch  # noqa: PLC0415

    name, architecture = _device_of(torch, device)
    return Key(
        {
            "torch": torch.__version__,
            "torch_git": torch.version.git_version,
            "triton": _triton_version(),
            "cuda": torch.version.cuda,
            "python": platform.python_version(),
            "device": name,
            "architecture": architecture,
            "model_config_sha": digest(model_config),
            "model_code_sha": code_digest(Path(__file__).parents[1], CODE_PACKAGES),
            "dtype": dtype,
            "compile_plan": compile_plan,
            "shape_plan": shape_plan,
            "n_threads": n_threads,
            "matmul_precision": matmul_precision,
            "environment": compiler_environment(environment),
        }
    )


def code_digest(folder: Path, packages: Iterable[str]) -> str:
    """Return the SHA-256 over names and contents of all `.py` files of packages in a folder."""
    whole = hashlib.sha256()
    for package in packages:
        for path in sorted((folder / package).rglob("*.py")):
            content = hashlib.sha256(path.read_bytes()).hexdigest()
            whole.update(f"{path.relative_to(folder).as_posix()} {content}\n".encode())
    return whole.hexdigest()


def compiler_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that may change what the compiler makes."""
    return {
        name: environment[name]
        for name in sorted(environment)
        if name.startswith(_ENVIRONMENT) and name not in _ENVIRONMENT_OF_NO_EFFECT
    }


def _device_of(torch: Any, device: str) -> tuple[str, str]:
    """Name and architecture: compiled code fits no other."""
    if device == "cuda":
        found = torch.cuda.get_device_properties(0)
        return found.name, f"{found.major}.{found.minor}"
    # Code for the CPU is compiled for the very model (`-march=native`).
    return _cpu_model(), torch.backends.cpu.get_cpu_capability()


def _cpu_model() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def _triton_version() -> str | None:
    try:
        # Late, as above; and a build of torch for the CPU has none.
        import triton  # noqa: PLC0415
    except ImportError:
        return None
    version: str = triton.__version__
    return version


def _leaves(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, part in value.items():
        if isinstance(part, dict) and part:
            yield from _leaves(part, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", part


def _canonical(value: Any, *, sort_keys: bool) -> str:
    return json.dumps(value, sort_keys=sort_keys, separators=(",", ":"), allow_nan=False)


def _shown(value: Any) -> str:
    text = _canonical(value, sort_keys=True)
    return text if len(text) <= MAX_VALUE_CHARS else text[:MAX_VALUE_CHARS] + "…"
