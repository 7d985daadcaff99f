"""The session that warm-up plays."""

import io
import logging
import re
from dataclasses import dataclass

import numpy as np
import pytest
from PIL import Image

from shared.audio import samples_from_f32, write_wav
from shared.clips import Clip
from shared.errors import ConfigError
from tests.fakes.model import FakeDuplexModel, FakeState
from tests.fakes.session import LOUD, SILENT, Stage, chunk
from tests.media import write_clip
from worker.sessions import rehearsal
from worker.sessions.host import SessionLimits
from worker.sessions.rehearsal import (
    ANSWER_S,
    MAX_CLIP_S,
    SHIPPED_CLIP,
    TALK_S,
    RehearsalFailed,
    inputs_of,
    rehearse,
    rehearse_answers,
    synthetic_clip,
    warm_up_inputs,
)


@dataclass
class TalkativeState(FakeState):
    pass


class TalkativeModel(FakeDuplexModel):
    """Answers silence, too, where it was asked for a talkative session."""

    def talkative_state(self, slot):
        state = TalkativeState(slot)
        self.states.append(state)
        return state

    def _one(self, kind, state, value):
        if kind == "think" and isinstance(state, TalkativeState):
            return True
        return super()._one(kind, state, value)


async def play(model, *sounds, limits=None):
    stage = Stage(model, limits=limits)
    told = []
    inputs = [chunk(seq, samples) for seq, samples in enumerate(sounds)]
    try:
        results = await rehearse(inputs, stage.host, lambda share, note: told.append((share, note)))
    finally:
        await stage.close()
    assert stage.host.slots.n_free == 2
    return results, told


def seconds(inputs):
    return [samples_from_f32(message.audio) for message in inputs]


# ---- playing


async def test_a_rehearsal_plays_a_whole_session_and_leaves_the_slot_clean():
    model = FakeDuplexModel()
    results, told = await play(model, SILENT, LOUD)

    assert [result.text for result in results] == ["", "u1 "]
    assert [(share, note.split(",")[0]) for share, note in told] == [
        (0.5, "unit 1 of 2: listen"),
        (1.0, "unit 2 of 2: speak"),
    ]
    assert model.named("end") == [("end", 0)]


async def test_the_last_unit_is_finalized_before_the_session_ends():
    model = FakeDuplexModel()
    await play(model, SILENT, LOUD)

    assert model.states[0].finalized == 2


async def test_every_unit_has_one_line_in_the_log(caplog):
    caplog.set_level(logging.INFO, rehearsal.__name__)
    await play(FakeDuplexModel(), SILENT, LOUD)

    pattern = (
        r"unit rehearsed unit=(\d/2) decision=(\w+) total_ms=[\d.]+ elapsed_s=[\d.]+ remaining"
    )
    # Earlier tests may have left other loggers talkative.
    own = [record for record in caplog.records if record.name == rehearsal.__name__]
    lines = [re.match(pattern, record.getMessage()) for record in own]
    assert [line and line.groups() for line in lines] == [("1/2", "listen"), ("2/2", "speak")]


async def test_what_was_not_spoken_is_spoken_by_script():
    model = TalkativeModel()
    results, told = await play(model, SILENT, SILENT)

    assert [bool(result.audio) for result in results] == [False] * 2 + [True] * TALK_S
    assert [note.split(":")[0] for _, note in told] == [
        *("unit 1 of 2", "unit 2 of 2", "unit 3 of 5", "unit 4 of 5", "unit 5 of 5")
    ]
    assert model.named("end") == [("end", 0)] * 2


async def test_a_model_that_has_spoken_needs_no_script():
    results, _ = await play(TalkativeModel(), SILENT, LOUD)

    assert len(results) == 2


async def test_a_back_end_without_a_script_may_stay_silent():
    results, _ = await play(FakeDuplexModel(), SILENT)

    assert [result.is_listen for result in results] == [True]


async def test_a_unit_that_fails_fails_the_rehearsal():
    with pytest.raises(RehearsalFailed, match="unit 1 failed"):
        await play(FakeDuplexModel(fail_units=frozenset({1})), SILENT, SILENT)


async def test_clients_limits_do_not_end_a_rehearsal():
    """A unit that has to be compiled first takes longer than a client may be idle."""
    limits = SessionLimits(idle_timeout_s=1e-6, max_session_s=1e-6)
    results, _ = await play(FakeDuplexModel(), LOUD, limits=limits)

    assert len(results) == 1


# ---- a chat request and a turn


async def answer(model, inputs, limits=None):
    stage = Stage(model, limits=limits)
    try:
        await rehearse_answers(inputs, stage.host, lambda share, note: None)
    finally:
        await stage.close()
    assert stage.host.slots.n_free == 2


async def test_a_chat_request_and_a_turn_are_answered_once():
    model = FakeDuplexModel()
    limits = SessionLimits(idle_timeout_s=1e-6, ask_timeout_s=1e-6, max_session_s=1e-6)
    await answer(model, inputs_of(synthetic_clip()), limits)

    chat, turns = model.states
    (question,) = chat.questions
    picture, sound, _ = question.messages[0].parts
    assert picture.pixels.shape == (480, 640, 3)
    assert np.abs(sound.samples).max() > 0.1
    assert not question.speaks
    assert len(turns.turns) == 1
    assert ("hear", 1) in model.batches
    assert model.named("end") == [("end", 0)] * 2


