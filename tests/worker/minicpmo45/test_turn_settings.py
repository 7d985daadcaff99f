"""Every setting of a chat request and of a conversation changes what it says it changes.

On the tiny checkpoint: its answers are random, and the same draws choose the same tokens.
"""

from __future__ import annotations

import numpy as np
import pytest

from shared.errors import BadMessage
from shared.protocol import GenerationSettings
from tests.golden.driver import run_program
from tests.worker.minicpmo45.conftest import picture, sound
from worker.models.contract import ChatQuestion, Clip, Picture, TurnMessage, TurnPrompt, Video
from worker.models.minicpmo45 import ops
from worker.models.minicpmo45.draws import SeededDraws

ASKED = (TurnMessage("user", ("what is the answer",)),)


def ask(model, messages=ASKED, fields=None, **generation):
    """Return the answer to a chat request; it always draws the same numbers."""
    state = model.chat_state(0)
    state.draws = SeededDraws(3)
    generation = {"max_new_tokens": 12} | generation
    question = ChatQuestion(messages, GenerationSettings(**generation), **(fields or {}))
    return run_program(model, model.chat(state, question))


def converse(model, speaks=False, system=("be kind",), **generation):
    """Return the answer to one turn of a new conversation."""
    state = model.turn_state(0)
    state.draws = SeededDraws(3)
    settings = GenerationSettings(**({"max_new_tokens": 20} | generation))
    run_program(model, model.prepare_turns(state, TurnPrompt(system, settings, speaks)))
    return run_program(model, model.turn(state, sound(1)))


BOTH = pytest.mark.parametrize("answered", [ask, converse])


def n_said(played) -> int:
    return played.value.n_generated_tokens


@BOTH
def test_max_new_tokens_is_the_longest_answer(tiny, answered):
    endless = {"length_penalty": 100.0}

    assert n_said(answered(tiny, max_new_tokens=10, **endless)) == 10
    assert n_said(answered(tiny, max_new_tokens=20, **endless)) == 20


@BOTH
def test_length_penalty_keeps_an_answer_from_ending(tiny, answered):
    lengths = [n_said(answered(tiny, max_new_tokens=20, length_penalty=p)) for p in (0.01, 100)]

    assert lengths[0] < lengths[1] == 20


@BOTH
def test_do_sample_and_temperature_decide_how_a_token_is_drawn(tiny, answered):
    greedy = answered(tiny, do_sample=False).value.text
    drawn = [answered(tiny, temperature=t).value.text for t in (0.001, 1.0, 2.0)]

    assert drawn[0] == greedy
    assert len({*drawn, greedy}) == 3


@BOTH
@pytest.mark.parametrize("narrow", [{"top_k": 1}, {"top_p": 0.0}])
def test_top_k_and_top_p_keep_the_likeliest(tiny, answered, narrow):
    wide = answered(tiny, temperature=2.0, top_k=0, top_p=1.0).value.text
    greedy = answered(tiny, do_sample=False).value.text

    assert answered(tiny, temperature=2.0, **narrow).value.text == greedy != wide


@BOTH
def test_repetition_penalty_makes_said_tokens_rarer(tiny, answered):
    repeated = [
        answered(tiny, do_sample=False, max_new_tokens=20, length_penalty=100.0, **penalty)
        for penalty in ({"repetition_penalty": 1.0}, {"repetition_penalty": 10.0})
    ]

    tokens = [[ran.op.payload.token for ran in p.of(ops.DECODE)] for p in repeated]
    assert len(set(tokens[0])) < len(set(tokens[1]))


def test_min_new_tokens_keeps_a_chat_answer_from_ending(tiny):
    eager = {"length_penalty": 0.01, "max_new_tokens": 12}

    assert n_said(ask(tiny, **eager)) < 12
    assert n_said(ask(tiny, min_new_tokens=12, **eager)) == 12


def test_max_input_tokens_bounds_a_chat_question(tiny):
    n = ask(tiny).value.n_input_tokens

    assert ask(tiny, max_input_tokens=n).value.text
    with pytest.raises(BadMessage, match=f"have {n} tokens, at most {n - 1}"):
        ask(tiny, max_input_tokens=n - 1)


@BOTH
def test_a_voice_is_made_only_where_it_is_asked_for(tiny, answered):
    silent = answered(tiny)
    spoken = ask(tiny, fields={"speaks": True}) if answered is ask else converse(tiny, speaks=True)

    kinds = [{ran.op.kind for ran in played.ops} for played in (silent, spoken)]
    assert {ops.SPEAK, ops.VOCODE} & kinds[0] == set()
    assert {ops.SPEAK, ops.VOCODE} < kinds[1]


def test_the_slices_of_a_picture_and_its_number_are_the_clients(tiny):
    messages = (TurnMessage("user", (Picture(picture(1, 1800, 1200)), "what")),)
    found = {
        (slices, numbered): ask(
            tiny, messages, {"max_slice_nums": slices, "use_image_id": numbered}
        ).value.n_input_tokens
        for slices in (1, 2, 9)
        for numbered in (False, True)
    }

    assert found[1, False] < found[2, False] < found[9, False]
    assert all(found[slices, False] < found[slices, True] for slices in (1, 2, 9))


@pytest.mark.parametrize(
    ("fields", "end"),
    [
        ({}, "assistant\n<think>\n\n</think>\n\n"),
        ({"use_tts_template": True}, "assistant\n<think>\n\n</think>\n\n<|tts_bos|>"),
        ({"enable_thinking": True}, "assistant\n"),
        ({"speaks": True}, "assistant\n<think>\n\n</think>\n\n<|tts_bos|>"),
    ],
)
def test_how_a_chat_answer_opens_is_the_clients_choice(tiny, fields, end):
    assert ask(tiny, fields=fields).value.prompt.endswith(f"<|im_start|>{end}")


def test_omni_mode_reads_a_film_second_by_second(tiny):
    seconds = ((picture(1),), (picture(2), picture(3)))
    samples = np.concatenate([sound(1), sound(2)])
    messages = (TurnMessage("user", (Video(seconds, samples), "what")),)

    plain, omni = (ask(tiny, messages, {"is_omni": is_omni}).value for is_omni in (False, True))

    assert omni.prompt.count("\n") < plain.prompt.count("\n")


def test_a_conversation_has_the_system_message_that_was_sent(tiny):
    short = converse(tiny, system=("hi",)).value
    long = converse(tiny, system=("hi, you are a very helpful parrot", Clip(sound(3)))).value

    assert short.n_input_tokens + 10 < long.n_input_tokens


def test_a_history_beyond_the_context_is_refused_with_both_numbers(tiny):
    turns = [TurnMessage(("user", "assistant")[i % 2], ("word " * 200,)) for i in range(41)]

    with pytest.raises(BadMessage, match=rf"have \d+ tokens, at most {tiny.n_positions - 1}: shor"):
        ask(tiny, tuple(turns), max_input_tokens=10**6)
