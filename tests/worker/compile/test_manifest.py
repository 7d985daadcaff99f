"""What a cache was made from: every difference is seen, named, and survives the file."""

import json
import subprocess
import sys

import pytest

from worker.compile.manifest import (
    DamagedCache,
    Files,
    Key,
    Manifest,
    code_digest,
    collect_key,
    compiler_environment,
    diff,
)


@pytest.fixture(scope="module")
def key():
    return collect_key(
        device="cpu",
        model_config={"layers": 2, "width": 64},
        dtype="float32",
        compile_plan={"modules": ["llm", "tts"], "mode": "default", "dynamic": True},
        shape_plan={"llm.decode": [1, 2, 4], "kv_len": 512},
        n_threads=1,
        matmul_precision="highest",
        environment={"TORCHINDUCTOR_MAX_AUTOTUNE": "1"},
    )


def manifest_of(key):
    return Manifest(key=key.fields, info={"driver": None}, files=Files(3, 300, "f" * 64))


def changed(value):
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    return "another"


FIELDS = (
    *("torch", "torch_git", "triton", "cuda", "python", "device", "architecture", "dtype"),
    *("model_config_sha", "model_code_sha", "compile_plan", "shape_plan", "n_threads"),
    *("matmul_precision", "environment"),
)


def test_the_key_names_all_that_a_cache_depends_on(key):
    assert sorted(key.fields) == sorted(FIELDS)
    assert len(key.fingerprint) == 16
    assert int(key.fingerprint, 16) >= 0


@pytest.mark.parametrize("name", FIELDS)
def test_every_field_changes_the_fingerprint_and_is_named_by_the_difference(key, name):
    there = Key({**key.fields, name: changed(key.fields[name])})

    assert there.fingerprint != key.fingerprint
    names = {field.name.partition(".")[0] for field in diff(key, there)}
    assert names == {name}


def test_a_difference_inside_of_a_plan_is_named_by_its_path(key):
    there = Key({**key.fields, "shape_plan": {"llm.decode": [1, 2, 4], "kv_len": 1024}})

    (field,) = diff(key, there)

    assert (field.name, field.here, field.there) == ("shape_plan.kv_len", 512, 1024)
    assert str(field) == "shape_plan.kv_len is 512 here, 1024 there"


def test_a_field_that_only_one_side_has_is_a_difference():
    (field,) = diff(Key({"a": 1}), Key({"a": 1, "b": 2}))

    assert (field.name, field.here, field.there) == ("b", None, 2)


def test_a_long_value_is_cut_in_the_sentence():
    (field,) = diff(Key({"a": "x" * 1000}), Key({"a": "y"}))

    assert len(str(field)) < 120


def test_the_order_of_names_does_not_matter():
    assert (
        Key({"a": 1, "b": {"c": 2, "d": 3}}).fingerprint
        == Key({"b": {"d": 3, "c": 2}, "a": 1}).fingerprint
    )


def test_a_key_is_the_same_after_it_was_in_a_file(tmp_path):
    """Tuples become lists there."""
    key = Key({"shape_plan": {"buckets": (1, 2, (3, 4))}})
    manifest_of(key).write(tmp_path / "manifest.json")

    read = Manifest.read(tmp_path / "manifest.json")

    assert Key(read.key) == key
    assert read.fingerprint == key.fingerprint
    assert diff(key, Key(read.key)) == ()


def test_a_manifest_is_read_as_it_was_written(tmp_path, key):
    written = Manifest(
        key=key.fields,
        info={"driver": "580.1", "build_s": 9.5},
        files=Files(3, 300, "f" * 64),
        verify={"warm_s": 2.0},
        accuracy={"cosine": 0.999},
    )
    written.write(tmp_path / "manifest.json")

    assert Manifest.read(tmp_path / "manifest.json") == written
    assert json.loads((tmp_path / "manifest.json").read_text())["schema"] == 1
    assert [path.name for path in tmp_path.iterdir()] == ["manifest.json"]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[]",
        b'{"schema": 1}',
        b'{"schema": 2, "key": {}, "info": {}, "files": {"count":1,"bytes":1,"tree_sha":""}}',
        b'{"key": [], "info": {}, "files": {"count": 1, "bytes": 1, "tree_sha": ""}}',
        b"[" * 100_000,
    ],
)
def test_what_is_no_manifest_of_this_schema_is_damage(tmp_path, content):
    (tmp_path / "manifest.json").write_bytes(content)

    with pytest.raises(DamagedCache, match=r"manifest\.json"):
        Manifest.read(tmp_path / "manifest.json")


def test_a_manifest_that_cannot_be_written_leaves_the_old_one(tmp_path, key, monkeypatch):
    path = tmp_path / "manifest.json"
    manifest_of(key).write(path)

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("worker.compile.manifest.os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        Manifest(key={}, info={}, files=Files(0, 0, "")).write(path)

    assert Manifest.read(path) == manifest_of(key)
    assert [path.name for path in tmp_path.iterdir()] == ["manifest.json"]


def test_code_counts_by_name_and_content(tmp_path):
    package = tmp_path / "nn"
    package.mkdir()
    (package / "a.py").write_text("x = 1\n")
    (tmp_path / "other.py").write_text("not asked for")
    first = code_digest(tmp_path, ["nn"])

    (package / "notes.txt").write_text("no code")
    assert code_digest(tmp_path, ["nn"]) == first
    (package / "a.py").write_text("x = 2\n")
    second = code_digest(tmp_path, ["nn"])
    (package / "a.py").rename(package / "b.py")

    assert len({first, second, code_digest(tmp_path, ["nn"])}) == 3


def test_only_variables_that_change_what_is_compiled_count():
    environment = {
        "TORCHINDUCTOR_MAX_AUTOTUNE": "1",
        "TRITON_INTERPRET": "1",
        "TORCHINDUCTOR_CACHE_DIR": "/somewhere",
        "TRITON_CACHE_DIR": "/somewhere",
        "TORCHINDUCTOR_COMPILE_THREADS": "4",
        "PATH": "/bin",
    }

    assert compiler_environment(environment) == {
        "TORCHINDUCTOR_MAX_AUTOTUNE": "1",
        "TRITON_INTERPRET": "1",
    }


def test_manifests_and_caches_are_read_without_torch():
    code = (
        "import sys, worker.compile.cache, worker.compile.manifest;sys.exit('torch' in sys.modules)"
    )

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
