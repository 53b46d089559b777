"""Parallel compilers: how many at once, and what remains after a failure."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from flashsmith.builder.processes import Command, run_all
from flashsmith.errors import CacheError, CompileError


def shell(name, script):
    return Command(name, ("/bin/sh", "-c", script))


def run(commands, tmp_path, jobs=2):
    done = []
    run_all(commands, cwd=tmp_path, jobs=jobs, finished=done.append)
    return done


def test_every_command_runs_and_its_output_is_returned(tmp_path):
    commands = [shell(f"c{i}", f"echo out{i}; echo err{i} >&2") for i in range(5)]
    done = run(commands, tmp_path)
    assert {d.command.name: d.output for d in done} == {
        f"c{i}": f"out{i}\nerr{i}\n" for i in range(5)
    }


@pytest.mark.parametrize("jobs", [1, 3])
def test_no_more_run_at_once_than_allowed(tmp_path, jobs):
    # A directory read whole: `ls run.*` would trip over a file that another command just removed.
    script = "touch run.$$; ls | grep -c ^run; sleep 0.1; rm run.$$"
    done = run([shell(f"c{i}", script) for i in range(6)], tmp_path, jobs=jobs)
    assert max(int(d.output) for d in done) == jobs


def test_a_failure_carries_the_words_and_the_command(tmp_path):
    failing = shell("shard_3", "echo 'a.cu(5): error: expected a \";\"' >&2; exit 2")
    with pytest.raises(CompileError) as caught:
        run([failing], tmp_path)
    words = str(caught.value)
    assert words.startswith("shard_3: /bin/sh ended with 2:\na.cu(5): error: expected")
    assert "The command was: /bin/sh -c" in words


def test_long_words_keep_their_beginning_and_end(tmp_path):
    script = "echo first; seq 1 20000; echo last; exit 1"
    with pytest.raises(CompileError) as caught:
        run([shell("c", script)], tmp_path)
    words = str(caught.value)
    assert len(words) < 8000
    assert "first" in words
    assert "last" in words


def test_a_failure_ends_the_others_with_their_children(tmp_path):
    long = shell("long", "sh -c 'echo $$ > child; exec sleep 60' & wait")
    failing = shell("failing", "while [ ! -s child ]; do sleep 0.01; done; exit 1")
    start = time.monotonic()
    with pytest.raises(CompileError, match="failing"):
        run([long, failing], tmp_path)
    assert time.monotonic() - start < 30
    child = int((tmp_path / "child").read_text())
    for _ in range(500):
        if not _alive(child):
            break
        time.sleep(0.01)
    assert not _alive(child)


def _alive(pid):
    """Whether a process runs; one that ended but was not collected yet does not."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_an_interrupt_ends_the_compilers(tmp_path):
    command = shell("long", "echo $$ > pid; exec sleep 60")
    quick = shell("quick", "while [ ! -s pid ]; do sleep 0.01; done")

    def interrupt(done):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_all([command, quick], cwd=tmp_path, jobs=2, finished=interrupt)
    assert not _alive(int((tmp_path / "pid").read_text()))


def test_a_killed_compiler_is_reported_as_such(tmp_path):
    with pytest.raises(CompileError, match=r"killed by signal 9 \(out of memory\? .*JOBS=1"):
        run([shell("c", "kill -9 $$")], tmp_path)


def test_a_compiler_that_cannot_start(tmp_path):
    with pytest.raises(CompileError, match="c: /no/such/nvcc does not run"):
        run([Command("c", ("/no/such/nvcc",))], tmp_path)


def test_a_compiler_on_a_full_disk(tmp_path):
    script = "echo '/usr/bin/ld: final link failed: No space left on device' >&2; exit 1"
    with pytest.raises(CacheError, match=r"the disk is full.*No space left"):
        run([shell("link", script)], tmp_path)


