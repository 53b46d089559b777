"""The types of the public functions: mypy as a user runs it, who has PyTorch's own types."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

CALLS = Path(__file__).with_name("typed_calls.py")

CARELESS = """
import flashsmith

flashsmith.attention(1, "x", None)
flashsmith.sdpa(1, "x", None)
"""


@pytest.mark.full
@pytest.mark.torch
def test_mypy_accepts_tensors_and_refuses_what_is_none(tmp_path: Path) -> None:
    if importlib.util.find_spec("mypy") is None:
        pytest.skip("needs mypy: it is not installed")
    careless = tmp_path / "careless.py"
    careless.write_text(CARELESS)
    mypy = [sys.executable, "-m", "mypy", "--config-file=", "--warn-unused-ignores"]
    done = subprocess.run(
        [*mypy, "--cache-dir", str(tmp_path / "cache"), str(careless), str(CALLS)],
        capture_output=True,
        text=True,
        timeout=600,
    )
    lines = done.stdout.splitlines()
    assert len(lines) == 7, done.stdout + done.stderr
    for line, (place, number) in zip(lines, [(4, n) for n in (1, 2, 3)], strict=False):
        assert f'careless.py:{place}: error: Argument {number} to "attention" has' in line
    for line, number in zip(lines[3:6], (1, 2, 3), strict=True):
        assert f'careless.py:5: error: Argument {number} to "sdpa" has' in line
