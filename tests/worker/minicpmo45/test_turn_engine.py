"""Chat requests and turns on the engine with the tiny checkpoint, beside live units."""

from __future__ import annotations

import weakref
from pathlib import Path

import numpy as np
import pytest
import torch

from shared.audio import read_wav
from shared.config import Config, ModelConfig
from shared.errors import BadMessage, ModelLoadError, VoiceUnavailable
from shared.protocol import GenerationSettings
from tests.worker.minicpmo45.conftest import N_SLOTS, picture, sound, start, unit
from worker.engine.engine import Engine, ProgramCancelled
from worker.models import packages
from worker.models.contract import (
    ChatQuestion,
    Clip,
    Picture,
    Piece,
    Taken,
    TurnMessage,
    TurnPrompt,
    Unit,
    WholeAnswer,
)
from worker.models.minicpmo45 import ops
from worker.models.minicpmo45.build import build
from worker.models.minicpmo45.draws import SeededDraws
from worker.models.voice_activity import DETECT_SPEECH, VAD_WINDOW, SpeechDetector

ASSETS = Path(__file__).parents[2] / "assets"
CHAT, OTHER, LIVE = 0, 1, 2
"""Slots, and the sessions on them."""


class Watched:
    """The model as the engine's runner, with every op that ran, and one kind that may fail."""

    def __init__(self, model):
        self.model, self.lanes, self.max_batch = model, model.lanes, model.max_batch
        self.ran, self.batches, self.fails = [], [], None

    def run(self, kind, bucket, payloads):
        slots = [getattr(payload, "slot", None) for payload in payloads]
        self.ran += [(slot, kind) for slot in slots]
        self.batches.append((kind, slots))
        if kind == self.fails:
            self.fails = None
            return [RuntimeError("broken") for _ in payloads]
        return self.model.run(kind, bucket, payloads)


class Bench:
    """An engine that is stepped by hand."""

    def __init__(self, model):
        self.model, self.runner = model, Watched(model)
        self.engine = Engine(self.runner)
        self.said = {}

    def spawn(self, session, program):
        self.said[session] = []
        return self.engine.spawn(session, program, self.said[session].append)

    def step(self):
        return sum(self.engine.step(lane) for lane in self.engine.lanes) > 0

    def until(self, condition):
        while not condition():
            assert self.step() or condition(), "nothing is left to do"

    def play(self, session, program):
        task = self.spawn(session, program)
        self.until(lambda: task.done)
        if task.error is not None:
            raise task.error
        return task.value

    def unit(self, state, k):
        """Play a unit of the live session; its decision and text."""
        self.play(LIVE, self.model.unit(state, unit(k)))
        (result,) = self.said[LIVE]
        return result.is_listen, result.text, len(result.audio)

    def n_ops(self, slot):
        return sum(owner == slot for owner, _ in self.runner.ran)


@pytest.fixture
def bench(tiny):
    return Bench(tiny)


def ask(model, slot, *parts, seed=3, **question):
    state = model.chat_state(slot)
    state.draws = SeededDraws(seed)
    generation = question.pop("generation", GenerationSettings(max_new_tokens=12, do_sample=False))
    messages = (TurnMessage("user", parts or ("what is the answer",)),)
    return model.chat(state, ChatQuestion(messages, generation, **question))


def talk(bench, slot, *system, speaks=True, n=20):
    state = bench.model.turn_state(slot)
    state.draws = SeededDraws(4)
    generation = GenerationSettings(max_new_tokens=n, do_sample=False)
    prompt = TurnPrompt(system or ("be kind",), generation, speaks)
    return state, bench.play(slot, bench.model.prepare_turns(state, prompt))


def told(bench, slot):
    """Text and sound of an answer as they were streamed."""
    pieces = [value for value in bench.said[slot] if isinstance(value, Piece)]
    return "".join(piece.text for piece in pieces), [len(p.audio) for p in pieces if p.audio.size]


# ---- chat


def test_a_chat_answer_with_everything_in_the_question(bench):
    program = ask(bench.model, CHAT, Picture(picture(1)), Clip(sound(2)), "what", speaks=True)

    answer = bench.play(CHAT, program)

    text, sounds = told(bench, CHAT)
    assert isinstance(answer, WholeAnswer)
    assert bench.said[CHAT][0] == Taken(answer.n_input_tokens)
    assert text == answer.text
    assert sounds
    assert sounds[0] == 24_000
    assert min(answer.timings.prefill_ms, answer.timings.vocode_ms, answer.timings.listen_ms) > 0


