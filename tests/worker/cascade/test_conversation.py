"""Turn taking of the cascade on the real engine, with fake models and a fake clock.

Time stands still while ops run; it moves to the next unit, or to the end of a unit's wait.
Speech is a constant sample value; the fake recogniser hears each value as one word.
"""

import numpy as np
import pytest

from shared.errors import BadMessage
from shared.protocol import DuplexSettings
from tests.fakes.cascade import END, FIRST_WORD, WORD_S, FakeCascade
from worker.engine.engine import Engine
from worker.models.cascade import conversation
from worker.models.cascade.endpointing import WINDOW_SAMPLES
from worker.models.contract import Prompt, Unit

UNIT = 32 * WINDOW_SAMPLES


class Session:
    """One session on the real engine; `second` plays one unit and returns its result."""

    def __init__(self, model=None, settings=None, slot=0, engine=None):
        self.model = model or FakeCascade()
        self.now = 100.0
        self.engine = engine or Engine(self.model, clock=lambda: self.now)
        self.state = conversation.new_state(self.model, slot)
        self.state.clock = lambda: self.now
        self.slot = slot
        self.held = set()
        """Lanes that do nothing."""
        self.index = 0
        self.prepared = self.prepare(settings)

    def prepare(self, settings=None, voice=(), prompt="kind"):
        empty = np.zeros(0, np.float32)
        value = Prompt(prompt, settings or DuplexSettings(), np.float32(voice), empty)
        return self.run(conversation.prepare(self.model, self.state, value)).value

    def run(self, program, until_s=0.99, drain=True):
        emitted = []
        task = self.engine.spawn(self.slot, program, emitted.append)
        self.turn(task, self.now + until_s, drain)
        task.emitted = emitted
        return task

    def turn(self, task, give_up_at, drain):
        """Without `drain`, ops that are left when the program is done stay where they are."""
        while drain or not task.done:
            self.engine.advance()
            n_batches = sum(
                self.engine.step(lane) for lane in self.engine.lanes if lane not in self.held
            )
            if n_batches:
                continue
            if task.done:
                return
            deadline = self.engine.next_deadline()
            assert deadline <= give_up_at, "the unit was not answered within its second"
            self.now = max(self.now, deadline)

    def second(self, pattern="", frames=(), force_listen=False, check=True, drain=True):
        """`pattern`: 32 windows, a digit is speech of that value; shorter ones end in silence."""
        values = [int(c) if c.isdigit() else 0 for c in pattern.ljust(32, ".")]
        audio = np.repeat(np.float32(values), WINDOW_SAMPLES)
        self.now = 101.0 + self.index
        unit = Unit(self.index, audio, tuple(frames), force_listen, None, self.now, self.now + 1.0)
        self.index += 1
        task = self.run(conversation.unit(self.model, self.state, unit), drain=drain)
        if not check:
            return task
        assert task.error is None, task.error
        (result,) = task.emitted
        assert result.audio.size <= 24_000
        return result

    def seconds(self, n, **kwargs):
        return [self.second(**kwargs) for _ in range(n)]

    def ask(self, pattern="...1111111111"):
        """A question that ends well within its unit; returns that unit's result."""
        return self.second(pattern)


def test_silence_is_listened_to_without_an_answer():
    session = Session()

    results = session.seconds(5)

    assert all(r.is_listen and not r.text and not r.audio.size for r in results)
    assert session.model.prompts == []


def test_a_question_is_answered_whole_then_it_listens_again():
    session = Session(FakeCascade(answer_words=20))
    session.second("...11111111111111111111111111111")

    results = [session.second("11111111"), *session.seconds(8)]

    spoken = [r for r in results if not r.is_listen]
    assert "".join(r.text for r in results).split() == [f"w{i}" for i in range(20)]
    assert sum(r.audio.size for r in results) == 20 * WORD_S * 24_000
    assert [r.end_of_turn for r in spoken] == [False] * (len(spoken) - 1) + [True]
    assert results[-1].is_listen


def test_the_first_speech_carries_the_caption():
    session = Session()
    results = [session.ask(), *session.seconds(3)]

    captions = [(r.heard, bool(r.audio.size)) for r in results if r.heard]

    assert captions == [("alpha", True)]


def test_the_answer_starts_in_the_unit_in_which_the_end_of_speech_is_certain():
    session = Session()

    result = session.second("...1111111111")

    assert not result.is_listen
    assert result.audio.size


def test_an_answer_prepared_in_a_short_silence_waits_until_the_end_is_certain():
    session = Session()

    early = session.second("." * 14 + "1" * 12)
    later = session.second()

    assert early.is_listen
    assert later.audio.size
    assert len(session.model.prompts) == 1


