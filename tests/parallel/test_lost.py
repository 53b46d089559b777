"""Ranks that get lost: what becomes of the others, in processes of gloo."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytest.importorskip("torch", reason="needs PyTorch: it is not installed")
pytestmark = pytest.mark.torch

import flashsmith.parallel.watch as module  # noqa: E402
from flashsmith.parallel.watch import Watch  # noqa: E402

SCRIPT = Path(__file__).parent / "lost_ranks.py"
TIMEOUT = 6.0
LOST = "group: rank 0 of 2 lost the others"


class Survivor(NamedTuple):
    """What became of rank 0: its exit status, None where it hung; the error that it was given; and
    what it wrote."""

    status: int | None
    said: str
    written: str


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *map(str, command)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
    )


def survivors(folder: Path, cases: Sequence[dict[str, Any]]) -> dict[str, Survivor]:
    file = folder / "cases.json"
    file.write_text(json.dumps([{"timeout": TIMEOUT, **case} for case in cases]))
    done = run(SCRIPT, folder, file)
    assert done.returncode == 0, done.stderr
    statuses = json.loads(done.stdout)
    found = {}
    for case in cases:
        name = case["name"]
        said = folder / f"{name}.said"
        found[name] = Survivor(
            statuses.get(name),
            said.read_text() if said.exists() else "",
            (folder / f"{name}-0.err").read_text(),
        )
    return found


# --- without kernels -----------------------------------------------------------------------------

# What the host is told while it waits for others itself.
HOST = {
    "killed": "",
    "ended": "",
    "raised": "",
    "stopped": "is stopped by a signal",
    "silent": "did not arrive within 6 s",
}
# What a process says that its GPU keeps from raising anything.
GPU = {
    "killed": "rank 1 has ended, and this rank has waited for it",
    "raised": "rank 1 has ended, and this rank has waited for it",
    "stopped": "and the group's timeout is 6 s",
    "silent": "and the group's timeout is 6 s",
}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Survivor]:
    cases = [{"name": f"host {how}", "how": how} for how in HOST]
    cases += [{"name": f"gpu {how}", "how": how, "stuck": "synchronize"} for how in GPU]
    cases += [
        {"name": "asking", "how": "killed", "stuck": "asking"},
        {"name": "exit", "how": "killed", "stuck": "exit"},
        {"name": "elsewhere", "how": "killed", "stuck": "elsewhere"},
    ]
    return survivors(tmp_path_factory.mktemp("lost"), cases)


@pytest.mark.parametrize("how", HOST)
def test_a_rank_that_waits_for_a_lost_one_gets_a_group_error(
    pairs: dict[str, Survivor], how: str
) -> None:
    found = pairs[f"host {how}"]
    assert found.status == 0, found
    assert found.said.startswith(f"GroupError: {LOST}")
    assert HOST[how] in found.said


@pytest.mark.parametrize("how", GPU)
def test_a_process_whose_gpu_waits_for_a_lost_rank_ends_and_says_why(
    pairs: dict[str, Survivor], how: str
) -> None:
    found = pairs[f"gpu {how}"]
    assert (found.status, found.said) == (1, ""), found
    assert f"flashsmith.errors.GroupError: {LOST}" in found.written
    assert GPU[how] in found.written
    assert "in wait_for_ever" in found.written  # where the thread is that waits


def test_a_gpu_that_does_not_answer_holds_up_nothing(pairs: dict[str, Survivor]) -> None:
    found = pairs["asking"]
    assert found.status == 1, found
    assert GPU["killed"] in found.written


def test_a_process_that_waits_elsewhere_is_left_alone(pairs: dict[str, Survivor]) -> None:
    """In a collective of the caller's, or for a file: no call is pending, so none is lost."""
    found = pairs["elsewhere"]
    assert (found.status, found.said, found.written) == (0, "", ""), found


def test_an_interpreter_that_cannot_end_is_killed(pairs: dict[str, Survivor]) -> None:
    found = pairs["exit"]
    assert found.said.startswith(f"GroupError: {LOST}")
    assert found.status == -signal.SIGALRM, found


