"""Rounds of messages and answers over one context, on a model that answers by script."""

from __future__ import annotations

import numpy as np
import pytest

from shared.config import Compat
from shared.errors import BadAudio, BadMessage
from tests.fakes.turn_model import TOKENIZER, TurnModel
from tests.golden.driver import run_program
from worker.engine.contract import Emit
from worker.models.contract import Clip, Picture, TurnMessage
from worker.models.minicpmo45 import half_duplex, ops
from worker.models.minicpmo45.half_duplex import HalfDuplexSettings
from worker.nn.code_sampling import CodeSampling

IDS = TOKENIZER.ids
OPENING = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n<|tts_bos|>"
CLOSING = "<|tts_eos|><|im_end|>\n"
TEXT_ONLY = HalfDuplexSettings(generate_audio=False)


def clip(seconds=1.0):
    return Clip(np.zeros(int(16_000 * seconds), np.float32))


class Session:
    """One session on slot 2."""

    def __init__(self, settings=TEXT_ONLY, system="be kind", model=None, voice=None, **changes):
        self.model = model or TurnModel(**changes)
        self.state = half_duplex.new_state(slot=2, seed=5)
        message = TurnMessage("system", (system,)) if system else None
        self.play(half_duplex.prepare(self.model, self.state, message, settings, voice))

    def play(self, program):
        return run_program(self.model, program)

    def hear(self, *parts, role="user"):
        message = TurnMessage(role, parts)
        return self.play(half_duplex.prefill(self.model, self.state, message))

    def answer(self, says="ok", **options):
        self.model.says = [*TOKENIZER.encode(says), IDS.tts_eos]
        return self.play(half_duplex.generate(self.model, self.state, **options))

    def round(self, text="hello", says="ok"):
        self.hear(text)
        return self.answer(says)

    @property
    def shown(self):
        """The context as text, runs of embeddings as `[n]`."""
        text, n = "", 0
        context = self.model.context[2]
        assert len(context) == self.state.n_tokens
        for row in [*context, None]:
            if isinstance(row, tuple):
                n += 1
                continue
            text += f"[{n}]" if n else ""
            n = 0
            text += TOKENIZER.decode([row], skip_special=False) if row is not None else ""
        return text


def encoded(text):
    return TOKENIZER.encode(text)


# ---- prompts


def test_a_session_begins_with_a_whole_system_message():
    assert Session().shown == "<|im_start|>system\nbe kind<|im_end|>\n"


def test_parts_of_the_users_turn_follow_each_other():
    session = Session()

    session.hear(Picture(np.zeros((448, 448, 3), np.uint8)), clip(1.3))
    session.hear(" hello")

    assert session.shown.removeprefix("<|im_start|>system\nbe kind<|im_end|>\n") == (
        "<|im_start|>user\n<image>[4]</image><|audio_start|>[13]<|audio_end|> hello"
    )


def test_parts_stand_on_their_own_lines_if_the_session_is_not_omni():
    session = Session(HalfDuplexSettings(generate_audio=False, is_omni=False), system="")

    session.hear("look", clip())

    assert session.shown == "<|im_start|>user\nlook\n<|audio_start|>[10]<|audio_end|>"


def test_clips_are_heard_as_a_whole():
    played = Session().hear(clip())

    assert not played.of(ops.ENCODE_CLIP)[0].op.payload.is_chunked


def test_the_answer_is_opened_as_a_spoken_one():
    session = Session(system="")

    session.round("hello", "ok")

    assert session.shown == f"<|im_start|>user\nhello{OPENING}ok"


def test_the_next_turn_closes_the_answer_before():
    session = Session(system="")

    session.round("a", "b")
    session.hear("c")
    session.hear("d")

    assert session.shown == (f"<|im_start|>user\na{OPENING}b{CLOSING}<|im_start|>user\ncd")


def test_without_a_system_message_the_users_comes_first():
    assert Session(system="").hear("x").value.prompt == "<|im_start|>user\nx"


@pytest.mark.parametrize(("role", "after"), [("assistant", ""), ("system", "x"), ("tool", "")])
def test_a_role_without_a_place_is_refused(role, after):
    session = Session(system="")
    if after:
        session.hear(after)

    with pytest.raises(BadMessage, match="no place"):
        session.hear("hello", role=role)


