import dataclasses
import shutil
import threading

import numpy as np
import pytest
import torch

from worker.compile.compiler import Compiler
from worker.compile.regions import CompilePlan
from worker.engine.contract import Op
from worker.engine.engine import Engine
from worker.models.cascade.language import DECODE, PREFILL, DecodeRequest, PrefillRequest
from worker.models.cascade.model import LANES, MAX_BATCH, CascadeModel
from worker.models.voice_activity import DETECT_SPEECH, DetectRequest, VadState
from worker.nn.sampling import Sampling


@pytest.mark.weights
def test_every_kind_has_a_lane_and_a_runner(cascade):
    assert set(cascade._runners) == set(cascade.lanes) == set(LANES)
    assert set(MAX_BATCH) <= set(LANES)
    assert set(LANES.values()) == {"language", "senses"}


@pytest.mark.weights
def test_stages_report_progress_that_only_grows(data_dir):
    reports = []
    model = CascadeModel(data_dir, context_tokens=64)
    model.load_model(lambda share, note: reports.append((share, note)))
    shares = [share for share, _ in reports]

    assert shares == sorted(shares)
    assert shares[0] == 0.0
    assert shares[-1] == 1.0
    assert all(note for _, note in reports)


@pytest.mark.weights
def test_compile_stage_says_that_it_is_off(cascade):
    assert cascade.apply_torch_compile(lambda share, note: None) == "off"


@pytest.mark.weights
def test_a_unit_that_breaks_the_detector_fails_alone(cascade):
    """Units of two sessions in one batch: the error of one was the error of both."""
    initial = VadState.initial()
    states = [dataclasses.replace(initial, hidden=initial.hidden[..., :7]), initial]
    engine = Engine(cascade)

    def unit(state):
        return (yield Op(DETECT_SPEECH, DetectRequest(state, np.zeros(16_000, np.float32))))

    tasks = [engine.spawn(slot, unit(state)) for slot, state in enumerate(states)]
    while engine.step("senses"):
        pass

    assert tasks[0].error is not None
    assert tasks[1].error is None


@pytest.mark.weights
def test_lanes_run_at_the_same_time_without_disturbing_each_other(cascade, clip):
    samples = clip("long_story")
    prompt = PrefillRequest(0, (1, 9690, 198, 2683), 0, Sampling())

    def language():
        (token,) = cascade.run(PREFILL, None, [prompt])
        tokens = [token]
        for position in range(4, 12):
            request = DecodeRequest(0, tokens[-1], position, Sampling())
            tokens += cascade.run(DECODE, None, [request])
        return tokens

    def senses():
        request = DetectRequest(VadState.initial(), samples)
        ((probabilities, _),) = cascade.run(DETECT_SPEECH, None, [request])
        return probabilities

    expected = language(), senses()
    results = {}
    threads = [
        threading.Thread(target=lambda name=name, lane=lane: results.update({name: lane()}))
        for name, lane in (("language", language), ("senses", senses))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert results["language"] == expected[0]
    assert np.array_equal(results["senses"], expected[1])


@pytest.mark.weights
def test_poison_reaches_every_cache_of_the_slot_and_no_other(cascade):
    language, hearing = cascade.language.cache, cascade.transcriber.cache
    tensors = (
        *language.keys,
        *language.values,
        *hearing.keys,
        *hearing.values,
        *hearing.heard_keys,
        *hearing.heard_values,
    )
    for tensor in tensors:
        with torch.inference_mode():
            tensor.zero_()

    cascade.poison_slot(1)

    for tensor in tensors:
        assert tensor[1].isnan().all()
        assert tensor[0].isfinite().all()
        assert tensor[2].isfinite().all()


def test_the_end_cleans_the_slot_of_every_kind_of_session(tmp_path, monkeypatch):
    model, poisoned = CascadeModel(tmp_path), []
    monkeypatch.setattr(model, "poison_slot", poisoned.append)

    for slot, new_state in enumerate((model.new_state, model.chat_state, model.turn_state)):
        model.end(new_state(slot))

    assert poisoned == [0, 1, 2]


@pytest.mark.weights
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile on a CPU needs g++")
@pytest.mark.timeout(600)
def test_compiled_model_says_what_the_eager_one_says(data_dir, compiling):
    compiler = Compiler(CompilePlan(on_recompile="fail"))
    compiled = CascadeModel(data_dir, compiler, context_tokens=400)
    compiled.load_model(lambda share, note: None)
    compiled.init_unified(2, lambda share, note: None)
    note = compiled.apply_torch_compile(lambda share, note: None)
    compiler.seal()

    def say(model):
        prompt = (1, 9690, 198, 2683) * 7
        for start in range(0, 252, len(prompt)):
            request = PrefillRequest(1, prompt, start, Sampling())
            tokens = list(model.run(PREFILL, None, [request]))
        # Past the end of the first span.
        for position in range(252, 260):
            request = DecodeRequest(1, tokens[-1], position, Sampling())
            tokens += model.run(DECODE, None, [request])
        return tokens

    assert note.startswith("1 regions, 2 graphs")  # one row, and several
    eager = CascadeModel(data_dir, context_tokens=400)
    eager.load_model(lambda share, note: None)
    eager.init_unified(2, lambda share, note: None)
    assert say(compiled) == say(eager)
    counts = compiler.report.counts()
    assert (counts["eager_fallbacks"], counts["recompiles_after_idle"]) == (0, 0)
    assert counts["stages"]["llm.decode"]["runs"] == 8
