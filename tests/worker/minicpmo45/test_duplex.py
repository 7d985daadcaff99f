"""Full duplex on the tiny checkpoint: turns, interruptions, settings, faults."""

import dataclasses

import numpy as np
import pytest
import torch

from shared.config import Compat, Config, DuplexConfig, ModelConfig
from shared.errors import BadImage, BadMessage, ContextFull, EngineFault, VoiceUnavailable
from shared.protocol import DuplexSettings
from tests.golden.driver import run_program
from tests.worker.minicpmo45.conftest import CHECKPOINT, picture, play, sound, start, unit
from worker.engine.contract import Emit, Op
from worker.models.contract import Prompt, Unit
from worker.models.minicpmo45 import ops
from worker.models.minicpmo45.build import build
from worker.models.minicpmo45.duplex import MOST_NEW_TOKENS, PREPARE_S, trim
from worker.models.minicpmo45.feeding import feed
from worker.models.minicpmo45.window import MAX_UNIT_TOKENS, WindowSettings

NONE = np.zeros(0, np.float32)


@pytest.fixture
def ids(tiny):
    return tiny.tokenizer.ids


def script(state, *tokens):
    state.script = iter(tokens)


def says(tiny, text):
    return tiny.tokenizer.encode(text)


# ---- decisions


def test_a_listening_unit_has_no_sound_and_costs_no_speech(tiny, ids):
    state = start(tiny)
    script(state, ids.listen)

    result, played = play(tiny, state, 0)

    assert result.is_listen
    assert (result.text, result.audio.size) == ("", 0)
    assert {ran.op.kind for ran in played.ops} == {
        ops.PREPARE_INPUT,
        ops.ENCODE_AUDIO,
        ops.PREFILL,
    }


def test_a_speaking_unit_says_its_words_for_one_second(tiny, ids):
    state = start(tiny)
    script(state, ids.speak, *says(tiny, " hello world"), ids.chunk_eos)

    result, _ = play(tiny, state, 0)

    assert not result.is_listen
    assert result.text == " hello world"
    assert result.audio.shape == (24_000,)
    assert np.isfinite(result.audio).all()
    assert not result.end_of_turn
    assert state.turn_is_open


def test_what_closes_a_unit_is_fed_with_the_next_one(tiny, ids):
    state = start(tiny)
    script(state, ids.listen)
    play(tiny, state, 0)
    assert state.pending == (ids.listen, ids.unit_end)
    before = state.n_tokens
    script(state, ids.listen)

    _, played = play(tiny, state, 1)

    (feed,) = [ran.op.payload for ran in played.of(ops.PREFILL)]
    assert feed.pieces[0] == (ids.listen, ids.unit_end, ids.unit_start)
    assert feed.start == before


def test_frames_come_before_sound(tiny, ids):
    state = start(tiny)
    script(state, ids.listen)

    result, played = play(tiny, state, 0, picture(0), picture(1))

    (feed,) = [ran.op.payload for ran in played.of(ops.PREFILL)]
    kinds = [piece if isinstance(piece, tuple) else len(piece) for piece in feed.pieces]
    frame = [(ids.image_start,), 64, (ids.image_end,)]
    assert kinds == [(ids.unit_start,), *frame, *frame, 10]
    assert (result.vision_slices, result.vision_tokens) == (2, 128)


def test_a_text_of_28_characters_ends_the_unit(tiny, ids):
    state = start(tiny)
    word = says(tiny, "a")
    script(state, ids.speak, *word * 40)

    result, _ = play(tiny, state, 0)

    assert result.text == "a" * 18  # 20 tokens at most come first, one is <|speak|>
    words = says(tiny, " question")
    script(state, ids.speak, *words * 20)
    result, _ = play(tiny, state, 1)
    assert len(result.text) < 28 <= len(result.text) + len(" question")


def test_listening_in_an_open_turn_becomes_the_start_of_speech(tiny, ids):
    state = start(tiny)
    script(state, ids.speak, *says(tiny, "a"), ids.chunk_eos)
    play(tiny, state, 0)
    script(state, ids.listen, *says(tiny, "b"), ids.chunk_eos)

    result, played = play(tiny, state, 1)

    assert not result.is_listen
    assert played.of(ops.DECODE)[0].op.payload.token == ids.tts_bos


