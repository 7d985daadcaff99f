"""Half-duplex turns on the real engine, with scripted models (`tests.fakes.cascade`)."""

import numpy as np
import pytest

from shared.errors import BadMessage
from shared.protocol import GenerationSettings
from tests.fakes.cascade import END, FIRST_WORD, WORD_S, WORDS, Desk, FakeCascade, ops_of
from worker.engine.contract import Op
from worker.models.cascade import turns
from worker.models.cascade.answer import DEFAULT_SYSTEM
from worker.models.contract import Clip, TurnPrompt
from worker.models.voice_activity import VAD_WINDOW


def spoken(*values):
    return np.repeat(np.float32(values), 1600)


class Talks:
    """A prepared session; `turn` plays one turn and returns its task."""

    def __init__(self, model=None, **changes):
        self.model = model or FakeCascade(answer_words=2)
        self.desk = Desk(self.model)
        self.state = turns.new_state(0)
        self.info = self.prepare(**changes)

    def prepare(self, system=("kind",), **changes):
        prompt = TurnPrompt(system, changes.pop("generation", GenerationSettings()), **changes)
        return self.desk.value(turns.prepare(self.model, self.state, prompt))

    def turn(self, *values):
        return self.desk.play(turns.turn(self.model, self.state, spoken(*values)))

    def start(self, *values):
        return self.desk.start(turns.turn(self.model, self.state, spoken(*values)))

    def cached_as_told(self):
        fed = self.state.context.n_fed
        return self.model.cache[0][:fed] == list(self.state.context.tokens[:fed])


def test_a_turn_is_heard_answered_and_spoken_phrase_by_phrase():
    talks = Talks(FakeCascade(answer_words=20))

    task = talks.turn(1)

    assert [len(piece.text.split()) for piece in task.emitted] == [8, 12]
    assert [piece.audio.size for piece in task.emitted] == [
        8 * WORD_S * 24_000,
        12 * WORD_S * 24_000,
    ]
    value = task.value
    assert (value.heard, value.n_generated_tokens, value.was_cut) == ("alpha", 20, False)
    assert value.text == "".join(piece.text for piece in task.emitted)
    assert value.n_input_tokens == len(talks.model.prompts[0])
    assert not value.audio.size


def test_text_only_comes_token_by_token_where_no_speech_is_wanted():
    task = Talks(FakeCascade(answer_words=3), speaks=False).turn(1)

    assert [piece.text for piece in task.emitted] == ["w0 ", "w1 ", "w2 "]
    assert not any(piece.audio.size for piece in task.emitted)


def test_the_conversation_is_remembered():
    talks = Talks()
    talks.turn(1)
    talks.turn(2)

    first = (1, 1, 1, 1, 2, *map(ord, "alpha"), 3)
    assert talks.model.prompts == [
        first,
        (*first, FIRST_WORD, FIRST_WORD + 1, END, 2, *map(ord, "bravo"), 3),
    ]
    assert talks.cached_as_told()


def test_sound_without_words_is_not_answered_and_leaves_no_trace():
    talks = Talks()

    task = talks.turn(5)
    talks.turn(1)

    assert task.emitted == []
    assert (task.value.text, task.value.heard, task.value.n_generated_tokens) == ("", "", 0)
    assert task.value.n_input_tokens == 4
    assert talks.model.prompts == [(1, 1, 1, 1, 2, *map(ord, "alpha"), 3)]


@pytest.mark.parametrize("n_pieces", [0, 1])
def test_closed_in_the_middle_the_question_stays_and_the_answer_goes(n_pieces):
    talks = Talks(FakeCascade(answer_words=40))
    task = talks.start(1)
    talks.desk.until(lambda: len(task.emitted) == n_pieces and "decode" in talks.model.kinds)

    task.cancel()
    talks.desk.engine.advance()
    n_ops = len(talks.model.kinds)
    assert not talks.desk.step()
    assert len(talks.model.kinds) == n_ops

    after = talks.turn(2)

    assert after.value.heard == "bravo"
    expected = (1, 1, 1, 1, 2, *map(ord, "alpha"), 2, *map(ord, "bravo"), 3)
    assert talks.model.prompts[-1] == expected
    assert talks.cached_as_told()


def test_closed_before_it_was_understood_nothing_stays():
    talks = Talks()
    task = talks.start(1)
    talks.desk.engine.advance()

    task.cancel()
    talks.turn(2)

    assert talks.model.prompts == [(1, 1, 1, 1, 2, *map(ord, "bravo"), 3)]


@pytest.mark.parametrize("kind", ["transcribe_step", "prefill", "decode", "synthesize"])
def test_a_failed_turn_leaves_a_conversation_that_goes_on(kind, caplog):
    talks = Talks()
    talks.model.broken = {kind}
    failed = talks.turn(1)
    talks.model.broken = set()

    after = talks.turn(2)

    assert failed.error is not None
    assert after.value.text == "w0 w1 "
    assert FIRST_WORD not in talks.model.prompts[-1]
    assert talks.cached_as_told()


