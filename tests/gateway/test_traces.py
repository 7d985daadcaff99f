"""What pages report about themselves."""

from __future__ import annotations

import json

import pytest

from gateway import traces
from shared.config import Config
from tests.fakes.front import open_front

PATH = "/api/_debug/record_trace"


@pytest.fixture
def config(tmp_path):
    return Config.model_validate({"service": {"data_dir": str(tmp_path)}})


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


async def test_an_object_becomes_a_line_with_the_time(config, tmp_path):
    async with open_front(config) as front:
        answers = [await front.http.post(PATH, json={"stage": n, "ts": "theirs"}) for n in (1, 2)]

    assert [(a.status_code, a.json()) for a in answers] == [(200, {"ok": True})] * 2
    written = lines(tmp_path / "traces" / "record_trace.jsonl")
    assert [row["stage"] for row in written] == [1, 2]
    assert all(row["ts"].startswith("20") for row in written)


@pytest.mark.parametrize("body", [b"[1]", b'"text"', b"{", b"", b"\xff", b'{"a":' + b"[" * 5000])
async def test_anything_but_an_object_is_refused(config, tmp_path, body):
    async with open_front(config) as front:
        answer = await front.http.post(PATH, content=body)

    assert (answer.status_code, answer.json()["slug"]) == (422, "bad_message")
    assert not (tmp_path / "traces").exists()


async def test_the_files_stay_bounded(config, tmp_path, monkeypatch):
    monkeypatch.setattr(traces, "MAX_FILE_BYTES", 1000)
    async with open_front(config) as front:
        for number in range(40):
            await front.http.post(PATH, json={"number": number, "text": "x" * 60})

    folder = tmp_path / "traces"
    assert sorted(path.name for path in folder.iterdir()) == [
        "record_trace.jsonl",
        "record_trace.jsonl.1",
    ]
    assert all(path.stat().st_size <= 1000 for path in folder.iterdir())
    newest = lines(folder / "record_trace.jsonl.1") + lines(folder / "record_trace.jsonl")
    numbers = [row["number"] for row in newest]
    assert numbers == list(range(numbers[0], 40))


async def test_a_disk_that_takes_nothing_is_told(config, tmp_path):
    (tmp_path / "traces").write_text("a file where the folder should be")
    async with open_front(config) as front:
        answer = await front.http.post(PATH, json={})
        alive = await front.http.get("/health")

    assert (answer.status_code, answer.json()["slug"]) == (507, "no_storage")
    assert alive.status_code == 200
