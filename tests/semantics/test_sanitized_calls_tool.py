"""tools/gpu/sanitized_calls.py: which calls a tool is started on, and what is read from it. No GPU:
compute-sanitizer is a stand-in that proves nothing, and says what a test has written for it."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from grids.decode_grid import watched_decode_cases

CASES = ["first", "second", "third", "fourth", "fifth"]
CLEAN = {"summary": "ERROR SUMMARY: 0 errors", "proven": "True", "exit": 0}
STAND_IN = f"""#!{sys.executable}
import json, sys, time
from pathlib import Path
plan = Path(sys.argv[0]).parent
number = sys.argv[sys.argv.index("--part") + 1].split("/")[0]
with (plan / "started").open("a") as file:
    file.write(json.dumps(sys.argv[1:]) + chr(10))
does = json.loads((plan / "does.json").read_text())[int(number) - 1]
if does.get("child"):
    import subprocess
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    (plan / "child").write_text(str(child.pid))
time.sleep(does.get("sleeps", 0))
rows = next(word for word in sys.argv if word.endswith(".rows.csv"))
if does["proven"]:
    case = json.loads((plan / "cases.json").read_text())[int(number) - 1]
    row = case + "," + does["proven"] + ",right"
    Path(rows).write_text("case,ok,said" + chr(10) + row + chr(10))
if does["summary"]:
    print("========= " + does["summary"])