def test_the_end_of_a_turn_flushes_the_voice(tiny, ids):
    state = start(tiny)
    script(state, ids.speak, *says(tiny, "a"), ids.chunk_eos)
    play(tiny, state, 0)
    script(state, ids.speak, *says(tiny, " red"), ids.turn_eos, ids.chunk_eos)

    result, played = play(tiny, state, 1)

    assert result.end_of_turn
    assert played.of(ops.VOCODE)[-1].op.payload.is_last
    assert state.speech_position == 0
    assert not state.turn_is_open


def test_a_turn_that_ends_where_the_model_listens_again_keeps_its_words(tiny, ids):
    state = start(tiny)
    script(state, ids.speak, *says(tiny, " red"), ids.turn_eos, ids.listen)

    result, _ = play(tiny, state, 0)

    assert not result.is_listen
    assert result.text == " red"
    assert result.end_of_turn
    assert state.pending[0] == ids.listen


def test_a_turn_may_end_without_a_word_where_the_model_listens_again(tiny, ids):
    state = start(tiny)
    script(state, ids.speak, *says(tiny, " hello"), ids.chunk_eos)
    play(tiny, state, 0)
    script(state, ids.turn_eos, ids.listen)

    result, _ = play(tiny, state, 1)

    assert (result.text, result.end_of_turn) == ("", True)
    assert (state.speech_position, state.turn_is_fresh) == (0, True)


# ---- interruptions


def test_force_listen_in_a_turn_ends_the_turn_for_the_model_and_the_voice(tiny, ids):
    state = start(tiny)
    script(state, ids.speak, *says(tiny, "a"), ids.chunk_eos)
    play(tiny, state, 0)

    result, played = play(tiny, state, 1, force_listen=True)

    assert result.is_listen
    assert result.interrupted
    assert not played.of(ops.DECODE)
    assert state.pending == (ids.turn_eos, ids.listen, ids.unit_end)
    assert (state.speech_position, state.turn_is_fresh) == (0, True)
    script(state, ids.listen)
    assert not play(tiny, state, 2)[0].interrupted


def test_force_listen_outside_of_a_turn_interrupts_nothing(tiny):
    state = start(tiny)

    result, _ = play(tiny, state, 0, force_listen=True)

    assert result.is_listen
    assert not result.interrupted


@pytest.mark.parametrize("kind", [ops.DECODE, ops.SPEAK, ops.VOCODE])
def test_an_interrupt_in_the_middle_of_a_unit_drops_what_it_says(tiny, ids, kind):
    state = start(tiny)
    script(state, ids.speak, *says(tiny, " hello world"), ids.chunk_eos)

    results = drive(tiny, state, 0, kind, lambda: tiny.interrupt(state))

    assert results[0].is_listen
    assert results[0].interrupted
    assert results[0].audio.size == 0
    assert state.pending[0] == ids.turn_eos
    assert state.pending[-1] == ids.unit_end
    script(state, ids.listen)
    after, _ = play(tiny, state, 1)
    assert after.is_listen
    assert not after.interrupted


@pytest.mark.parametrize(
    "kind",
    [ops.PREPARE_INPUT, ops.ENCODE_AUDIO, ops.PREFILL, ops.DECODE, ops.SPEAK, ops.VOCODE],
)
def test_an_interrupt_at_any_op_of_an_open_turn_is_told_by_that_unit(tiny, ids, kind):
    state = start(tiny)
    script(state, ids.speak, *says(tiny, " hello"), ids.chunk_eos)
    play(tiny, state, 0)
    script(state, ids.speak, *says(tiny, " world"), ids.chunk_eos)

    (result,) = drive(tiny, state, 1, kind, lambda: tiny.interrupt(state))

    assert (result.is_listen, result.interrupted, result.text) == (True, True, "")
    assert state.pending.count(ids.turn_eos) == 1
    assert (state.speech_position, state.turn_is_fresh, state.turn_is_open) == (0, True, False)
    script(state, ids.listen)
    assert not play(tiny, state, 2)[0].interrupted


