"""Sessions of a running gateway become recordings; what was left behind does at the start."""

from __future__ import annotations

import asyncio
import errno
import json
import signal

import pytest

from gateway.clock import Clock
from gateway.recording import backlog, service
from gateway.recording import store as store_module
from gateway.recording.backlog import Backlog, processes_for
from gateway.recording.journal import Journal
from gateway.recording.service import Recordings
from shared.config import Config, RecordingConfig, ServiceConfig
from shared.protocol import Input, Result
from tests.gateway.recording.conftest import PATIENCE_S


@pytest.fixture
def start(tmp_path):
    started = []

    def start(**rules):
        config = Config(
            service=ServiceConfig(data_dir=str(tmp_path / "data")),
            recording=RecordingConfig(**rules),
        )
        recordings = Recordings(config, Clock())
        recordings.start()
        started.append(recordings)
        return recordings

    yield start
    assert all(not recordings.writer._thread.is_alive() for recordings in started)


def is_finished(recordings, recording_id):
    folder = recordings.store.find(recording_id)
    return folder is not None and (folder / "recording.json").exists()


async def test_an_ended_session_is_finished_and_an_earlier_one_too(
    start, write_log, took, gave, tone, until
):
    said = [took(0, Input(0, tone(1))), gave(1, Result(0, is_listen=True, unit_index=1))]
    write_log("crashed", "audio_duplex", said, reason=None)
    recordings = start()
    recording = recordings.recorder.begin("adx_1", "audio_duplex", 0, {})
    recording.took(Input(0, tone(1)), 0.0)
    assert recordings.live == {recording.recording_id}
    recording.end("stopped")
    for each in (recording.recording_id, "crashed"):
        await until(lambda each=each: is_finished(recordings, each), PATIENCE_S)
    await until(lambda: recordings.store.unfinished() == [], PATIENCE_S)
    await recordings.stop()

    body = json.loads((recordings.store.find("crashed") / "recording.json").read_text())
    assert (len(body["chunks"]), body["end_reason"]) == (1, "interrupted")


async def test_without_room_on_the_disk_no_recording_begins(start, monkeypatch, until):
    monkeypatch.setattr(store_module, "MIN_FREE_BYTES", 2**62)
    recordings = start()

    def begin():
        return recordings.recorder.begin("adx_1", "audio_duplex", 0, {})

    await until(lambda: begin() is None)
    await recordings.stop()


def test_room_is_looked_for_as_often_as_the_documents_say():
    assert service.LOOK_EVERY_S <= 1