def test_there_is_no_answer_to_nothing():
    session = Session()
    with pytest.raises(BadMessage, match="nothing to answer"):
        session.answer()

    session.round()

    with pytest.raises(BadMessage, match="nothing to answer"):
        session.answer()


def test_a_message_that_fails_leaves_the_context_as_it_was():
    session = Session()
    session.round()
    before = session.shown, list(session.state.rounds)

    with pytest.raises(BadAudio):
        session.hear("x", Clip(np.zeros(0, np.float32)))

    assert (session.shown, session.state.rounds) == before
    session.hear("y")
    assert session.shown == before[0] + CLOSING + "<|im_start|>user\ny"


def test_a_message_whose_program_is_closed_leaves_the_context_as_it_was():
    session = Session()
    session.round()
    before = session.shown
    program = half_duplex.prefill(session.model, session.state, TurnMessage("user", ("x" * 600,)))
    asked = next(program)
    session.model.run(asked.kind, asked.bucket, [asked.payload])
    program.close()

    session.hear("y")

    assert session.shown == before + CLOSING + "<|im_start|>user\ny"


def test_a_new_prompt_starts_anew():
    session = Session()
    session.round()

    session.play(
        half_duplex.prepare(
            session.model, session.state, TurnMessage("system", ("new",)), TEXT_ONLY
        )
    )

    assert session.shown == "<|im_start|>system\nnew<|im_end|>\n"
    assert session.state.rounds == []


def test_settings_belong_to_one_session():
    model = TurnModel()
    first = Session(HalfDuplexSettings(temperature=0.1, generate_audio=False), model=model)
    second = Session(model=model)

    for session, temperature in ((first, 0.1), (second, 0.7)):
        session.hear("x")
        played = session.answer()
        sampling = played.of(ops.DECODE)[0].op.payload.choice.sampling
        assert sampling.temperature == temperature


# ---- text


def test_text_comes_in_chunks_of_ten_tokens():
    session = Session()
    session.hear("x")

    played = session.answer("abcdefghijklmnopqrstuvw")

    assert [delta.text for delta in played.emitted] == ["abcdefghij", "klmnopqrst", "uvw"]
    assert played.value.text == "abcdefghijklmnopqrstuvw"
    assert played.value.has_ended


def test_a_chunk_never_ends_in_half_a_character():
    session = Session()
    session.hear("x")

    played = session.answer("abcdefghiéxyz")

    assert [delta.text for delta in played.emitted] == ["abcdefghi", "éxyz"]


def test_an_answer_that_ends_with_its_chunk_has_no_empty_one_behind():
    session = Session()
    session.hear("x")

    played = session.answer("abcdefghij")

    assert [delta.text for delta in played.emitted] == ["abcdefghij"]
    assert played.value.has_ended


def test_an_answer_may_be_empty():
    session = Session()
    session.hear("x")

    played = session.answer("")

    assert (played.value.text, played.emitted) == ("", [])
    assert played.value.has_ended


def test_the_limit_is_whole_chunks():
    session = Session(HalfDuplexSettings(generate_audio=False, max_new_tokens=12))
    session.hear("x")

    turn = session.answer("x" * 50).value

    assert (len(turn.token_ids), turn.has_ended) == (20, False)


@pytest.mark.parametrize("end", [IDS.tts_eos, IDS.im_end, IDS.eos_alt])
def test_terminators_end_the_answer_and_are_not_fed(end):
    session = Session(system="")
    session.hear("x")
    session.model.says = [*encoded("ab"), end, *encoded("c")]

    turn = session.play(half_duplex.generate(session.model, session.state)).value

    assert (turn.text, turn.has_ended) == ("ab", True)
    assert session.shown.endswith(f"{OPENING}ab")


def test_sampling_is_the_originals():
    session = Session()
    session.hear("x")

    choice = session.answer("x").of(ops.PREFILL)[-1].op.payload.choice

    sampling = choice.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.7, 100, 0.8)
    assert (sampling.repetition_penalty, sampling.length_penalty) == (1.02, 1.1)
    assert set(sampling.endings) == {IDS.tts_eos, IDS.im_end, IDS.eos_alt}
    assert choice.forbidden is None


