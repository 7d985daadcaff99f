"""What compiling and capturing did, in numbers: for the log, `/api/compile` and metrics."""

from __future__ import annotations

import logging
import threading
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch._dynamo.utils import counters

log = logging.getLogger(__name__)


@dataclass(slots=True)
class StageCounts:
    """Of one stage. Written by its lane's thread alone, read by anyone."""

    runs: int = 0
    replays: int = 0
    captures: int = 0


@dataclass(frozen=True, slots=True)
class Compilation:
    """What the compiler has done in this process so far."""

    graphs: int
    fx_hits: int
    fx_misses: int
    aot_hits: int
    aot_misses: int
    graph_breaks: int

    @classmethod
    def now(cls) -> Compilation:
        return cls(
            graphs=int(counters["stats"]["unique_graphs"]),
            fx_hits=int(counters["inductor"]["fxgraph_cache_hit"]),
            fx_misses=int(counters["inductor"]["fxgraph_cache_miss"]),
            aot_hits=int(counters["aot_autograd"]["autograd_cache_hit"]),
            aot_misses=int(counters["aot_autograd"]["autograd_cache_miss"]),
            graph_breaks=sum(counters["graph_break"].values()),
        )


@dataclass(slots=True)
class CompileReport:
    """Counts of one worker, from its start on."""

    stages: dict[str, StageCounts] = field(default_factory=dict)
    """By stage name; the stages' own objects."""
    region_graphs: Counter[str] = field(default_factory=Counter)
    """Graphs that were made while a region was called, by region."""
    region_hits: Counter[str] = field(default_factory=Counter)
    """Of them, those that the cache had."""
    region_seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Time of the calls that made graphs, by region."""
    fallbacks: Counter[str] = field(default_factory=Counter)
    """Calls that met no compiled graph after the start and ran eagerly, by region."""
    reasons: dict[str, str] = field(default_factory=dict)
    """The first failed guard of each such region."""
    graph_pool_bytes: int = 0
    is_sealed: bool = False
    """The start is over: from now on every compilation is a mistake."""
    _at_seal: Compilation | None = None
    _replays_at_seal: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def seal(self) -> None:
        """The start is over."""
        self._at_seal = Compilation.now()
        self.is_sealed = True

    def fell_back(self, region: str, reason: str) -> None:
        """Count a call that would have been compiled again; the log gets one line per region."""
        with self._lock:
            self.fallbacks[region] += 1
            if region in self.reasons:
                return
            self.reasons[region] = reason
        log.error("no compiled graph fits region=%s: eager from now on: %s", region, reason)

    @property
    def n_fallbacks(self) -> int:
        return sum(self.fallbacks.values())

    @property
    def recompiles_after_idle(self) -> int:
        """Graphs that were made after the start, and calls that would have made one."""
        if self._at_seal is None:
            return 0
        return Compilation.now().graphs - self._at_seal.graphs + self.n_fallbacks

    def counts(self) -> Mapping[str, Any]:
        """Everything that can be counted, as JSON values."""
        now = Compilation.now()
        # Copies: stages are declared and regions counted on the thread that starts the worker.
        named, regions = dict(self.stages), {*self.region_graphs, *self.fallbacks}
        stages = named.values()
        return {
            "graphs": now.graphs,
            "fx_hits": now.fx_hits,
            "fx_misses": now.fx_misses,
            "aot_hits": now.aot_hits,
            "aot_misses": now.aot_misses,
            "graph_breaks": now.graph_breaks,
            "recompiles_after_idle": self.recompiles_after_idle,
            "eager_fallbacks": self.n_fallbacks,
            "fallback_reasons": dict(self.reasons),
            "stage_runs": sum(one.runs for one in stages),
            "captured_replays": sum(one.replays for one in stages),
            "captures": sum(one.captures for one in stages),
            "graph_pool_bytes": self.graph_pool_bytes,
            "regions": {
                name: {
                    "graphs": self.region_graphs[name],
                    "hits": self.region_hits[name],
                    "seconds": round(self.region_seconds[name], 2),
                    "fallbacks": self.fallbacks[name],
                }
                for name in sorted(regions)
            },
            "stages": {
                name: {"runs": one.runs, "replays": one.replays, "captures": one.captures}
                for name, one in named.items()
            },
        }
