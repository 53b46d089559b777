"""tools/ci/count_tests.py: what of a run, or of the parts of one, docs/results.md may state."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[1] / "tools" / "ci" / "count_tests.py"
PASSED = '<testcase name="a" time="1.5"/>'
FAILED = '<testcase name="b" time="2"><failure message="no"/></testcase>'
BROKEN = '<testcase name="c" time="0"><error message="no fixture"/></testcase>'
SKIPPED = '<testcase name="d" time="0"><skipped message="needs a GPU"/></testcase>'


def counted(folder: Path, *suites: str) -> subprocess.CompletedProcess[str]:
    paths = [folder / f"{number}.xml" for number in range(len(suites))]
    for path, cases in zip(paths, suites, strict=True):
        path.write_text(f"<testsuites><testsuite>{cases}</testsuite></testsuites>")
    command = [sys.executable, str(TOOL), *map(str, paths)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_one_file(tmp_path: Path) -> None:
    done = counted(tmp_path, 2 * PASSED + 3 * SKIPPED)
    assert done.stdout.splitlines() == [
        "tests: 2 passed, 0 failed, 3 skipped (3 s of work)",
        "  skipped 3: needs a GPU",
    ]
    assert done.returncode == 0


def test_several_files_are_summed(tmp_path: Path) -> None:
    done = counted(tmp_path, PASSED + SKIPPED, PASSED + FAILED + BROKEN + SKIPPED)
    first, second, total, reasons = done.stdout.splitlines()
    assert first.endswith("0.xml: 1 passed, 0 failed, 1 skipped (2 s of work)")
    assert second.endswith("1.xml: 1 passed, 2 failed, 1 skipped (4 s of work)")
    assert total == "tests: 2 passed, 2 failed, 2 skipped (5 s of work)"
    assert reasons == "  skipped 2: needs a GPU"
    assert done.returncode == 1


@pytest.mark.parametrize("suites", [(), ("",), (SKIPPED,), (PASSED, SKIPPED)])
def test_a_part_of_which_nothing_ran_is_no_proof(suites: tuple[str, ...], tmp_path: Path) -> None:
    assert counted(tmp_path, *suites).returncode == 1