@pytest.mark.parametrize("inputs", [[], [chunk(0, SILENT)], [chunk(0, np.ones(48_000))]])
async def test_whatever_is_played_there_is_one_turn(inputs):
    model = FakeDuplexModel()
    await answer(model, inputs)

    assert len(model.states[1].turns) == 1


@pytest.mark.parametrize("kind", ["chat", "turn", "prepare_turns", "detect_speech"])
async def test_what_fails_fails_the_rehearsal(monkeypatch, kind):
    model = FakeDuplexModel()

    def fails(*_):
        yield from ()
        raise ValueError("broken")

    monkeypatch.setattr(model, kind, fails)
    with pytest.raises(RehearsalFailed, match="failed in the model"):
        await answer(model, [chunk(0, SILENT)])


# ---- what is played


def test_the_shipped_clip_asks_a_question_before_a_camera():
    inputs = warm_up_inputs()

    assert SHIPPED_CLIP.stat().st_size < 300_000
    assert [len(message.frames) for message in inputs] == [1] * 6 + [0] * ANSWER_S
    assert [message.seq for message in inputs] == list(range(6 + ANSWER_S))
    assert {len(second) for second in seconds(inputs)} == {16_000}
    assert max(np.abs(second).max() for second in seconds(inputs[:4])) > 0.1
    assert {Image.open(io.BytesIO(message.frames[0])).size for message in inputs[:6]} == {
        (640, 480)
    }


def test_another_video_is_played_second_by_second_with_its_pictures(tmp_path):
    write_clip(tmp_path / "clip.mp4", seconds=3)

    inputs = warm_up_inputs(tmp_path / "clip.mp4")

    assert [len(message.frames) for message in inputs] == [1] * 3 + [0] * ANSWER_S
    is_loud = [bool(np.abs(second).mean() > 0.1) for second in seconds(inputs)]
    assert is_loud == [True] * 3 + [False] * ANSWER_S


def test_sound_alone_is_cut_into_seconds_with_room_for_an_answer(tmp_path):
    write_wav(tmp_path / "clip.wav", np.full(20_000, 0.5, np.float32), 16_000)

    inputs = warm_up_inputs(tmp_path / "clip.wav")

    sound = np.concatenate(seconds(inputs))
    assert len(inputs) == 2 + ANSWER_S
    assert not any(message.frames for message in inputs)
    assert sound[19_999] == pytest.approx(0.5, abs=1e-3)
    assert not sound[20_000:].any()


def test_pictures_alone_are_shown_in_silence(tmp_path):
    Image.new("RGB", (32, 32)).save(tmp_path / "still.png")

    inputs = warm_up_inputs(tmp_path / "still.png")

    assert [len(message.frames) for message in inputs] == [1] + [0] * ANSWER_S
    assert not np.concatenate(seconds(inputs)).any()


def test_a_codecs_last_block_is_no_second_of_its_own():
    sound = np.full(32_800, 0.5, np.float32)

    assert len(inputs_of(Clip(sound, ()))) == 2 + ANSWER_S
    assert len(inputs_of(Clip(np.append(sound, sound[:1600]), ()))) == 3 + ANSWER_S


def test_a_long_film_is_cut(tmp_path):
    write_wav(tmp_path / "long.wav", np.ones(16_000 * 40, np.float32), 16_000)

    assert len(warm_up_inputs(tmp_path / "long.wav")) == MAX_CLIP_S + ANSWER_S


def test_a_video_that_is_missing_is_a_sentence(tmp_path):
    with pytest.raises(ConfigError, match=r"^compile\.warmup_video: .*gone\.mp4: no such file$"):
        warm_up_inputs(tmp_path / "gone.mp4")


def test_a_file_of_another_kind_is_a_sentence(tmp_path):
    (tmp_path / "note.txt").write_text("hello")

    with pytest.raises(ConfigError, match=r"^compile\.warmup_video: .*cannot be read as"):
        warm_up_inputs(tmp_path / "note.txt")


def test_an_empty_sound_is_a_sentence(tmp_path):
    write_wav(tmp_path / "empty.wav", np.zeros(0, np.float32), 16_000)

    with pytest.raises(ConfigError, match="holds neither sound nor pictures"):
        warm_up_inputs(tmp_path / "empty.wav")


def test_without_the_shipped_clip_one_is_made_that_is_the_same_every_time(
    tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(rehearsal, "SHIPPED_CLIP", tmp_path / "none.mp4")

    inputs = warm_up_inputs()

    assert "synthetic clip" in caplog.text
    assert inputs == inputs_of(synthetic_clip())
    assert [len(message.frames) for message in inputs] == [1] * 2 + [0] * ANSWER_S
    assert 0.1 < np.abs(seconds(inputs)[0]).max() < 1.0
    assert inputs[0].frames != inputs[1].frames
