from __future__ import annotations

import asyncio

import pytest

from gateway import inbox
from gateway.inbox import HeldBytes, Inbox
from shared.errors import BadMessage, MediaFull
from shared.protocol import Input, Prepare, Resume

SECOND = bytes(64_000)


def chunk(audio: bytes = SECOND, frame: bytes = b"") -> Input:
    return Input(-1, audio, [frame] if frame else [])


async def test_chunks_are_numbered_as_they_leave_so_dropped_ones_leave_no_gap():
    box = Inbox(HeldBytes())
    for i in range(inbox.MAX_INBOX_UNITS + 1):
        box.put(chunk(SECOND[:-4] + i.to_bytes(4, "little")), float(i))

    left = [(await box.get())[0] for _ in range(inbox.MAX_INBOX_UNITS)]

    assert [command.seq for command in left] == list(range(inbox.MAX_INBOX_UNITS))
    assert left[0].audio[-4:] == (1).to_bytes(4, "little")


async def test_a_dropped_chunk_is_answered_in_its_turn():
    box = Inbox(HeldBytes())
    box.put(chunk(), 0.0)
    await box.get()
    for i in range(inbox.MAX_INBOX_UNITS + 1):
        box.put(chunk(), 1.0 + i)

    early = box.due()
    first = box.answered(0)
    late = box.due()

    assert early == []
    assert first is not None
    assert [dropped.arrived_at for dropped in late] == [1.0]


def test_a_chunk_that_was_never_sent_cannot_be_answered():
    box = Inbox(HeldBytes())
    box.put(chunk(), 0.0)

    assert box.answered(0) is None


async def test_commands_are_never_dropped_for_audio():
    box = Inbox(HeldBytes())
    box.put(Prepare("p"), 0.0)
    for _ in range(50):
        box.put(chunk(), 0.0)
    box.put(Resume(), 0.0)

    left = [(await box.get())[0] for _ in range(2 + inbox.MAX_INBOX_UNITS)]

    assert (left[0], left[-1]) == (Prepare("p"), Resume())


def test_one_chunk_may_be_larger_than_what_is_held_else():
    box = Inbox(HeldBytes())

    box.put(chunk(frame=bytes(inbox.MAX_HELD_BYTES + 1)), 0.0)

    assert box.n_unanswered == 1


def test_voices_beyond_the_bound_are_refused(monkeypatch):
    monkeypatch.setattr(inbox, "MAX_HELD_BYTES", 1000)
    box = Inbox(HeldBytes())
    box.put(Prepare("p", reference_voice=bytes(800)), 0.0)

    with pytest.raises(BadMessage, match="queue_done"):
        box.put(Prepare("p", reference_voice=bytes(800)), 0.0)


def test_all_inboxes_share_one_bound_and_give_back_what_they_held(monkeypatch):
    """A full queue of clients with long voices must not fill the memory."""
    monkeypatch.setattr(inbox, "MAX_HELD_BYTES_IN_ALL", 1000)
    monkeypatch.setattr(inbox, "OWN_SHARE_BYTES", 100)
    held = HeldBytes()
    first, second = Inbox(held), Inbox(held)
    first.put(Prepare("p", reference_voice=bytes(800)), 0.0)

    with pytest.raises(MediaFull):
        second.put(Prepare("p", reference_voice=bytes(800)), 0.0)
    first.close()
    second.put(Prepare("p", reference_voice=bytes(800)), 0.0)

    assert held.total == 800


def test_a_client_with_little_is_served_while_others_hold_all_there_is(monkeypatch):
    """Some waiting clients with much input had the chunks of every live session refused."""
    monkeypatch.setattr(inbox, "MAX_HELD_BYTES_IN_ALL", 2_000_000)
    held = HeldBytes()
    Inbox(held).put(chunk(SECOND, bytes(1_930_000)), 0.0)
    live = Inbox(held)

    live.put(chunk(SECOND, bytes(200_000)), 0.0)

    assert live.n_unanswered == 1
    with pytest.raises(BadMessage):
        live.put(chunk(SECOND, bytes(1_000_000)), 0.0)


async def test_chunks_beyond_those_that_may_wait_for_an_answer_are_refused(monkeypatch):
    """A worker that answers nothing left one small object per chunk here, without a bound."""
    monkeypatch.setattr(inbox, "MAX_UNANSWERED", 2)
    box = Inbox(HeldBytes())
    for _ in range(2):
        box.put(chunk(bytes(4)), 0.0)
        await box.get()

    with pytest.raises(BadMessage):
        box.put(chunk(bytes(4)), 0.0)
    box.put(Resume(), 0.0)
    box.answered(0)
    box.put(chunk(bytes(4)), 0.0)


async def test_getting_waits_for_the_next_command():
    box = Inbox(HeldBytes())
    getting = asyncio.ensure_future(box.get())
    await asyncio.sleep(0)

    box.put(Resume(), 7.0)

    assert await getting == (Resume(), 7.0)