def test_pictures_are_gone_once_they_have_been_seen(bench):
    """They count against what other sessions may send, and an answer takes its time."""
    pixels = picture(1)
    seen = weakref.ref(pixels)
    task = bench.spawn(CHAT, ask(bench.model, CHAT, Picture(pixels), "what"))
    del pixels

    bench.until(lambda: bench.said[CHAT])

    assert bench.said[CHAT][0].n_input_tokens > 0
    assert seen() is None
    bench.until(lambda: task.done)
    assert task.error is None


def test_a_voice_that_cannot_be_encoded_is_refused_in_chat(bench):
    with pytest.raises(VoiceUnavailable):
        bench.play(CHAT, ask(bench.model, CHAT, speaks=True, voice=sound(1)))


def test_a_question_that_is_too_long_says_so(bench):
    with pytest.raises(BadMessage, match="at most"):
        bench.play(CHAT, ask(bench.model, CHAT, "x" * 9000))


def test_two_chats_and_a_live_session_share_the_model(bench):
    """Each says what it says alone; decode steps of both chats run as one."""
    model = bench.model
    questions = {CHAT: ("hello the world",), OTHER: ("red people", Clip(sound(7)))}
    alone = {slot: bench.play(slot, ask(model, slot, *said)) for slot, said in questions.items()}
    live = start(model, LIVE, seed=5)
    units_alone = [bench.unit(live, k) for k in range(3)]
    for slot in range(N_SLOTS):
        model.poison_slot(slot)
    bench.runner.batches.clear()

    chats = {slot: bench.spawn(slot, ask(model, slot, *said)) for slot, said in questions.items()}
    live = start(model, LIVE, seed=5)
    units = [bench.unit(live, k) for k in range(3)]
    bench.until(lambda: all(task.done for task in chats.values()))

    for slot, task in chats.items():
        assert task.error is None
        assert (task.value.text, task.value.n_generated_tokens) == (
            alone[slot].text,
            alone[slot].n_generated_tokens,
        )
    assert units == units_alone
    together = [slots for kind, slots in bench.runner.batches if kind == ops.DECODE]
    assert [CHAT, OTHER] in [sorted(slots) for slots in together]


def test_a_unit_that_comes_during_two_answers_runs_before_them(bench):
    """Once its input is prepared, nothing runs up to its result but in one batch with it."""
    model = bench.model
    generation = GenerationSettings(max_new_tokens=40, do_sample=False)
    chats = [
        bench.spawn(slot, ask(model, slot, "x" * 1200, generation=generation))
        for slot in (CHAT, OTHER)
    ]
    live = start(model, LIVE)
    ids = model.tokenizer.ids
    live.script = iter([ids.speak, *model.tokenizer.encode(" hello world"), ids.chunk_eos])
    bench.until(lambda: bench.said[CHAT] and bench.said[OTHER])
    bench.runner.batches.clear()
    due = Unit(0, sound(0), deadline=model.clock() + 1.0)
    task = bench.spawn(LIVE, model.unit(live, due))
    bench.engine.step("host")
    bench.until(lambda: bench.said[LIVE])

    prepared, *batches = bench.runner.batches
    assert prepared[0] == ops.PREPARE_INPUT
    assert {ops.DECODE, ops.SPEAK, ops.VOCODE} < {kind for kind, _ in batches}
    assert all(LIVE in slots for _, slots in batches)
    assert not any(chat.done for chat in chats)
    bench.until(lambda: task.done and all(chat.done for chat in chats))


@pytest.mark.parametrize(
    "stage",
    [
        *(ops.PREPARE_INPUT, ops.ENCODE_IMAGES, ops.ENCODE_CLIP, ops.PREFILL),
        *(ops.DECODE, ops.SPEAK, ops.START_TURN, ops.VOCODE),
    ],
)
def test_a_closed_chat_runs_no_further_op(bench, stage):
    model = bench.model
    generation = GenerationSettings(max_new_tokens=30, do_sample=False)
    parts = ("x" * 1200, Picture(picture(1)), Clip(sound(2)))
    task = bench.spawn(CHAT, ask(model, CHAT, *parts, speaks=True, generation=generation))
    other = bench.spawn(OTHER, ask(model, OTHER))
    # What is encoded belongs to no slot; the other chat has nothing to encode.
    bench.until(lambda: {(CHAT, stage), (None, stage)} & set(bench.runner.ran))
    n_before, n_pieces = bench.n_ops(CHAT), len(bench.said[CHAT])

    quiet = bench.engine.cancel_session(CHAT)
    bench.engine.advance()

    assert quiet.done()
    assert isinstance(task.error, ProgramCancelled)
    bench.until(lambda: other.done)
    assert not bench.step()
    assert (bench.n_ops(CHAT), len(bench.said[CHAT])) == (n_before, n_pieces)
    assert other.error is None