def test_an_interrupt_after_a_turn_is_told_since_the_client_may_still_play_it(tiny, ids):
    state = start(tiny)
    script(state, ids.speak, *says(tiny, " red"), ids.turn_eos, ids.chunk_eos)
    play(tiny, state, 0)

    tiny.interrupt(state)
    result, _ = play(tiny, state, 1)

    assert result.is_listen
    assert result.interrupted


def test_an_interrupt_that_meets_a_decision_to_listen_is_told_with_it(tiny, ids):
    """The first result that listens after an interrupt says so, not one later."""
    state = start(tiny)
    script(state, ids.speak, *says(tiny, " red"), ids.turn_eos, ids.chunk_eos)
    play(tiny, state, 0)
    script(state, ids.listen)

    (result,) = drive(tiny, state, 1, ops.PREFILL, lambda: tiny.interrupt(state))

    assert (result.is_listen, result.interrupted) == (True, True)
    script(state, ids.speak, *says(tiny, "a"), ids.chunk_eos)
    assert not play(tiny, state, 2)[0].is_listen


def test_an_interrupt_while_words_are_chosen_costs_no_speech(tiny, ids):
    state = start(tiny)
    script(state, ids.speak, *says(tiny, " hello world"), ids.chunk_eos)
    kinds = []

    drive(tiny, state, 0, ops.DECODE, lambda: tiny.interrupt(state), kinds)

    assert kinds.count(ops.DECODE) == 1
    assert ops.SPEAK not in kinds


def test_after_an_interrupt_nothing_of_the_old_turn_is_heard(tiny, ids):
    """A unit of no words leaves speech tokens behind although no turn is open."""
    state = start(tiny)
    script(state, ids.chunk_eos)
    play(tiny, state, 0)
    assert not state.turn_is_open
    assert state.speech_position > 0

    tiny.interrupt(state)
    result, _ = play(tiny, state, 1)

    assert result.interrupted
    assert (state.speech_position, state.turn_is_fresh) == (0, True)
    assert len(state.codes.waiting) == 3


def test_an_interrupt_while_nobody_speaks_changes_nothing(tiny, ids):
    state = start(tiny)
    script(state, ids.listen)
    play(tiny, state, 0)

    tiny.interrupt(state)
    script(state, ids.speak, *says(tiny, "a"), ids.chunk_eos)
    result, _ = play(tiny, state, 1)

    assert not result.is_listen


def drive(model, state, k, kind, before, kinds=None):
    """Run a unit, calling `before` ahead of the first op of a kind; return what it emitted.

    The kinds of all ops are appended to `kinds`.
    """
    program = model.unit(state, unit(k))
    emitted, reply, is_due = [], None, True
    while True:
        try:
            request = program.send(reply)
        except StopIteration:
            return emitted
        if isinstance(request, Emit):
            emitted.append(request.value)
            reply = None
            continue
        assert isinstance(request, Op)
        if kinds is not None:
            kinds.append(request.kind)
        if request.kind == kind and is_due:
            is_due = False
            before()
        reply = model.run(request.kind, request.bucket, [request.payload])[0]


# ---- settings: every one acts


def test_force_listen_count_holds_the_model_back(tiny):
    state = start(tiny, settings=DuplexSettings(force_listen_count=2))

    kinds = [bool(play(tiny, state, k)[1].ops[-1].op.payload.choice) for k in range(3)]

    assert kinds == [False, False, True]


def test_generate_audio_false_answers_in_text_alone(tiny, ids):
    state = start(tiny, settings=DuplexSettings(generate_audio=False))
    script(state, ids.speak, *says(tiny, " red"), ids.chunk_eos)

    result, played = play(tiny, state, 0)

    assert result.text == " red"
    assert result.audio.size == 0
    assert not played.of(ops.SPEAK)


def test_max_new_speak_tokens_bounds_a_unit(tiny, ids):
    state = start(tiny, settings=DuplexSettings(max_new_speak_tokens_per_chunk=4))
    script(state, ids.speak, *says(tiny, "abcdefgh"))

    result, _ = play(tiny, state, 0)

    assert result.text == "ab"


