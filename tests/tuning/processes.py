"""Looking at processes from outside: whose children there are, and whether they are gone."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from pathlib import Path


def with_path() -> dict[str, str]:
    """The environment of a program that imports what this one can."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def child_pids(parent: int) -> list[int]:
    """The processes whose parent it is."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                if int(fields[1]) == parent:
                    found.append(int(folder.name))
    return found


def alive(pid: int) -> bool:
    """Whether it still runs; a zombie does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def wait_until_gone(pids: list[int], seconds: float = 15.0) -> None:
    """Fails the test when one of them is still there in the end."""
    deadline = time.monotonic() + seconds
    while any(map(alive, pids)):
        assert time.monotonic() < deadline, f"still there: {list(filter(alive, pids))}"
        time.sleep(0.02)