# ---- turns


def test_turns_are_answered_in_text_and_sound(bench):
    state, prepared = talk(bench, CHAT, "be kind", Clip(sound(1)))
    assert prepared.ignored == ("reference_voice",)
    assert prepared.voice == "neutral"

    for k in (2, 3):
        answer = bench.play(CHAT, bench.model.turn(state, sound(k)))
        text, sounds = told(bench, CHAT)
        assert (text, bool(sounds)) == (answer.text, True)
        assert answer.n_input_tokens + answer.n_generated_tokens == state.n_tokens


def test_a_turn_that_is_interrupted_is_followed_by_the_next(bench):
    state, _ = talk(bench, CHAT)
    task = bench.spawn(CHAT, bench.model.turn(state, sound(1)))
    bench.until(lambda: told(bench, CHAT)[0])
    n_before = bench.n_ops(CHAT)

    task.cancel()
    bench.engine.advance()

    assert not bench.step()
    assert bench.n_ops(CHAT) == n_before
    n_held = state.n_tokens
    answer = bench.play(CHAT, bench.model.turn(state, sound(2)))
    assert answer.n_input_tokens > n_held
    assert told(bench, CHAT)[0] == answer.text


@pytest.mark.parametrize("kind", [ops.ENCODE_CLIP, ops.PREFILL, ops.DECODE, ops.SPEAK])
def test_a_turn_that_fails_is_followed_by_the_next(bench, kind):
    state, _ = talk(bench, CHAT)
    bench.runner.fails = kind

    with pytest.raises(RuntimeError, match="broken"):
        bench.play(CHAT, bench.model.turn(state, sound(1)))

    assert bench.play(CHAT, bench.model.turn(state, sound(2))).n_generated_tokens > 0
    assert sum(state.rounds) + state.n_system == state.n_tokens


# ---- speech


def test_speech_is_found_piece_by_piece_as_in_one(bench):
    samples, _ = read_wav(ASSETS / "capital_france.wav")
    samples = samples[: 5 * 16_000]
    found = []
    for size in (8000, 800):
        state, _ = talk(bench, CHAT, speaks=False)
        pieces = [samples[i : i + size] for i in range(0, len(samples), size)]
        found.append(
            np.concatenate(
                [bench.play(CHAT, bench.model.detect_speech(state, piece)) for piece in pieces]
            )
        )

    assert found[0].shape == (len(samples) // VAD_WINDOW,)
    np.testing.assert_allclose(found[0], found[1], atol=1e-5)
    assert found[0].max() > 0.9
    assert bench.model.lanes[DETECT_SPEECH] == "host"


def test_a_new_conversation_does_not_hear_the_end_of_the_last(bench):
    state, _ = talk(bench, CHAT, speaks=False)
    bench.play(CHAT, bench.model.detect_speech(state, sound(1)[:700]))
    prompt = TurnPrompt((), GenerationSettings(), speaks=False)

    bench.play(CHAT, bench.model.prepare_turns(state, prompt))

    assert bench.play(CHAT, bench.model.detect_speech(state, sound(1)[:511])).size == 0


def test_a_missing_detector_is_told_before_weights_are_read(monkeypatch):
    model = build(Config(model=ModelConfig(model_path="/nowhere")))
    missing = packages.Package("no-such-thing", "no_such_thing", "1.0", "x.onnx")
    monkeypatch.setattr("worker.models.minicpmo45.model.SILERO", missing)

    with pytest.raises(ModelLoadError, match="pip install .*no-such-thing==1.0"):
        model.load_model(lambda share, note: None)


def test_a_damaged_detector_is_one_sentence(tmp_path):
    (tmp_path / "vad.onnx").write_bytes(b"no network")

    with pytest.raises(ModelLoadError, match=r"vad\.onnx cannot be loaded"):
        SpeechDetector(tmp_path / "vad.onnx")


# ---- the end


@pytest.mark.parametrize("kind", ["new_state", "chat_state", "turn_state"])
def test_the_end_of_any_session_leaves_nothing(tiny, kind):
    state = getattr(tiny, kind)(CHAT)
    with torch.inference_mode():
        for tensor in (*tiny.language.cache.keys, *tiny.speech_cache.keys):
            tensor[CHAT].zero_()
    state.voice = tiny.default_voice

    tiny.end(state)

    assert state.voice is None
    for tensor in (*tiny.language.cache.keys, *tiny.speech_cache.keys):
        assert tensor[CHAT].isnan().any()
