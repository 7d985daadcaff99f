"""Chat requests and turns as the contract has them, on a model that answers by script."""

from __future__ import annotations

import math

import numpy as np
import pytest

from shared.errors import BadAudio, BadMessage
from shared.protocol import GenerationSettings, Timings
from tests.fakes.turn_model import TOKENIZER, TurnModel
from tests.golden.driver import run_program
from worker.engine.contract import Emit, Op
from worker.models.contract import ChatQuestion, Clip, Piece, Taken, TurnMessage, TurnPrompt
from worker.models.minicpmo45 import chat, half_duplex, ops, turns
from worker.models.minicpmo45.op_costs import OpCosts

IDS = TOKENIZER.ids
SLOT = 2
UNSAID = GenerationSettings()
SECOND = np.zeros(16_000, np.float32)
HELLO = (TurnMessage("user", ("hello",)),)
CLOSING = "<|tts_eos|><|im_end|>\n"
OPENING = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n<|tts_bos|>"
QUESTION = "<|im_start|>user\n<|audio_start|>[10]<|audio_end|>"


def ask(model, generation=UNSAID, **question):
    asked = ChatQuestion(**{"messages": HELLO, "generation": generation} | question)
    return run_program(model, turns.answer(model, chat.new_state(SLOT, seed=3), asked))


def text_choice(played):
    return played.of(ops.PREFILL)[-1].op.payload.choice


class Conversation:
    """A session of turns on one slot."""

    def __init__(self, *system, model=None, generation=UNSAID, speaks=False):
        self.model = model or TurnModel()
        self.state = half_duplex.new_state(SLOT, seed=5)
        prompt = TurnPrompt(system, generation, speaks)
        self.prepared = run_program(self.model, turns.prepare(self.model, self.state, prompt))

    def program(self, says="ok", samples=SECOND):
        self.model.says = [*TOKENIZER.encode(says), IDS.tts_eos]
        return turns.turn(self.model, self.state, samples)

    def turn(self, says="ok", samples=SECOND):
        return run_program(self.model, self.program(says, samples))

    def ops_until(self, program, is_there):
        """Advance a program until it has asked for what `is_there` accepts."""
        asked = next(program)
        while not is_there(asked):
            is_op = isinstance(asked, Op)
            reply = self.model.run(asked.kind, asked.bucket, [asked.payload])[0] if is_op else None
            asked = program.send(reply)
        return asked

    @property
    def shown(self):
        """The context behind the system message as text, runs of embeddings as `[n]`."""
        text, n = "", 0
        context = self.model.context[SLOT][: self.state.n_tokens]
        assert sum(self.state.rounds) + self.state.n_system == self.state.n_tokens
        for row in [*context[self.state.n_system :], None]:
            if isinstance(row, tuple):
                n += 1
                continue
            text += f"[{n}]" if n else ""
            n = 0
            text += TOKENIZER.decode([row], skip_special=False) if row is not None else ""
        return text


# ---- chat


def test_a_chat_answer_is_told_piece_by_piece_and_whole():
    model = TurnModel(says=[*TOKENIZER.encode("hi"), IDS.im_end])

    played = ask(model)

    taken, *pieces = played.emitted
    assert taken == Taken(len(TOKENIZER.encode(played.value.prompt)))
    assert [piece.text for piece in pieces] == ["h", "i"]
    assert (played.value.text, played.value.was_cut) == ("hi", False)
    assert played.value.n_input_tokens == taken.n_input_tokens
    assert played.value.n_generated_tokens == 2
    assert played.value.ignored == ()


def test_what_was_streamed_is_not_told_twice():
    streamed, whole = (
        ask(TurnModel(says=TOKENIZER.encode("hi")), speaks=True, is_streaming=is_streaming)
        for is_streaming in (True, False)
    )

    sounds = [piece.audio for piece in streamed.emitted[1:] if piece.audio.size]
    assert streamed.value.audio.size == 0
    assert [type(value) for value in whole.emitted] == [Taken]
    assert np.array_equal(whole.value.audio, np.concatenate(sounds))


