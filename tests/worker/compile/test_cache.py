"""A worker's cache: found or not, copied, made once, shared at once, mended from the master.

The files are not the compiler's; to the cache one file is like another.
"""

import errno
import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from shared.errors import CompileCacheError
from worker.compile import files
from worker.compile.cache import CacheState, CompileCache
from worker.compile.manifest import Files, Key, Manifest
from worker.compile.master import Master, cache_root

KEY = Key({"torch": "2.11", "shape_plan": {"batch": [1, 2]}, "dtype": "bfloat16"})
CONTENT = {
    "inductor/fxgraph/ab/entry": b"graph" * 100,
    "inductor/aotautograd/cd/entry": b"aot" * 100,
    "inductor/xy/wrapper.py": b"def call(): ...",
    "triton/KERNEL/kernel.cubin": b"\x7fELF" * 50,
}
VARIABLES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TORCHINDUCTOR_COMPILE_THREADS")
DEAD_PID = 2**22 + 1
"""Above the kernel's largest."""


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """The cache changes the process's own variables; afterwards they are as before."""
    for name in VARIABLES:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.fixture
def make(tmp_path):
    """Return what makes the cache of a key, as a new process would; all are closed at the end."""
    made = []
    (tmp_path / "tmp").mkdir()

    def make(key=KEY):
        made.append(CompileCache(tmp_path / "cache", key, tmp_path / "tmp"))
        return made[-1]

    yield make
    for cache in made:
        cache.close()


def compile_something(cache, content=CONTENT):
    for path, data in content.items():
        place = cache.copy / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(data)


def build(cache, content=CONTENT):
    """Do what a cold worker does; return its manifest."""
    cache.open()
    with cache.lock():
        compile_something(cache, content)
        return cache.publish({"build_s": 1.0})


@pytest.fixture
def master(make):
    """A whole cache; its directory."""
    cache = make()
    build(cache)
    cache.close()
    return cache.master.directory


def held_by(directory):
    return {path: (directory / path).read_bytes() for path, _ in files.list_files(directory)}


# ---- what is found


def test_without_any_cache_it_is_cold(make):
    cache = make()
    status = cache.open()

    assert status.state is CacheState.COLD
    assert str(cache.master.root) in status.reason
    assert held_by(cache.copy) == {}


def test_a_published_cache_is_warm_and_copied(make, master):
    cache = make()
    status = cache.open()

    assert status.state is CacheState.WARM
    assert status.fingerprint == KEY.fingerprint == master.name
    assert status.manifest.info["build_s"] == 1.0
    assert held_by(cache.copy) == CONTENT


def test_the_compiler_works_in_the_copy(make, master):
    cache = make()
    cache.open()

    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(cache.copy / "inductor")
    assert os.environ["TRITON_CACHE_DIR"] == str(cache.copy / "triton")
    assert int(os.environ["TORCHINDUCTOR_COMPILE_THREADS"]) in range(1, 5)
    assert Path(os.environ["TRITON_CACHE_DIR"]).is_dir()
    assert not cache.copy.is_relative_to(cache.master.root)


def test_a_cold_start_compiles_with_as_many_processes_as_the_compiler_likes(make):
    make().open()

    assert "TORCHINDUCTOR_COMPILE_THREADS" not in os.environ


def test_a_chosen_number_of_processes_stays(make, master, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "7")
    make().open()

    assert os.environ["TORCHINDUCTOR_COMPILE_THREADS"] == "7"


