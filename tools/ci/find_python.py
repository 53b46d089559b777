"""Prints the interpreter for a Python version such as 3.10, or the current one if that version is
not installed.

Usage: python tools/ci/find_python.py 3.10

Searches PATH and the versions of pyenv, because the commands of pyenv on PATH may be shims that do
not run.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path


def candidates(version: str) -> Iterator[str]:
    found = shutil.which(f"python{version}")
    if found is not None:
        yield found
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    yield from map(str, sorted(root.glob(f"versions/{version}.*/bin/python")))


def runs(interpreter: str, version: str) -> bool:
    """Whether an interpreter is of this version and can make virtual environments."""
    code = "import ensurepip, ssl, sys; print('%d.%d' % sys.version_info[:2])"
    try:
        done = subprocess.run([interpreter, "-c", code], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0 and done.stdout.strip() == version


def find_python(version: str) -> str:
    for interpreter in candidates(version):
        if runs(interpreter, version):
            return interpreter
    return sys.executable


if __name__ == "__main__":
    print(find_python(sys.argv[1]))
