"""The session that warm-up plays."""

import numpy as np
import pytest

from shared.audio import write_wav
from shared.errors import BadAudio
from tests.fakes.model import FakeDuplexModel
from tests.fakes.session import LOUD, SILENT, Stage
from worker.sessions.rehearsal import (
    ANSWER_S,
    RehearsalFailed,
    rehearse,
    synthetic_sound,
    warm_up_chunks,
)


async def play(model: FakeDuplexModel, chunks):
    stage = Stage(model)
    told: list[tuple[float, str]] = []
    try:
        results = await rehearse(chunks, stage.host, lambda share, note: told.append((share, note)))
    finally:
        await stage.close()
    return results, told, stage


async def test_a_rehearsal_plays_a_whole_session_and_leaves_the_slot_clean():
    results, told, stage = await play(FakeDuplexModel(), [SILENT, LOUD])

    assert [result.text for result in results] == ["", "u1 "]
    assert told == [(0.5, "unit 1 of 2"), (1.0, "unit 2 of 2")]
    assert stage.host.slots.n_free == 2


async def test_a_unit_that_fails_fails_the_rehearsal():
    with pytest.raises(RehearsalFailed, match="unit 1 failed"):
        await play(FakeDuplexModel(fail_units=frozenset({1})), [SILENT, SILENT])


def test_the_clip_is_cut_into_seconds_with_room_for_an_answer(tmp_path):
    write_wav(tmp_path / "clip.wav", np.full(20_000, 0.5, np.float32), 16_000)

    chunks = warm_up_chunks(tmp_path / "clip.wav")

    assert [len(chunk) for chunk in chunks] == [16_000] * (2 + ANSWER_S)
    assert np.concatenate(chunks)[19_999] == pytest.approx(0.5, abs=1e-3)
    assert np.concatenate(chunks)[20_000] == 0.0


def test_a_clip_of_another_rate_is_refused(tmp_path):
    write_wav(tmp_path / "clip.wav", np.zeros(10, np.float32), 24_000)

    with pytest.raises(BadAudio, match="24000 Hz"):
        warm_up_chunks(tmp_path / "clip.wav")


def test_without_a_clip_a_sound_is_made_that_is_the_same_every_time(tmp_path):
    chunks = warm_up_chunks(tmp_path / "none.wav")

    assert len(chunks) == 2 + ANSWER_S
    assert np.concatenate(chunks[:2]).tolist() == synthetic_sound().tolist()
    assert 0.1 < float(np.abs(chunks[0]).max()) < 1.0