def test_the_next_turn_takes_over_from_the_closing_of_the_last():
    talks = Talks()
    task = talks.start(1)
    talks.desk.until(lambda: task.done)
    closing = talks.state.closing

    after = talks.turn(2)

    assert closing.done
    assert after.value.text == "w0 w1 "
    assert talks.cached_as_told()


def test_preparing_again_starts_anew():
    talks = Talks()
    task = talks.start(1)
    talks.desk.until(lambda: task.done)

    talks.prepare(system=("x" * 40,))
    talks.turn(2)

    assert talks.model.prompts[-1] == (*(1,) * 40, 2, *map(ord, "bravo"), 3)
    assert talks.cached_as_told()


def test_a_long_conversation_keeps_its_context_bounded():
    talks = Talks(FakeCascade(answer_words=30, context_tokens=300))

    tasks = [talks.turn(1) for _ in range(30)]

    assert all(task.error is None for task in tasks)
    assert max(map(len, talks.model.prompts)) < 300
    assert talks.model.prompts[-1][:5] == (1, 1, 1, 1, 2)
    assert talks.cached_as_told()


def test_a_question_that_does_not_fit_is_refused_and_nothing_is_lost(monkeypatch):
    talks = Talks(FakeCascade(answer_words=2, context_tokens=120))
    talks.turn(1)
    monkeypatch.setitem(WORDS, 3, "c" * 110)

    task = talks.turn(3)
    talks.turn(2)

    assert isinstance(task.error, BadMessage)
    assert "111 tokens" in str(task.error)
    assert talks.model.prompts[-1][4:10] == (2, *map(ord, "alpha"))


def test_settings_of_the_session_hold_for_its_turns():
    settings = GenerationSettings(max_new_tokens=5, temperature=0.4)
    talks = Talks(FakeCascade(), generation=settings)

    task = talks.turn(1)

    assert (task.value.n_generated_tokens, task.value.was_cut) == (5, True)
    assert {sampling.temperature for sampling in talks.model.samplings} == {0.4}


def test_preparing_tells_what_it_took_and_what_means_nothing_here():
    settings = GenerationSettings(length_penalty=1.1, max_input_tokens=9, max_new_tokens=9)
    voice = Clip(spoken(1))
    info = Talks(system=("Be", voice, "kind."), generation=settings).info

    assert info.ignored == ("length_penalty", "max_input_tokens", "reference_voice")
    assert (info.prompt_chars, info.prompt_tokens) == (8, 8)
    assert (info.voice, info.languages) == ("fake", ("en",))


def test_an_empty_system_message_is_the_own_one():
    assert Talks(system=()).info.prompt_chars == len(DEFAULT_SYSTEM)


@pytest.mark.parametrize(
    ("system", "settings"),
    [(("x" * 60,), GenerationSettings()), (("x",), GenerationSettings(max_new_tokens=0))],
)
def test_a_preparation_that_is_refused_leaves_the_conversation(system, settings):
    talks = Talks(FakeCascade(answer_words=2, context_tokens=100))
    talks.turn(1)

    prompt = TurnPrompt(system, settings)
    task = talks.desk.play(turns.prepare(talks.model, talks.state, prompt))
    talks.turn(2)

    assert isinstance(task.error, BadMessage)
    assert talks.model.prompts[-1][4:10] == (2, *map(ord, "alpha"))


def test_speech_is_detected_before_what_is_due_later_and_holds_up_nobody_who_is_late():
    """Sound may come much faster than it was spoken."""
    talks = Talks()
    talks.state.clock = lambda: 100.0
    op = next(turns.detect_speech(talks.state, spoken(1)))

    assert isinstance(op, Op)
    assert op.deadline == 100.0
    windows = np.repeat(np.float32([0, 1, 0]), VAD_WINDOW)
    found = talks.desk.value(turns.detect_speech(talks.state, windows))
    assert found.tolist() == pytest.approx([0.01, 0.95, 0.01])


def test_what_fills_no_window_is_kept_in_the_state():
    talks = Talks()
    talks.model.detect_speech = lambda request: (np.zeros(0, np.float32), "new state")

    talks.desk.value(turns.detect_speech(talks.state, spoken(1)[:100]))

    assert talks.state.vad == "new state"


def test_live_units_come_first_and_what_is_heard_already_is_due_later():
    talks = Talks(FakeCascade(answer_words=20))
    talks.state.clock = lambda: 100.0

    ops = ops_of(talks.model, turns.turn(talks.model, talks.state, spoken(1)))

    deadlines = [op.deadline for op in ops]
    assert min(deadlines) == 100.0 + turns.REPLY_S
    assert max(deadlines) == 100.0 + turns.REPLY_S + 8 * WORD_S
