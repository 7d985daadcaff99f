"""`precompile.py`: builds once, verifies in a second start, keeps nothing that does not hold."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import precompile
from tests.fakes.launch import hear_signals
from worker.compile.master import Master

ROOT = Path(__file__).parents[1]


SCRIPT = """
import sys
from pathlib import Path
import precompile
from tests.test_precompile import fake_command

folder, *habits = sys.argv[1:]
arguments = ["--config", folder + "/config.json"]
command_of = lambda *paths: [*fake_command(*paths), *habits]
sys.exit(precompile.main(arguments, command_of, Path(folder) / "run"))
"""


def fake_command(config, port, report):
    argv = [sys.executable, "-m", "tests.fakes.starting_worker", "--config", str(config)]
    return [*argv, "--port", str(port), "--start-only", str(report)]


class Program:
    """`precompile.main` with a fake worker, on a cache of its own."""

    def __init__(self, folder, capsys):
        self.folder, self.capsys = folder, capsys
        self.cache = folder / "cache"
        self.out = self.err = ""
        self.habits = []
        self.write_config()

    def write_config(self, **sections):
        content = {"compile": {"cache_dir": str(self.cache)}, **sections}
        (self.folder / "config.json").write_text(json.dumps(content))

    def run(self, *arguments):
        def command_of(*paths):
            # The first worker has the first habits, and so on; the last ones stay.
            habits = self.habits.pop(0) if len(self.habits) > 1 else (self.habits or [[]])[0]
            return [*fake_command(*paths), *habits]

        argv = ["--config", str(self.folder / "config.json"), *arguments]
        status = precompile.main(argv, command_of, self.folder / "run")
        self.out, self.err = self.capsys.readouterr()
        return status

    def spawn(self, *habits):
        """Run it as a process of its own."""
        argv = [sys.executable, "-c", SCRIPT, str(self.folder), *habits]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen(argv, cwd=ROOT, text=True, preexec_fn=hear_signals, **pipes)

    @property
    def result(self):
        return json.loads(self.out.splitlines()[-1])

    @property
    def starts(self):
        """The configuration of every worker that was started, oldest first."""
        return [json.loads(line) for line in (self.folder / "starts").read_text().splitlines()]

    @property
    def caches(self):
        return [path for path in self.cache.glob("*") if len(path.name) == 16]


@pytest.fixture
def program(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("FAKE_LOG", str(tmp_path / "starts"))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    before = signal.getsignal(signal.SIGTERM)
    yield Program(tmp_path, capsys)
    signal.signal(signal.SIGTERM, before)


def test_the_first_time_builds_and_verifies_in_a_second_start(program):
    assert program.run() == 0

    result = program.result
    assert result["built"]
    assert (result["cold_s"], result["verify_s"], result["weights_s"]) == (3.5, 3.5, 9.0)
    assert (result["graphs"], result["files"]) == (5, 1)
    assert result["stages"]["verify"]["load_model"] == 9.0
    assert [start["compile"]["on_cold"] for start in program.starts] == ["compile", "eager"]
    manifest = Master(program.cache, result["fingerprint"]).check()
    assert manifest.verify["warm_s"] == 3.5
    assert (manifest.verify["graphs"], manifest.verify["fx_misses"]) == (5, 0)


def test_the_second_time_only_verifies(program):
    program.run()
    made = program.caches[0] / "inductor/graph"
    content = made.read_text()

    assert program.run() == 0
    assert not program.result["built"]
    assert "was there already" in program.out
    assert len(program.starts) == 3
    assert made.read_text() == content


def test_two_at_once_build_once(program):
    both = [program.spawn(), program.spawn()]
    results = [json.loads(one.communicate(timeout=60)[0].splitlines()[-1]) for one in both]

    assert sorted(result["built"] for result in results) == [False, True]


def test_force_builds_anew(program):
    program.run()
    made = program.caches[0] / "inductor/graph"
    content = made.read_text()

    assert program.run("--force") == 0
    assert program.result["built"]
    assert made.read_text() != content
    assert list(program.cache.glob(".old*")) == []


def test_a_forced_build_that_fails_leaves_the_older_cache(program):
    program.run()
    made = program.caches[0] / "inductor/graph"
    content = made.read_text()
    program.habits = [[], ["dies"]]

    assert program.run("--force") == 1
    assert made.read_text() == content
    assert list(program.cache.glob(".old*")) == []


def test_a_cache_that_the_second_start_does_not_find_whole_is_removed(program):
    program.habits = [[], ["misses"]]

    assert program.run() == 1
    assert "the second start was not warm" in program.err
    assert "2 graphs were not in it" in program.err
    assert program.caches == []


def test_what_a_second_start_adds_has_to_be_found_by_a_third(program):
    program.habits = [["adds"]]

    assert program.run() == 0
    assert "that one has added 1 files" in program.out
    assert len(program.starts) == 3
    assert program.result["files"] == 2


def test_a_cache_to_which_every_start_adds_is_removed(program):
    program.habits = [["keeps-adding"]]

    assert program.run() == 1
    assert "1 files were written" in program.err
    assert len(program.starts) == 3
    assert program.caches == []


def test_what_was_made_but_not_shared_is_no_success(program):
    program.habits = [["unshared"]]

    assert program.run() == 1
    assert "it is cold" in program.err


def test_an_older_cache_that_does_not_hold_is_made_anew(program):
    program.run()
    program.habits = [["misses"], []]

    assert program.run() == 0
    assert program.result["built"]
    assert "made anew" in program.out


def test_verify_only_builds_nothing(program):
    assert program.run("--verify-only") == 1
    assert "it is cold" in program.err
    assert program.caches == []
    assert [start["compile"]["on_cold"] for start in program.starts] == ["eager"]


def test_verify_only_names_what_has_changed(program):
    program.run()

    assert program.run("--verify-only", "--modules", "llm", "tts") == 1
    assert "it is stale; modules is ['llm', 'tts'], was 'all'" in program.err


def test_verify_only_of_a_whole_cache_is_a_success(program):
    program.run()

    assert program.run("--verify-only") == 0
    assert not program.result["built"]


def test_verify_only_leaves_a_cache_that_does_not_hold(program):
    program.run()
    program.habits = [["misses"]]

    assert program.run("--verify-only") == 1
    assert len(program.caches) == 1


def test_the_command_line_decides_what_is_compiled(program):
    program.write_config(compile={"cache_dir": str(program.cache), "encoders": False})

    assert program.run("--modules", "tts", "llm", "--mode", "max-autotune") == 0

    section = program.starts[0]["compile"]
    assert (section["modules"], section["mode"]) == (["llm", "tts"], "max-autotune")
    assert not section["encoders"]
    assert "if their configuration says the same" in program.out


def test_workers_compile_whatever_the_machine_has(program):
    """ "auto" on a machine without GPU would compile nothing."""
    program.run()

    assert program.starts[0]["service"]["compile"] is True


def test_an_unknown_module_is_named(program):
    assert program.run("--modules", "lmm") == 2
    assert "did you mean llm" in program.err


def test_a_service_that_compiles_nothing_needs_no_cache(program):
    program.write_config(service={"compile": False})

    assert program.run() == 2
    assert "service.compile is false" in program.err


def test_a_back_end_without_regions_is_told(program):
    program.habits = [["disabled"]]

    assert program.run() == 1
    assert "compiles nothing" in program.err


def test_a_cache_of_nothing_is_no_success(program):
    program.habits = [["empty"]]

    assert program.run() == 1
    assert "nothing is compiled" in program.err
    assert program.caches == []


def test_a_worker_that_dies_is_told_with_its_last_lines(program):
    program.habits = [["dies"]]

    assert program.run() == 1
    assert "ended with status 1" in program.err
    assert "there is no GPU with enough memory" in program.err
    log = program.folder / "run/precompile.log"
    assert str(log) in program.err
    assert "no GPU" in log.read_text()


def test_a_worker_without_a_report_is_told(program):
    program.habits = [["silent"]]

    assert program.run() == 1
    assert "left no report" in program.err


def test_progress_is_told_while_a_worker_starts(program):
    program.habits = [["slow"], []]

    assert program.run() == 0
    assert "apply_torch_compile  40% (2.0 s, about 3 s left); llm.decode 4" in program.out


def test_a_root_that_cannot_be_trusted_is_told(program):
    program.run()
    program.cache.chmod(0o777)
    program.habits = [[]]

    assert program.run() == 1
    assert "written to by everybody" in program.err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_worker_too(tmp_path, program, number):
    running = program.spawn("hangs")
    pid_file = tmp_path / "starts.pid"
    deadline = time.monotonic() + 20
    while not (pid_file.exists() and pid_file.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    running.send_signal(number)
    _, errors = running.communicate(timeout=20)

    assert running.returncode == 130
    assert errors.strip() == "stopped"
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_file.read_text()), 0)


def test_without_gpu_a_switch_that_is_still_missing_is_named(program):
    """ "auto" compiles nothing there, so no worker would look for what was built."""
    program.run()
    assert "set service.compile to true" in program.out

    program.write_config(service={"compile": True})
    program.run()
    assert "set service.compile to true" not in program.out


def test_a_place_that_cannot_be_written_to_is_told_before_anything_is_compiled(
    tmp_path, capsys
) -> None:
    (tmp_path / "file").write_text("")
    config = tmp_path / "config.json"
    settings = {"compile": {"cache_dir": str(tmp_path / "file" / "below")}}
    config.write_text(json.dumps(settings))

    def never(*_: object) -> list[str]:
        raise AssertionError("a worker was started")

    assert precompile.main(["--config", str(config)], never, tmp_path) == 1
    assert "below cannot be used" in capsys.readouterr().err
