"""What a worker compiled and captured, for `/metrics`; `docs/operations.md` explains each of them.

Counted by the compiler and its report; here it is only read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import get_args

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from shared.protocol import CacheState, CompileStatus

INFO = ("torch", "triton", "gpu")
"""Of the versions that a worker knows: labels beside the fingerprint."""


def compile_families(status: CompileStatus, versions: Mapping[str, str]) -> Iterator[Metric]:
    """Yield every metric about compiling, also those that have nothing to say yet."""
    states = GaugeMetricFamily(
        "omni_worker_compile_cache_state", "1 = how the cache was found", labels=["state"]
    )
    for state in get_args(CacheState):
        states.add_metric([state], float(status.state == state))
    yield states
    yield _gauge("compile_degraded", "1 = what should be compiled is not", status.degraded)
    yield _gauge("compile_graphs", "Compiled graphs in use", status.graphs)
    yield _gauge("compile_new_cache_files", "Files that the compiler has written", status.new_files)
    yield _gauge("cudagraph_pool_bytes", "Memory of captured graphs", status.graph_pool_bytes)
    for name, text, value in (
        ("compile_cache_hits", "Graphs that the cache had", status.fx_hits),
        ("compile_cache_misses", "Graphs that the cache did not have", status.fx_misses),
        ("compile_recompiles", "Compilations after the start", status.recompiles_after_idle),
        ("compile_graph_breaks", "Places where a graph had to end", status.graph_breaks),
        ("cudagraph_captures", "Graphs that were captured", status.captures),
    ):
        yield CounterMetricFamily(f"omni_worker_{name}", text, value=value)
    yield from _by_region(status)
    yield from _by_stage(status)
    info = GaugeMetricFamily(
        "omni_worker_compile_build_info",
        "1, with what the compiled code was made by and for",
        labels=["fingerprint", *INFO],
    )
    if status.state is not None:
        info.add_metric([status.fingerprint, *(versions.get(name, "") for name in INFO)], 1.0)
    yield info


def _by_region(status: CompileStatus) -> Iterator[Metric]:
    regions = status.regions.items()
    yield _labelled(
        GaugeMetricFamily,
        "compile_seconds",
        "Time of the calls that compiled, or read the cache, by region",
        "region",
        ((name, one.seconds) for name, one in regions),
    )
    yield _labelled(
        CounterMetricFamily,
        "compile_eager_fallbacks",
        "Calls after the start that met no graph and ran eagerly, by region",
        "region",
        ((name, one.fallbacks) for name, one in regions),
    )


def _by_stage(status: CompileStatus) -> Iterator[Metric]:
    stages = status.stages.items()
    yield _labelled(
        CounterMetricFamily,
        "cudagraph_replays",
        "Runs that replayed a captured graph, by stage",
        "stage",
        ((name, one.replays) for name, one in stages),
    )
    yield _labelled(
        CounterMetricFamily,
        "cudagraph_misses",
        "Runs whose shape was not captured, by stage; none where nothing is",
        "stage",
        ((name, one.runs - one.replays if status.captures else 0) for name, one in stages),
    )


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"omni_worker_{name}", text, value=value)


def _labelled(
    kind: type[GaugeMetricFamily | CounterMetricFamily],
    name: str,
    text: str,
    label: str,
    values: Iterable[tuple[str, float]],
) -> Metric:
    family = kind(f"omni_worker_{name}", text, labels=[label])
    for value_of, value in values:
        family.add_metric([value_of], value)
    return family
