"""The worker process: it may crash, hang and raise, and never outlives its parent."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from processes import alive, wait_until_gone, with_path
from worker_targets import Target

from flashsmith.tuning.worker import Worker, WorkerResult, wait_for_any

PATIENCE = 30.0


def ask(worker: Worker, method: str, *arguments: Any, seconds: float = PATIENCE) -> WorkerResult:
    """The outcome of one request."""
    worker.request(method, *arguments, seconds=seconds)
    while (outcome := worker.outcome()) is None:
        wait_for_any([worker], PATIENCE)
    return outcome


@pytest.fixture
def worker() -> Iterator[Worker]:
    worker = Worker(Target())
    yield worker
    worker.stop()


def test_one_process_answers_request_after_request(worker: Worker) -> None:
    assert ask(worker, "add", 2, 3) == WorkerResult(5)
    pid = ask(worker, "pid").value
    assert ask(worker, "pid").value == pid
    assert worker.starts == 1
    assert not worker.busy
    worker.stop()
    assert not alive(pid)


@pytest.mark.parametrize(
    ("method", "kind", "reason"),
    [
        ("abort", "crash", "the process was killed by SIGABRT: the last words"),
        ("leave", "crash", "the process ended with 7"),
        ("fail", "error", "ValueError: not like this (worker_targets.py, line"),
        ("no_such_method", "error", "has no attribute 'no_such_method'"),
    ],
)
def test_a_failure_is_an_outcome_and_the_next_request_starts_afresh(
    worker: Worker, method: str, kind: str, reason: str
) -> None:
    pid = ask(worker, "pid").value
    failure = ask(worker, method).failure
    assert failure is not None
    assert (failure.kind, reason in failure.reason) == (kind, True), failure
    assert not alive(pid)
    assert ask(worker, "add", 1, 1).value == 2
    assert worker.starts == 2


def test_a_hang_is_killed_in_time(worker: Worker) -> None:
    pid = ask(worker, "pid").value
    began = time.monotonic()
    failure = ask(worker, "sleep", 3600.0, seconds=0.3).failure
    assert failure is not None
    assert (failure.kind, failure.reason) == ("hang", "not done after 0.3 s")
    assert time.monotonic() - began < 10
    assert not alive(pid)


def test_starting_up_does_not_count_as_hanging(worker: Worker) -> None:
    # A process takes longer than that to import anything.
    assert ask(worker, "add", 1, 2, seconds=0.05).value == 3


@pytest.mark.parametrize(
    ("opens", "reason"),
    [
        ("raises", "RuntimeError: there is no such device"),
        ("dies", "the process ended with 3"),
        ("hangs", "not up after 1 s"),
    ],
)
def test_what_does_not_come_up_is_told_apart(opens: str, reason: str) -> None:
    seconds = 1.0 if opens == "hangs" else 60.0
    worker = Worker(Target(opens), startup_seconds=seconds)
    failure = ask(worker, "add", 1, 1).failure
    assert failure is not None
    # Where a machine is slow, importing alone takes the second.
    assert (failure.kind, reason in failure.reason) == ("startup", True), failure


def test_a_busy_worker_refuses(worker: Worker) -> None:
    worker.request("sleep", 5.0, seconds=PATIENCE)
    with pytest.raises(RuntimeError, match="busy"):
        worker.request("add", 1, 1, seconds=PATIENCE)


def test_waiting_ends_with_the_first_who_is_done(worker: Worker) -> None:
    quick = Worker(Target())
    try:
        ask(worker, "add", 1, 1)
        ask(quick, "add", 1, 1)
        worker.request("sleep", 60.0, seconds=PATIENCE)
        quick.request("sleep", 0.1, seconds=PATIENCE)
        began = time.monotonic()
        wait_for_any([worker, quick], PATIENCE)
        assert time.monotonic() - began < 10
        assert quick.outcome() == WorkerResult("slept")
        assert worker.outcome() is None
    finally:
        quick.stop()


def test_a_gentle_worker_ends_its_children_when_it_is_stopped(tmp_path: Path) -> None:
    worker = Worker(Target(), gentle=True)
    note = tmp_path / "pids"
    worker.request("compile_for_long", str(note), seconds=PATIENCE)
    pids = read_pids(worker, note)
    worker.stop()
    wait_until_gone(pids)


def read_pids(worker: Worker, note: Path) -> list[int]:
    while not (note.exists() and len(note.read_text().split()) == 2):
        assert worker.outcome() is None
        time.sleep(0.02)
    return [int(word) for word in note.read_text().split()]


PARENT = """
import sys, time
sys.path[:0] = [{tests!r}]
from worker_targets import Target
from flashsmith.tuning.worker import Worker
worker = Worker(Target(), gentle={gentle})
worker.request("compile_for_long", {note!r}, seconds=600)
while worker.outcome() is None:
    time.sleep(0.02)
"""


@pytest.mark.parametrize("gentle", [False, True])
def test_a_killed_parent_takes_its_worker_along(tmp_path: Path, gentle: bool) -> None:
    note = tmp_path / "pids"
    tests = str(Path(__file__).parent)
    program = PARENT.format(tests=tests, gentle=gentle, note=str(note))
    parent = subprocess.Popen([sys.executable, "-c", program], env=with_path())
    deadline = time.monotonic() + 60
    while not (note.exists() and len(note.read_text().split()) == 2):
        assert parent.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process, child = map(int, note.read_text().split())
    parent.kill()
    parent.wait()
    # A gentle one ends what it started; the other leaves that to its builder.
    wait_until_gone([process, child] if gentle else [process])
    if not gentle:
        subprocess.run(["kill", str(child)], check=True)


def test_what_the_target_needs_is_found_where_this_process_finds_it(worker: Worker) -> None:
    assert ask(worker, "add", 4, 5).value == 9  # worker_targets is on this process's path alone
