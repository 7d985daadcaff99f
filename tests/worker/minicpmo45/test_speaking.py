"""Text streams, the buffer in front of the vocoder, and what the speech head is asked for."""

from __future__ import annotations

import math
import random

import pytest
import torch

from tests.fakes.turn_model import TOKENIZER, TurnModel
from tests.golden.driver import run_program
from worker.models.minicpmo45 import ops
from worker.models.minicpmo45.draws import SeededDraws
from worker.models.minicpmo45.speaking import CodeBuffer, TextStream, Utterance, Words, say
from worker.models.minicpmo45.tokenizer import Tokenizer, build_bpe
from worker.models.minicpmo45.vocabulary import BUILT_IN_ADDED, BUILT_IN_VOCABULARY
from worker.nn.code_sampling import CodeSampling

SILENCE = (4218, 4218, 4218)


def words(n, is_closing=False):
    return Words(tuple(range(n)), tuple(torch.zeros(2) for _ in range(n)), is_closing)


def utterance(attention="full_attention", **changes):
    return Utterance(0, "voice", CodeSampling(), attention, **changes)


def speak(model, voice, n_words=4, *, is_last=False, max_new=500, **changes):
    draws = SeededDraws(0)
    return run_program(
        model,
        say(model, voice, words(n_words), draws, is_last=is_last, max_new=max_new, **changes),
    )


def requests(played):
    return [run.op.payload for run in played.of(ops.SPEAK)]


# ---- text


def test_streamed_text_is_the_decoded_text():
    """Any tokens: whole words, single bytes, special ones."""
    draw = random.Random(0)
    for _ in range(50):
        ids = [draw.choice((draw.randrange(256), TOKENIZER.ids.turn_eos)) for _ in range(30)]
        for shows_special in (False, True):
            stream = TextStream(TOKENIZER, shows_special)
            text = "".join(map(stream.push, ids)) + stream.flush()
            assert text == TOKENIZER.decode(ids, skip_special=not shows_special)


def test_a_token_that_is_no_bytes_is_streamed_as_it_is_written():
    token = "<é你>"
    added = {**BUILT_IN_ADDED, token: (151_990, False)}
    tokenizer = Tokenizer(build_bpe(BUILT_IN_VOCABULARY, [], added))

    text = TextStream(tokenizer).push(151_990)

    assert text == tokenizer.decode([151_990]) == token


# ---- codes


def test_a_turn_begins_with_silence_and_looks_ahead():
    buffer = CodeBuffer()
    buffer.push(range(25))

    (codes, is_last), *others = buffer.take(is_last=False)

    assert codes == (*SILENCE, *range(25))
    assert not is_last
    assert not others
    assert buffer.waiting == [22, 23, 24]


@pytest.mark.parametrize(("n", "n_taken"), [(4, 0), (5, 8), (12, 15)])
def test_few_codes_wait_for_more(n, n_taken):
    buffer = CodeBuffer()
    buffer.push(range(n))

    assert sum(len(codes) for codes, _ in buffer.take(is_last=False)) == n_taken


def test_nothing_waits_at_the_end_of_a_turn():
    buffer = CodeBuffer()
    buffer.push(range(30))

    assert [(len(codes), last) for codes, last in buffer.take(is_last=True)] == [
        (28, False),
        (8, False),
        (3, True),
    ]
    assert list(buffer.take(is_last=True)) == []


def test_whole_seconds_only_where_asked_for():
    buffer = CodeBuffer()
    buffer.push(range(49))

    assert [len(codes) for codes, _ in buffer.take(is_last=False, at_least=25)] == [28]
    assert [(len(c), last) for c, last in buffer.take(True, at_least=25)] == [(27, True)]


# ---- runs of the speech head


def test_a_run_goes_on_from_its_last_code_in_bounded_pieces():
    played = speak(TurnModel(speaks=[60]), utterance())

    first, second, third = requests(played)
    assert (first.start, first.n_inputs, first.last_code) == (0, 5, None)
    assert (second.start, second.last_code) == (29, 24)
    assert (third.start, third.last_code) == (54, 49)


def test_later_words_follow_behind_the_live_positions():
    """The fake speech head fails where a start is not the live length."""
    model, voice = TurnModel(speaks=[3, 60, 7]), utterance()

    for n_words in (4, 10, 2):
        speak(model, voice, n_words)

    assert voice.position == (5 + 3) + (11 + 60) + (3 + 7)
    assert len(voice.codes) == 70


