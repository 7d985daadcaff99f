"""One answer to a list of messages, on a model that answers by script."""

from __future__ import annotations

import math

import numpy as np
import pytest

from shared.config import Compat
from shared.errors import BadMessage
from tests.fakes.turn_model import TOKENIZER, TurnModel
from tests.golden.driver import run_program
from worker.engine.contract import Emit, Op
from worker.models.contract import Clip, Picture, Piece, Taken, TurnMessage
from worker.models.minicpmo45 import chat, ops
from worker.models.minicpmo45.chat import ChatRequest, SpeechOut, Written

IDS = TOKENIZER.ids
HELLO = (TurnMessage("user", ("hello",)),)


def play(model, **request):
    request = ChatRequest(**{"messages": HELLO} | request)
    return run_program(model, chat.chat(model, chat.new_state(slot=1, seed=3), request))


def deltas(played):
    return [delta for delta in played.emitted if isinstance(delta, Piece)]


def texts(played):
    return [delta.text for delta in deltas(played) if delta.text]


def choices(played):
    runs = played.of(ops.PREFILL)[-1:] + played.of(ops.DECODE)
    return [run.op.payload.choice for run in runs]


# ---- prompt


def test_messages_are_rendered_in_the_template_and_fed():
    model = TurnModel(says=TOKENIZER.encode("hi"))

    answer = play(model).value

    assert answer.prompt == (
        "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )
    fed = TOKENIZER.encode(answer.prompt)
    assert model.context[1] == fed + TOKENIZER.encode("hi")
    assert answer.n_input_tokens == len(fed)


def test_thoughts_are_left_open_if_wanted():
    assert "<think>" not in play(TurnModel(), enable_thinking=True).value.prompt


@pytest.mark.parametrize(
    "request_",
    [
        {"messages": (TurnMessage("user", (Clip(np.zeros(16_000, np.float32)),)),)},
        {"use_tts_template": True},
        {"speech": SpeechOut()},
    ],
)
def test_an_answer_to_sound_or_with_a_voice_opens_as_a_spoken_one(request_):
    assert play(TurnModel(), **request_).value.prompt.endswith("<|tts_bos|>")


def test_chat_clips_are_heard_second_by_second():
    played = play(
        TurnModel(), messages=(TurnMessage("user", (Clip(np.zeros(16_000, np.float32)), "?")),)
    )

    assert played.of(ops.ENCODE_CLIP)[0].op.payload.is_chunked


def test_a_long_prompt_is_fed_in_bounded_pieces():
    model = TurnModel(n_positions=2000)

    played = play(model, messages=(TurnMessage("user", ("x" * 1500,)),))

    rows = [run.op.payload.n_rows for run in played.of(ops.PREFILL)]
    assert len(rows) == 3
    assert max(rows) == ops.MAX_FEED_ROWS
    assert sum(rows) == played.value.n_input_tokens
    assert [run.op.payload.choice is None for run in played.of(ops.PREFILL)] == [True, True, False]


def test_every_op_waits_for_live_units():
    parts = (Picture(np.zeros((30, 30, 3), np.uint8)), Clip(np.zeros(16_000, np.float32)))
    model = TurnModel(says=TOKENIZER.encode("hi"))

    played = play(model, messages=(TurnMessage("user", parts),), speech=SpeechOut())

    assert {run.op.deadline for run in played.ops} == {math.inf}


@pytest.mark.parametrize(("limit", "n_positions"), [(100, 4096), (8192, 101)])
def test_a_prompt_that_is_too_long_is_refused_before_anything_runs(limit, n_positions):
    model = TurnModel(n_positions=n_positions)

    with pytest.raises(BadMessage, match="at most 100"):
        play(
            model,
            messages=(TurnMessage("user", ("x" * 200,)),),
            max_input_tokens=limit,
        )
    assert not model.context


# ---- refused


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        ({"num_beams": 3}, "num_beams is 3"),
        ({"messages": ()}, "no messages"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"speech": SpeechOut(vocoder="cosyvoice2")}, "'cosyvoice2' is not supported"),
    ],
)
def test_what_cannot_be_done_is_refused(request_, reason):
    with pytest.raises(BadMessage, match=reason):
        play(TurnModel(), **request_)


def test_a_voice_is_refused_where_there_is_none():
    with pytest.raises(BadMessage, match="no voice"):
        play(TurnModel(has_voice=False), speech=SpeechOut())


# ---- text


def test_text_comes_as_it_is_chosen():
    played = play(TurnModel(says=[*TOKENIZER.encode("one two"), IDS.im_end]))

    assert isinstance(played.emitted[0], Taken)
    assert texts(played) == list("one two")
    assert played.value.text == "one two"
    assert played.value.token_ids[-1] == IDS.im_end
    assert not played.value.was_cut


