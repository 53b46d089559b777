"""tools/ci/find_python.py: an interpreter of a version, or this one."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

OURS = "{}.{}".format(*sys.version_info[:2])


@pytest.fixture
def tool(
    load_tool: Callable[[str], ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> ModuleType:
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path / "pyenv"))
    return load_tool("ci/find_python.py")


def interpreter(path: Path, script: str) -> str:
    path.parent.mkdir(parents=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def test_a_shim_that_runs_nothing_is_passed_over(tool: ModuleType, tmp_path: Path) -> None:
    interpreter(tmp_path / "bin" / f"python{OURS}", "echo not installed >&2; exit 127")
    real = tmp_path / "pyenv" / "versions" / f"{OURS}.1" / "bin" / "python"
    expected = interpreter(real, f'exec {sys.executable} "$@"')
    assert tool.find_python(OURS) == expected


def test_one_of_another_version_is_not_taken(tool: ModuleType, tmp_path: Path) -> None:
    interpreter(tmp_path / "bin" / "python3.5", f'exec {sys.executable} "$@"')
    assert tool.find_python("3.5") == sys.executable


def test_without_one_it_is_this(tool: ModuleType) -> None:
    assert tool.find_python(OURS) == sys.executable
