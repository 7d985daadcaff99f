"""Sessions beside, after and apart from each other: each one is as if it were alone."""

import copy

import numpy as np
import pytest
import torch

from shared.config import Config, DuplexConfig, ModelConfig
from shared.errors import ModelLoadError
from shared.protocol import DuplexSettings
from tests.golden.driver import run_program
from tests.worker.minicpmo45.conftest import CHECKPOINT, picture, play, sound, start, unit
from worker.engine.engine import Engine
from worker.models.contract import Unit
from worker.models.minicpmo45 import ops
from worker.models.minicpmo45.build import build
from worker.models.minicpmo45.snapshot import restore, save
from worker.models.minicpmo45.window import MAX_UNIT_TOKENS

N_UNITS = 8


def frames_of(k):
    return (picture(k),) if k % 3 == 0 else ()


def heard(result):
    return (result.is_listen, result.text, result.end_of_turn, result.n_speech_tokens)


def talk(model, seed):
    """Decisions of a session that speaks at once, in its own words; afterwards it is free."""
    ids = model.tokenizer.ids
    words = model.tokenizer.encode((" hello world", " the answer", " red people")[seed % 3])
    second = (ids.chunk_eos,) if seed % 2 else (ids.turn_eos, ids.chunk_eos)
    return iter([ids.speak, *words, ids.chunk_eos, ids.speak, *words[:1], *second])


def alone(model, slot, seed, n_units=N_UNITS, settings=None, talks=False):
    """Results of a session that has the model for itself."""
    state = start(model, slot, seed, settings)
    state.script = talk(model, seed) if talks else None
    return [play(model, state, k + seed, *frames_of(k))[0] for k in range(n_units)]


def assert_same(ours, theirs):
    assert [heard(result) for result in ours] == [heard(result) for result in theirs]
    for mine, yours in zip(ours, theirs, strict=True):
        assert np.isfinite(mine.audio).all()
        np.testing.assert_allclose(mine.audio, yours.audio, atol=2e-4)


def test_a_slot_reused_after_any_ending_equals_a_fresh_one(tiny):
    fresh = alone(tiny, 0, seed=5)
    for n_units in (0, 1, 5):
        tiny.poison_slot(1)
        state = start(tiny, 1, seed=9)
        for k in range(n_units):
            play(tiny, state, k, *frames_of(k))
        # Not even a clean end: the next session simply begins.
        assert_same(alone(tiny, 1, seed=5), fresh)


def test_a_slot_reused_in_the_middle_of_an_op_sequence_equals_a_fresh_one(tiny):
    fresh = alone(tiny, 0, seed=5)
    state = start(tiny, 1, seed=9)
    program = tiny.unit(state, unit(0))
    request = program.send(None)
    for _ in range(3):
        reply = tiny.run(request.kind, request.bucket, [request.payload])[0]
        request = program.send(reply)
    program.close()
    tiny.end(state)

    assert_same(alone(tiny, 1, seed=5), fresh)


def test_sessions_in_one_batch_equal_each_alone(tiny):
    """Three sessions whose ops the engine merges, against the same ones one after the other."""
    seeds = (5, 6, 7)
    apart = [alone(tiny, slot, seed, talks=True) for slot, seed in enumerate(seeds)]
    for slot in range(3):
        tiny.poison_slot(slot)
    engine = Engine(tiny)
    sizes: dict[str, int] = {}
    run = tiny.run

    def watched(kind, bucket, payloads):
        sizes[kind] = max(sizes.get(kind, 0), len(payloads))
        return run(kind, bucket, payloads)

    engine._runner = Runner(tiny, watched)
    states = [start(tiny, slot, seed) for slot, seed in enumerate(seeds)]
    for state, seed in zip(states, seeds, strict=True):
        state.script = talk(tiny, seed)
    together: list[list] = [[] for _ in seeds]
    for k in range(N_UNITS):
        for slot, seed in enumerate(seeds):
            # As `play` does it: sound of its own, pictures of everybody.
            made = Unit(k, sound(k + seed), frames_of(k))
            engine.spawn(slot, tiny.unit(states[slot], made), together[slot].append)
        while any(engine.step(lane) for lane in engine.lanes):
            pass

    for ours, theirs in zip(together, apart, strict=True):
        assert_same(ours, theirs)
    assert min(sizes[kind] for kind in (ops.DECODE, ops.SPEAK, ops.VOCODE)) > 1


class Runner:
    def __init__(self, model, run):
        self.lanes, self.max_batch, self.run = model.lanes, model.max_batch, run


