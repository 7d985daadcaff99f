"""Whatever has happened to the files of a recording, the next start takes it as far as it goes."""

from __future__ import annotations

import json
import os
import shutil
from datetime import UTC, datetime

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.recording import journal, retention
from gateway.recording.finish import finish
from shared.config import RecordingConfig
from shared.protocol import (
    Answered,
    Ask,
    AudioPart,
    ChatMessage,
    Delta,
    Failure,
    Generating,
    ImagePart,
    Input,
    Prefilled,
    Prepare,
    PrepareTurns,
    Result,
    Speaking,
    TextPart,
    TurnDone,
)

MANY = settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@pytest.fixture
def logs(write_log, took, gave, tone, jpeg):
    """One whole log of each kind, with every kind of record that it can have."""
    speech = tone(0.05, 24_000)
    duplex = [
        took(0.1, Prepare("Be brief.")),
        took(1.0, Input(0, tone(0.05), [jpeg])),
        gave(1.1, Result(0, is_listen=True, unit_index=1, heard="hello")),
        took(2.0, Input(1, tone(0.05))),
        gave(2.1, Result(1, is_listen=False, unit_index=2, text="Hi.", audio=speech)),
        took(3.0, Input(2, tone(0.05))),
        gave(3.1, Failure("bad_audio", "no audio", seq=2)),
    ]
    turns = [
        took(0.0, PrepareTurns([TextPart("Be kind.")])),
        gave(0.1, Speaking(is_speaking=True)),
        took(0.5, Input(0, tone(0.05))),
        gave(0.6, Speaking(is_speaking=False)),
        gave(0.7, Generating(500.0)),
        gave(0.8, Delta(0, "Hi ", speech)),
        gave(0.9, TurnDone(1, "Hi there.", "hello", n_tokens=4)),
    ]
    parts = [TextPart("What is it?"), ImagePart(jpeg), AudioPart(tone(0.05))]
    chat = [
        took(0.1, Ask([ChatMessage("user", parts)])),
        gave(0.2, Prefilled(20)),
        gave(0.5, Delta(0, "Red.", speech)),
        gave(0.6, Answered("Red.", 20, 3)),
    ]
    return {
        "duplex": write_log("duplex", "audio_duplex", duplex),
        "turns": write_log("turns", "half_duplex_audio", turns),
        "chat": write_log("chat", "chat", chat),
    }


@MANY
@given(
    kind=st.sampled_from(["duplex", "turns", "chat"]),
    cut=st.floats(0, 1),
    flips=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 7)), max_size=3),
)
def test_a_log_that_is_cut_and_altered_anywhere_becomes_a_recording(
    logs, tmp_path, kind, cut, flips
):
    folder = tmp_path / "damaged"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(logs[kind], folder)
    raw = bytearray((folder / journal.NAME).read_bytes())
    n_bytes, whole = len(raw), bytes(raw)
    raw = raw[: round(cut * n_bytes)]
    for where, bit in flips if raw else ():
        raw[int(where * len(raw))] ^= 1 << bit
    (folder / journal.NAME).write_bytes(raw)

    finish(folder)

    body = json.loads((folder / "recording.json").read_text())
    meta = json.loads((folder / "meta.json").read_text())
    assert isinstance(body["chunks" if kind == "duplex" else "turns"], list)
    assert meta["ended_at"] is not None
    assert (body["end_reason"] == "stopped") == (raw == whole)
    if not whole.startswith(raw) and len(raw) > 100:
        assert "problem" in body or body["end_reason"] == "interrupted"
    assert [path.name for path in folder.iterdir() if path.name.startswith((".", "log"))] == []


def test_what_a_power_failure_has_left_empty_is_reported_as_damage(logs):
    folder = logs["duplex"]
    raw = (folder / journal.NAME).read_bytes()
    (folder / journal.NAME).write_bytes(raw[:-200] + bytes(200))

    finish(folder)

    body = json.loads((folder / "recording.json").read_text())
    assert (len(body["chunks"]), body["end_reason"]) == (2, "interrupted")
    assert "damaged" in body["problem"]
    assert "merged_replay" in body


