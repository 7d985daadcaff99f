"""Sessions that come at different instants share their steps, and so keep their deadlines."""

from __future__ import annotations

import pytest

from worker.engine.contract import Op
from worker.engine.engine import Engine

LANE = "device"
COSTS_S = {
    # First op of a call, every further op of it.
    "encode": (0.0025, 0.0025),
    "prefill": (0.0070, 0.0010),
    "decode": (0.0042, 0.0001),
    "speak": (0.0130, 0.0003),
    "vocode": (0.0127, 0.0030),
}
"""About what they take on an H200. Encoding gains nothing by a batch."""
N_STEPS = 20


class Device:
    """Runs ops on a clock of its own, and notes how many ran together."""

    lanes = dict.fromkeys(COSTS_S, LANE)
    max_batch = {"prefill": 8, "decode": 64, "speak": 32, "vocode": 32}

    def __init__(self) -> None:
        self.now = 0.0
        self.batches: dict[str, list[int]] = {kind: [] for kind in COSTS_S}

    def clock(self) -> float:
        return self.now

    def run(self, kind, bucket, payloads):
        first, further = COSTS_S[kind]
        self.now += first + further * (len(payloads) - 1)
        self.batches[kind].append(len(payloads))
        return payloads


def unit(deadline):
    """Program of a unit that speaks."""
    for kind in ("encode", "prefill", *["decode"] * N_STEPS, "speak", "vocode"):
        yield Op(kind, None, deadline=deadline)


def talk(n_sessions: int, round_span_s: float, n_units: int = 5) -> tuple[Device, list[float]]:
    """Have sessions send a unit a second, evenly apart; how long each unit took, in seconds."""
    device = Device()
    engine = Engine(device, device.clock, round_span_s=round_span_s)
    arrivals = [i / n_sessions for i in range(n_sessions * n_units)]
    took: list[float] = []

    def begin(arrived_at: float, name: int) -> None:
        engine.spawn(
            name,
            unit(arrived_at + 1.0),
            on_done=lambda task: took.append(device.now - arrived_at),
        )

    for name, arrived_at in enumerate(arrivals):
        while device.now < arrived_at:
            if not engine.step(LANE):
                device.now = arrived_at
        begin(arrived_at, name)
    while engine.step(LANE):
        pass
    return device, took


def mean(numbers) -> float:
    return sum(numbers) / len(numbers)


def test_strictly_by_deadline_nobody_shares_a_step():
    device, took = talk(16, round_span_s=0.0)

    assert mean(device.batches["decode"]) < 1.5
    assert max(took) > 2.0


@pytest.mark.parametrize(("n_sessions", "limit_s"), [(1, 0.13), (8, 0.13), (16, 0.4), (48, 1.0)])
def test_in_rounds_every_unit_is_in_time(n_sessions, limit_s):
    _, took = talk(n_sessions, round_span_s=1.0)

    assert len(took) == 5 * n_sessions
    assert max(took) < limit_s


def test_batches_grow_with_the_load():
    means = []
    for n_sessions in (8, 24, 48):
        device, _ = talk(n_sessions, round_span_s=1.0)
        means.append(mean(device.batches["speak"]))

    assert means[0] < 1.5 < means[1] < 4 < means[2]


def test_a_long_answer_does_not_keep_units_waiting():
    device = Device()
    engine = Engine(device, device.clock, round_span_s=1.0)
    took: list[float] = []

    def many(kind):
        for _ in range(400):
            yield Op(kind, None, deadline=device.now + 0.5)

    # Others have had the device for seconds: that must not be paid back at a stretch.
    for kind in ("decode", "prefill"):
        engine.spawn(kind, many(kind))
        while engine.step(LANE):
            pass
    engine.spawn("answer", many("decode"))
    engine.step(LANE)
    for name in range(4):
        arrived_at = device.now
        engine.spawn(
            name,
            unit(arrived_at + 1.0),
            on_done=lambda task, arrived_at=arrived_at: took.append(device.now - arrived_at),
        )
        for _ in range(12):
            engine.step(LANE)
    while len(took) < 4:
        assert engine.step(LANE)

    assert max(took) < 0.45


def test_what_has_no_deadline_waits_for_units():
    device = Device()
    engine = Engine(device, device.clock, round_span_s=1.0)
    done: list[str] = []
    engine.spawn("chat", unit(float("inf")), on_done=lambda task: done.append("chat"))
    engine.spawn("live", unit(1.0), on_done=lambda task: done.append("live"))
    engine.step(LANE)
    began_at = device.now

    while "live" not in done:
        engine.step(LANE)

    assert done == ["live"]
    # Alone it takes as long, but for the rows of the chat that its steps carry along.
    assert device.now - began_at < 0.13
