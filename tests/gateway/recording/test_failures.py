"""How a session failed is said in its recording, at the place where it failed, in all modes."""

from __future__ import annotations

import json

import pytest

from gateway.recording.finish import finish
from shared.protocol import (
    Ask,
    ChatMessage,
    Delta,
    Failure,
    Generating,
    Input,
    Prefilled,
    Result,
    TextPart,
)


def body_of(folder):
    return json.loads((folder / "recording.json").read_text())


def test_a_failure_of_full_duplex_at_the_chunk_without_an_answer(write_log, took, gave, tone):
    said = [
        took(0.0, Input(0, tone(1))),
        gave(0.1, Result(0, is_listen=False, unit_index=0, text="Well, ")),
        took(1.0, Input(1, tone(1))),
    ]
    folder = write_log("lost", "audio_duplex", said, reason="worker_lost")

    finish(folder)

    body = body_of(folder)
    assert body["end_reason"] == "worker_lost"
    assert [chunk.get("error") for chunk in body["chunks"]] == [None, "worker_lost"]


@pytest.mark.parametrize(("end_of_turn", "error"), [(False, "worker_lost"), (True, None)])
def test_a_failure_of_full_duplex_at_the_last_chunk_of_an_open_turn(
    write_log, took, gave, tone, end_of_turn, error
):
    said = [
        took(0.0, Input(0, tone(1))),
        gave(0.1, Result(0, is_listen=False, unit_index=0, end_of_turn=end_of_turn)),
    ]
    folder = write_log("lost", "audio_duplex", said, reason="worker_lost")

    finish(folder)

    assert body_of(folder)["end_reason"] == "worker_lost"
    assert [chunk.get("error") for chunk in body_of(folder)["chunks"]] == [error]


def test_a_failure_of_half_duplex_at_the_open_turn(write_log, took, gave, tone):
    said = [
        took(0.0, Input(0, tone(0.5))),
        gave(0.6, Generating(500.0)),
        gave(0.9, Delta(0, "Well, ", tone(0.1, 24_000))),
    ]
    folder = write_log("lost", "half_duplex_audio", said, reason="worker_lost")

    finish(folder)

    (turn,) = body_of(folder)["turns"]
    assert (turn["error"], turn["output"]["text"]) == ("worker_lost", "Well, ")
    assert body_of(folder)["end_reason"] == "worker_lost"


@pytest.mark.parametrize(
    ("reason", "error"),
    [("worker_lost", "worker_lost"), ("client_gone", None), ("stopped", None), (None, None)],
)
def test_a_failure_of_a_chat_at_its_turn_and_only_a_failure(write_log, took, gave, reason, error):
    said = [took(0.0, Ask([ChatMessage("user", [TextPart("Hi")])])), gave(0.2, Prefilled(3))]
    folder = write_log("lost", "chat", said, reason=reason)

    finish(folder)

    (turn,) = body_of(folder)["turns"]
    assert turn.get("error") == error


def test_a_failure_is_named_by_what_the_worker_has_said(write_log, took, gave):
    said = [
        took(0.0, Ask([ChatMessage("user", [TextPart("Hi")])])),
        gave(0.2, Failure("model_fault", "it failed")),
    ]
    folder = write_log("failed", "chat", said, reason="internal")

    finish(folder)

    assert body_of(folder)["turns"][0]["error"] == "model_fault"