@pytest.mark.parametrize("asked", [1, 2, 1_000_000])
def test_whatever_is_asked_for_a_unit_fits_into_the_context(tiny, ids, asked):
    """Control tokens have no characters, so the rule of 28 does not stop them."""
    state = start(tiny, settings=DuplexSettings(max_new_speak_tokens_per_chunk=asked))
    script(state, *[ids.speak] * 2 * MAX_UNIT_TOKENS)

    _, played = play(tiny, state, 0)

    assert len(played.of(ops.DECODE)) == min(asked, MOST_NEW_TOKENS) - 1


def test_the_largest_unit_fits_into_the_context(tiny, ids):
    state = start(tiny, settings=DuplexSettings(max_new_speak_tokens_per_chunk=MOST_NEW_TOKENS))
    script(state, ids.speak, ids.chunk_eos)
    play(tiny, state, 0)
    play(tiny, state, 1, force_listen=True)
    before = state.n_tokens
    assert len(state.pending) == 3
    script(state, *[ids.speak] * MOST_NEW_TOKENS)

    result, _ = play(tiny, state, 2, *[picture(k) for k in range(14)])

    assert result.vision_slices == 14
    assert state.context_tokens + 1 - before <= MAX_UNIT_TOKENS


def test_the_rows_of_a_slice_count(tiny, monkeypatch):
    monkeypatch.setattr(type(tiny), "n_image_tokens", 128)
    state = start(tiny)

    with pytest.raises(BadImage, match="at most 7"):
        play(tiny, state, 0, *[picture(0)] * 8)


def test_a_unit_that_is_held_back_does_not_ask_the_output_head(tiny, ids):
    state = start(tiny, settings=DuplexSettings(force_listen_count=1))
    script(state, ids.speak, ids.chunk_eos)
    calls = []
    hook = tiny.language.llm.head.register_forward_hook(lambda *_: calls.append(1))

    drive(tiny, state, 0, None, None)
    n_held_back = len(calls)
    drive(tiny, state, 1, None, None)
    hook.remove()

    assert n_held_back == 0
    assert len(calls) == 2  # <unit> ... and <|speak|>


def test_max_slice_nums_cuts_frames_into_tiles(tiny, ids):
    frame = picture(0, 1280, 720)
    state = start(tiny, settings=DuplexSettings(max_slice_nums=4))
    script(state, ids.listen, ids.listen, ids.listen)

    default, _ = play(tiny, state, 0, frame)
    lower, _ = play(tiny, state, 1, frame, max_slice_nums=1)
    each, _ = play(tiny, state, 2, frame, frame, max_slice_nums=(4, 1))

    assert default.vision_slices > 1
    assert lower.vision_slices == 1
    assert each.vision_slices == default.vision_slices + 1


@pytest.mark.parametrize(
    ("settings", "field", "value"),
    [
        ({"temperature": 0.3}, "temperature", 0.3),
        ({"top_k": 7}, "top_k", 7),
        ({"top_p": 0.4}, "top_p", 0.4),
        ({"text_repetition_penalty": 1.3}, "repetition_penalty", 1.3),
        ({"text_repetition_window_size": 9}, "window", 9),
        ({"length_penalty": 1.5}, "length_penalty", 1.5),
        ({"listen_prob_scale": 0.5}, "listen_prob_scale", 0.5),
        ({"listen_top_k": 3}, "listen_top_k", 3),
        ({"decode_mode": "greedy"}, "is_greedy", True),
        ({"temperature": 0.0}, "is_greedy", True),
    ],
)
def test_text_settings_reach_the_decision(tiny, settings, field, value):
    state = start(tiny, settings=DuplexSettings(**settings))

    _, played = play(tiny, state, 0)

    choice = played.of(ops.PREFILL)[0].op.payload.choice
    assert getattr(choice.sampling, field) == value


def test_tts_temperature_reaches_the_speech_head(tiny, ids):
    state = start(tiny, settings=DuplexSettings(tts_temperature=0.3))
    script(state, ids.speak, *says(tiny, "a"), ids.chunk_eos)

    _, played = play(tiny, state, 0)

    assert played.of(ops.SPEAK)[0].op.payload.sampling.temperature == 0.3