def test_without_an_end_the_last_draw_is_dropped():
    model, voice = TurnModel(speaks=[10**6, 3]), utterance()

    speak(model, voice, max_new=40)

    assert len(voice.codes) == 39
    assert voice.position == 5 + 39
    speak(model, voice)


def test_the_penalty_counts_the_codes_of_the_whole_turn():
    model, voice = TurnModel(speaks=[30, 3]), utterance()

    runs = requests(speak(model, voice)) + requests(speak(model, voice))

    assert [run.recent for run in runs] == [(), tuple(range(9, 25)), tuple(range(14, 30))]


def test_only_the_first_code_of_a_turn_is_drawn_freely():
    model, voice = TurnModel(), utterance()

    runs = requests(speak(model, voice)) + requests(speak(model, voice))

    assert [run.sampling.first_is_free for run in runs] == [True, False]


def test_greedy_runs_need_no_draws():
    voice = Utterance(0, "voice", CodeSampling(is_greedy=True), "full_attention")

    assert requests(speak(TurnModel(), voice))[0].draws == ()


def test_sound_of_several_words_is_continuous():
    model, voice = TurnModel(speaks=[10, 20, 1]), utterance()

    calls = [
        run.op.payload
        for is_last in (False, False, True)
        for run in speak(model, voice, is_last=is_last).of(ops.VOCODE)
    ]

    assert [(len(c.codes), c.is_last) for c in calls] == [(28, False), (9, True)]
    assert calls[0].codes[3:] + calls[1].codes[3:] == tuple(range(31))


def test_the_vocoder_is_started_once_and_only_if_there_is_sound():
    model, voice = TurnModel(speaks=[10, 20, 30]), utterance()

    starts = [len(speak(model, voice).of(ops.START_TURN)) for _ in range(3)]

    assert starts == [0, 1, 0]


# ---- what later words see


def test_a_sliding_window_keeps_the_newest_positions():
    model, voice = TurnModel(speaks=[100, 250, 3]), utterance("sliding_window")

    moves = [[run.op.payload for run in speak(model, voice).of(ops.MOVE)] for _ in range(3)]

    assert moves[:2] == [[], []]
    assert moves[2] == [ops.MoveRequest(0, 60, 360, 0, "speech")]
    assert voice.position == 300 + 5 + 3


def test_recomputing_begins_again_with_the_last_words_and_codes():
    model, voice = TurnModel(speaks=[7, 8, 9]), utterance("sliding_recompute")

    speak(model, voice, 4)
    speak(model, voice, 5)
    again, new = requests(speak(model, voice, 6))

    assert (again.start, again.max_new, len(again.text_ids)) == (0, 0, 5)
    assert again.given_codes == tuple(range(7, 15))
    assert (new.start, len(new.text_ids)) == (6 + 8, 6)


def test_reindexing_keeps_the_first_words_and_the_last():
    model, voice = TurnModel(speaks=[7, 8, 9, 3]), utterance("reindex")

    moves = [[run.op.payload for run in speak(model, voice).of(ops.MOVE)] for _ in range(4)]

    first, second, third = 5 + 7, 5 + 8, 5 + 9
    # The second words stand behind the first ones already.
    assert moves[:3] == [[], [], []]
    start = first + second
    assert moves[3] == [ops.MoveRequest(0, start, start + third, first, "speech")]
    assert voice.position == first + third + 5 + 3


# ---- when it is due


def test_sound_that_is_ahead_of_its_hearer_is_due_when_it_has_been_played():
    model = TurnModel(speaks=[100])
    voice = utterance(reply_s=1.0)

    played = speak(model, voice)

    # The clock stands still: each second of sound lets the next one be due a second later.
    assert [run.op.deadline - model.now for run in played.of(ops.VOCODE)] == [1.0, 1.0, 2.0, 3.0]
    assert voice.due(model.now) == model.now + 4.0


def test_sound_that_has_been_played_is_due_soon():
    model = TurnModel(speaks=[50, 50])
    voice = utterance(reply_s=1.0)
    speak(model, voice)
    model.now += 60.0

    played = speak(model, voice)

    assert played.of(ops.SPEAK)[0].op.deadline == model.now + 1.0


def test_a_voice_that_answers_whenever_there_is_time_has_no_deadline():
    played = speak(TurnModel(speaks=[60]), utterance())

    assert {run.op.deadline for run in played.ops} == {math.inf}