def test_closing_removes_the_copy_and_restores_the_environment(make, master, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/shared")
    cache = make()
    cache.open()
    copy = cache.copy
    cache.close()

    assert not copy.exists()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "/shared"
    assert "TRITON_CACHE_DIR" not in os.environ


def test_a_cache_of_something_else_is_stale_and_the_nearest_one_is_compared(make):
    near = Key({**KEY.fields, "torch": "2.10"})
    far = Key({"torch": "2.9", "shape_plan": {"batch": [8]}, "dtype": "float32"})
    for key in (near, far):
        cache = make(key)
        build(cache)
        cache.close()

    status = make().open()

    assert status.state is CacheState.STALE
    assert [field.name for field in status.stale] == ["torch"]
    assert near.fingerprint in status.reason
    assert 'torch is "2.11" here, "2.10" there' in status.reason


def cut_entry(master):
    path = master / "inductor/fxgraph/ab/entry"
    path.write_bytes(path.read_bytes()[:50])


def cut_both_entries(master):
    cut_entry(master)
    os.truncate(master / "inductor/aotautograd/cd/entry", 3)


def delete_wrapper(master):
    (master / "inductor/xy/wrapper.py").unlink()


def delete_manifest(master):
    (master / "manifest.json").unlink()


def cut_manifest(master):
    os.truncate(master / "manifest.json", 40)


def foreign_manifest(master):
    Manifest(key={"torch": "1"}, info={}, files=Files(0, 0, "")).write(master / "manifest.json")


def extra_file(master):
    (master / "triton/other").write_bytes(b"x")


DAMAGES = [
    *(cut_entry, cut_both_entries, delete_wrapper, delete_manifest, cut_manifest),
    *(foreign_manifest, extra_file),
]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_damaged_cache_is_not_used_and_is_replaced(make, master, damage):
    damage(master)
    cache = make()
    status = cache.open()

    assert status.state is CacheState.DAMAGED
    assert str(master) in status.reason
    assert held_by(cache.copy) == {}

    with cache.lock():
        compile_something(cache)
        cache.publish({})
    cache.close()
    assert make().open().state is CacheState.WARM


def test_content_is_compared_before_any_of_it_is_used(make, master):
    """Number and size are right. A process that has loaded damaged code can make no whole cache."""
    kernel = master / "triton/KERNEL/kernel.cubin"
    kernel.write_bytes(bytes(len(kernel.read_bytes())))
    cache = make()

    assert cache.open().state is CacheState.DAMAGED
    assert held_by(cache.copy) == {}
    with cache.lock():
        compile_something(cache)
        cache.publish({})
    assert held_by(master) == CONTENT


def test_kernels_that_name_their_parts_by_path_are_found_in_every_copy(make):
    maker = make()
    maker.open()
    kernel = maker.copy / "triton" / "ABC"
    kernel.mkdir(parents=True)
    (kernel / "add.cubin").write_bytes(b"code")
    group = kernel / "__grp__add.json"
    group.write_text(json.dumps({"child_paths": {"add.cubin": str(kernel / "add.cubin")}}))
    compile_something(maker)
    with maker.lock():
        maker.publish({})
    maker.close()

    for cache in (make(), make()):
        cache.open()
        named = json.loads((cache.copy / "triton/ABC/__grp__add.json").read_text())
        part = Path(named["child_paths"]["add.cubin"])
        assert part.is_relative_to(cache.copy)
        assert part.read_bytes() == b"code"
        assert not cache.changes().written
        cache.close()


def test_locks_and_byte_code_are_no_part_of_a_cache(make, master):
    for folder in ("locks", "__pycache__"):
        (master / "inductor" / folder).mkdir()
        (master / "inductor" / folder / "file").write_bytes(b"x")
    cache = make()

    assert cache.open().state is CacheState.WARM
    assert held_by(cache.copy) == CONTENT


# ---- the copy


def test_the_copy_is_nobody_elses(make, master):
    cache = make()
    cache.open()

    for directory in (cache.copy, cache.copy.parent):
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert cache.copy.name == f"worker-{os.getpid()}"
    assert cache.copy.parent.name == f"omni-compile-{os.geteuid()}"


def test_copies_of_dead_workers_are_removed(make, tmp_path):
    parent = tmp_path / "tmp" / f"omni-compile-{os.geteuid()}"
    parent.mkdir(mode=0o700)
    for name in (f"worker-{DEAD_PID}", f"worker-{DEAD_PID}.1", f"worker-{os.getpid()}.3"):
        (parent / name / "inductor").mkdir(parents=True)
    alive = parent / f"worker-{os.getppid()}"
    alive.mkdir()

    cache = make()
    cache.open()

    assert set(parent.iterdir()) == {alive, cache.copy}


def test_changes_are_what_the_compiler_wrote(make, master):
    cache = make()
    cache.open()
    assert len(cache.changes()) == 0

    (cache.copy / "inductor/locks").mkdir()
    (cache.copy / "inductor/locks/a.lock").touch()
    assert len(cache.changes()) == 0

    (cache.copy / "inductor/xy/new.py").write_bytes(b"x")
    (cache.copy / "inductor/fxgraph/ab/entry").write_bytes(b"shorter")
    (cache.copy / "inductor/xy/wrapper.py").unlink()
    changes = cache.changes()

    assert changes.new == ("inductor/xy/new.py",)
    assert changes.changed == ("inductor/fxgraph/ab/entry",)
    assert changes.removed == ("inductor/xy/wrapper.py",)
    assert changes.written == changes.new + changes.changed
    assert len(changes) == 3


def test_after_publishing_changes_count_anew(make):
    cache = make()
    build(cache)

    assert len(cache.changes()) == 0


def test_a_damaged_copy_is_taken_again_once_and_elsewhere(make, master):
    cache = make()
    cache.open()
    first = cache.copy
    (first / "triton/KERNEL/kernel.cubin").write_bytes(b"damaged")

    assert cache.repair()

    assert cache.status.state is CacheState.WARM
    assert cache.copy != first
    assert not first.exists()
    assert os.environ["TRITON_CACHE_DIR"] == str(cache.copy / "triton")
    assert held_by(cache.copy) == CONTENT
    assert not cache.repair()


def test_a_repair_from_a_damaged_master_starts_with_nothing(make, master):
    cache = make()
    assert cache.open().state is CacheState.WARM
    (master / "triton/KERNEL/kernel.cubin").write_bytes(b"damaged")

    assert cache.repair()

    assert cache.status.state is CacheState.DAMAGED
    assert held_by(cache.copy) == {}


def test_a_master_that_goes_away_while_it_is_copied_counts_as_damaged(make, master, monkeypatch):
    whole_copy = files.copy

    def copy(source, target):
        (source / "triton/KERNEL/kernel.cubin").unlink()
        whole_copy(source, target)

    monkeypatch.setattr(files, "copy", copy)
    cache = make()

    assert cache.open().state is CacheState.DAMAGED
    assert held_by(cache.copy) == {}


# ---- places that cannot be used


def no_room(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_too_little_room_for_the_copy_is_told_before(make, master, monkeypatch):
    usage = shutil.disk_usage("/")._replace(free=1000)
    monkeypatch.setattr("worker.compile.files.shutil.disk_usage", lambda _: usage)

    with pytest.raises(CompileCacheError, match="MB are needed .* set TMPDIR"):
        make().open()


def test_a_disk_that_is_full_while_copying_leaves_no_half_copy(make, master, monkeypatch):
    monkeypatch.setattr("worker.compile.files.shutil.copyfile", no_room)
    cache = make()

    with pytest.raises(CompileCacheError, match="No space left on device; free some"):
        cache.open()
    assert list((cache.master.root.parent / "tmp").glob("*/worker-*")) == []


def test_a_disk_that_is_full_while_publishing_leaves_all_as_it_was(make, monkeypatch):
    cache = make()
    cache.open()
    compile_something(cache)
    with monkeypatch.context() as patch:
        patch.setattr("worker.compile.files.shutil.copyfile", no_room)
        with cache.lock(), pytest.raises(CompileCacheError, match="No space left"):
            cache.publish({})

    assert not cache.master.exists()
    assert list(cache.master.root.glob(".build*")) == []
    assert held_by(cache.copy) == CONTENT


def test_too_little_room_for_publishing_is_told_before(make, monkeypatch):
    cache = make()
    cache.open()
    compile_something(cache)
    usage = shutil.disk_usage("/")._replace(free=10)
    monkeypatch.setattr("worker.compile.files.shutil.disk_usage", lambda _: usage)

    with cache.lock(), pytest.raises(CompileCacheError, match=r"compile\.cache_dir"):
        cache.publish({})
    assert list(cache.master.root.glob(".build*")) == []


@pytest.mark.skipif(not files.NOEXEC, reason="the system does not tell")
def test_a_file_system_without_execution_is_refused(make, monkeypatch):
    """Compiled kernels are loaded as libraries."""
    facts = SimpleNamespace(f_flag=files.NOEXEC)
    monkeypatch.setattr("worker.compile.files.os.statvfs", lambda _: facts)

    with pytest.raises(CompileCacheError, match="noexec"):
        make().open()


def test_a_root_that_everybody_may_write_to_is_refused(make, master):
    master.parent.chmod(0o777)

    with pytest.raises(CompileCacheError, match=r"written to by everybody \(mode 777\).*as code"):
        make().open()


def test_a_cache_that_everybody_may_write_to_is_refused(make, master):
    master.chmod(0o777)

    with pytest.raises(CompileCacheError, match="written to by everybody"):
        make().open()


def test_a_root_of_another_user_is_refused(make, master, monkeypatch):
    monkeypatch.setattr("worker.compile.files.os.geteuid", lambda: os.getuid() + 1)
    monkeypatch.setattr("worker.compile.files.ROOT_UID", -1)

    with pytest.raises(CompileCacheError, match="belongs to another user"):
        make().examine()


def test_a_place_for_copies_that_somebody_has_prepared_is_refused(make, tmp_path):
    planted = tmp_path / "tmp" / f"omni-compile-{os.geteuid()}"
    planted.mkdir()
    planted.chmod(0o777)

    with pytest.raises(CompileCacheError, match="TMPDIR"):
        make().open()


def test_a_link_in_the_place_for_copies_is_refused(make, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "tmp" / f"omni-compile-{os.geteuid()}").symlink_to(tmp_path / "elsewhere")

    with pytest.raises(CompileCacheError, match="is no directory"):
        make().open()


def test_a_root_that_is_made_is_ours_alone(make):
    cache = make()
    build(cache)

    assert stat.S_IMODE(cache.master.root.stat().st_mode) == 0o700


def test_a_root_may_be_a_link(make, master, tmp_path):
    (tmp_path / "link").symlink_to(master.parent)
    cache = CompileCache(tmp_path / "link", KEY, tmp_path / "tmp")

    assert cache.open().state is CacheState.WARM
    cache.close()


@pytest.fixture
def unprivileged():
    """A folder in which permissions count: root does not see them."""
    folder = Path(tempfile.mkdtemp())
    user = os.geteuid()
    if user == 0:
        os.chown(folder, 65534, 65534)
        os.seteuid(65534)
    yield folder
    os.seteuid(user)
    for path in (folder, *folder.rglob("*")):
        if path.is_dir():
            path.chmod(0o700)
    shutil.rmtree(folder)


def test_a_read_only_cache_serves_and_cannot_be_changed(unprivileged):
    (unprivileged / "tmp").mkdir()
    built = CompileCache(unprivileged / "cache", KEY, unprivileged / "tmp")
    build(built)
    built.close()
    for path in [*(unprivileged / "cache").rglob("*"), unprivileged / "cache"]:
        path.chmod(0o500 if path.is_dir() else 0o400)

    cache = CompileCache(unprivileged / "cache", KEY, unprivileged / "tmp")
    assert cache.open().state is CacheState.WARM
    # The compiler has to be able to write where it reads.
    (cache.copy / "inductor/fxgraph/ab/other").write_bytes(b"x")
    (cache.copy / "inductor/fxgraph/ab/entry").write_bytes(b"x")
    cache.close()

    other = CompileCache(unprivileged / "cache", Key({"torch": "3"}), unprivileged / "tmp")
    assert other.open().state is CacheState.STALE
    compile_something(other)
    with other.lock(), pytest.raises(CompileCacheError, match=r"Permission denied; set compile\."):
        other.publish({})
    other.close()


def test_a_place_for_copies_that_cannot_be_written_to_is_refused(unprivileged):
    (unprivileged / "tmp").mkdir(mode=0o500)

    with pytest.raises(CompileCacheError, match="Permission denied; set TMPDIR"):
        CompileCache(unprivileged / "cache", KEY, unprivileged / "tmp").open()


# ---- making it once


def test_one_that_is_whole_is_not_replaced(make, master):
    cache = make()
    cache.open()
    with cache.lock():
        compile_something(cache, {"inductor/other": b"x"})
        kept = cache.publish({"build_s": 99.0})

    assert kept.info["build_s"] == 1.0
    assert held_by(master) == CONTENT


def test_a_second_one_waits_and_says_so(make):
    first, second = make(), make()
    first.open()
    waited, is_waiting = [], threading.Event()
    found = []

    def on_wait(seconds):
        waited.append(seconds)
        is_waiting.set()

    def wait():
        with second.lock(on_wait):
            found.append(second.examine().state)

    with first.lock():
        thread = threading.Thread(target=wait)
        thread.start()
        assert is_waiting.wait(10)
        compile_something(first)
        first.publish({})
    thread.join(10)

    assert found == [CacheState.WARM]
    assert waited[0] > 0


def test_waiting_can_be_given_up(make):
    first, second = make(), make()

    def enough(_):
        raise InterruptedError("asked to stop")

    with first.lock(), pytest.raises(InterruptedError), second.lock(enough):
        pass
    with second.lock():
        pass


def test_leftovers_of_killed_builders_are_removed(make):
    cache = make()
    cache.open()
    root = cache.master.root
    root.mkdir()
    for name in (f".build-{KEY.fingerprint}-{DEAD_PID}", f".old-{KEY.fingerprint}-{DEAD_PID}"):
        (root / name / "inductor").mkdir(parents=True)
    other = root / f".build-{KEY.fingerprint}-{os.getppid()}"
    other.mkdir()
    (root / "fxgraph").mkdir()
    with cache.lock():
        compile_something(cache)
        cache.publish({})

    kept = {path.name for path in root.iterdir() if path.suffix != ".lock"}
    assert kept == {KEY.fingerprint, other.name, "fxgraph", "leases"}


def make_older(root, number):
    """A cache that was made long ago; its fingerprint."""
    older = Key({"torch": number})
    master = Master(root, older.fingerprint)
    master.directory.mkdir(parents=True)
    manifest = Manifest(key=older.fields, info={}, files=Files(0, 0, ""))
    manifest.write(master.directory / "manifest.json")
    os.utime(master.directory / "manifest.json", (number, number))
    return older.fingerprint


def test_the_two_newest_are_kept(make, tmp_path):
    older = [make_older(tmp_path / "cache", number) for number in (1000, 2000, 3000)]
    build(make())

    kept = {path.name for path in (tmp_path / "cache").iterdir() if len(path.name) == 16}
    assert kept == {KEY.fingerprint, older[-1]}


def test_one_that_a_living_worker_uses_is_kept(make, tmp_path):
    root = tmp_path / "cache"
    used, unused, _ = (make_older(root, number) for number in (1000, 2000, 3000))
    (root / "leases").mkdir()
    (root / "leases" / f"{used}-{os.getppid()}").touch()
    (root / "leases" / f"{unused}-{DEAD_PID}").touch()
    build(make())

    assert (root / used).exists()
    assert not (root / unused).exists()
    assert not (root / "leases" / f"{unused}-{DEAD_PID}").exists()


def test_a_worker_holds_a_lease_until_it_closes(make, master):
    cache = make()
    cache.open()
    lease = master.parent / "leases" / f"{KEY.fingerprint}-{os.getpid()}"

    assert lease.exists()
    cache.close()
    assert not lease.exists()


def test_figures_of_a_second_start_are_written_into_the_manifest(make, master):
    cache = make()
    with cache.lock():
        cache.master.record({"warm_s": 3.5})

    status = cache.open()
    assert status.state is CacheState.WARM
    assert status.manifest.verify == {"warm_s": 3.5}


def test_a_cache_that_was_set_aside_comes_back_unless_there_is_a_new_one(make, master):
    one = Master(master.parent, master.name)
    one.put_back(one.set_aside())
    assert held_by(master) == CONTENT

    aside = one.set_aside()
    assert not master.exists()
    build(make(), {"inductor/new": b"x"})
    one.put_back(aside)

    assert held_by(master) == {"inductor/new": b"x"}
    assert not aside.exists()


def test_the_root_is_configured_else_inherited_else_a_folder_of_its_own():
    inherited = {"TORCHINDUCTOR_CACHE_DIR": "/inherited"}

    assert cache_root("/mine", inherited) == Path("/mine")
    assert cache_root(None, inherited) == Path("/inherited")
    assert cache_root(None, {}) == Path.cwd() / "torch_compile_cache"


# ---- several processes

WORKER = """
import json, sys
from pathlib import Path
from worker.compile.cache import CompileCache
from worker.compile.manifest import Key

folder, key = Path(sys.argv[1]), json.loads(sys.argv[2])
cache = CompileCache(folder / "cache", Key(key), folder / "tmp")
status, built = cache.open(), False
if not status.is_warm:
    with cache.lock():
        status = cache.open()
        if not status.is_warm:
            for number in range(50):
                (cache.copy / "inductor" / f"graph{number}").write_bytes(bytes(1000 * number))
            cache.publish({})
            built = True
        status = cache.open()
held = sum(path.stat().st_size for path in (cache.copy / "inductor").iterdir())
cache.close()
print(json.dumps({"state": status.state, "built": built, "held": held}))
"""


def test_eight_cold_workers_at_once_make_it_once(tmp_path):
    (tmp_path / "tmp").mkdir()
    command = [sys.executable, "-c", WORKER, str(tmp_path), json.dumps(KEY.fields)]
    workers = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(8)]
    reports = [json.loads(worker.communicate(timeout=60)[0]) for worker in workers]

    assert [report["state"] for report in reports] == ["warm"] * 8
    assert [report["held"] for report in reports] == [1000 * sum(range(50))] * 8
    assert sum(report["built"] for report in reports) == 1
    assert list((tmp_path / "tmp" / f"omni-compile-{os.geteuid()}").iterdir()) == []
