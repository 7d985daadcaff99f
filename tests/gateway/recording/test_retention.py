"""What is removed: by age, by size, and never what is in use or not ours."""

from __future__ import annotations

import asyncio
import io
import os
import sys
import threading
import zipfile
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import ClassVar

import pytest

from gateway.clock import Clock
from gateway.recording import archive, journal, retention
from gateway.recording import finish as finishing
from gateway.recording.journal import Journal
from gateway.recording.recorder import JournalRecorder
from gateway.recording.store import write_json
from gateway.recording.writer import Writer
from shared.config import RecordingConfig
from shared.errors import RecordingInUse
from shared.protocol import Input

NOW = datetime(2026, 3, 31, 12, 0, tzinfo=UTC)
MIB_IN_GIB = 1 / 1024
N_RACES, N_TRIES = 40, 400
"""On a busy machine others may win all of the first ones."""


@pytest.fixture
def make(store):
    def make(recording_id, days_ago, n_bytes=0):
        created_at = (NOW - timedelta(days=days_ago)).isoformat()
        folder = store.create(recording_id, {"created_at": created_at, "app_type": "chat"})
        (folder / "recording.json").write_bytes(bytes(n_bytes))
        return folder

    return make


def left(store):
    return {folder.name for folder in store.folders()}


def clean(store, **rules):
    return retention.clean(store, RecordingConfig(**rules), NOW)


def test_what_is_older_than_its_days_goes(store, make):
    for days in (1, 6, 8, 30):
        make(f"d{days}", days)

    assert clean(store, session_retention_days=7) == 2
    assert left(store) == {"d1", "d6"}


def test_the_oldest_go_until_the_rest_fits(store, make):
    for days in (1, 2, 3, 4):
        make(f"d{days}", days, 300_000)

    clean(store, max_storage_gb=MIB_IN_GIB * 0.7)

    assert left(store) == {"d1", "d2"}
    assert [path.name for path in store.root.glob(".*")] == []


def test_age_is_looked_at_before_size(store, make):
    make("new", 1, 600_000)
    make("old", 9, 600_000)

    clean(store, session_retention_days=7, max_storage_gb=MIB_IN_GIB * 0.7)

    assert left(store) == {"new"}


@pytest.mark.parametrize("value", [-1, 0])
def test_zero_and_less_are_no_rule(store, make, value):
    make("old", 9999, 1_000_000)
    rules = {"session_retention_days": value, "max_storage_gb": value}

    assert not retention.is_on(RecordingConfig(**rules))
    assert clean(store, **rules) == 0
    assert retention.is_on(RecordingConfig(session_retention_days=1))


def test_a_live_session_is_not_touched_however_old_or_large(store, make):
    live = make("live", 30, 3_000_000)
    log = Journal(live)
    make("ended", 20, 10)

    assert clean(store, session_retention_days=7, max_storage_gb=MIB_IN_GIB) == 1
    assert left(store) == {"live"}
    log.close()
    assert clean(store, session_retention_days=7) == 1


def test_one_that_is_being_finished_is_not_touched(store, make):
    folder = make("busy", 30)
    Journal(folder).close()

    with journal.locked(folder):
        assert clean(store, session_retention_days=7) == 0
        with pytest.raises(RecordingInUse):
            store.delete("busy")
    assert left(store) == {"busy"}