async def test_a_write_that_finds_the_disk_full_promises_no_more_until_there_is_room(
    start, monkeypatch, until
):
    """Ids of recordings were given out that never existed, until the next look."""

    def refuse(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(service, "LOOK_EVERY_S", 0.2)
    recordings = start()

    def begin():
        return recordings.recorder.begin("adx_1", "audio_duplex", 0, {})

    await asyncio.sleep(0.05)
    with monkeypatch.context() as patch:
        patch.setattr(recordings.store, "create", refuse)
        assert begin() is not None
        await until(lambda: recordings.writer.n_stopped["disk"] == 1)
        assert begin() is None
    await until(lambda: begin() is not None)
    await recordings.stop()


async def test_a_session_of_another_gateway_on_the_same_folder_is_left_alone(start, store, until):
    folder = store.create("theirs", {"app_type": "chat"})
    log = Journal(folder)
    recordings = start()
    await asyncio.sleep(0.1)
    await until(lambda: recordings.n_unfinished == 0, PATIENCE_S)
    await recordings.stop()

    assert not (folder / "recording.json").exists()
    log.close()


async def test_nothing_is_recorded_where_that_is_off(start):
    recordings = start(enabled=False)

    assert recordings.recorder is None
    assert recordings.live == frozenset()
    await recordings.stop()


class Scripted:
    """Stands in for the finishing process: what each run does to its folders."""

    def __init__(self, recordings, codes):
        self.recordings = recordings
        self.codes = codes
        self.runs = []

    async def __call__(self, *argv, **_):
        self.runs.append([name.rpartition("/")[2] for name in argv[3:]])
        return Ended(self.codes.pop(0))


class Ended:
    def __init__(self, code):
        self.returncode = code

    async def wait(self):
        return self.returncode


async def test_folders_of_a_process_that_crashed_are_tried_again_in_their_order(
    start, write_log, until, monkeypatch
):
    for name in "abc":
        write_log(name, "chat", [])
    script = Scripted(None, [-signal.SIGSEGV, 0])
    monkeypatch.setattr(backlog.asyncio, "create_subprocess_exec", script)
    recordings = start()
    await until(lambda: len(script.runs) == 2)
    await recordings.stop()

    assert script.runs == [["a", "b", "c"]] * 2


async def test_a_machine_that_starts_no_process_loses_no_recording(
    start, write_log, until, monkeypatch, caplog
):
    folder = write_log("a", "chat", [])

    async def refuse(*_, **__):
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(backlog.asyncio, "create_subprocess_exec", refuse)
    recordings = start()
    await until(lambda: "not finished now" in caplog.text)
    await recordings.stop()

    assert recordings.store.unfinished() == [folder]


async def test_a_process_that_hangs_is_ended(start, write_log, until, monkeypatch, caplog):
    folder = write_log("a", "chat", [])
    monkeypatch.setattr(backlog, "FINISH_TIMEOUT_S", 0.05)
    recordings = start()
    await until(lambda: "ended with code=None" in caplog.text, 10)
    await recordings.stop()

    assert (folder / "meta.json").exists()


class Hanging:
    """A finishing process that does nothing until a signal ends it."""

    def __init__(self):
        self.signals = []
        self.returncode = None
        self._ended = asyncio.Event()

    async def wait(self):
        await self._ended.wait()
        return self.returncode

    def kill(self):
        self._end(signal.SIGKILL)

    def terminate(self):
        self._end(signal.SIGTERM)

    def _end(self, number):
        self.signals.append(number)
        self.returncode = -number
        self._ended.set()


async def test_a_process_that_hangs_cannot_take_its_attempt_back(
    start, write_log, until, monkeypatch
):
    write_log("a", "chat", [])
    processes = []

    async def run(*_, **__):
        processes.append(Hanging())
        return processes[-1]

    monkeypatch.setattr(backlog, "FINISH_TIMEOUT_S", 0.02)
    monkeypatch.setattr(backlog.asyncio, "create_subprocess_exec", run)
    recordings = start()
    await until(lambda: len(processes) == 2)
    await recordings.stop()

    assert processes[0].signals == [signal.SIGKILL]


async def test_processes_that_fail_before_their_first_log_are_started_less_and_less(
    start, write_log, until, monkeypatch, caplog
):
    first, second = write_log("a", "chat", []), write_log("b", "chat", [])
    script = Scripted(None, [1] * 100)
    monkeypatch.setattr(backlog.asyncio, "create_subprocess_exec", script)
    recordings = start()
    await until(lambda: "processes fail at it recording=b" in caplog.text)
    await recordings.stop()

    assert script.runs == [["a", "b"]] * 6 + [["b"]] * 6
    assert recordings.n_unfinished == 2
    assert recordings.store.unfinished() == [first, second]


class TestFullDisk:
    """What does not fit the disk was left until the next start, and no metric showed it."""

    @pytest.fixture
    def full(self, monkeypatch):
        """A disk that takes no file of the finishing processes while this is set."""
        full = asyncio.Event()
        run = asyncio.create_subprocess_exec

        async def start(*argv, **options):
            argv = ("sh", "-c", 'ulimit -f 0; exec "$@"', "sh", *argv) if full.is_set() else argv
            return await run(*argv, **options)

        full.set()
        monkeypatch.setattr(backlog.asyncio, "create_subprocess_exec", start)
        monkeypatch.setattr(backlog, "RETRY_FIRST_S", 0.1)
        monkeypatch.setattr(service, "LOOK_EVERY_S", 0.02)
        return full

    async def test_what_did_not_fit_is_finished_once_there_is_room(
        self, start, write_log, took, tone, until, full
    ):
        folder = write_log("a", "audio_duplex", [took(0, Input(0, tone(1)))])
        recordings = start()
        await until(lambda: recordings._backlog._postponed, PATIENCE_S)
        assert recordings.n_unfinished == 1
        seen = [path.name for path in folder.iterdir() if not path.name.startswith(".")]
        assert sorted(seen) == ["log.msgpack", "meta.json"]

        full.clear()
        await until(lambda: is_finished(recordings, "a"), PATIENCE_S)
        await until(lambda: recordings.n_unfinished == 0, PATIENCE_S)
        await recordings.stop()

        assert recordings.store.unfinished() == []
        assert not recordings._backlog._n_postponed

    async def test_no_process_is_started_while_there_is_no_room(
        self, start, write_log, until, monkeypatch
    ):
        write_log("a", "chat", [])
        script = Scripted(None, [0] * 100)
        monkeypatch.setattr(backlog.asyncio, "create_subprocess_exec", script)
        monkeypatch.setattr(backlog, "RETRY_FIRST_S", 0.01)
        monkeypatch.setattr(service, "LOOK_EVERY_S", 0.01)
        monkeypatch.setattr(store_module, "MIN_FREE_BYTES", 2**62)
        recordings = start()
        await until(lambda: recordings._backlog._postponed)
        await asyncio.sleep(0.1)
        assert len(script.runs) == 1

        monkeypatch.setattr(store_module, "MIN_FREE_BYTES", 0)
        await until(lambda: len(script.runs) >= 3)
        await recordings.stop()

    async def test_it_is_tried_less_and_less(self, write_log, monkeypatch):
        folder = write_log("a", "chat", [])
        monkeypatch.setattr(backlog.asyncio, "create_subprocess_exec", Scripted(None, [0] * 100))
        waiting = Backlog(lambda: True)
        waits = []
        for _ in range(8):
            before = asyncio.get_running_loop().time()
            await waiting._finish([folder], 0)
            waits.append(round(waiting._postponed[folder] - before))

        assert waits == [30, 60, 120, 240, 480, 600, 600, 600]


async def test_a_machine_that_starts_no_process_now_is_asked_again(
    start, write_log, until, monkeypatch
):
    write_log("a", "chat", [])
    script = Scripted(None, [0])
    n_refused = 0

    async def refuse_once(*argv, **options):
        nonlocal n_refused
        n_refused += 1
        if n_refused == 1:
            raise OSError(12, "Cannot allocate memory")
        return await script(*argv, **options)

    monkeypatch.setattr(backlog.asyncio, "create_subprocess_exec", refuse_once)
    monkeypatch.setattr(backlog, "RETRY_FIRST_S", 0.01)
    monkeypatch.setattr(service, "LOOK_EVERY_S", 0.02)
    recordings = start()
    await until(lambda: script.runs == [["a"]])
    await recordings.stop()


async def test_short_talks_do_not_wait_for_all_the_long_ones(
    start, write_log, took, tone, until, monkeypatch
):
    for i, name in enumerate(("long_a", "long_b", "short_a", "short_b")):
        write_log(name, "chat", [took(0, Input(0, tone(30 if i < 2 else 1)))])
    script = Scripted(None, [0] * 10)
    monkeypatch.setattr(backlog.asyncio, "create_subprocess_exec", script)
    monkeypatch.setattr(backlog, "BATCH_BYTES", 1_000_000)
    recordings = start()
    await until(lambda: len(script.runs) == 3)
    await recordings.stop()

    assert script.runs == [["short_a", "short_b"], ["long_a"], ["long_b"]]


@pytest.mark.parametrize(("n_cores", "n"), [(1, 1), (2, 1), (8, 2), (16, 4), (128, 8)])
def test_processes_leave_most_cores_to_live_sessions(n_cores, n):
    assert processes_for(n_cores) == n


async def test_several_processes_share_what_waits(write_log, until, monkeypatch):
    folders = [write_log(name, "chat", []) for name in "abcd"]
    running = []

    async def run(*argv, **_):
        running.append([name.rpartition("/")[2] for name in argv[3:]])
        return Hanging()

    monkeypatch.setattr(backlog.asyncio, "create_subprocess_exec", run)
    monkeypatch.setattr(backlog, "BATCH", 1)
    waiting = Backlog(lambda: True)
    tasks = [asyncio.create_task(waiting.finish_all()) for _ in range(3)]
    waiting.add(folders)
    await until(lambda: len(running) == 3)
    assert len(waiting) == 4
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)

    assert sorted(running) == [["a"], ["b"], ["c"]]