def test_nobody_gets_half_a_character():
    model = TurnModel(says=[*TOKENIZER.encode("né 你😀"), IDS.im_end])

    assert texts(play(model)) == ["n", "é", " ", "你", "😀"]


def test_a_character_that_is_never_completed_ends_as_a_replacement():
    half = TOKENIZER.encode("é")[:1]

    played = play(TurnModel(says=[*TOKENIZER.encode("n"), *half, IDS.im_end]))

    assert texts(played) == ["n", "\ufffd"]
    assert played.value.text == "n\ufffd"


def test_special_tokens_are_no_text():
    model = TurnModel(says=[*TOKENIZER.encode("a"), IDS.tts_eos, *TOKENIZER.encode("b")])

    played = play(model)

    assert texts(played) == ["a", "b"]
    assert played.value.text == "ab"


def test_without_streaming_only_the_length_of_the_prompt_is_emitted():
    played = play(TurnModel(says=TOKENIZER.encode("hi")), is_streaming=False, speech=SpeechOut())

    assert [type(value) for value in played.emitted] == [Taken]
    assert played.value.text == "hi"
    assert played.value.audio.size


@pytest.mark.parametrize("end", [IDS.im_end, IDS.endoftext])
def test_both_terminators_end_the_answer(end):
    answer = play(TurnModel(says=[*TOKENIZER.encode("a"), end, *TOKENIZER.encode("b")])).value

    assert (answer.text, answer.was_cut) == ("a", False)


def test_the_answer_is_cut_at_its_limit():
    answer = play(TurnModel(says=TOKENIZER.encode("abcdef")), max_new_tokens=4).value

    assert (answer.text, len(answer.token_ids), answer.was_cut) == ("abcd", 4, True)


def test_the_answer_ends_with_the_context():
    prompt = play(TurnModel()).value.prompt
    n_positions = len(TOKENIZER.encode(prompt)) + 3

    answer = play(TurnModel(says=TOKENIZER.encode("abcdef"), n_positions=n_positions)).value

    assert (answer.text, answer.was_cut) == ("abc", True)


def test_a_terminator_cannot_be_chosen_too_early():
    played = play(TurnModel(says=TOKENIZER.encode("abcd")), min_new_tokens=2)

    early = frozenset((IDS.im_end, IDS.endoftext))
    assert [choice.forbidden for choice in choices(played)] == [early, early, None, None, None]


def test_the_penalty_looks_at_what_was_generated():
    played = play(TurnModel(says=TOKENIZER.encode("abc")))

    a, b, c = TOKENIZER.encode("abc")
    assert [choice.recent.tolist() for choice in choices(played)] == [[], [a], [a, b], [a, b, c]]
    sampling = choices(played)[0].sampling
    assert (sampling.repetition_penalty, sampling.window) == (1.02, 512)


def test_the_defaults_are_those_of_the_original_with_one_beam():
    sampling = choices(play(TurnModel()))[0].sampling

    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.7, 0.8, 100)


def test_greedy_answers_have_no_temperature():
    assert choices(play(TurnModel(), do_sample=False))[0].sampling.temperature == 0


def test_the_same_seed_draws_the_same_numbers():
    first, second = (play(TurnModel(says=TOKENIZER.encode("abc"))) for _ in range(2))

    assert [c.draws for c in choices(first)] == [c.draws for c in choices(second)]
    assert len({c.draws for c in choices(first)}) == 4


def test_answers_as_the_original_gives_them():
    said = [0, *TOKENIZER.encode("best"), IDS.turn_eos, IDS.im_end]

    text = play(TurnModel(says=said, compat=Compat(answer_strips_character_set=True))).value.text

    assert text == "best<|turn"
    assert play(TurnModel(says=said)).value.text == "!best"


# ---- voice


def spoken(**changes):
    model = TurnModel(
        **{"says": [*TOKENIZER.encode("hello you"), IDS.im_end], "speaks": [60]} | changes
    )
    return model, play(model, speech=SpeechOut())


def test_the_whole_answer_is_one_text_for_the_speech_head():
    _, played = spoken()

    first, *others = [run.op.payload for run in played.of(ops.SPEAK)]
    assert first.text_ids == tuple(TOKENIZER.encode("hello you"))
    assert first.is_closing
    assert all(request.last_code is not None for request in others)
    assert [request.min_new for request in (first, *others)] == [50, 25, 0]