@pytest.mark.parametrize("n_before", [1, 4])
def test_a_restored_session_equals_the_uninterrupted_one(tiny, n_before):
    whole = alone(tiny, 0, seed=6)
    state = start(tiny, 1, seed=6)
    for k in range(n_before):
        play(tiny, state, k + 6, *frames_of(k))
    snapshot = save(tiny, state)

    # What happens in between leaves no trace, neither in the snapshot nor in the slot.
    for k in range(n_before, n_before + 2):
        play(tiny, state, 100 + k)
    tiny.poison_slot(2)
    for slot in (1, 2):
        again = restore(tiny, snapshot, slot)
        rest = [play(tiny, again, k + 6, *frames_of(k))[0] for k in range(n_before, N_UNITS)]
        assert_same(rest, whole[n_before:])


def test_two_sessions_in_a_row_equal_two_first_ones(tiny):
    """Nothing leaks: neither the encoder's cache nor the floor of the features."""
    first = alone(tiny, 0, seed=5, n_units=6)
    second = alone(tiny, 0, seed=5, n_units=6)

    assert_same(second, first)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ten_minutes_keep_every_cache_bounded(monkeypatch):
    """Encoder resets, slides of the features' buffer and cuts of the context are all crossed."""
    duplex = DuplexConfig(basic_window_high_tokens=400, basic_window_low_tokens=300)
    model = build(Config(model=ModelConfig(model_path=str(CHECKPOINT)), duplex=duplex))
    model.load_model(lambda share, note: None)
    model.init_unified(1, lambda share, note: None)
    model.poison_slot(0)
    state = start(model)
    ids = model.tokenizer.ids
    tensors = dict(shapes(model))
    n_cuts = n_resets = n_slides = 0
    silence = [ids.listen]
    speech = [ids.speak, *model.tokenizer.encode(" hello"), ids.chunk_eos]
    ending = [ids.speak, *model.tokenizer.encode(" red"), ids.turn_eos, ids.chunk_eos]

    for k in range(600):
        script = {0: speech, 1: speech, 2: ending}.get(k % 20, silence)
        state.script = iter(script)
        past, dropped, base = state.audio_past, state.window.n_dropped_tokens, state.mel.base_frames
        result, played = play(model, state, k)
        n_resets += state.audio_past < past
        n_cuts += state.window.n_dropped_tokens > dropped
        n_slides += state.mel.base_frames > base
        assert result.is_listen == (script is silence)
        assert np.isfinite(result.audio).all()
        assert all(torch.isfinite(ran.logits).all() for ran in played.ops if ran.logits is not None)
        assert state.context_tokens <= 400
        assert state.context_tokens + MAX_UNIT_TOKENS <= model.n_positions
        assert state.audio_past <= model.config.audio.max_positions
        assert state.speech_position <= model.n_speech_positions

    assert dict(shapes(model)) == tensors
    assert n_resets == 599 // 29
    assert n_slides == 58  # at 30 s, then every 10 s
    assert n_cuts > 50
    assert len(state.said) <= 4096
    assert len(copy.deepcopy(state.mel).__dict__) == len(state.mel.__dict__)


def shapes(model):
    caches = (model.language.cache, model.audio_cache, model.speech_cache)
    for index, cache in enumerate(caches):
        for side, tensors in (("keys", cache.keys), ("values", cache.values)):
            for layer, tensor in enumerate(tensors):
                yield (index, side, layer), (tuple(tensor.shape), tensor.data_ptr())


def test_a_turn_longer_than_the_speech_cache_goes_on(tiny, monkeypatch):
    monkeypatch.setattr(tiny, "n_speech_positions", 128)
    state = start(tiny, settings=DuplexSettings())
    ids = tiny.tokenizer.ids
    state.script = iter(
        [
            token
            for _ in range(12)
            for token in (ids.speak, *tiny.tokenizer.encode(" hello world"), ids.chunk_eos)
        ]
    )

    moves = 0
    for k in range(12):
        result, played = play(tiny, state, k)
        moves += len(played.of(ops.MOVE))
        assert not result.is_listen
        assert np.isfinite(result.audio).all()
        assert state.speech_position <= 128

    assert moves > 0


def test_a_window_cut_leaves_the_next_unit_sound(tiny, monkeypatch):
    state = start(tiny, seed=3)
    state.window.settings = type(state.window.settings)(high_tokens=120, low_tokens=90)
    cuts = 0
    for k in range(12):
        result = run_program(tiny, tiny.unit(state, unit(k)))
        cuts += len(result.of(ops.MOVE))
        assert all(torch.isfinite(ran.logits).all() for ran in result.ops if ran.logits is not None)
        assert state.context_tokens <= 120 + 40

    assert cuts > 1


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("can't allocate memory: 9 bytes")],
)
def test_too_many_slots_are_one_sentence(monkeypatch, error):
    model = build(Config(model=ModelConfig(model_path=str(CHECKPOINT))))
    model.load_model(lambda share, note: None)

    def full(*args):
        raise error

    monkeypatch.setattr("worker.models.minicpmo45.senses.AudioCache.allocate", full)

    with pytest.raises(ModelLoadError, match="not enough memory for 7 slots"):
        model.init_unified(7, lambda share, note: None)
