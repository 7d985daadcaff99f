"""What the doctor finds out about compiling: versions, the cache, and what the last starts did."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec

from shared.config import Config
from shared.errors import CompileCacheError, ModelLoadError
from shared.protocol import CompileStatus
from worker.__main__ import settings_of
from worker.compile import files
from worker.compile.cache import CacheStatus
from worker.compile.master import cache_root

ANSWER_TIMEOUT_S = 1.0
MAX_SHOWN_BUCKETS = 8


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the table."""

    what: str
    value: str
    is_ok: bool = True
    """False: the service cannot run like this."""


@dataclass(frozen=True, slots=True)
class Rate:
    """What a GPU reaches: dense bf16 products, and bytes read plus written by a copy."""

    tflops: float
    gb_s: float
    source: str


SHEET = "vendor's sheet, peak"
RATES: Mapping[str, Rate] = {
    "H200": Rate(790.0, 4300.0, "measured"),
    "H100 80GB HBM3": Rate(989.0, 3350.0, SHEET),
    "H100 PCIe": Rate(756.0, 2000.0, SHEET),
    "A100-SXM4-80GB": Rate(312.0, 2039.0, SHEET),
    "A100 80GB PCIe": Rate(312.0, 1935.0, SHEET),
    "A100-SXM4-40GB": Rate(312.0, 1555.0, SHEET),
    "A100-PCIE-40GB": Rate(312.0, 1555.0, SHEET),
    "RTX 4090": Rate(165.0, 1008.0, SHEET),
}
"""By a part of the name that the driver gives."""


def expected_rate(gpu_name: str) -> Rate | None:
    """Return what a GPU of this name should reach; None if that is not known."""
    return next((rate for name, rate in RATES.items() if name in gpu_name), None)


def examine_compiling(
    config: Config, environment: Mapping[str, str], explain: bool
) -> Iterator[Finding]:
    """Look at what a worker of this configuration would compile, and from where.

    Args:
        environment: as it was before torch was imported.
        explain: also tell what earlier starts and running workers have compiled.
    """
    # Late: it imports torch, and its absence is a finding of its own.
    from worker import plan  # noqa: PLC0415

    told = plan.versions(plan.device_of(config))
    for name in ("triton", "driver"):
        yield Finding(name, told[name] or "none")
    yield from _root(config, environment)
    compiles = plan.plan_of(config)
    if compiles is None:
        yield Finding("compile cache", "disabled: nothing is compiled (service.compile)")
        return
    if _is_on_the_hub(config):
        path = config.model.model_path
        yield Finding("compile cache", f"not known: the checkpoint {path} is no folder here")
        return
    try:
        n_slots = settings_of(config, None).n_slots
        cache = plan.cache_of(config, compiles, n_slots, environment)
        found = cache.examine()
    except (CompileCacheError, ModelLoadError) as error:
        yield Finding("compile cache", str(error), is_ok=False)
        return
    yield Finding("compile cache", f"{found.state}, fingerprint {found.fingerprint}")
    yield from _reasons(found)
    if explain:
        yield from _explained(found)
        yield from _running(config)


def _root(config: Config, environment: Mapping[str, str]) -> Iterator[Finding]:
    root = cache_root(config.compile.cache_dir, environment)
    if not root.is_dir():
        yield Finding("compile cache in", f"{root}, not made yet")
        return
    try:
        files.ensure_trusted(root, "set compile.cache_dir to a directory of your own")
    except CompileCacheError as error:
        yield Finding("compile cache in", str(error), is_ok=False)
        return
    problem = files.write_problem(root)
    access = f"read only: {problem.strerror}" if problem else "may be written to"
    yield Finding("compile cache in", f"{root}, {access}")


def _is_on_the_hub(config: Config) -> bool:
    """Whether a look at the checkpoint would download it."""
    path = config.model.model_path
    is_read = config.backend == "minicpmo45" and not config.model.random_weights
    return is_read and path is not None and not Path(path).expanduser().exists()


def _reasons(found: CacheStatus) -> Iterator[Finding]:
    if found.is_warm:
        return
    if not found.stale:
        yield Finding("  why", found.reason)
    for field in found.stale:
        yield Finding("  stale", str(field))


def _explained(found: CacheStatus) -> Iterator[Finding]:
    """What the manifest says of the start that made the cache, and of the one that verified it."""
    if found.manifest is None:
        yield Finding("  regions and shapes", "known once a start has filled the cache")
        return
    info, verify = found.manifest.info, found.manifest.verify
    compiled = info.get("compiled", {})
    yield Finding("  built", f"{info.get('built_at', '?')}, in {info.get('build_s', '?')} s")
    yield Finding("  graph breaks then", str(compiled.get("graph_breaks", "?")))
    yield from _planned(info.get("plan", {}), compiled.get("regions", {}))
    if verify:
        told = "{warm_s} s, {fx_hits} hits, {fx_misses} misses, {recompiles} recompiles"
        yield Finding("  verified", told.format_map(_Gaps(verify)))


def _planned(plan: Mapping[str, Any], compiled: Mapping[str, Any]) -> Iterator[Finding]:
    for name, region in plan.get("regions", {}).items():
        made = _Gaps(compiled.get(name, {}))
        text = f"{region['module']}, {region['calls']} calls, "
        text += "{graphs} graphs, {seconds} s".format_map(made)
        yield Finding(f"  region {name}", text)
    for name, buckets in plan.get("stages", {}).items():
        shown = " ".join(buckets[:MAX_SHOWN_BUCKETS])
        more = f" and {len(buckets) - MAX_SHOWN_BUCKETS} more"
        text = f"{len(buckets)} shapes: {shown}"
        yield Finding(f"  stage {name}", text + more * (len(buckets) > MAX_SHOWN_BUCKETS))


class _Gaps(dict[str, Any]):
    """Figures of which some may be missing: a manifest is a file."""

    def __missing__(self, name: str) -> str:
        return "?"


def _running(config: Config) -> Iterator[Finding]:
    """What the workers that run here say of their start."""
    base = config.service.worker_base_port
    with httpx.Client(trust_env=False, timeout=ANSWER_TIMEOUT_S) as client:
        for port in range(base, base + _n_workers(config)):
            status = _ask(client, port)
            if status is None:
                yield Finding(f"worker on port {port}", "does not run")
            else:
                yield from _told_by(port, status)


def _n_workers(config: Config) -> int:
    # Late, as above.
    import torch  # noqa: PLC0415

    n_gpus = torch.cuda.device_count() if config.backend == "minicpmo45" else 0
    return n_gpus or config.service.cpu_workers


def _ask(client: httpx.Client, port: int) -> CompileStatus | None:
    try:
        answer = client.get(f"http://127.0.0.1:{port}/api/compile")
        return msgspec.json.decode(answer.content, type=CompileStatus)
    except (httpx.HTTPError, msgspec.MsgspecError):
        return None


def _told_by(port: int, status: CompileStatus) -> Iterator[Finding]:
    degraded = f", degraded: {status.reason}" if status.degraded else ""
    yield Finding(
        f"worker on port {port}",
        f"{status.state or 'loading'}{degraded}, {status.graphs} graphs ({status.fx_hits} hits, "
        f"{status.fx_misses} misses), {status.graph_breaks} graph breaks, "
        f"{status.recompiles_after_idle} recompiles after its start",
    )
    for name, region in status.regions.items():
        why = status.fallback_reasons.get(name, "")
        text = f"{region.graphs} graphs, {region.hits} hits, {region.fallbacks} eager calls"
        yield Finding(f"  region {name}", f"{text}: {why}" if why else text)