def test_settings_that_are_not_said_are_the_models_own():
    sampling = text_choice(ask(TurnModel())).sampling

    theirs = chat.ChatRequest(HELLO)
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.window) == (
        *(theirs.temperature, theirs.top_p, theirs.top_k, theirs.max_new_tokens),
    )
    assert sampling.length_penalty == 1.0


def test_settings_that_are_said_count():
    said = GenerationSettings(
        *(4, 2, True, 0.5, 0.6, 7, 1.3),
        length_penalty=1.2,
    )
    played = ask(TurnModel(says=TOKENIZER.encode("abcdef")), said)

    choice = text_choice(played)
    assert choice.sampling.temperature == 0.5
    assert (choice.sampling.top_p, choice.sampling.top_k) == (0.6, 7)
    assert choice.sampling.repetition_penalty == 1.3
    assert choice.sampling.length_penalty == 1.2
    assert set(choice.sampling.endings) == {IDS.im_end, IDS.endoftext} == choice.forbidden
    assert (played.value.text, played.value.was_cut) == ("abcd", True)
    assert played.value.n_generated_tokens == 4


def test_a_longer_prompt_than_asked_for_is_refused():
    with pytest.raises(BadMessage, match="at most 3"):
        ask(TurnModel(), GenerationSettings(max_input_tokens=3))


@pytest.mark.parametrize(
    "said",
    [
        {"max_new_tokens": 0},
        {"min_new_tokens": -1},
        {"temperature": math.nan},
        {"temperature": -0.1},
        {"top_p": 1.5},
        {"top_k": -1},
        {"repetition_penalty": 0.0},
        {"length_penalty": math.inf},
        {"max_input_tokens": 0},
    ],
)
def test_impossible_settings_are_refused_by_name_before_anything_runs(said):
    model = TurnModel()
    (name,) = said

    with pytest.raises(BadMessage, match=f"{name} is .*, must be"):
        ask(model, GenerationSettings(**said))
    with pytest.raises(BadMessage, match=f"{name} is .*, must be"):
        Conversation(model=model, generation=GenerationSettings(**said))
    assert not model.context


def test_a_picture_has_at_least_one_slice():
    with pytest.raises(BadMessage, match="max_slice_nums is 0"):
        ask(TurnModel(), max_slice_nums=0)


def test_the_voice_of_an_answer_is_the_clients_if_there_is_one():
    voices = [
        ask(TurnModel(says=TOKENIZER.encode("hi")), speaks=True, voice=voice)
        .of(ops.START_TURN)[0]
        .op.payload.voice
        for voice in (np.zeros(0, np.float32), SECOND)
    ]

    assert voices == ["default voice", "own voice"]


def test_how_messages_are_read_is_the_clients_choice():
    parts = (TurnMessage("user", ("a", "b")),)

    apart, together = (
        ask(TurnModel(), messages=parts, is_omni=is_omni).value for is_omni in (False, True)
    )
    assert "a\nb" in apart.prompt
    assert "ab" in together.prompt
    assert "<think>" not in ask(TurnModel(), enable_thinking=True).value.prompt
    assert ask(TurnModel(), use_tts_template=True).value.prompt.endswith("<|tts_bos|>")


# ---- turns


def test_a_conversation_begins_with_what_the_client_says():
    model = TurnModel()
    said = Conversation("be", Clip(SECOND), "kind", model=model, speaks=True)

    prepared = said.prepared.value
    assert (prepared.prompt_chars, prepared.prompt_tokens) == (6, len(model.context[SLOT]))
    assert (prepared.voice, prepared.ignored) == ("client", ())
    assert set(prepared.languages) == {"en", "zh"}
    assert said.state.voice == "own voice"
    assert ("audio", 0) in model.context[SLOT]


def test_a_conversation_without_a_system_message_gets_one():
    conversation = Conversation()

    context = TOKENIZER.decode(conversation.model.context[SLOT], skip_special=False)
    assert context == f"<|im_start|>system\n{turns.DEFAULT_SYSTEM}<|im_end|>\n"
    assert conversation.prepared.value.prompt_chars == 0
    assert conversation.prepared.value.voice == "default"