def test_a_pause_inside_a_question_is_no_end():
    session = Session()
    session.second("." * 14 + "1" * 12)

    results = [session.second("22222222"), *session.seconds(3)]

    heard = [r.heard for r in results if r.heard]
    assert heard == ["alpha bravo"]
    last_prompt = session.model.prompts[-1]
    assert last_prompt == (1, 1, 1, 1, 2, *map(ord, "alpha bravo"), 3)


def test_speech_during_the_answer_stops_it_and_is_answered():
    session = Session()
    session.ask()
    assert session.second().audio.size

    cut = session.second("." * 22 + "2" * 10)
    after = [session.second("22222"), *session.seconds(12)]

    assert cut.is_listen
    assert cut.interrupted
    assert not cut.audio.size
    assert [r.heard for r in after if r.heard] == ["bravo"]
    assert not any(r.interrupted for r in after)


def test_after_an_interruption_the_context_holds_the_question_and_nothing_of_its_answer():
    session = Session()
    session.ask()
    session.second()
    session.second("." * 22 + "2" * 10)
    session.second("22222")
    session.seconds(2)

    expected = (1, 1, 1, 1, 2, *map(ord, "alpha"), 2, *map(ord, "bravo"), 3)
    assert session.model.prompts[-1] == expected


def test_a_cough_does_not_stop_the_answer():
    session = Session()
    session.ask()

    result = session.second("..........222...")

    assert result.audio.size
    assert not result.interrupted


def test_speech_right_after_the_last_audio_still_flushes_the_client():
    """The client plays the last second while the next unit is being recorded."""
    session = Session(FakeCascade(answer_words=3))
    assert session.ask().end_of_turn

    result = session.second("..2222222222222")

    assert result.interrupted


def test_an_interruption_and_its_answer_do_not_share_a_result():
    """Clients that know no `interrupted` flush nothing on a speak result."""
    session = Session()
    session.ask()

    cut = session.second("..22222222")
    after = session.second()

    assert cut.is_listen
    assert cut.interrupted
    assert after.heard == "bravo"
    assert after.audio.size
    assert not after.interrupted


def test_speech_long_after_the_answer_interrupts_nothing():
    session = Session(FakeCascade(answer_words=3))
    session.ask()
    session.second()

    assert not session.second("..2222222222222").interrupted


def test_force_listen_drops_the_speech_at_once():
    session = Session()
    session.ask()

    forced = session.second(force_listen=True)
    after = session.seconds(3)

    assert forced.is_listen
    assert forced.interrupted
    assert all(r.is_listen for r in after)


def test_while_listening_is_forced_no_answer_begins():
    session = Session()
    forced = session.second("...11111111111", force_listen=True)

    after = session.second()

    assert forced.is_listen
    assert after.heard == "alpha"


def test_the_first_units_can_be_forced_to_listen():
    session = Session(settings=DuplexSettings(force_listen_count=2))

    results = [session.ask(), session.second(), session.second()]

    assert [r.is_listen for r in results] == [True, True, False]


def test_an_interrupt_between_units_shows_in_the_next_result():
    session = Session()
    session.ask()

    conversation.interrupt(session.state)

    result = session.second()
    assert result.is_listen
    assert result.interrupted
    assert not session.second().interrupted


def test_an_interrupt_of_silence_does_nothing():
    session = Session()
    session.second()

    conversation.interrupt(session.state)

    assert not session.second().interrupted


def test_noise_that_is_no_speech_gets_no_answer():
    session = Session()

    results = [session.second("...5555555555555"), *session.seconds(2)]

    assert all(r.is_listen and not r.heard for r in results)
    assert session.second("...1111111111").heard == "alpha"


def test_the_conversation_is_remembered():
    session = Session(FakeCascade(answer_words=2))
    session.ask()
    session.second()
    session.second("...2222222222")

    first = (1, 1, 1, 1, 2, *map(ord, "alpha"), 3)
    assert session.model.prompts == [
        first,
        (*first, FIRST_WORD, FIRST_WORD + 1, END, 2, *map(ord, "bravo"), 3),
    ]


def test_a_long_conversation_keeps_its_context_bounded():
    session = Session(FakeCascade(answer_words=30, context_tokens=900))
    for _ in range(40):
        session.ask()
        session.seconds(9)

    assert len(session.model.prompts) == 40
    assert max(map(len, session.model.prompts)) < 900
    assert session.model.prompts[-1][:5] == (1, 1, 1, 1, 2)


