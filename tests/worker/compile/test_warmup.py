"""The file that keeps the shapes of real traffic."""

import json
import logging
import threading

import pytest
from filelock import FileLock

from tests.fakes.patience import PATIENCE_S
from worker.compile import warmup
from worker.compile.warmup import ShapeProfile, load_shapes, replay

DECODE = ("llm.decode", (4, 512))
VOCODE = ("vocode", (1, 28, False))
IMAGES = ("vpm", 1024)


def accepts_all(stage, bucket):
    return True


@pytest.fixture
def path(tmp_path):
    return tmp_path / "profiles" / "shapes.json"


def count(profile, shape, n=1):
    for _ in range(n):
        profile.record(*shape)


def test_what_was_recorded_is_replayed_most_frequent_first(path):
    with ShapeProfile(path) as profile:
        count(profile, VOCODE, 2)
        count(profile, DECODE, 3)
        count(profile, IMAGES, 1)

    assert load_shapes(path) == {DECODE: 3, VOCODE: 2, IMAGES: 1}
    assert replay(load_shapes(path), accepts_all) == [DECODE, VOCODE, IMAGES]


def test_shapes_of_equal_counts_have_one_order(path):
    shapes = {VOCODE: 1, DECODE: 1, IMAGES: 1}

    assert replay(shapes, accepts_all) == replay(dict(reversed(shapes.items())), accepts_all)


def test_several_workers_and_starts_add_up(path):
    first, second = ShapeProfile(path), ShapeProfile(path)
    count(first, DECODE, 2)
    count(second, DECODE, 3)
    count(second, IMAGES)
    first.close()
    second.close()
    count(second, DECODE)
    second.close()

    assert load_shapes(path) == {DECODE: 6, IMAGES: 1}


def test_counts_of_many_threads_are_all_there(path):
    profile = ShapeProfile(path)
    threads = [threading.Thread(target=count, args=(profile, DECODE, 5000)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    profile.close()

    assert load_shapes(path) == {DECODE: 20_000}


def test_an_open_profile_is_written_now_and_then(path, monkeypatch):
    is_written = threading.Event()
    replace = warmup._replace

    def noticed(*arguments):
        replace(*arguments)
        is_written.set()

    monkeypatch.setattr(warmup, "_replace", noticed)
    with ShapeProfile(path, every_s=0.01) as profile:
        count(profile, DECODE)
        assert is_written.wait(PATIENCE_S)
        assert load_shapes(path) == {DECODE: 1}


def test_nothing_new_writes_nothing(path):
    with ShapeProfile(path):
        pass

    assert not path.exists()
    assert load_shapes(path) == {}


def test_shapes_that_no_stage_takes_are_left_out_with_one_line(path, caplog):
    caplog.set_level(logging.INFO)
    shapes = {DECODE: 1, ("gone", 1): 9, ("gone", 2): 8, ("vpm", 7): 7}

    known = replay(shapes, lambda stage, bucket: (stage, bucket) == DECODE)

    assert known == [DECODE]
    assert [record.message for record in caplog.records] == [
        "shape profile shapes=4 left_out=3 of stages=gone,vpm"
    ]


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[1, 2",
        "\xff",
        "[]",
        "[" * 100_000,
        '{"schema": 2, "shapes": []}',
        '{"schema": 1}',
        '{"schema": 1, "shapes": [["llm", 1]]}',
        '{"schema": 1, "shapes": [["llm", 1, 0]]}',
        '{"schema": 1, "shapes": [["llm", 1, 2.5]]}',
        '{"schema": 1, "shapes": [["llm", {"rows": 1}, 2]]}',
        '{"schema": 1, "shapes": [["llm", [1, null], 2]]}',
    ],
)
def test_a_damaged_profile_is_a_warning_and_is_put_aside(path, caplog, content):
    path.parent.mkdir()
    path.write_text(content, encoding="latin-1")

    assert load_shapes(path) == {}
    assert "shape profile ignored" in caplog.text
    assert path.read_text(encoding="latin-1") == content

    profile = ShapeProfile(path)
    count(profile, DECODE)
    profile.close()
    assert load_shapes(path) == {DECODE: 1}
    assert path.with_name("shapes.json.damaged").read_text(encoding="latin-1") == content


def test_a_file_that_cannot_be_read_is_a_warning(path, caplog):
    path.mkdir(parents=True)

    assert load_shapes(path) == {}
    assert "shape profile ignored" in caplog.text


def test_what_could_not_be_written_is_written_later(path, caplog):
    path.parent.write_text("a file where the folder should be")
    profile = ShapeProfile(path)
    count(profile, DECODE)
    profile.save()
    assert "shape profile not written" in caplog.text

    path.parent.unlink()
    count(profile, DECODE)
    profile.save()
    assert load_shapes(path) == {DECODE: 2}


def test_a_neighbour_that_holds_the_file_for_long_is_not_waited_for(path, caplog, monkeypatch):
    monkeypatch.setattr(warmup, "LOCK_TIMEOUT_S", 0.01)
    profile = ShapeProfile(path)
    count(profile, DECODE)
    path.parent.mkdir()
    with FileLock(f"{path}.lock"):
        profile.save()
    assert "shape profile not written" in caplog.text
    assert not path.exists()

    profile.save()
    assert load_shapes(path) == {DECODE: 1}


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(path, monkeypatch):
    profile = ShapeProfile(path)
    count(profile, DECODE)
    profile.save()

    def full_disk(*_):
        raise OSError("no space left on device")

    count(profile, DECODE)
    with monkeypatch.context() as patched:
        patched.setattr(warmup.os, "replace", full_disk)
        profile.save()
    assert load_shapes(path) == {DECODE: 1}
    assert sorted(
        file.name for file in path.parent.glob("*.json*") if ".lock" not in file.name
    ) == ["shapes.json"]


def test_the_file_has_one_shape_a_line(path):
    profile = ShapeProfile(path)
    count(profile, VOCODE)
    count(profile, DECODE, 2)
    profile.close()

    lines = path.read_text().splitlines()
    assert json.loads(lines[1].rstrip(",")) == ["llm.decode", [4, 512], 2]
    assert json.loads(lines[2]) == ["vocode", [1, 28, False], 1]
