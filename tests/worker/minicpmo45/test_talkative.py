"""A session that speaks whatever it hears: what warm-up plays when the model stayed silent."""

import numpy as np

from shared.protocol import DuplexSettings
from tests.golden.driver import run_program
from tests.worker.minicpmo45.conftest import play
from worker.models.contract import CanTalk, Prompt
from worker.models.minicpmo45.model import MiniCpmO45
from worker.models.minicpmo45.ops import START_TURN, VOCODE


def prepared(model: MiniCpmO45):
    assert isinstance(model, CanTalk)
    state = model.talkative_state(0)
    none = np.zeros(0, np.float32)
    run_program(model, model.prepare(state, Prompt("", DuplexSettings(), none, none)))
    return state


def test_every_unit_speaks_and_every_third_one_ends_the_turn(tiny: MiniCpmO45):
    state = prepared(tiny)
    results = [play(tiny, state, k)[0] for k in range(6)]

    assert not any(result.is_listen for result in results)
    assert [result.end_of_turn for result in results] == [False, False, True] * 2
    assert {result.text for result in results} == {"Hello, I am"}
    assert results[1].n_speech_tokens == 25


def test_a_turn_of_it_needs_every_op_of_speaking(tiny: MiniCpmO45):
    state = prepared(tiny)
    ran = [play(tiny, state, k)[1] for k in range(3)]

    assert sum(len(played.of(START_TURN)) for played in ran) == 1
    last = [played.of(VOCODE)[-1].op.payload.is_last for played in ran[1:]]
    assert last == [False, True]