async def test_another_gateways_sessions_are_not_counted(start, store, until):
    folder = store.create("theirs", {"app_type": "chat"})
    log = Journal(folder)
    recordings = start()
    await until(lambda: recordings.n_unfinished == 1)
    await until(lambda: recordings.n_unfinished == 0, PATIENCE_S)
    await recordings.stop()
    log.close()


async def test_a_data_dir_that_cannot_be_written_to_costs_recordings_only(
    start, write_log, until, monkeypatch, caplog
):
    """Such as a read-only mount, which is refused to an administrator too."""
    folder = write_log("a", "chat", [])

    def refuse(*_, **__):
        raise OSError(30, "Read-only file system")

    script = Scripted(None, [0] * 100)
    monkeypatch.setattr(backlog.asyncio, "create_subprocess_exec", script)
    monkeypatch.setattr(store_module.os, "access", lambda *_: False)
    monkeypatch.setattr(store_module.shutil, "rmtree", refuse)
    monkeypatch.setattr(store_module.Store, "sweep", refuse)
    recordings = start()
    await until(lambda: "cannot be looked at: Read-only file system" in caplog.text)
    await until(lambda: recordings.recorder.begin("adx_1", "audio_duplex", 0, {}) is None)
    assert "cannot be written to" in caplog.text
    await recordings.stop()

    assert folder.exists()


async def test_old_recordings_are_removed_a_while_after_the_start(
    start, write_log, until, monkeypatch
):
    monkeypatch.setattr(service, "FIRST_CLEAN_S", 0.05)
    folder = write_log("old", "chat", [], created_at="2020-01-01T00:00:00+00:00")
    (folder / "log.msgpack").unlink()
    recordings = start(session_retention_days=7)
    assert folder.exists()
    await until(lambda: not folder.exists())
    await recordings.stop()
