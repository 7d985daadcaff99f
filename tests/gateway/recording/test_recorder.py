"""The hot path: nothing waits for the disk, memory has a bound, a bad disk costs a recording."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import re
import threading
import time
from datetime import UTC, datetime

import pytest

from gateway.clock import Clock
from gateway.recording import journal, retention
from gateway.recording import store as storing
from gateway.recording import writer as writing
from gateway.recording.finish import finish
from gateway.recording.journal import Journal
from gateway.recording.recorder import JournalRecorder
from gateway.recording.writer import RECORD_BYTES, Writer, media_bytes
from shared.config import RecordingConfig
from shared.protocol import (
    Ask,
    AudioPart,
    ChatMessage,
    Input,
    Pause,
    Prepare,
    PrepareTurns,
    Result,
    TextPart,
)
from tests.fakes.patience import PATIENCE_S

CHUNK = Input(0, bytes(64_000), [bytes(1000)])


@pytest.fixture
def closed():
    return []


@pytest.fixture
def writer(store):
    writer = Writer(store, max_bytes=1_000_000)
    yield writer
    if writer._thread.ident is not None:
        writer.close()


@pytest.fixture
def recorder(writer, closed):
    return JournalRecorder(writer, Clock(), lambda: True, closed.append)


def begin(recorder, session_id="omni_1"):
    return recorder.begin(session_id, "omni_duplex", 3, {"x": 1})


async def test_a_session_is_in_its_log_and_its_end_is_announced(
    recorder, writer, closed, store, records, until
):
    writer.start()
    now = time.monotonic()
    recording = begin(recorder)
    assert recorder.live == {recording.recording_id}
    recording.took(CHUNK, now + 1)
    recording.gave(Result(0, is_listen=True, unit_index=1), 20.0, now + 1.5)
    recording.end("stopped")
    await until(lambda: closed)

    folder = store.find(recording.recording_id)
    assert closed == [folder]
    assert recorder.live == frozenset()
    chunk, result, end = records(folder)
    assert chunk.message == CHUNK
    assert chunk.at == pytest.approx(1.0, abs=0.2)
    assert (result.wall_clock_ms, end.reason) == (20.0, "stopped")
    meta = json.loads((folder / "meta.json").read_text())
    assert meta["ended_at"] is None
    assert (meta["app_type"], meta["worker_id"], meta["config"]) == ("omni_duplex", 3, {"x": 1})
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d", meta["title"])
    assert meta["created_at"].endswith("+00:00")


async def test_what_came_while_the_client_was_queued_counts_as_come_at_the_begin(
    recorder, writer, closed, records, until
):
    writer.start()
    recording = begin(recorder)
    recording.took(CHUNK, time.monotonic() - 60)
    recording.end("stopped")
    await until(lambda: closed)

    assert [record.at for record in records(closed[0])] == [0.0, 0.0]


async def test_only_the_owner_of_the_files_may_read_them(recorder, writer, closed, store, until):
    writer.start()
    recording = begin(recorder)
    recording.end("stopped")
    await until(lambda: closed)

    folder = store.find(recording.recording_id)
    modes = {path.stat().st_mode & 0o777 for path in folder.iterdir()}
    assert modes == {0o600}
    assert folder.stat().st_mode & 0o777 == 0o700


async def test_nothing_is_promised_that_the_disk_has_no_room_for(
    writer, store, closed, monkeypatch
):
    recorder = JournalRecorder(writer, Clock(), store.has_room, closed.append)
    assert begin(recorder) is not None

    monkeypatch.setattr(storing, "MIN_FREE_BYTES", 2**62)

    assert begin(recorder) is None
    assert len(recorder.live) == 1


async def test_ids_cannot_be_guessed_and_never_meet(recorder):
    ids = {begin(recorder, "hdx_same").recording_id for _ in range(50)}

    assert len(ids) == 50
    assert all(re.fullmatch(r"\d{8}_\d{6}_hdx_same_[A-Za-z0-9_-]{16}", each) for each in ids)


async def test_an_id_holds_no_character_that_means_something_to_a_path(recorder, store):
    recording = begin(recorder, "../../étc;" + "x" * 300)

    assert re.fullmatch(r"[A-Za-z0-9_-]{1,120}", recording.recording_id)


async def test_a_voice_is_not_kept(recorder, writer, closed, records, until):
    writer.start()
    recording = begin(recorder)
    recording.took(Prepare("p", reference_voice=b"SECRET", tts_reference_voice=b"SECRET"), 0.0)
    recording.took(Ask([ChatMessage("user", [TextPart("t")])], voice=b"SECRET"), 0.0)
    recording.took(PrepareTurns([TextPart("Be kind."), AudioPart(b"SECRET")]), 0.0)
    recording.end("stopped")
    await until(lambda: closed)

    assert b"SECRET" not in (closed[0] / journal.NAME).read_bytes()
    *_, turns, _ = records(closed[0])
    assert turns.message.system == [TextPart("Be kind.")]


async def test_memory_is_bounded_and_a_session_beyond_it_is_recorded_no_further(
    recorder, writer, closed, records, until, caplog
):
    """The writer does not run yet: nothing leaves the queue."""
    first, second = begin(recorder), begin(recorder)
    for i in range(100):
        first.took(CHUNK, float(i))
    second.took(Pause(), 0.0)
    assert writer.queued_bytes <= writer.max_bytes
    assert writer.n_stopped["queue_full"] == 1
    assert "recording stopped, its session goes on" in caplog.text

    writer.start()
    await until(lambda: writer.queued_bytes == 0)
    first.took(CHUNK, 200.0)
    second.took(Pause(), 1.0)
    first.end("stopped")
    second.end("stopped")
    await until(lambda: len(closed) == 2)

    per_chunk = RECORD_BYTES + 65_000
    shown = {f.name: list(records(f)) for f in closed}
    kept = shown[first.recording_id]
    assert len(kept) - 1 == writer.max_bytes // per_chunk
    assert kept[-1].reason == "truncated"
    assert len(shown[second.recording_id]) == 3
    assert len(caplog.records) == 1


async def test_what_is_queued_costs_the_caller_no_time(recorder, writer, store, monkeypatch):
    """The disk hangs: the session does not notice."""
    hang = threading.Event()
    monkeypatch.setattr(
        writing, "Journal", lambda folder: hang.wait(PATIENCE_S) and Journal(folder)
    )
    writer.start()
    recording = begin(recorder)

    begun = time.perf_counter()
    for _ in range(10):
        recording.took(CHUNK, 0.0)
        recording.gave(Result(0, is_listen=True, unit_index=1), 0.0, 0.0)
    recording.end("stopped")

    assert time.perf_counter() - begun < 0.1
    hang.set()


async def test_a_begin_waits_for_no_disk_to_have_it(
    recorder, writer, closed, records, until, monkeypatch
):
    """A slow one held up the logs of all sessions; a killed gateway lost their first seconds."""
    hang = threading.Event()
    monkeypatch.setattr("gateway.recording.store.os.fsync", lambda _: hang.wait(2 * PATIENCE_S))
    writer.start()
    recording = begin(recorder)
    recording.took(CHUNK, 0.0)
    recording.end("stopped")

    await until(lambda: closed)
    hang.set()

    assert [record.message for record in records(closed[0])] == [CHUNK, None]


async def test_nobody_removes_or_finishes_a_recording_that_is_just_beginning(
    recorder, writer, closed, store, records, until, monkeypatch
):
    """Between its `meta.json` and its log it looked like one that had ended."""

    def meddle(folder):
        retention.clean(store, RecordingConfig(max_storage_gb=1e-9), datetime.now(UTC))
        log = Journal(folder)
        for unfinished in store.unfinished():
            finish(unfinished)
        return log

    monkeypatch.setattr(writing, "Journal", meddle)
    writer.start()
    recording = begin(recorder)
    recording.took(CHUNK, 0.0)
    recording.end("stopped")
    await until(lambda: closed)

    assert writer.n_stopped == {}
    assert [record.message for record in records(closed[0])] == [CHUNK, None]


async def test_what_a_crash_leaves_of_a_begin_is_swept(recorder, writer, store, monkeypatch):
    class Killed(BaseException):
        pass

    def be_killed(_):
        raise Killed

    monkeypatch.setattr(writing, "Journal", be_killed)
    begin(recorder)
    with pytest.raises(Killed):
        writer._write(writer._items.get())
    (left,) = store.root.iterdir()
    store.sweep()
    assert left.exists(), "somebody may be at it"
    os.utime(left, (0, 0))

    store.sweep()

    assert list(store.root.iterdir()) == []
    assert store.summaries() == []


async def test_a_clock_that_is_set_back_changes_no_length(writer, closed, store, records, until):
    wall = 1_800_000_000.0
    clock = Clock(wall=lambda: wall)
    recorder = JournalRecorder(writer, clock, lambda: True, closed.append)
    writer.start()
    recording = begin(recorder)
    wall -= 86_400
    recording.took(CHUNK, time.monotonic() + 2.0)
    recording.end("stopped")
    later = begin(recorder)
    later.end("stopped")
    await until(lambda: len(closed) == 2)
    for folder in closed:
        finish(folder)

    meta = json.loads((store.find(recording.recording_id) / "meta.json").read_text())
    assert meta["duration_s"] == pytest.approx(2.0, abs=0.2)
    assert meta["ended_at"] > meta["created_at"]
    assert len(store.summaries()) == 2


async def test_nothing_is_promised_where_nothing_can_be_written(
    writer, store, closed, monkeypatch, caplog
):
    """A read-only mount has room, and took a session's word for a recording that never came."""
    recorder = JournalRecorder(writer, Clock(), store.has_room, closed.append)
    monkeypatch.setattr(storing.os, "access", lambda _, mode: mode & os.W_OK == 0)

    assert begin(recorder) is None
    assert "cannot be written to" in caplog.text


