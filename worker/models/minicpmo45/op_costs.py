"""What a program's ops took, by the clock around each of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from shared.protocol import Timings
from worker.engine.contract import Op, Program
from worker.models.minicpmo45 import ops

STAGES: Final[Mapping[str, str]] = {
    ops.PREPARE_INPUT: "vision_ms",
    ops.ENCODE_IMAGES: "vision_ms",
    ops.ENCODE_CLIP: "listen_ms",
    ops.PREFILL: "prefill_ms",
    ops.DECODE: "decode_ms",
    ops.SPEAK: "speech_tokens_ms",
    ops.START_TURN: "vocode_ms",
    ops.VOCODE: "vocode_ms",
}
"""Op kind -> field of `Timings`; other kinds count for the total only."""


class OpCosts:
    """Milliseconds of each stage, the wait for other sessions included."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._began_at = clock()
        self._stages: dict[str, float] = {}

    def of(self, program: Program) -> Program:
        """Return the program with its ops measured; everything else passes unchanged."""
        reply: Any = None
        error: BaseException | None = None
        try:
            while True:
                request = program.send(reply) if error is None else program.throw(error)
                began_at = self._clock()
                reply = error = None
                try:
                    reply = yield request
                except Exception as failure:  # noqa: BLE001 - it is raised where the op stands
                    error = failure
                if isinstance(request, Op) and request.kind in STAGES:
                    stage, took_ms = STAGES[request.kind], 1000 * (self._clock() - began_at)
                    self._stages[stage] = self._stages.get(stage, 0.0) + took_ms
        except StopIteration as stop:
            return stop.value
        finally:
            program.close()

    def timings(self) -> Timings:
        return Timings(**self._stages, total_ms=1000 * (self._clock() - self._began_at))