def test_a_words_state_is_the_one_at_its_own_position():
    model, played = spoken()

    positions = [int(state) for state in played.of(ops.SPEAK)[0].op.payload.hidden[:, 0]]
    said = [model.context[1][position] for position in positions]
    assert said == TOKENIZER.encode("hello you")


def test_sound_is_handed_out_second_by_second():
    _, played = spoken()

    calls = [run.op.payload for run in played.of(ops.VOCODE)]
    assert [(len(call.codes), call.is_last) for call in calls] == [
        (28, False),
        (28, False),
        (13, True),
    ]
    assert [len(d.audio) for d in deltas(played) if d.audio.size] == [24_000, 24_000, 12_480]
    assert len(played.value.audio) == 63 * 960
    kinds = [run.op.kind for run in played.ops]
    # The first second is made before the next codes are drawn.
    assert kinds.index(ops.VOCODE) < len(kinds) - 1 - kinds[::-1].index(ops.SPEAK)


def test_every_second_begins_with_what_the_vocoder_looked_ahead_at():
    _, played = spoken()

    codes = [run.op.payload.codes for run in played.of(ops.VOCODE)]
    assert codes[0][:3] == (4218, 4218, 4218)
    assert codes[1][:3] == codes[0][-3:]
    assert codes[2][:3] == codes[1][-3:]


def test_the_voice_of_the_request_is_learnt():
    model = TurnModel(says=TOKENIZER.encode("hi"))

    played = play(model, speech=SpeechOut(voice=np.zeros(16_000, np.float32)))

    assert played.of(ops.START_TURN)[0].op.payload.voice == "own voice"


def test_thoughts_and_what_follows_the_end_of_speech_are_not_said():
    ids = [IDS.think_start, 70, IDS.think_end, 71, 72, IDS.tts_eos, 73]
    written = Written(ids, list(range(7)))

    assert chat.spoken_part(TOKENIZER, written) == ((71, 72), (3, 4))


def test_an_answer_without_words_has_no_sound():
    _, played = spoken(says=[IDS.im_end])

    assert played.value.audio.size == 0
    assert not played.of(ops.SPEAK)


def test_a_text_longer_than_the_speech_head_can_hold_is_said_in_parts():
    model, played = spoken(
        says=TOKENIZER.encode("x" * 150), speaks=[10, 10, 10], n_speech_positions=128
    )

    firsts = [r.op.payload for r in played.of(ops.SPEAK) if r.op.payload.last_code is None]
    assert [len(first.text_ids) for first in firsts] == [64, 64, 22]
    assert [first.is_closing for first in firsts] == [False, False, True]
    assert [run.op.payload.is_last for run in played.of(ops.VOCODE)] == [False, True]


def test_a_voice_that_outgrows_its_cache_goes_on_with_the_newer_half():
    """The fake speech head fails where a run does not fit its cache."""
    _, played = spoken(speaks=[400], n_speech_positions=128)

    moves = [run.op.payload for run in played.of(ops.MOVE)]
    assert moves
    assert all((m.cache, m.target, m.end - m.start) == ("speech", 0, 64) for m in moves)
    assert len(played.value.audio) == 403 * 960


def test_a_voice_that_finds_no_end_stops_at_its_limit():
    _, played = spoken(speaks=[10**6])

    assert len(played.value.audio) == (chat.MAX_CODES - 1 + 3) * 960


def test_the_samples_go_through_16_bit_if_asked_to_do_as_the_original():
    _, played = spoken(compat=Compat(voice_through_int16=True))

    assert played.value.audio[0] == np.float32(np.trunc(0.5 * 32767) / 32768)


# ---- abort


def test_a_closed_request_asks_for_nothing_more():
    model = TurnModel(says=TOKENIZER.encode("abcdef"))
    program = chat.chat(model, chat.new_state(0, 0), ChatRequest(HELLO))
    asked = next(program)
    while not (isinstance(asked, Emit) and isinstance(asked.value, Piece)):
        is_op = isinstance(asked, Op)
        reply = model.run(asked.kind, asked.bucket, [asked.payload])[0] if is_op else None
        asked = program.send(reply)

    program.close()

    with pytest.raises(StopIteration):
        next(program)


def test_the_next_request_of_a_slot_begins_anew_after_an_abort():
    model = TurnModel(says=TOKENIZER.encode("abcdef"))
    state = chat.new_state(slot=1, seed=0)
    program = chat.chat(model, state, ChatRequest(HELLO))
    model.run(ops.PREFILL, None, [next(program).payload])
    program.close()

    answer = run_program(model, chat.chat(model, state, ChatRequest(HELLO))).value

    assert model.context[1] == TOKENIZER.encode(answer.prompt) + TOKENIZER.encode("bcdef")