def test_an_answer_ends_before_the_context_is_full():
    session = Session(FakeCascade(answer_words=200, context_tokens=60))
    session.ask()
    session.seconds(20)

    assert len(session.model.cache[0]) <= 60


def test_text_only_when_no_audio_is_wanted():
    session = Session(FakeCascade(answer_words=4), DuplexSettings(generate_audio=False))

    results = [session.ask(), *session.seconds(2)]

    assert "".join(r.text for r in results) == "w0 w1 w2 w3 "
    assert not any(r.audio.size for r in results)
    assert sum(r.end_of_turn for r in results) == 1


def test_a_question_about_the_picture_gets_what_the_camera_reads():
    session = Session()
    frame = np.zeros((8, 8, 3), np.uint8)

    session.second("...4444444444", frames=[frame])

    prompt = "".join(map(chr, session.model.prompts[0][5:-1]))
    assert "EXIT 42" in prompt
    assert prompt.endswith("read the sign")


def test_other_questions_do_not_read_the_picture():
    session = Session(FakeCascade(broken={"read_text"}))
    frame = np.zeros((8, 8, 3), np.uint8)

    assert session.second("...1111111111", frames=[frame]).heard == "alpha"


def test_an_old_picture_is_not_read():
    session = Session(FakeCascade(broken={"read_text"}))
    session.second(frames=[np.zeros((8, 8, 3), np.uint8)])
    session.seconds(6)

    assert session.second("...4444444444").heard == "read the sign"


@pytest.mark.parametrize("kind", ["transcribe_step", "prefill", "decode", "synthesize"])
def test_a_failing_model_fails_the_unit_and_not_the_session(kind, caplog):
    session = Session()
    session.model.broken = {kind}
    tasks = [session.second("...1111111111", check=False), session.second(check=False)]
    errors = [task.error for task in tasks if task.error]

    session.model.broken = set()

    assert len(errors) == 1
    assert [session.second("...2222222222").heard] == ["bravo"]


def test_preparing_again_starts_anew():
    session = Session()
    session.ask()

    session.prepare(prompt="new")
    session.second("...2222222222")

    assert session.model.prompts[-1] == (1, 1, 1, 2, *map(ord, "bravo"), 3)


def test_settings_without_a_meaning_here_are_named():
    settings = DuplexSettings(length_penalty=1.1, top_k=5, listen_prob_scale=1.0)

    info = Session().prepare(settings, voice=[0.1])

    assert info.ignored == ("length_penalty", "listen_prob_scale", "reference_voice")
    assert info.languages == ("en",)
    assert info.prompt_tokens == 4


@pytest.mark.parametrize(
    ("settings", "temperature"),
    [
        (DuplexSettings(), 0.0),
        (DuplexSettings(decode_mode="sampling"), 0.7),
        (DuplexSettings(temperature=0.3), 0.3),
        (DuplexSettings(top_k=5), 0.7),
        (DuplexSettings(temperature=0.3, decode_mode="greedy"), 0.0),
    ],
)
def test_sampling_is_greedy_unless_asked_for(settings, temperature):
    assert Session(settings=settings).state.generation.sampling.temperature == temperature


def test_two_sessions_do_not_hear_each_other():
    model = FakeCascade(answer_words=4)
    first = Session(model)
    second = Session(model, slot=1)

    assert first.second("...1111111111").heard == "alpha"
    assert second.second("...2222222222").heard == "bravo"
    assert model.cache[0] != model.cache[1]


def test_a_question_beyond_the_context_fails_and_nothing_else_is_lost():
    session = Session(FakeCascade(answer_words=2, context_tokens=300, sign="x" * 300))
    session.ask()
    session.second()

    frame = np.zeros((8, 8, 3), np.uint8)
    task = session.second("...4444444444", frames=[frame], check=False)
    session.ask("...2222222222")

    assert isinstance(task.error, BadMessage)
    assert "does not fit" in str(task.error)
    assert session.model.prompts[-1][4:10] == (2, *map(ord, "alpha"))


def test_the_input_kept_is_bounded():
    session = Session()
    session.seconds(50)
    assert len(session.state.audio) < 2 * UNIT


def cached_as_told(session):
    """Whether the slot's cache holds what the context says it holds."""
    fed = session.state.context.n_fed
    return session.model.cache[session.slot][:fed] == list(session.state.context.tokens[:fed])


def test_preparing_again_stops_the_answer_that_is_closing_its_turn():
    """It outlived its answer and wrote old tokens over the new prompt."""
    session = Session(FakeCascade(answer_words=2))
    assert session.second("...1111111111", drain=False).end_of_turn

    session.prepare(prompt="x" * 40)

    assert session.state.context.n_fed == 40
    assert cached_as_told(session)