def test_a_server_that_takes_no_voices_says_so_and_speaks_with_its_own():
    model = TurnModel(can_learn_voices=False)

    conversation = Conversation("be kind", Clip(SECOND), model=model, speaks=True)

    assert conversation.prepared.value.ignored == ("reference_voice",)
    assert conversation.prepared.value.voice == "default"
    assert conversation.state.voice == "default voice"
    assert ("audio", 0) in model.context[SLOT]


def test_a_server_that_cannot_speak_says_so():
    model = TurnModel(can_learn_voices=False, has_voice=False, voice_name="")

    conversation = Conversation("x", Clip(SECOND), model=model, speaks=True)

    assert conversation.prepared.value.ignored == ("reference_voice", "speaks")
    assert not conversation.turn().of(ops.SPEAK)


def test_settings_of_a_conversation():
    said = GenerationSettings(12, 2, False, 0.5, 0.6, 7, 1.3, 1.4, 100)

    conversation = Conversation("x", generation=said)

    assert conversation.prepared.value.ignored == ("max_input_tokens", "min_new_tokens")
    assert conversation.state.settings == half_duplex.HalfDuplexSettings(
        *(12, False, 0.5, 7, 0.6, 1.3, 1.4), generate_audio=False
    )


def test_a_turn_is_answered_in_pieces_and_told_whole():
    model = TurnModel(speaks=[30, 3])
    conversation = Conversation("x", model=model, speaks=True)

    played = conversation.turn("abcdefghijkl")

    shapes = [(piece.text, len(piece.audio)) for piece in played.emitted]
    assert shapes == [("abcdefghij", 0), ("", 24_000), ("kl", 0), ("", 11 * 960)]
    answer = played.value
    assert (answer.text, answer.was_cut, answer.n_generated_tokens) == ("abcdefghijkl", False, 12)
    assert answer.n_input_tokens + 12 == conversation.state.n_tokens == len(model.context[SLOT])
    assert answer.audio.size == 0
    assert answer.prompt.startswith("<|im_start|>user\n")
    assert conversation.shown == f"{QUESTION}{OPENING}abcdefghijkl"


def test_a_turn_that_is_closed_in_its_middle_holds_what_was_said():
    conversation = Conversation("x")
    program = conversation.program("abcdefghijklmnop")
    conversation.ops_until(program, lambda asked: isinstance(asked, Emit))
    program.close()

    assert conversation.turn("yes").value.text == "yes"
    assert conversation.shown == (f"{QUESTION}{OPENING}abcdefghij{CLOSING}{QUESTION}{OPENING}yes")


@pytest.mark.parametrize("kind", [ops.ENCODE_CLIP, ops.PREFILL, ops.DECODE, ops.SPEAK])
def test_a_turn_that_fails_leaves_a_conversation_that_goes_on(kind):
    conversation = Conversation("x", speaks=True)
    conversation.turn("one")
    program = conversation.program("two")
    conversation.ops_until(program, lambda asked: isinstance(asked, Op) and asked.kind == kind)

    with pytest.raises(RuntimeError, match="broken"):
        program.throw(RuntimeError("broken"))

    played = conversation.turn("three")
    assert played.value.text == "three"
    assert conversation.shown.startswith(f"{QUESTION}{OPENING}one{CLOSING}<|im_start|>user\n")
    assert conversation.shown.endswith(f"{QUESTION}{OPENING}three")
    assert played.of(ops.SPEAK)[0].op.payload.start == 0


def is_opening(asked):
    """The op that opens the answer, and so the first that chooses a token."""
    return isinstance(asked, Op) and asked.kind == ops.PREFILL and asked.payload.choice is not None


def test_a_question_whose_answer_never_began_is_asked_with_the_next_one():
    conversation = Conversation("x")
    conversation.turn("one")
    program = conversation.program("two")
    conversation.ops_until(program, is_opening)
    program.close()

    conversation.turn("three")

    heard = "<|audio_start|>[10]<|audio_end|>"
    assert conversation.shown == (f"{QUESTION}{OPENING}one{CLOSING}{QUESTION}{heard}{OPENING}three")


