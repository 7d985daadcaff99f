"""The demo's protocol, message by message, on both back ends: `tests/transcripts`."""

from __future__ import annotations

import asyncio

import pytest

from tests.e2e.conftest import RunningService
from tests.transcripts.replay import Mismatch, Transcript, compare, replay, transcripts

BACK_ENDS = {"cascade": "running_service", "minicpmo45": "tiny_service"}

CASES = [
    pytest.param(one, back_end, id=f"{one.name}-{back_end}")
    for back_end in BACK_ENDS
    for one in transcripts()
    if back_end in one.back_ends
]


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize(("transcript", "back_end"), CASES)
def test_the_service_speaks_as_the_transcript_says(
    transcript: Transcript, back_end: str, request: pytest.FixtureRequest
) -> None:
    service: RunningService = request.getfixturevalue(BACK_ENDS[back_end])

    asyncio.run(replay(transcript, service.http_url))


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ({"a": 1}, {"b": 1}),
        ({"a": 1}, {"a": 2}),
        ({"a": 1}, {"a": "<text>"}),
        ({"a": True}, {"a": "<int>"}),
        ({"a": 1}, {"a": 1.0}),
        ({"a": ""}, {"a": "<words>"}),
        ({"a": ""}, {"a": "<sound or null>"}),
        ({"a": []}, {"a": [{}]}),
        ([], {"a": 1}),
    ],
)
def test_what_differs_is_seen(found: object, expected: object) -> None:
    with pytest.raises(Mismatch):
        compare(found, expected)