def test_a_new_turn_takes_over_from_the_one_that_is_still_being_closed():
    """Both fed the context; the old one fed the last of it, so nobody chose the first token."""
    session = Session(FakeCascade(answer_words=2, sign="x" * 60))
    assert session.second("...1111111111", drain=False).end_of_turn
    session.held = {"language"}
    session.seconds(2)
    session.second("...4444444444", frames=[np.zeros((8, 8, 3), np.uint8)])

    session.held = set()
    result = session.second()

    assert result.heard == "read the sign"
    assert result.text == "w0 w1 "
    assert cached_as_told(session)


def test_a_failed_answer_leaves_nothing_half_said_in_the_context():
    session = Session()
    session.model.broken = {"synthesize"}
    session.second("...1111111111", check=False)
    session.model.broken = set()

    session.ask("...2222222222")

    assert session.model.prompts[-1] == (1, 1, 1, 1, 2, *map(ord, "bravo"), 3)


def test_an_answer_that_fails_while_it_is_heard_leaves_its_question_only():
    session = Session()
    session.ask()
    session.model.broken = {"synthesize", "decode"}
    tasks = [session.second(check=False) for _ in range(9)]
    session.model.broken = set()

    session.ask("...2222222222")

    assert sum(task.error is not None for task in tasks) == 1
    expected = (1, 1, 1, 1, 2, *map(ord, "alpha"), 2, *map(ord, "bravo"), 3)
    assert session.model.prompts[-1] == expected


def test_a_long_question_makes_the_oldest_turns_go():
    """It did not fit, and from then on no question did."""
    session = Session(FakeCascade(answer_words=100, context_tokens=500, sign="x" * 250))
    for _ in range(3):
        session.ask()
        session.seconds(27)

    session.second("...4444444444", frames=[np.zeros((8, 8, 3), np.uint8)])

    assert "".join(map(chr, session.model.prompts[-1])).count("alpha") == 0
    assert session.second().audio.size


def test_a_page_full_of_text_is_cut():
    session = Session(FakeCascade(sign="x" * 5000))

    result = session.second("...4444444444", frames=[np.zeros((8, 8, 3), np.uint8)])

    assert result.heard == "read the sign"
    assert len(session.model.prompts[0]) < 1500


def test_a_prompt_without_room_for_a_conversation_is_refused():
    session = Session(FakeCascade(context_tokens=100))
    task = session.run(
        conversation.prepare(
            session.model,
            session.state,
            Prompt("x" * 60, DuplexSettings(), np.zeros(0, np.float32), np.zeros(0, np.float32)),
        )
    )

    assert isinstance(task.error, BadMessage)
    assert "60 tokens" in str(task.error)


def test_preparing_again_counts_the_forced_units_anew():
    session = Session(settings=DuplexSettings(force_listen_count=1))
    session.seconds(3)

    session.prepare(DuplexSettings(force_listen_count=2))

    results = [session.ask(), session.second(), session.second()]
    assert [r.is_listen for r in results] == [True, True, False]


def test_hearing_goes_before_every_other_op_of_its_lane():
    """A minute of speech took four seconds to transcribe, and nobody was heard meanwhile."""
    session = Session()
    unit = Unit(0, np.zeros(UNIT, np.float32), arrived_at=101.0)

    op = next(conversation.unit(session.model, session.state, unit))

    assert op.kind == "detect_speech"
    assert op.deadline < 100.0


@pytest.mark.parametrize("length", [4, 12, 30])
def test_stages_are_no_longer_than_their_unit(length):
    """An answer is begun before its first unit, and goes on between units: `cost_llm_ms` of the
    first unit that spoke was more than its `cost_all_ms`."""
    session = Session(FakeCascade(answer_words=length))
    run = session.model.run

    def take_time(kind, bucket, payloads):
        session.now += 0.004
        return run(kind, bucket, payloads)

    session.model.run = take_time
    session.state.clock = session.engine.clock = lambda: session.now

    # The silence begins in one unit, and in the next one it is certain.
    results = [session.second("...".ljust(24, "1")), *session.seconds(10)]

    timings = [result.timings for result in results]
    assert any(result.audio.size for result in results)
    for spent in timings:
        stages = [spent.listen_ms, spent.transcribe_ms, spent.prefill_ms, spent.decode_ms]
        assert sum(stages) + spent.vocode_ms <= spent.total_ms + 1e-6
    assert sum(spent.ahead_ms for spent in timings) > 0
    assert results[0].is_listen
    assert results[1].timings.decode_ms == 0.0