def test_the_penalty_looks_at_the_chunk_and_128_tokens_before():
    session = Session(HalfDuplexSettings(generate_audio=False, max_new_tokens=400))
    session.hear("x")
    said = "".join(chr(97 + i % 26) for i in range(300))

    played = session.answer(said)

    choices = [run.op.payload.choice for run in played.of(ops.DECODE)]
    ids = encoded(said)
    for n in range(1, 301):
        first = max(0, (n - 1) // 10 * 10 + 1 - 128) if n > 10 else 0
        assert choices[n - 1].recent.tolist() == ids[first:n], n
        assert len(choices[n - 1].recent) <= choices[n - 1].sampling.window


def test_the_penalty_begins_anew_with_each_turn():
    session = Session()
    session.round("a", "bcd")
    session.hear("e")

    played = session.answer("f")

    assert played.of(ops.PREFILL)[0].op.payload.choice.recent.size == 0


def test_a_closed_answer_stays_as_far_as_it_came():
    session = Session(system="")
    session.hear("x")
    session.model.says = encoded("abcdefghijklmnop")
    program = half_duplex.generate(session.model, session.state)
    asked = next(program)
    while not isinstance(asked, Emit):
        asked = program.send(session.model.run(asked.kind, asked.bucket, [asked.payload])[0])
    program.close()

    session.hear("stop")

    assert session.shown == (
        f"<|im_start|>user\nx{OPENING}abcdefghij{CLOSING}<|im_start|>user\nstop"
    )
    assert sum(session.state.rounds) == session.state.n_tokens


def test_an_answer_that_was_closed_before_it_began_can_be_asked_for_again():
    session = Session(system="")
    session.hear("x")
    program = half_duplex.generate(session.model, session.state)
    next(program)
    program.close()

    session.answer("ok")

    assert session.shown == f"<|im_start|>user\nx{OPENING}ok"


# ---- voice


SPOKEN = HalfDuplexSettings()


def spoken(says="abcdefghijklmnopqrstuvw", settings=SPOKEN, **changes):
    session = Session(settings, **changes)
    session.hear("x")
    return session, session.answer(says)


def test_every_chunk_is_spoken_before_the_next_one_is_written():
    _, played = spoken(speaks=[20, 30, 1])

    kinds = [run.op.kind for run in played.ops]
    write = [ops.DECODE] * 10
    assert kinds == [
        *(ops.PREFILL, *write, ops.SPEAK),
        # Codes 1 to 45 make the first second; 50 of them the second one.
        *(*write, ops.SPEAK, ops.START_TURN, ops.VOCODE, ops.SPEAK, ops.VOCODE),
        *(*write[:3], ops.SPEAK, ops.VOCODE),
    ]


def test_words_can_wait_as_long_as_there_is_sound_to_be_played():
    session, played = spoken(speaks=[150, 10])

    due = [run.op.deadline - session.model.now for run in played.of(ops.DECODE)]
    assert due[:10] == [1.0] * 10
    assert set(due[10:20]) == {6.0}


def test_words_carry_the_state_at_their_own_position():
    session, played = spoken()

    heads = [r.op.payload for r in played.of(ops.SPEAK) if r.op.payload.last_code is None]
    for head in heads:
        at = [session.model.context[2][int(position)] for position in head.hidden[:, 0]]
        assert tuple(at) == head.text_ids
    assert [len(head.text_ids) for head in heads] == [10, 10, 3]
    assert [head.is_closing for head in heads] == [False, False, True]
    assert [head.min_new for head in heads] == [0, 0, 0]


def test_a_text_that_was_cut_off_is_not_closed_for_the_speech_head():
    _, played = spoken("x" * 50, HalfDuplexSettings(max_new_tokens=20))

    heads = [r.op.payload for r in played.of(ops.SPEAK) if r.op.payload.last_code is None]
    assert [head.is_closing for head in heads] == [False, False]
    assert played.of(ops.VOCODE)[-1].op.payload.is_last


def test_text_comes_before_its_sound():
    _, played = spoken(speaks=[30, 30, 5])

    shapes = [(bool(delta.text), len(delta.audio)) for delta in played.emitted]
    assert shapes == [(True, 0), (False, 24_000), (True, 0), (False, 24_000), (True, 0)] + [
        (False, 18 * 960)
    ]
    assert len(played.value.audio) == 68 * 960


def test_spoken_text_has_no_unspeakable_tokens():
    _, played = spoken()

    forbidden = played.of(ops.DECODE)[0].op.payload.choice.forbidden
    signs = {TOKENIZER.token_id(sign) for sign in ":#@*()[]&/$"}
    assert forbidden == signs | {IDS.unk} | TOKENIZER.bad_ids


def test_every_turn_has_a_fresh_voice():
    session, _ = spoken(speaks=[30, 3, 3])
    session.hear("y")
    session.model.speaks = [26]

    played = session.answer("ok")

    assert played.of(ops.SPEAK)[0].op.payload.start == 0
    assert played.of(ops.SPEAK)[0].op.payload.recent == ()
    assert len(played.of(ops.START_TURN)) == 1
    assert played.of(ops.VOCODE)[0].op.payload.codes[:3] == (4218, 4218, 4218)


def test_how_the_voice_is_drawn_can_be_chosen():
    _, played = spoken(settings=HalfDuplexSettings(code_sampling=CodeSampling(is_greedy=True)))

    assert played.of(ops.SPEAK)[0].op.payload.sampling.is_greedy


def test_the_voice_of_a_session_is_the_clients():
    _, played = spoken(voice=np.zeros(16_000, np.float32))

    assert played.of(ops.START_TURN)[0].op.payload.voice == "own voice"


def test_a_server_without_a_voice_answers_in_text():
    _, played = spoken("a", has_voice=False)

    assert not played.of(ops.SPEAK)
    assert played.of(ops.DECODE)[0].op.payload.choice.forbidden is None


# ---- window


def window(high=200, low=120, **changes):
    settings = HalfDuplexSettings(
        generate_audio=False, max_new_tokens=10, high_tokens=high, low_tokens=low
    )
    return Session(settings, system="s", **changes)


SYSTEM = "<|im_start|>system\ns<|im_end|>\n"


def test_whole_rounds_go_oldest_first_and_the_system_message_stays():
    session = window()
    texts = [letter * 20 for letter in "abcdefgh"]
    for text in texts:
        session.round(text)

    rounds = session.shown.removeprefix(SYSTEM).split(CLOSING)
    kept = texts[-len(rounds) :]
    assert 1 < len(rounds) < len(texts)
    assert rounds == [f"<|im_start|>user\n{text}{OPENING}ok" for text in kept]
    assert sum(session.state.rounds) + session.state.n_system == session.state.n_tokens


def test_the_window_is_cut_down_to_its_lower_size():
    session = window()
    while session.state.n_tokens <= 200:
        session.round("a" * 20)

    played = session.hear("b")

    (move,) = [run.op.payload for run in played.of(ops.MOVE)]
    n_system = len(encoded(SYSTEM))
    assert move.target == n_system
    assert move.end - (move.start - n_system) <= 120
    n_rounds = len(session.state.rounds)
    assert n_rounds >= 2


def test_a_small_cache_makes_the_window_smaller():
    session = window(high=8000, low=6000, n_positions=200)

    for letter in "abcdefgh":
        session.round(letter * 20)

    assert session.shown.startswith(SYSTEM + "<|im_start|>user\n")
    assert session.shown.endswith(f"{'h' * 20}{OPENING}ok")


def test_room_for_the_answer_is_made_before_it_begins():
    """The fake model fails where a context overflows."""
    session = Session(
        HalfDuplexSettings(generate_audio=False, max_new_tokens=60), system="s", n_positions=250
    )

    for letter in "abcd":
        session.round(letter * 10, "x" * 60)

    assert session.shown.endswith("x" * 60)


def test_an_answer_is_cut_where_its_round_alone_would_fill_the_cache():
    session = window(n_positions=150)
    session.state.settings = HalfDuplexSettings(generate_audio=False, max_new_tokens=500)
    session.hear("a")

    turn = session.answer("x" * 500).value

    assert not turn.has_ended
    assert session.state.n_tokens == 150


def test_the_newest_round_goes_too_if_a_message_needs_the_room():
    session = window(n_positions=200)
    session.round("a" * 50)

    session.hear("b" * 130)

    assert session.shown == f"{SYSTEM}<|im_start|>user\n{'b' * 130}"
    session.answer("ok")
    assert sum(session.state.rounds) + session.state.n_system == session.state.n_tokens


def test_a_cut_that_is_closed_in_its_middle_leaves_the_system_message():
    """Whether an op that was running has moved the cache is not known to a closed program."""
    session = window(n_positions=200)
    for letter in "abc":
        session.round(letter * 20)
    message = TurnMessage("user", ("d" * 60,))
    program = half_duplex.prefill(session.model, session.state, message)
    request = program.send(None)
    assert request.kind == ops.MOVE
    session.model.run(request.kind, request.bucket, [request.payload])
    program.close()

    assert (session.state.rounds, session.state.n_tokens) == ([], len(encoded(SYSTEM)))
    session.round("e")
    assert session.shown == f"{SYSTEM}<|im_start|>user\ne{OPENING}ok"


def test_what_cannot_fit_is_refused_before_it_is_encoded():
    session = window(n_positions=200)
    message = TurnMessage("user", (clip(30.0),))

    with pytest.raises(BadMessage, match="room for"):
        half_duplex.prefill(session.model, session.state, message).send(None)


@pytest.mark.parametrize("n", [0, -10])
def test_an_answer_of_no_tokens_is_refused(n):
    with pytest.raises(BadMessage, match="at least 1"):
        Session(HalfDuplexSettings(max_new_tokens=n))


def test_what_no_cut_can_make_room_for_is_refused():
    session = window(n_positions=200)
    session.round("a")
    before = session.shown

    with pytest.raises(BadMessage, match="room for"):
        session.hear("b" * 300)

    assert session.shown == before
    session.round("c")


def test_the_open_round_is_never_cut():
    session = window(n_positions=200)
    session.hear("a" * 100)

    with pytest.raises(BadMessage, match="room for"):
        session.hear("b" * 100)

    assert session.shown == f"{SYSTEM}<|im_start|>user\n{'a' * 100}"


def test_a_system_message_may_take_half_of_the_context():
    with pytest.raises(BadMessage, match="at most 100"):
        Session(system="s" * 150, n_positions=200)


def test_rounds_can_be_counted_as_the_original_does():
    """It counts the answer's text, without what opened it."""
    session = window(compat=Compat(window_registers_retokenised_text=True))

    session.round("a", "ok")

    assert session.state.rounds == [len(encoded("<|im_start|>user\na")) + len(encoded("ok"))]


# ---- taking back


def test_an_answer_that_was_taken_back_is_given_again():
    session = Session()
    session.hear("x")
    before = session.shown

    first = session.answer("abc", saves=True)
    half_duplex.restore(session.state)
    assert session.state.n_tokens == len(encoded(before))
    second = session.answer("abc")

    draws = [[r.op.payload.choice.draws for r in p.of(ops.DECODE)] for p in (first, second)]
    assert draws[0] == draws[1]
    assert session.shown == before + OPENING + "abc"


def test_taken_back_equals_never_said():
    taken_back, untouched = Session(), Session()
    for session in (taken_back, untouched):
        session.round("a", "b")
        session.hear("x")
    taken_back.answer("never mind", saves=True)
    half_duplex.restore(taken_back.state)

    for session in (taken_back, untouched):
        session.hear("y")
        session.answer("yes")

    assert taken_back.shown == untouched.shown
    assert taken_back.state.rounds == untouched.state.rounds


def test_an_answer_is_taken_back_once():
    session = Session()
    session.hear("x")
    session.answer("a", saves=True)
    half_duplex.restore(session.state)

    with pytest.raises(BadMessage, match="nothing to go back to"):
        half_duplex.restore(session.state)


def test_nothing_is_taken_back_across_a_cut():
    session = window()
    while session.state.n_tokens <= 200:
        session.hear("a" * 20)
        session.answer("b", saves=True)
    session.hear("c")

    with pytest.raises(BadMessage, match="nothing to go back to"):
        half_duplex.restore(session.state)