def test_a_penalty_window_of_nothing_looks_at_nothing(tiny):
    state = start(tiny, settings=DuplexSettings(text_repetition_window_size=0))
    state.said = [1, 2, 3]

    _, played = play(tiny, state, 0)

    assert not played.of(ops.PREFILL)[0].op.payload.choice.recent.size


def test_settings_belong_to_their_session(tiny):
    first = start(tiny, 0, settings=DuplexSettings(temperature=0.3))
    second = start(tiny, 1)

    assert first.sampling.temperature == 0.3
    assert second.sampling.temperature == 0.7


def test_settings_without_a_meaning_are_named(tiny):
    state = tiny.new_state(0)
    settings = DuplexSettings(ls_mode="explicit", temperature=0.5)

    played = run_program(tiny, tiny.prepare(state, Prompt("hi", settings, NONE, NONE)))

    assert played.value.ignored == ("ls_mode",)
    assert played.value.prompt_tokens == state.n_tokens


# ---- quirks that may be chosen


@pytest.mark.parametrize(("is_filled_up", "n_samples"), [(True, 24_000), (False, 9600)])
def test_short_sound_is_filled_up_unless_the_client_may_pace_it(
    tiny, ids, monkeypatch, is_filled_up, n_samples
):
    monkeypatch.setattr(tiny, "compat", Compat(short_chunks_start_with_silence=is_filled_up))
    codes = ops.Spoken((1,) * 10, has_ended=True)
    monkeypatch.setitem(tiny._runners, ops.SPEAK, lambda requests: [codes for _ in requests])
    state = start(tiny)
    script(state, ids.speak, *says(tiny, "ab"), ids.chunk_eos)

    result, _ = play(tiny, state, 0)

    assert len(result.audio) == n_samples
    assert not result.audio[: n_samples - 9600].any()


def test_rounding_to_16_bit_is_a_choice(tiny, ids, monkeypatch):
    tokens = (ids.speak, *says(tiny, " hello world"), ids.chunk_eos)
    samples = []
    for rounds in (False, True):
        monkeypatch.setattr(tiny, "compat", Compat(voice_through_int16=rounds))
        state = start(tiny, seed=3)
        script(state, *tokens)
        samples.append(play(tiny, state, 0)[0].audio)

    exact, rounded = samples
    steps = rounded * 32768
    assert np.abs(steps - np.round(steps)).max() < 1e-3
    assert 0 < np.abs(exact - rounded).max() < 1e-4


# ---- faults


def test_too_many_slices_are_refused_before_anything_is_used(tiny):
    state = start(tiny)
    before = dataclasses.replace(state)
    frames = (picture(0, 1280, 720),) * 3

    with pytest.raises(BadImage, match="at most 14"):
        play(tiny, state, 0, *frames, max_slice_nums=9)

    assert state.context_tokens == before.context_tokens
    assert state.mel.emitted_frames == 0


@pytest.mark.parametrize("kind", [ops.ENCODE_AUDIO, ops.PREFILL, ops.DECODE, ops.SPEAK, ops.VOCODE])
def test_a_unit_that_fails_leaves_the_context_as_it_was(tiny, ids, kind):
    state = start(tiny)
    script(state, ids.listen)
    play(tiny, state, 0)
    before = (state.n_tokens, state.pending)
    script(state, ids.speak, *says(tiny, " red"), ids.chunk_eos)
    program = tiny.unit(state, unit(1))

    with pytest.raises(RuntimeError, match="device"):
        fail_at(tiny, program, kind)

    assert (state.n_tokens, state.pending) == before
    script(state, ids.listen)
    assert play(tiny, state, 2)[0].is_listen


def test_a_unit_that_fails_has_said_nothing(tiny, ids, monkeypatch):
    state = start(tiny)
    prefill = tiny._runners[ops.PREFILL]

    def speaking(requests):
        return [dataclasses.replace(fed, token=ids.speak) for fed in prefill(requests)]

    monkeypatch.setitem(tiny._runners, ops.PREFILL, speaking)

    with pytest.raises(RuntimeError, match="device"):
        fail_at(tiny, tiny.unit(state, unit(0)), ops.DECODE)

    assert state.said == []


