"""Turn-based programs on real weights: the tiny golden checkpoint, caches and all."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from shared.config import Compat
from tests.golden.driver import run_program
from tests.golden.loaded import load_model
from tests.golden.replay_chat import step_logits
from worker.models.contract import Clip, Picture, TurnMessage
from worker.models.minicpmo45 import chat, half_duplex, ops, prompt
from worker.models.minicpmo45.chat import ChatRequest, SpeechOut
from worker.models.minicpmo45.feeding import n_rows
from worker.models.minicpmo45.half_duplex import HalfDuplexSettings
from worker.nn.code_sampling import CodeSampling

GOLDEN = Path(__file__).parents[2] / "golden" / "data"
GREEDY = HalfDuplexSettings(max_new_tokens=20, do_sample=False, generate_audio=False)
NOISE = np.random.default_rng(0)


def sound(seconds):
    return Clip(NOISE.normal(0, 0.1, int(16_000 * seconds)).astype(np.float32))


SAID = [sound(seconds) for seconds in (1.3, 2.1, 0.7, 1.1)]
SEEN = Picture(NOISE.integers(0, 256, (90, 120, 3), np.uint8))


@pytest.fixture(scope="module")
def model():
    return load_model(GOLDEN, n_slots=2, compat=Compat())


class Session:
    def __init__(self, model, settings=GREEDY, slot=0, seed=1):
        self.model, self.state = model, half_duplex.new_state(slot, seed)
        self.play(
            half_duplex.prepare(
                model, self.state, TurnMessage("system", ("kind ", SAID[0])), settings
            )
        )

    def play(self, program):
        with torch.inference_mode():
            return run_program(self.model, program)

    def hear(self, *parts):
        return self.play(half_duplex.prefill(self.model, self.state, TurnMessage("user", parts)))

    def answer(self, **options):
        return self.play(half_duplex.generate(self.model, self.state, **options))

    def talk(self):
        """Two rounds; returns the logits of the second answer."""
        self.hear(SEEN, SAID[1])
        self.answer()
        self.hear("and ", SAID[2])
        return step_logits(self.answer())


def test_an_answer_that_was_taken_back_leaves_no_trace(model):
    session = Session(model)
    session.hear(SEEN, SAID[1])
    session.answer(saves=True)
    half_duplex.restore(session.state)
    session.answer()
    session.hear("and ", SAID[2])

    torch.testing.assert_close(step_logits(session.answer()), Session(model).talk())


def test_a_slot_that_was_used_before_answers_like_a_fresh_one(model):
    fresh = Session(model, slot=1).talk()
    Session(model, slot=0).talk()
    model.poison_slot(0)

    torch.testing.assert_close(Session(model, slot=0).talk(), fresh)


def test_a_neighbour_in_the_middle_of_a_turn_changes_nothing(model):
    alone = Session(model).talk()
    other = Session(model, slot=1)
    other.hear(SAID[3])
    neighbour = half_duplex.generate(model, other.state)
    with torch.inference_mode():
        asked = next(neighbour)
        for _ in range(5):
            asked = neighbour.send(model.run(asked.kind, asked.bucket, [asked.payload])[0])

        torch.testing.assert_close(Session(model).talk(), alone)


def test_a_context_that_lost_its_oldest_round_goes_on(model):
    """Keys that moved are turned: what is left is seen at its new distance from the new rows."""
    settings = dataclasses.replace(GREEDY, high_tokens=300, low_tokens=200)
    session = Session(model, settings)
    moves = []
    for index in range(5):
        heard, answered = session.hear(SEEN, SAID[index % 4]), session.answer()
        moves += heard.of(ops.MOVE) + answered.of(ops.MOVE)
        logits = step_logits(answered)

    assert len(moves) > 1
    assert logits.isfinite().all()
    assert sum(session.state.rounds) + session.state.n_system == session.state.n_tokens


@pytest.mark.parametrize(
    "attention", ["full_attention", "sliding_window", "sliding_recompute", "reindex"]
)
def test_every_kind_of_speech_attention_speaks(model, attention, monkeypatch):
    config = dataclasses.replace(model.config, tts_attention=attention)
    monkeypatch.setattr(model, "config", config)
    settings = HalfDuplexSettings(max_new_tokens=40, do_sample=False)
    model.poison_slot(0)
    session = Session(model, settings)
    session.hear(SAID[1])

    turn = session.answer().value

    assert turn.audio.size
    assert np.isfinite(turn.audio).all()


def test_a_spoken_chat_answer(model):
    request = ChatRequest(
        (TurnMessage("user", (SEEN, SAID[1], "what is it?")),),
        max_new_tokens=12,
        max_slice_nums=1,
        speech=SpeechOut(sampling=CodeSampling(is_greedy=True, top_p=0.85, top_k=25)),
    )
    model.poison_slot(1)

    with torch.inference_mode():
        played = run_program(model, chat.chat(model, chat.new_state(1, 0), request))

    answer = played.value
    assert len(answer.token_ids) == 12
    assert len(answer.audio) >= (chat.MIN_CODES + 3) * 960
    assert np.isfinite(answer.audio).all()


def test_a_chat_clip_longer_than_the_encoder_holds_is_heard_whole(model):
    request = ChatRequest((TurnMessage("user", (sound(31.25), sound(1))),), max_new_tokens=2)

    with torch.inference_mode():
        played = run_program(model, chat.chat(model, chat.new_state(0, 0), request))

    rows = [len(run.result) for run in played.of(ops.ENCODE_CLIP)]
    assert rows == [300, 12, 10]
    assert step_logits(played).isfinite().all()


@pytest.mark.parametrize("seconds", [30.01, 31.25, 61])
@pytest.mark.parametrize("hears_padding", [False, True])
@torch.inference_mode()
def test_a_long_clip_in_ops_of_30_s_equals_it_in_one(model, seconds, hears_padding, monkeypatch):
    monkeypatch.setattr(model, "compat", Compat(long_clips_hear_padding=hears_padding))
    heard = sound(seconds)
    options = prompt.MediaOptions(1, use_image_id=False, is_clip_chunked=True)
    layout = prompt.lay_out(model, prompt.AUDIO_MARK, (heard,), options)

    played = run_program(model, prompt.embed(model, layout, options, 0.0))

    whole = ops.ClipRequest(heard.samples, is_chunked=True)
    rows = torch.cat([run.result for run in played.of(ops.ENCODE_CLIP)])
    torch.testing.assert_close(rows, model.run(ops.ENCODE_CLIP, None, [whole])[0], rtol=0, atol=0)
    assert n_rows(played.value) == layout.n_rows