class TestRace:
    """Removing beside everything else that a recording goes through; all of it is "too much"."""

    RULES: ClassVar = {"max_storage_gb": 1e-9}

    @pytest.fixture
    def cleaning(self, store, caplog):
        """Removes again and again until the test is over."""
        is_over = threading.Event()

        def clean_on():
            while not is_over.is_set():
                clean(store, **self.RULES)

        with ThreadPoolExecutor(2) as pool:
            runs = [pool.submit(clean_on) for _ in range(2)]
            yield
            is_over.set()
            for run in runs:
                run.result()
        assert [r.message for r in caplog.records if r.levelname != "INFO"] == []

    async def test_sessions_that_live_lose_nothing(self, store, cleaning, records, until):
        writer = Writer(store, max_bytes=10_000_000)
        writer.start()
        recorder = JournalRecorder(writer, Clock(), lambda: True, lambda _: None)
        sessions = [recorder.begin(f"omni_{i}", "omni_duplex", 0, {}) for i in range(30)]
        for n in range(10):
            for session in sessions:
                session.took(Input(n, bytes(4000)), 0.0)
            await asyncio.sleep(0.005)
        await until(lambda: writer.queued_bytes == 0)
        found = {folder.name: len(list(records(folder))) for folder in store.folders()}

        assert found == dict.fromkeys((s.recording_id for s in sessions), 10)
        assert writer.n_stopped == {}
        for session in sessions:
            session.end("stopped")
        await asyncio.to_thread(writer.close)

    def test_one_that_is_being_finished_becomes_whole_or_was_gone_before(
        self, store, write_log, took, tone, cleaning, monkeypatch
    ):
        made = []
        make = finishing._make

        def check(folder):
            make(folder)
            made.append(sorted(path.name for path in folder.iterdir() if path.suffix))

        monkeypatch.setattr(finishing, "_make", check)
        said = [took(0.0, Input(0, tone(0.1)))]
        for i in range(N_TRIES):
            finishing.finish(write_log(f"a{i}", "audio_duplex", said))
            if i >= N_RACES and made:
                break

        whole = ["log.msgpack", "merged_replay.wav", "meta.json", "recording.json"]
        assert made
        assert made == [whole] * len(made)

    def test_downloads_are_whole(self, store, cleaning):
        def fill(folder):
            for n in range(6):
                (folder / f"{n}.wav").write_bytes(bytes(50_000))

        n_whole = 0
        for i in range(N_TRIES):
            if i >= N_RACES and n_whole:
                break
            folder = store.create(f"d{i}", {"created_at": NOW.isoformat()}, fill)
            try:
                sent = b"".join(archive.pieces(folder))
            except FileNotFoundError:
                continue  # it was removed before its download began
            with zipfile.ZipFile(io.BytesIO(sent)) as file:
                names = file.namelist()
            assert len(names) in {0, 7}
            n_whole += len(names) == 7
        assert n_whole > 0


def test_folders_that_are_not_ours_stay(store, make):
    make("ours", 30)
    for name, meta in (("none", None), ("odd", "{"), ("dateless", "{}"), ("list", "[]")):
        folder = store.root / name
        folder.mkdir()
        if meta is not None:
            (folder / "meta.json").write_text(meta)

    assert clean(store, session_retention_days=1, max_storage_gb=1e-9) == 1
    assert sorted(p.name for p in store.root.iterdir()) == ["dateless", "list", "none", "odd"]


def test_dates_of_the_reference_without_zone_are_understood(store):
    store.create("naive", {"created_at": "2020-01-01T00:00:00"})

    assert clean(store, session_retention_days=7) == 1


def test_what_an_interrupted_removal_has_left_is_swept(store, make):
    folder = make("kept", 1)
    for name in (".upload-1", ".meta.json-1"):
        (folder / name).write_bytes(b"x")
        os.utime(folder / name, (0, 0))
    (folder / ".upload-2").write_bytes(b"somebody is at it")
    (folder / ".attempts").write_bytes(b".")
    os.utime(folder / ".attempts", (0, 0))
    (store.root / ".deleting-x").mkdir()
    (store.root / ".deleting-x" / "file").write_bytes(b"x")

    store.sweep()

    assert [p.name for p in store.root.iterdir()] == ["kept"]
    assert sorted(p.name for p in folder.iterdir()) == [
        ".attempts",
        ".upload-2",
        "meta.json",
        "recording.json",
    ]


def test_the_list_has_the_newest_first_and_follows_changes(store, make):
    make("older", 2, 100)
    folder = make("newer", 1, 100)
    assert [s.recording_id for s in store.summaries()] == ["newer", "older"]
    before = store.summaries()[0].n_bytes

    (folder / "frontend_replay.webm").write_bytes(bytes(1000))

    assert store.summaries()[0].n_bytes == before + 1000
    store.delete("newer")
    assert [s.recording_id for s in store.summaries()] == ["older"]


def test_two_may_ask_for_the_list_at_the_same_time(store, make, monkeypatch):
    make("a", 1)
    store.summaries()

    class Overtaken(dict):
        """Another thread has made its list between two looks at this one."""

        def __contains__(self, name):
            store._summaries = {}
            return super().__contains__(name)

    store._summaries = Overtaken(store._summaries)

    assert [s.recording_id for s in store.summaries()] == ["a"]


def test_a_process_that_is_told_to_end_leaves_no_half_of_a_file(store, make, monkeypatch):
    def end(_):
        sys.exit(1)

    folder = make("a", 1)
    before = sorted(p.name for p in folder.iterdir())
    monkeypatch.setattr("gateway.recording.store.os.fsync", end)

    with pytest.raises(SystemExit):
        write_json(folder / "meta.json", {})

    assert sorted(p.name for p in folder.iterdir()) == before


def test_there_may_be_no_folder_at_all(store):
    store.sweep()
    assert store.summaries() == []
    assert store.unfinished() == []