@pytest.mark.parametrize(
    ("mode", "kind"), [("basic", ops.MOVE), ("context", ops.MOVE), ("context", ops.PREFILL)]
)
def test_a_cut_that_fails_leaves_a_session_that_goes_on_from_its_prompt(tiny, ids, mode, kind):
    state = start(tiny)
    n_prompt = state.n_tokens
    settings = WindowSettings(mode=mode, high_tokens=120, low_tokens=90, max_units=2)
    state.window = dataclasses.replace(state.window, settings=settings)
    script(state, *[ids.speak, *says(tiny, "ab"), ids.chunk_eos] * 2)
    for k in range(2):
        play(tiny, state, k)
    settings = dataclasses.replace(settings, high_tokens=1, low_tokens=1, max_units=1)
    state.window.settings = settings
    tokens, pending = state.context_tokens, state.pending

    with pytest.raises(RuntimeError, match="device"):
        fail_at(tiny, trim(state, 0.0), kind, is_after_move=kind == ops.PREFILL)

    assert (tokens, pending) != (state.context_tokens, state.pending)
    assert state.context_tokens == n_prompt
    assert state.pending == state.window.suffix
    assert (list(state.window.units), state.window.previous) == ([], ())
    script(state, ids.listen)
    _, played = play(tiny, state, 2)
    assert played.of(ops.PREFILL)[0].op.payload.start == n_prompt - len(state.window.suffix)


def test_a_cut_that_has_not_begun_leaves_what_closes_the_unit_pending(tiny, ids):
    state = start(tiny)
    script(state, ids.listen, ids.listen)
    for k in range(2):
        play(tiny, state, k)
    state.window.settings = WindowSettings(high_tokens=1, low_tokens=1)
    before = (state.n_tokens, state.pending, list(state.window.units))

    program = trim(state, 0.0)
    program.send(None)
    program.close()

    assert (state.n_tokens, state.pending, list(state.window.units)) == before


def test_more_carried_words_than_one_op_takes_are_fed_in_pieces(tiny, ids):
    state = start(tiny)
    settings = WindowSettings(mode="context", max_units=1, previous_max_tokens=900)
    state.window = dataclasses.replace(state.window, settings=settings)
    state.window.previous = state.window.marker + (says(tiny, "a")[0],) * 900
    extra = len(state.window.previous)
    run_program(tiny, feed(0, state.n_tokens, [(ids.unit_start,) * extra], 0.0))
    state.n_tokens += extra
    script(state, *[ids.speak, *says(tiny, "ab"), ids.chunk_eos] * 2)
    play(tiny, state, 0)

    _, played = play(tiny, state, 1)

    rows = [ran.op.payload.n_rows for ran in played.of(ops.PREFILL)][-2:]
    assert rows[0] == ops.MAX_FEED_ROWS
    assert sum(rows) == len(state.window.previous) + len(state.window.suffix)


def fail_at(model, program, kind, is_after_move=False):
    """Run a program up to the first op of a kind, which fails."""
    reply, is_due = None, not is_after_move
    while True:
        request = program.send(reply)
        reply = None
        if isinstance(request, Op):
            if is_due and request.kind == kind:
                program.throw(RuntimeError("device"))
            is_due = is_due or request.kind == ops.MOVE
            reply = model.run(request.kind, request.bucket, [request.payload])[0]


def test_a_prompt_that_leaves_no_room_is_refused(tiny):
    state = tiny.new_state(0)

    with pytest.raises(BadMessage, match="tokens, at most"):
        run_program(tiny, tiny.prepare(state, Prompt("x" * 9000, DuplexSettings(), NONE, NONE)))


def test_a_long_prompt_is_fed_in_pieces(tiny):
    state = tiny.new_state(0)
    prompt = Prompt("x" * 1200, DuplexSettings(), NONE, NONE)

    played = run_program(tiny, tiny.prepare(state, prompt))

    rows = [ran.op.payload.n_rows for ran in played.of(ops.PREFILL)]
    assert max(rows) == ops.MAX_FEED_ROWS
    assert sum(rows) == played.value.prompt_tokens > 1200


