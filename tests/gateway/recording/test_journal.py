"""A log is good up to its last whole record, whatever ended its writer."""

from __future__ import annotations

import pytest

from gateway.recording import journal
from gateway.recording.journal import Journal
from shared.protocol import Input, Pause, Result


@pytest.fixture
def folder(write_log, took, gave):
    said = [
        took(0.5, Input(0, b"12345678", [b"jpeg"])),
        gave(0.9, Result(0, is_listen=False, unit_index=1, text="hello", audio=b"abcd")),
    ]
    return write_log("one", "omni_duplex", said)


def test_what_was_said_is_read_back(folder, records):
    first, second, end = records(folder)

    assert (first.kind, first.at, first.message) == (
        journal.TOOK,
        0.5,
        Input(0, b"12345678", [b"jpeg"]),
    )
    assert second.wall_clock_ms == 12.5
    assert (end.kind, end.reason) == (journal.END, "stopped")


def test_a_log_that_is_cut_anywhere_is_read_up_to_its_last_whole_record(folder, records):
    whole = (folder / journal.NAME).read_bytes()
    seen = set()

    for n in range(len(whole)):
        (folder / journal.NAME).write_bytes(whole[:n])
        found = list(records(folder))
        seen.add(len(found))
        assert [record.kind for record in found] == [journal.TOOK, journal.GAVE][: len(found)]

    assert seen == {0, 1, 2}


@pytest.mark.parametrize("at", [12, 30, 60])
def test_nothing_is_read_behind_a_record_that_has_changed(folder, records, at):
    raw = bytearray((folder / journal.NAME).read_bytes())
    raw[at] ^= 0x40
    (folder / journal.NAME).write_bytes(raw)

    with pytest.raises(journal.LogDamaged):
        list(records(folder))


def test_what_stands_before_the_damage_is_read(folder, records):
    raw = bytearray((folder / journal.NAME).read_bytes())
    raw[-1] ^= 0x40
    (folder / journal.NAME).write_bytes(raw)
    reading = records(folder)

    assert [next(reading).kind for _ in range(2)] == [journal.TOOK, journal.GAVE]
    with pytest.raises(journal.LogDamaged):
        next(reading)


def test_a_length_of_four_gigabytes_asks_for_no_memory(folder, records):
    (folder / journal.NAME).write_bytes(journal.MAGIC + b"\xff" * 100)

    assert list(records(folder)) == []


def test_a_message_of_another_version_is_passed_over(store, records):
    folder = store.create("two", {})
    log = Journal(folder)
    log.append(journal.TOOK, 0.0, 0.0, b"\x81\xa4type\xa5later")
    log.append(journal.TOOK, 1.0, 0.0, b"\x81\xa4type\xa5pause")
    log.close()

    assert [record.message for record in records(folder)] == [Pause()]


def test_a_live_log_is_locked_and_an_ended_one_is_not(store):
    folder = store.create("three", {})
    log = Journal(folder)
    with journal.locked(folder) as is_ours:
        assert not is_ours
    log.close()
    with journal.locked(folder) as is_ours:
        assert is_ours