def test_the_environment_of_a_compiler(tmp_path, monkeypatch):
    monkeypatch.setenv("NVCC_APPEND_FLAGS", "-O0")
    monkeypatch.setenv("TMPDIR", "/elsewhere")
    (done,) = run([shell("c", 'echo "$NVCC_APPEND_FLAGS|$TMPDIR|$LC_ALL"')], tmp_path)
    assert done.output == f"|{tmp_path}|C\n"
    assert os.environ["TMPDIR"] == "/elsewhere"


# ---- when the process that started the compilers ends ----

PARENT = """
import os, signal, sys
from pathlib import Path
from flashsmith.builder.processes import Command, run_all

# As deep as nvcc's: a shell's child, one of another session, one that ignores what it can.
script = (
    "echo $$ >> pids; (echo $(sh -c 'echo $PPID') >> pids; sleep 60; :) &"
    "setsid sh -c 'echo $$ >> pids; sleep 60; :' &"
    "trap '' TERM HUP INT QUIT; echo ready >> pids; while :; do sleep 1; done"
)
if sys.argv[2] == "orderly":  # the groups of the compilers are killed then
    script = script.replace("setsid ", "")
# What a job in the background ignores, or one without a terminal.
signal.signal(signal.SIGINT, signal.default_int_handler)
for ignored in (signal.SIGQUIT, signal.SIGHUP):
    signal.signal(ignored, signal.SIG_DFL)
commands = [Command(name, ("/bin/sh", "-c", script)) for name in ("one", "two")]
if sys.argv[2] == "fork" and os.fork() == 0:
    os.setsid()
    import time
    time.sleep(20)  # holds all that its parent had open
    os._exit(0)
run_all(commands, cwd=Path(sys.argv[1]), jobs=2, finished=print)
"""


def check_compilers_end_with(number, tmp_path, how="plain"):
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path), how])
    pids = tmp_path / "pids"
    words = []
    while words.count("ready") < 2 or len(words) < 8:
        assert parent.poll() is None
        time.sleep(0.02)
        words = pids.read_text().split() if pids.exists() else []
    started = [int(word) for word in words if word != "ready"]
    assert all(map(_alive, started))
    parent.send_signal(number)
    parent.wait(timeout=30)
    deadline = time.monotonic() + 5
    while any(map(_alive, started)) and time.monotonic() < deadline:
        time.sleep(0.05)
    left = list(filter(_alive, started))
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_compilers_end_with_their_parent(number, tmp_path):
    check_compilers_end_with(number, tmp_path)


def test_compilers_end_with_their_parent_though_a_forked_child_lives_on(tmp_path):
    check_compilers_end_with(signal.SIGKILL, tmp_path, "fork")


@pytest.mark.full
@pytest.mark.parametrize(
    "name", ["HUP", "INT", "QUIT", "ABRT", "SEGV", "BUS", "USR1", "ALRM", "XCPU", "SYS"]
)
def test_compilers_end_with_their_parent_by_any_signal(name, tmp_path):
    how = "orderly" if name == "INT" else "plain"
    check_compilers_end_with(getattr(signal, f"SIG{name}"), tmp_path, how)


def test_no_other_process_is_killed(tmp_path):
    """Not even who keeps temporary files in a folder of a name like that."""
    other = subprocess.Popen(["sleep", "60"], env={**os.environ, "TMPDIR": f"{tmp_path}x"})
    try:
        check_compilers_end_with(signal.SIGKILL, tmp_path)
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_nothing_watches_once_the_compilers_are_done(tmp_path):
    run([shell("c", "true")], tmp_path)
    # The watchdog is gone by now; a child of its that was killed with it takes a moment.
    deadline = time.monotonic() + 10
    while left := _named_in_a_command(tmp_path):
        assert time.monotonic() < deadline, left
        time.sleep(0.01)


def _named_in_a_command(folder):
    """The command lines of processes that name a folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found.append(path.read_text())
    return [line for line in found if str(folder) in line]