# --- in the calls of each schedule ---------------------------------------------------------------

TOOL = Path(__file__).parents[2] / "tools" / "gpu" / "parallel_lost.py"


@pytest.mark.full
def test_a_rank_that_is_lost_within_a_call_of_each_schedule(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    options = {
        "--device": "cpu", "--heads": "4:2", "--d": "64", "--seqs": "32", "--timeout": "20",
        "--slack": "100", "--ways": "killed,stopped,between",
    }  # fmt: skip
    done = run(TOOL, rows, *[part for pair in options.items() for part in pair])
    assert done.returncode == 0, done.stdout + done.stderr
    found = [json.loads(line) for line in rows.read_text().splitlines()]
    assert len(found) == 9
    for row in found:
        if row["way"] == "between":  # gloo's own error
            assert (row["status"], row["raised"]) == (1, False), row
            assert "Error" in row["said"]
            continue
        assert row["raised"], row
        assert row["status"] in (1, -signal.SIGALRM)  # gloo may keep it from ending
        assert row["said"].startswith(f"GroupError: {LOST}")
    assert done.stdout.count(" over after ") == 9


# --- the watch itself ----------------------------------------------------------------------------


class Marks:
    """Of a GPU that gets as far as it is let."""

    def __init__(self) -> None:
        self.set_so_far = self.done = 0

    def set(self, stream: Any) -> None:
        self.set_so_far += 1

    def reached(self) -> bool:
        return self.done >= self.set_so_far


class Device(NamedTuple):
    type: str = "planted"


def planted(monkeypatch: pytest.MonkeyPatch, lost: list[str]) -> tuple[Watch, Marks]:
    marks = Marks()
    monkeypatch.setitem(module.MARKS, "planted", lambda device: marks)
    return Watch(0, 2, 60.0, lambda: lost[0]), marks


def test_what_goes_on_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    watch, marks = planted(monkeypatch, [""])
    for _ in range(10):
        # A mark every 40 s, of which the GPU reaches the one before.
        watch.mark(Device())
        watch.ask()
        assert watch.reason(40.0) == ""
        marks.done += 1
    watch.ask()
    assert watch.reason(1000.0) == watch.reason(1000.0) == ""


def test_a_late_rank_is_waited_for_as_long_as_the_group_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watch, marks = planted(monkeypatch, [""])
    watch.mark(Device())
    watch.ask()
    assert [bool(watch.reason(1.0)) for _ in range(70)].index(True) == 64
    marks.done = 1
    watch.ask()
    assert watch.reason(1.0) == ""


def test_a_rank_that_has_ended_is_waited_for_as_long_as_a_gpu_needs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lost = [""]
    watch, _ = planted(monkeypatch, lost)
    watch.mark(Device())
    assert [watch.reason(1.0) for _ in range(31)] == [""] * 31
    lost[0] = "rank 1 has ended"
    # Not from when it began to wait: the host may find it by itself, and raise.
    assert [bool(watch.reason(1.0)) for _ in range(7)] == [False] * 5 + [True] * 2


def test_a_rank_that_ends_when_nothing_is_owed_is_no_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    watch, marks = planted(monkeypatch, ["rank 1 has ended"])
    watch.mark(Device())
    marks.done = 1
    watch.ask()
    assert [watch.reason(1.0) for _ in range(100)] == [""] * 100


def test_a_host_that_does_not_return_is_seen_without_a_gpu() -> None:
    watch = Watch(0, 2, 60.0, lambda: "")
    with watch.waiting():
        assert [bool(watch.reason(1.0)) for _ in range(70)].index(True) == 64
    assert watch.reason(1.0) == ""


def test_an_error_of_cuda_is_left_to_the_calls_of_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watch, marks = planted(monkeypatch, ["rank 1 has ended"])

    def reached() -> bool:
        raise RuntimeError("an illegal address")

    monkeypatch.setattr(marks, "reached", reached)
    watch.mark(Device())
    watch.ask()
    assert [watch.reason(1.0) for _ in range(9)] == [""] * 9
