"""Full duplex, half duplex and chat on one model at the same time, and one after the other."""

import dataclasses

import numpy as np
import torch

from tests.worker.minicpmo45.conftest import N_SLOTS, sound, start, unit
from worker.engine.engine import Engine
from worker.models.contract import Clip, TurnMessage
from worker.models.minicpmo45 import chat, half_duplex
from worker.models.minicpmo45.chat import ChatRequest
from worker.models.minicpmo45.half_duplex import HalfDuplexSettings

SETTINGS = HalfDuplexSettings(max_new_tokens=20, do_sample=False)
QUESTION = TurnMessage("user", ("what is ", Clip(sound(50))))


def duplex_units(model, slot):
    state = start(model, slot, seed=5)
    for k in range(4):
        yield model.unit(state, unit(k))


def half_duplex_turns(model, slot):
    state = half_duplex.new_state(slot, 5)
    system = TurnMessage("system", ("be kind",))
    yield half_duplex.prepare(model, state, system, SETTINGS)
    for _ in range(2):
        yield half_duplex.prefill(model, state, QUESTION)
        yield half_duplex.generate(model, state)


def chat_requests(model, slot):
    state = chat.new_state(slot, 5)
    for text in ("hello the world", "question?"):
        request = ChatRequest((TurnMessage("user", (text,)),), max_new_tokens=12, do_sample=False)
        yield chat.chat(model, state, request)


MODES = (duplex_units, half_duplex_turns, chat_requests)


def run(model, *sessions):
    """Play sessions at once, each its programs in order; return what every program left."""
    engine = Engine(model)
    left = [[] for _ in sessions]
    tasks = [None] * len(sessions)
    while True:
        for index, programs in enumerate(sessions):
            if tasks[index] is not None and not tasks[index].done:
                continue
            if tasks[index] is not None:
                assert tasks[index].error is None, tasks[index].error
                left[index].append(tasks[index].value)
            program = next(programs, None)
            emitted = left[index]
            tasks[index] = engine.spawn(index, program, emitted.append) if program else None
        if not any(tasks):
            return left
        while any(engine.step(lane) for lane in engine.lanes):
            pass


def plain(value):
    """A value without tensors, times and last digits, so that it can be compared."""
    if dataclasses.is_dataclass(value):
        fields = dataclasses.asdict(value)
        fields.pop("timings", None)
        return {name: plain(field) for name, field in fields.items()}
    if isinstance(value, (np.ndarray, torch.Tensor)):
        return np.round(np.asarray(value, np.float64), 2).shape
    return value


def test_three_modes_at_once_equal_each_alone(tiny):
    apart = [run(tiny, mode(tiny, slot))[0] for slot, mode in enumerate(MODES)]
    for slot in range(N_SLOTS):
        tiny.poison_slot(slot)

    together = run(tiny, *(mode(tiny, slot) for slot, mode in enumerate(MODES)))

    assert [[plain(value) for value in mode] for mode in together] == [
        [plain(value) for value in mode] for mode in apart
    ]


def test_a_slot_changes_its_mode_from_one_session_to_the_next(tiny):
    fresh = [run(tiny, mode(tiny, 0))[0] for mode in MODES]
    for slot in range(N_SLOTS):
        tiny.poison_slot(slot)

    switched = [run(tiny, mode(tiny, 0))[0] for mode in (*MODES, *MODES)]

    for index, mode in enumerate(switched):
        assert [plain(v) for v in mode] == [plain(v) for v in fresh[index % len(MODES)]]


def test_units_go_before_chat(tiny):
    """A unit that comes while a long answer is written is served at the next op."""
    engine = Engine(tiny)
    state = chat.new_state(1, 5)
    request = ChatRequest((TurnMessage("user", ("x" * 1500,)),), max_new_tokens=40, do_sample=False)
    answer = engine.spawn("chat", chat.chat(tiny, state, request))
    engine.step("language")
    duplex = start(tiny, 0)
    live = engine.spawn("live", tiny.unit(duplex, unit(0)))
    n_ops = 0
    while not live.done:
        assert any(engine.step(lane) for lane in engine.lanes)
        n_ops += 1

    assert not answer.done
    assert n_ops < 80