def test_a_folder_that_cannot_be_looked_at_ends_no_looking_for_room(store, monkeypatch):
    """It ended the task that does, and with it every later attempt to finish a recording."""
    stat = os.stat

    def refuse(path, **options):
        if str(path).startswith(str(store.root.parent)):
            raise PermissionError(13, "Permission denied")
        return stat(path, **options)

    monkeypatch.setattr(os, "stat", refuse)

    assert store.has_room() in (True, False)


@pytest.mark.parametrize("where", ["create", "append"])
async def test_a_full_disk_stops_one_recording_and_says_so_once(
    recorder, writer, closed, store, records, until, monkeypatch, caplog, where
):
    def refuse(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    writer.start()
    with monkeypatch.context() as patch:
        patch.setattr(store if where == "create" else writing.Journal, where, refuse)
        recording = begin(recorder)
        for i in range(10):
            recording.took(CHUNK, float(i))
        await until(lambda: writer.n_stopped["disk"])
        await until(lambda: writer.queued_bytes == 0)
    recording.took(CHUNK, 0.0)
    recording.end("stopped")

    after = begin(recorder)
    after.took(CHUNK, 0.0)
    after.end("stopped")
    await until(lambda: any(f.name == after.recording_id for f in closed))

    assert writer.n_stopped == {"disk": 1}
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert "No space left on device" in caplog.text
    assert len(list(records(store.find(after.recording_id)))) == 2


async def test_a_disk_that_refuses_the_begin_is_left_without_a_trace(
    recorder, writer, store, until, monkeypatch
):
    def refuse(path, flags):
        raise OSError(errno.ENOSPC, "No space left on device")

    writer.start()
    with monkeypatch.context() as patch:
        patch.setattr(storing, "_private", refuse)
        begin(recorder)
        await until(lambda: writer.n_stopped["disk"])

    assert list(store.root.iterdir()) == []


async def test_a_disk_that_refuses_at_the_very_end_costs_one_recording(
    recorder, writer, closed, records, until, monkeypatch
):
    def refuse(log):
        close(log)
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    close = Journal.close
    writer.start()
    with monkeypatch.context() as patch:
        patch.setattr(Journal, "close", refuse)
        begin(recorder).end("stopped")
        await until(lambda: writer.n_stopped["disk"])
    after = begin(recorder)
    after.end("stopped")
    await until(lambda: len(closed) == 2)

    assert [folder.name for folder in closed][1] == after.recording_id
    assert [record.reason for record in records(closed[0])] == ["stopped"]


async def test_a_message_for_which_there_is_no_memory_costs_one_recording(
    recorder, writer, closed, until, monkeypatch
):
    def refuse(_):
        raise MemoryError

    writer.start()
    with monkeypatch.context() as patch:
        patch.setattr(writing, "encode", refuse)
        begin(recorder).took(CHUNK, 0.0)
        await until(lambda: writer.n_stopped["disk"])
    after = begin(recorder)
    after.end("stopped")

    await until(lambda: any(f.name == after.recording_id for f in closed))


async def test_a_configuration_that_json_cannot_hold_costs_one_recording(
    recorder, writer, closed, store, until
):
    writer.start()
    recorder.begin("a", "chat", 0, {"x": object()})
    good = begin(recorder)
    good.end("stopped")

    await until(lambda: closed)
    assert [folder.name for folder in closed] == [good.recording_id]
    assert list(store.root.iterdir()) == closed


async def test_the_end_of_the_gateway_waits_for_what_is_queued(recorder, writer, store, records):
    writer.start()
    recording = begin(recorder)
    for i in range(10):
        recording.took(CHUNK, float(i))
    recording.end("server_shutdown")

    await asyncio.to_thread(writer.close)

    assert len(list(records(store.find(recording.recording_id)))) == 11


def test_media_and_text_of_a_message_are_counted():
    assert media_bytes(CHUNK) == 65_000
    message = ChatMessage("user", [TextPart("abc"), AudioPart(bytes(100))])
    assert media_bytes(Ask([message], voice=bytes(50))) == 157