sys.exit(does["exit"])
"""


class StandIn:
    """``folder`` holds the stand-in and its plan, and the rows of the tool's runs."""

    def __init__(self, tool: ModuleType, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.tool, self.monkeypatch, self.folder = tool, monkeypatch, folder
        script = folder / "compute-sanitizer"
        script.write_text(STAND_IN)
        script.chmod(0o755)
        (folder / "cases.json").write_text(json.dumps(CASES))
        monkeypatch.setenv("PATH", str(folder), prepend=":")
        monkeypatch.setattr(tool, "handful", lambda family: CASES)

    def run(self, does: list[dict[str, object]], *options: str, tool: str = "memcheck") -> int:
        """The exit status; ``does``: of each call."""
        (self.folder / "does.json").write_text(json.dumps(does))
        (self.folder / "started").write_text("")
        words = ["sanitized_calls.py", str(self.folder / "seen.csv"), "--tool", tool]
        words += ["--family", "mma_sync_decode", "--kernels", "decode", "--at-once", "3", *options]
        self.monkeypatch.setattr(sys, "argv", words)
        status: int = self.tool.main()
        return status

    def commands(self) -> list[list[str]]:
        return [json.loads(line) for line in (self.folder / "started").read_text().splitlines()]

    def outcomes(self) -> list[str]:
        with (self.folder / "seen.csv").open(newline="") as file:
            rows = list(csv.DictReader(file))
        assert [row["case"] for row in rows] == CASES
        return [row["outcome"] for row in rows]


@pytest.fixture
def stand_in(
    load_tool: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> StandIn:
    return StandIn(load_tool("gpu/sanitized_calls.py"), monkeypatch, tmp_path)


def test_each_call_is_a_process_of_its_own(
    stand_in: StandIn, capsys: pytest.CaptureFixture[str]
) -> None:
    assert stand_in.run([CLEAN] * 5, tool="racecheck") == 0
    assert stand_in.outcomes() == ["clean"] * 5
    assert "racecheck: 5 of 5 calls seen, 0 reported" in capsys.readouterr().out
    parts, ports = set(), set()
    for words in stand_in.commands():
        assert words[:2] == ["--tool", "racecheck"]
        assert "--handful" in words
        assert words[words.index("--kernel-name") + 1] == "kernel_substring=decode"
        parts.add(words[words.index("--part") + 1])
        ports.add(words[words.index("--port") + 1])
    assert parts == {f"{number}/5" for number in range(1, 6)}
    assert len(ports) == 5, "instances beside each other must not meet"


@pytest.mark.parametrize(
    ("does", "outcome", "status"),
    [
        ({"summary": "ERROR SUMMARY: 3 errors", "exit": 9}, "reported", 9),
        # Its exit status alone may say so, or its summary.
        ({"summary": "RACECHECK SUMMARY: 2 hazards displayed (2 errors)"}, "reported", 9),
        ({"exit": 9}, "reported", 9),
        ({"summary": "", "exit": 255}, "exit 255", 2),
        ({"summary": ""}, "exit 0", 2),
        # The kernel gave nothing that is right: what the tool saw is not the call.
        ({"proven": "False", "exit": 1}, "exit 1", 2),
        ({"proven": "", "exit": 2}, "exit 2", 2),
    ],
)
def test_only_proven_calls_with_a_summary_are_seen(
    stand_in: StandIn, does: dict[str, object], outcome: str, status: int
) -> None:
    assert stand_in.run([CLEAN, CLEAN, CLEAN | does, CLEAN, CLEAN]) == status
    assert stand_in.outcomes() == ["clean", "clean", outcome, "clean", "clean"]


def test_a_call_that_hangs_is_ended_and_keeps_no_other(
    stand_in: StandIn, capsys: pytest.CaptureFixture[str]
) -> None:
    hangs = CLEAN | {"sleeps": 600, "child": True}
    assert stand_in.run([CLEAN, CLEAN, CLEAN, CLEAN, hangs], "--seconds", "6") == 2
    assert stand_in.outcomes() == ["clean"] * 4 + ["out of time"]
    out = capsys.readouterr().out
    assert "5 out of time" in out
    assert "4 of 5 calls seen" in out
    child = (stand_in.folder / "child").read_text()
    # Where cores are taken, what has been killed may be seen to run for a while.
    patience = time.monotonic() + 60
    while (state := _state_of(child)) not in ("", "Z"):
        assert time.monotonic() < patience, f"its child runs on: {state}"
        time.sleep(0.1)


def _state_of(process: str) -> str:
    """As ps says it: nothing of one that is gone, Z of one that nobody has waited for."""
    asked = ["ps", "-o", "stat=", "-p", process]
    return subprocess.run(asked, capture_output=True, text=True).stdout.strip()[:1]


def test_clean_calls_are_not_run_again(stand_in: StandIn) -> None:
    errors = CLEAN | {"summary": "ERROR SUMMARY: 1 error", "exit": 9}
    assert stand_in.run([CLEAN, errors, CLEAN, CLEAN | {"proven": ""}, CLEAN]) == 9
    assert stand_in.run([CLEAN] * 5, "--", "--racecheck-num-workers", "2") == 0
    again = stand_in.commands()
    assert {words[words.index("--part") + 1] for words in again} == {"2/5", "4/5"}
    assert all("--racecheck-num-workers" in words[: words.index("--family")] for words in again)
    assert stand_in.outcomes() == ["clean"] * 5


def test_the_longest_calls_begin_first(stand_in: StandIn) -> None:
    stand_in.run([CLEAN] * 5, "--at-once", "1")
    parts = [words[words.index("--part") + 1] for words in stand_in.commands()]
    assert parts == [f"{number}/5" for number in (5, 4, 3, 2, 1)]


def test_parts_are_the_cases_of_the_grid_tool(load_tool: Callable[[str], ModuleType]) -> None:
    """--part N/COUNT of prove_grid.py is the case that this tool calls the Nth."""
    grid = load_tool("gpu/prove_grid.py")
    cases = grid.handful("mma_sync_decode")
    for number, case in enumerate(cases, 1):
        assert cases[grid.part_of(f"{number}/{len(cases)}")] == [case]
    texts = [str(case) for case in cases]
    assert len(set(texts)) == len(texts)
    assert {str(case) for case in watched_decode_cases("mma_sync_decode")} <= set(texts)