@pytest.mark.parametrize("content", [b"", b'{"title": "', b'{"app_type": "chat", "created_at": 5}'])
@pytest.mark.parametrize(
    ("kind", "app_type", "what"),
    [
        ("duplex", "omni_duplex", "chunks"),
        ("turns", "half_duplex_audio", "turns"),
        ("chat", "chat", "turns"),
    ],
)
def test_a_lost_meta_json_costs_neither_the_log_nor_the_place_in_the_list(
    store, logs, kind, app_type, what, content
):
    """Every kind became a recording of turns without any, and its log was removed."""
    folder = logs[kind]
    ended_at = datetime(2026, 3, 2, 12, tzinfo=UTC).timestamp()
    os.utime(folder / journal.NAME, (ended_at, ended_at))
    (folder / "meta.json").write_bytes(content)

    finish(folder)

    body = json.loads((folder / "recording.json").read_text())
    assert body["mode"] == ("duplex" if kind == "duplex" else app_type)
    assert (body["session_id"], body["end_reason"]) == (kind, "stopped")
    assert len(body[what]) == (3 if kind == "duplex" else 1)
    assert "meta.json was lost" in body["problem"]
    (summary,) = [one for one in store.summaries() if one.recording_id == kind]
    assert (summary.app_type, summary.created_at.date().isoformat()) == (app_type, "2026-03-02")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"\xff\xfe",
        b"[" * 200_000,
        b'{"created_at": 5}',
        b'{"created_at": "0001-01-01T00:00:00"}',
        b'{"created_at": "9999-12-31T23:59:59+00:00", "app_type": ["chat"]}',
        b'{"created_at": "9999-12-31T23:59:59-23:59", "duration_s": 1e999}',
    ],
)
def test_a_damaged_meta_json_ends_neither_the_start_nor_the_cleaning(store, logs, content):
    (logs["chat"] / "meta.json").write_bytes(content)

    store.sweep()
    for folder in store.unfinished():
        finish(folder)

    assert json.loads((logs["chat"] / "recording.json").read_text())["end_reason"] == "stopped"
    assert "duplex" in {summary.recording_id for summary in store.summaries()}
    config = RecordingConfig(session_retention_days=1)
    retention.clean(store, config, datetime(2026, 3, 31, tzinfo=UTC))
    assert store.find("duplex") is None
    assert logs["chat"].exists() or content.startswith(b'{"created_at": "0001')


def test_a_folder_that_cannot_be_looked_at_hides_no_other(store, logs, monkeypatch):
    stat = type(store.root).stat

    def refuse(path, **options):
        if path.name == "chat":
            raise OSError(5, "Input/output error")
        return stat(path, **options)

    monkeypatch.setattr(type(store.root), "stat", refuse)

    assert {summary.recording_id for summary in store.summaries()} == {"duplex", "turns"}


class TestLinks:
    """Nothing is read, written or removed outside of a recording's folder."""

    @pytest.fixture
    def outside(self, tmp_path):
        outside = tmp_path / "outside"
        outside.mkdir()
        (outside / "meta.json").write_text('{"created_at": "2020-01-01T00:00:00+00:00"}')
        (outside / ".notes-1").write_text("mine")
        return outside

    def test_a_folder_elsewhere_is_no_recording(self, store, logs, outside):
        (store.root / "link").symlink_to(outside)

        assert store.find("link") is None
        assert not store.delete("link")
        assert (outside / "meta.json").exists()

    def test_what_is_swept_is_ours(self, store, logs, outside):
        (store.root / "link").symlink_to(outside)
        (store.root / "theirs").mkdir()
        (store.root / "theirs" / ".notes-1").write_text("mine")
        for notes in (outside, store.root / "theirs"):
            os.utime(notes / ".notes-1", (0, 0))

        store.sweep()

        assert (outside / ".notes-1").exists()
        assert (store.root / "theirs" / ".notes-1").exists()

    def test_finishing_writes_through_none(self, logs, outside):
        folder = logs["duplex"]
        (folder / "user_audio").symlink_to(outside)
        (folder / "ai_audio").mkdir()
        (folder / "ai_audio/turn_0_chunk_001.wav").symlink_to(outside / "meta.json")
        (folder / ".merged_replay.wav").symlink_to(outside / "meta.json")
        before = {path.name: path.read_bytes() for path in outside.iterdir()}

        finish(folder)

        assert {path.name: path.read_bytes() for path in outside.iterdir()} == before
        assert (folder / "user_audio/000.wav").is_file()
        assert not (folder / "user_audio").is_symlink()
        assert (folder / "merged_replay.wav").is_file()

    def test_a_log_elsewhere_is_not_ours_to_finish(self, store, logs, outside):
        log = logs["chat"] / journal.NAME
        log.rename(outside / "log")
        log.symlink_to(outside / "log")

        assert logs["chat"] not in store.unfinished()