def test_a_client_voice_needs_the_files_that_encode_it(tiny):
    state = tiny.new_state(0)
    voice = sound(0)

    with pytest.raises(VoiceUnavailable, match=r"campplus\.onnx"):
        run_program(tiny, tiny.prepare(state, Prompt("hi", DuplexSettings(), voice, NONE)))


def test_text_alone_needs_no_voice(tiny):
    """The client's voice is heard all the same, and no encoder is needed for that."""
    state = tiny.new_state(0)
    settings = DuplexSettings(generate_audio=False)

    played = run_program(tiny, tiny.prepare(state, Prompt("hi", settings, sound(0), NONE)))

    assert played.of(ops.ENCODE_CLIP)
    assert played.value.voice == "neutral"


def test_without_a_voice_none_is_told(tiny, monkeypatch):
    monkeypatch.setattr(tiny, "token2wav", None)
    state = tiny.new_state(0)

    settings = DuplexSettings(generate_audio=True, tts_temperature=0.5, temperature=0.5)

    played = run_program(tiny, tiny.prepare(state, Prompt("hi", settings, sound(0), NONE)))

    assert played.value.voice == ""
    assert played.value.ignored == ("generate_audio", "tts_temperature")


def test_a_sample_that_only_the_language_model_hears_is_no_voice(tiny, monkeypatch):
    monkeypatch.setattr(tiny, "default_heard", sound(0))

    assert tiny.voice_encoder is None
    assert tiny.voice_name == "neutral"


def test_a_context_beyond_what_the_model_was_trained_for_is_logged(caplog):
    duplex = DuplexConfig(basic_window_high_tokens=32_768)
    model = build(Config(model=ModelConfig(model_path=str(CHECKPOINT)), duplex=duplex))

    model.load_model(lambda share, note: None)

    n_trained = model.config.max_positions
    assert model.n_positions > n_trained
    assert f"n_trained={n_trained}" in caplog.text


def test_the_ops_of_a_prompt_do_not_pass_units_that_are_due(tiny, monkeypatch):
    monkeypatch.setattr(tiny, "clock", lambda: 50.0)
    state = tiny.new_state(0)
    settings = DuplexSettings(generate_audio=False)

    played = run_program(tiny, tiny.prepare(state, Prompt("hi", settings, sound(0), NONE)))

    assert {ran.op.deadline for ran in played.ops} == {50.0 + PREPARE_S}


def test_a_lost_accelerator_fails_the_worker_and_a_bad_op_does_not(tiny, monkeypatch):
    def lost(_):
        raise torch.AcceleratorError("CUDA error: device-side assert triggered")

    monkeypatch.setitem(tiny._runners, ops.DECODE, lost)

    with pytest.raises(EngineFault, match="decode"):
        tiny.run(ops.DECODE, None, [None])
    with pytest.raises(AttributeError):
        tiny.run(ops.PREFILL, None, [None])


def test_a_session_without_a_window_says_when_it_is_full(tiny, ids, monkeypatch):
    monkeypatch.setattr(tiny, "window", WindowSettings(mode="off", max_tokens=1024))
    state = start(tiny)
    state.n_tokens = 1025

    with pytest.raises(ContextFull):
        play(tiny, state, 0)


def test_a_unit_of_frames_alone_is_heard_after_its_picture(tiny, ids):
    state = start(tiny)
    script(state, ids.listen)

    played = run_program(tiny, tiny.unit(state, Unit(0, NONE, (picture(0),))))

    assert played.emitted[0].is_listen
    assert not played.of(ops.ENCODE_AUDIO)
    assert state.n_units == 1


def test_preparing_again_starts_anew(tiny, ids):
    state = start(tiny)
    script(state, ids.speak, *says(tiny, " red"), ids.chunk_eos)
    play(tiny, state, 0)
    fresh = start(tiny, 1, system="again")

    run_program(tiny, tiny.prepare(state, Prompt("again", DuplexSettings(), NONE, NONE)))

    assert state.context_tokens == fresh.context_tokens
    assert (state.n_units, state.turn_is_open, state.said) == (0, False, [])
    assert (state.audio_past, state.speech_position, state.turn_is_fresh) == (0, 0, True)
    assert not state.window.units
