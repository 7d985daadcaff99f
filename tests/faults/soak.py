"""Two live conversations while everything around them goes wrong.

    .venv/bin/python -m tests.faults.soak --minutes 20
    .venv/bin/python -m tests.faults.soak --minutes 20 --url ws://127.0.0.1:8006

Without `--url` it starts a gateway, a cascade worker with four slots and a second worker around
the fake model. Two sessions on the cascade ask a spoken question every twenty seconds, at the pace
of a microphone. Meanwhile, seeded, sessions of all modes on both workers end in every way, send
garbage and image bombs, do not read, come over bad networks, in crowds that have to queue; the
second worker is killed, frozen, stopped and started again. With `--url` a service that runs
already gets the same clients; its processes are left alone and not looked into.

Prints a table and, as the last line, one JSON object. Exit status 1 when a healthy session lost a
deadline or a caption, or when something leaked.

The faulty sessions send silence or noise nearly always: on two cores, more speech would measure
the CPU and not the service.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from websockets.exceptions import ConnectionClosed, InvalidHandshake

from client.journal import percentiles
from client.media import read_audio
from client.paced import LoopProbe
from scripts.machine import fetch
from shared.limits import INPUT_SAMPLE_RATE_HZ as RATE
from tests.bench.provenance import provenance
from tests.faults.clients import (
    Caller,
    Target,
    chunk_of,
    chunks_of,
    closed_while_the_model_speaks,
    killed_while_the_model_speaks,
    turn_of,
)
from tests.faults.endings import ENDINGS, SLOW_ENDINGS, Ending, by_mode
from tests.faults.healthy import PERIOD_S, QUESTIONS, Healthy
from tests.faults.leaks import show_usage
from tests.faults.processes import (
    Process,
    Usage,
    cascade_worker,
    fake_worker,
    gateway,
    running,
    wait_ready,
    wait_until,
)
from tests.faults.proxy import Proxy
from tests.faults.service import Service
from tests.faults.turn_clients import (
    turns_closed_in_mid_answer,
    turns_interrupted_then_stopped,
    turns_killed_in_mid_answer,
    turns_stopped,
    turns_stopped_in_mid_answer,
)

ASSETS = Path(__file__).parents[1] / "assets"
N_CASCADE_SLOTS = 4
N_FAKE_SLOTS = 2
AT_A_TIME = 3
QUESTION_SHARE = 0.1
"""Of the faulty sessions that speak: so many ask a real question, the others hiss."""

QUESTION_PATIENCE_S = 20.0
NOISE_PATIENCE_S = 2.0
"""For an answer in half duplex; the embedded voice detector takes noise for no turn."""

CROWD = 8
FAULT_INTERVAL_S = 25.0
FROZEN_S = 4.0
DOWN_S = 2.0


# ---- the faulty


async def spoke_over_a_bad_network(target: Target) -> None:
    async with Proxy(target.port, seed=target.rng.randrange(1000)) as proxy:
        for faults in (proxy.up, proxy.down):
            faults.delay_s, faults.jitter_s, faults.loss = 0.1, 0.3, 0.1
        async with Caller.live(target.through(proxy)) as caller:
            await caller.exchange(5)
            await caller.stop()


async def spoke_over_a_thin_line(target: Target) -> None:
    async with Proxy(target.port) as proxy, Caller.live(target.through(proxy)) as caller:
        proxy.up.bytes_per_s = proxy.down.bytes_per_s = 60_000.0
        await caller.exchange(4)
        caller.vanish()


async def came_in_a_crowd(target: Target) -> None:
    """More at once than there are slots; some wait for a place, some leave the queue."""

    async def one(patience_s: float) -> None:
        async with Caller.open(target) as caller:
            with contextlib.suppress(TimeoutError, ConnectionClosed):
                async with asyncio.timeout(patience_s):
                    await caller.say("prepare", system_prompt=target.prompt)
                    await caller.hear("prepared")
            caller.vanish()

    await asyncio.gather(*(one(target.rng.uniform(0.0, 2.0)) for _ in range(CROWD)))


FAULTY: Final[tuple[Ending, ...]] = (
    *ENDINGS,
    *SLOW_ENDINGS,
    spoke_over_a_bad_network,
    spoke_over_a_thin_line,
    came_in_a_crowd,
)
SPEAKING: Final = (
    closed_while_the_model_speaks,
    killed_while_the_model_speaks,
    turns_closed_in_mid_answer,
    turns_interrupted_then_stopped,
    turns_killed_in_mid_answer,
    turns_stopped,
    turns_stopped_in_mid_answer,
)


@dataclass
class Trouble:
    """Opens faulty sessions until it is cancelled, and remembers how they went."""

    target: Target
    rng: random.Random
    ended: Counter[str] = field(default_factory=Counter)
    cut_short: Counter[str] = field(default_factory=Counter)
    """By a fault of a worker, mostly: these sessions check what they get."""

    async def run(self) -> None:
        spoken = read_audio(ASSETS / QUESTIONS[0][0])
        question = replace(
            self.target,
            speech=chunks_of(spoken),
            turn=turn_of(spoken),
            turn_patience_s=QUESTION_PATIENCE_S,
        )
        while True:
            ending = self.rng.choice(FAULTY)
            asks = ending in SPEAKING and self.rng.random() < QUESTION_SHARE
            try:
                await ending(question if asks else self.target)
                self.ended[ending.__name__] += 1
            except (
                AssertionError,
                ConnectionClosed,
                InvalidHandshake,
                OSError,
                TimeoutError,
            ) as error:
                self.cut_short[f"{ending.__name__}: {type(error).__name__}"] += 1
            await asyncio.sleep(self.rng.uniform(0.1, 1.5))


async def worker_faults(worker: Process, rng: random.Random, done: Counter[str]) -> None:
    """Kill, freeze and stop a worker in turn, each time bringing it back."""
    kinds = ["kill", "freeze", "terminate"]
    while True:
        await asyncio.sleep(rng.uniform(0.6, 1.4) * FAULT_INTERVAL_S)
        kind = rng.choice(kinds)
        done[kind] += 1
        if kind == "freeze":
            worker.freeze()
            await asyncio.sleep(FROZEN_S)
            worker.thaw()
            continue
        if kind == "kill":
            worker.kill()
        else:
            worker.terminate()
            await asyncio.to_thread(worker.wait)
        await asyncio.sleep(DOWN_S)
        worker.start()


# ---- one run


def target_at(url: str, n_slots: int, rng: random.Random) -> Target:
    """A service whose faulty clients hiss, at the pace of a microphone."""
    hiss = 0.3 * np.random.default_rng(3).standard_normal(RATE).astype(np.float32)
    hiss = np.clip(hiss, -0.9, 0.9)
    return Target(
        url,
        n_slots,
        silence=chunk_of(np.zeros(RATE, np.float32)),
        speech=(chunk_of(hiss),),
        turn=turn_of(hiss),
        turn_patience_s=NOISE_PATIENCE_S,
        chunk_s=1.0,
        rng=rng,
    )


async def converse(
    healthy: Sequence[Healthy], url: str, n_units: int, troubles: Sequence[Any]
) -> LoopProbe:
    """Run the healthy sessions to their end, the troubles beside them from when all are live.

    Raises what a trouble raises, at once: without it the rest of the time would prove nothing.
    """
    async with LoopProbe() as probe:
        running = asyncio.gather(*(one.run(url, n_units) for one in healthy))
        for one in healthy:
            await one.is_live.wait()
        beside = [asyncio.create_task(trouble) for trouble in troubles]
        try:
            waiting: set[asyncio.Future[Any]] = {running, *beside}
            while not running.done():
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
        finally:
            for task in (running, *beside):
                task.cancel()
            await asyncio.gather(running, *beside, return_exceptions=True)
    return probe


def soak(folder: Path, minutes: float, seed: int) -> dict[str, Any]:
    """Run against processes of our own."""
    rng = random.Random(seed)
    cascade = cascade_worker(folder, "cascade", sessions_per_worker=N_CASCADE_SLOTS)
    options: dict[str, Any] = {"unit_ms": 20, "unit_samples": RATE, "speech_s": 10.0}
    fake = fake_worker(folder, "fake", slots=N_FAKE_SLOTS, **options)
    front = gateway(folder, [cascade.port, fake.port])
    target = target_at(front.ws_url, N_CASCADE_SLOTS + N_FAKE_SLOTS, rng)
    service = Service(front, [cascade, fake], target)
    n_units = int(minutes * 60)
    healthy = [Healthy("first", 2), Healthy("second", 2 + PERIOD_S // 2)]
    troubles = [Trouble(target, random.Random(rng.random())) for _ in range(AT_A_TIME)]
    done: Counter[str] = Counter()
    usage: dict[str, dict[str, Usage]] = {"early": {}}

    async def start_the_fake_worker() -> None:
        fake.start()
        await asyncio.to_thread(wait_ready, front, fake)

    async def look_early() -> None:
        """Once everything has been used."""
        await asyncio.sleep(0.25 * n_units)
        while not usage["early"]:
            with contextlib.suppress(AssertionError, OSError):
                usage["early"] = await asyncio.to_thread(service.usage)
            # The second worker may be down or frozen just now.
            await asyncio.sleep(1.0)

    async def trouble() -> None:
        # Only now, so that the healthy have found their places on the other worker.
        await start_the_fake_worker()
        async with asyncio.TaskGroup() as group:
            for each in troubles:
                group.create_task(each.run())
            group.create_task(worker_faults(fake, random.Random(rng.random()), done))

    with running(front, cascade, fake):
        wait_ready(front, cascade, fake)
        usage["start"] = service.settle()
        fake.kill()
        wait_until(lambda: (front.health() or {})["workers_ready"] == 1, "one worker", front)
        probe = asyncio.run(converse(healthy, front.ws_url, n_units, [trouble(), look_early()]))
        if not fake.is_alive():
            fake.start()
        fake.thaw()
        usage["end"] = service.settle()
        leaks = service.leaks(usage["start"], usage["early"])
        status = front.get("/status") or {}
        traces = {process.name: len(process.trace_lines()) for process in service.processes}
    return {
        **_figures(healthy, n_units, troubles, probe),
        "worker_faults": dict(done),
        "error_slugs": status.get("errors", {}),
        "trace_lines": traces,
        "usage": {
            name: {moment: asdict(held[name]) for moment, held in usage.items() if held}
            for name in usage["start"]
        },
        "leaks": leaks,
    }


def soak_at(url: str, minutes: float, seed: int) -> dict[str, Any]:
    """Run against a service that somebody else has started."""
    rng = random.Random(seed)
    http_url = url.replace("ws", "http", 1)
    before = json.loads(fetch(f"{http_url}/status", 5.0) or b"{}")
    target = target_at(url, before["slots_total"], rng)
    n_units = int(minutes * 60)
    healthy = [Healthy("first", 2), Healthy("second", 2 + PERIOD_S // 2)]
    troubles = [Trouble(target, random.Random(rng.random())) for _ in range(AT_A_TIME)]
    runs = [each.run() for each in troubles]
    probe = asyncio.run(converse(healthy, url, n_units, runs))

    def free() -> int:
        status = json.loads(fetch(f"{http_url}/status", 5.0) or b"{}")
        return int(status.get("slots_free", -1))

    leaks = []
    try:
        wait_until(lambda: free() == before["slots_free"], "slots are free", timeout_s=45.0)
    except AssertionError:
        leaks = [f"{free()} slots are free, {before['slots_free']} were at the start"]
    after = json.loads(fetch(f"{http_url}/status", 5.0) or b"{}")
    return {
        **_figures(healthy, n_units, troubles, probe),
        "error_slugs": after.get("errors", {}),
        "usage": {},
        "leaks": leaks,
    }


def _figures(
    healthy: Sequence[Healthy], n_units: int, troubles: Sequence[Trouble], probe: LoopProbe
) -> dict[str, Any]:
    faulty = dict(sum((trouble.ended for trouble in troubles), Counter()))
    return {
        "healthy": {one.name: one.report(n_units) for one in healthy},
        "healthy_are_well": all(one.is_well(n_units) for one in healthy),
        "faulty_by_mode": by_mode(faulty),
        "faulty": faulty,
        "cut_short": dict(sum((trouble.cut_short for trouble in troubles), Counter())),
        "own_loop_late_ms": percentiles(probe.late_s, 1000),
    }


def show(report: dict[str, Any]) -> None:
    for name, one in report["healthy"].items():
        print(
            f"{name:8} units {one['units']}/{one['expected']}  missed {one['missed']}  "
            f"dropped {one['dropped']}  interruptions {one['interruptions']}  "
            f"captions {one['questions'] - len(one['wrong_captions'])}/{one['questions']}"
            f"{'  ' + one['problem'] if one['problem'] else ''}"
        )
        print(f"{'':8} latency ms {one['latency_ms']}  gaps ms {one['gaps_ms']}")
    print(f"faulty sessions: {sum(report['faulty'].values())} {report['faulty_by_mode']}")
    print(f"how they ended: {report['faulty']}")
    print(f"cut short: {report['cut_short']}")
    print(f"faults of the second worker: {report.get('worker_faults', {})}")
    print(f"errors by slug: {report['error_slugs']}")
    print(f"lines of tracebacks: {report.get('trace_lines', {})}")
    print(f"own event loop late, ms: {report['own_loop_late_ms']}")
    show_usage(report["usage"])
    for leak in report["leaks"]:
        print(f"leak: {leak}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--url", help="a service that runs already (ws://host:port)")
    parser.add_argument("--logs", type=Path, help="an empty folder to keep the processes' logs in")
    arguments = parser.parse_args()
    if arguments.url:
        report = soak_at(arguments.url, arguments.minutes, arguments.seed)
    else:
        with tempfile.TemporaryDirectory() as folder:
            logs = arguments.logs or Path(folder)
            report = soak(logs, arguments.minutes, arguments.seed)
    show(report)
    settings = {"minutes": arguments.minutes, "seed": arguments.seed}
    print(json.dumps({**provenance(), **settings, **report}))
    return 0 if report["healthy_are_well"] and not report["leaks"] else 1


if __name__ == "__main__":
    sys.exit(main())
