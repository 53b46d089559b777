"""The scripts of examples/ run, and README names each of them."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted((ROOT / "examples").glob("*.py"))


def marked(script: Path) -> object:
    """PyTorch's are skipped where it is not installed; one that takes the emulator half a minute is
    run by shards."""
    needs_torch = re.search(r"^import torch$", script.read_text(), re.MULTILINE)
    marks = [pytest.mark.torch] * (needs_torch is not None)
    marks += [pytest.mark.full] * (script.name == "one_set_of_bits.py")
    return pytest.param(script, id=script.name, marks=marks)


@pytest.mark.parametrize("script", [*map(marked, SCRIPTS)])
def test_an_example_runs(
    script: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # A script may set it; what a test sets is taken back.
    monkeypatch.setenv("FLASHSMITH_EMULATE", "1")
    monkeypatch.setattr(sys, "argv", [str(script)])
    runpy.run_path(str(script), run_name="__main__")
    assert capsys.readouterr().out


def test_the_readme_names_the_examples() -> None:
    assert len(SCRIPTS) == 5
    readme = (ROOT / "README.md").read_text()
    for script in SCRIPTS:
        assert f"](examples/{script.name})" in readme