@pytest.mark.parametrize("n_before", [0, 1])
def test_questions_without_answers_never_fill_the_context(n_before):
    model = TurnModel(n_positions=250)
    conversation = Conversation("x", model=model, generation=GenerationSettings(max_new_tokens=10))
    for _ in range(n_before):
        conversation.turn("one")
    for _ in range(6):
        program = conversation.program("two", np.zeros(5 * 16_000, np.float32))
        conversation.ops_until(program, is_opening)
        program.close()
        assert conversation.shown.count("<|im_start|>user") <= n_before + 1

    assert conversation.turn("three", np.zeros(10 * 16_000, np.float32)).value.text == "three"
    assert conversation.shown.endswith(f"[100]<|audio_end|>{OPENING}three")
    assert CLOSING * 2 not in conversation.shown


def test_a_question_that_no_context_can_hold_is_refused_and_the_next_one_answered():
    conversation = Conversation("x", model=TurnModel(n_positions=250))

    with pytest.raises(BadMessage, match="room for"):
        conversation.turn(samples=np.zeros(40 * 16_000, np.float32))

    assert conversation.turn("ok").value.text == "ok"


def test_a_question_without_samples_is_refused_and_loses_nothing():
    conversation = Conversation("x")
    program = conversation.program("two")
    conversation.ops_until(program, is_opening)
    program.close()
    before = conversation.shown

    with pytest.raises(BadAudio):
        conversation.turn(samples=np.zeros(0, np.float32))

    assert conversation.shown == before == QUESTION


def test_a_new_prompt_forgets_the_conversation():
    conversation = Conversation("x")
    conversation.turn("one")
    prompt = TurnPrompt(("y",), GenerationSettings(), speaks=False)

    run_program(conversation.model, turns.prepare(conversation.model, conversation.state, prompt))

    assert (conversation.shown, conversation.state.rounds) == ("", [])


# ---- what it took


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def test_every_op_is_booked_under_its_stage():
    clock = Clock()
    costs = OpCosts(clock)

    def program():
        for kind in (ops.ENCODE_CLIP, ops.PREFILL, ops.DECODE, ops.DECODE, ops.SPEAK, ops.VOCODE):
            yield Op(kind, None)
        yield Emit(Piece("x"))
        yield Op(ops.MOVE, None)
        return "value"

    measured, values = costs.of(program()), []

    def play():
        values.append((yield from measured))

    for asked in play():
        clock.now += 0.002 if isinstance(asked, Op) else 1.0
    assert values == ["value"]
    took = costs.timings()
    assert took.decode_ms == pytest.approx(4)
    for stage in ("listen_ms", "prefill_ms", "speech_tokens_ms", "vocode_ms"):
        assert getattr(took, stage) == pytest.approx(2)
    assert took.total_ms == pytest.approx(1014)


def test_a_measured_program_meets_its_errors_and_its_end():
    met = []

    def program():
        try:
            yield Op(ops.DECODE, None)
        except ValueError as error:
            met.append(str(error))
        try:
            yield Op(ops.DECODE, None)
        finally:
            met.append("closed")

    inner = program()  # held here: nobody else ends it
    measured = OpCosts(Clock()).of(inner)
    next(measured)
    measured.throw(ValueError("broken"))
    measured.close()

    assert met == ["broken", "closed"]


def test_an_answer_says_what_it_took():
    model = TurnModel(says=TOKENIZER.encode("hi"))
    run = model.run

    def slow(kind, bucket, payloads):
        model.now += 0.003
        return run(kind, bucket, payloads)

    model.run = slow

    took = ask(model, speaks=True).value.timings

    assert isinstance(took, Timings)
    assert took.prefill_ms == pytest.approx(3)
    assert took.decode_ms == pytest.approx(6)
    assert took.speech_tokens_ms > 0
    assert took.vocode_ms > 0
    assert took.total_ms == pytest.approx(
        took.prefill_ms + took.decode_ms + took.speech_tokens_ms + took.vocode_ms
    )
