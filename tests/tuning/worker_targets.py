"""What worker processes are asked to do in tests; they import this file."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path


@dataclass
class Target:
    """A target whose methods end well or badly."""

    opens: str = "well"

    def open(self) -> None:
        if self.opens == "raises":
            raise RuntimeError("there is no such device")
        if self.opens == "dies":
            os._exit(3)
        if self.opens == "hangs":
            time.sleep(3600)

    def add(self, a: int, b: int) -> int:
        return a + b

    def pid(self) -> int:
        return os.getpid()

    def sleep(self, seconds: float) -> str:
        time.sleep(seconds)
        return "slept"

    def abort(self) -> None:
        print("the last words", flush=True)
        os.abort()

    def leave(self) -> None:
        os._exit(7)

    def fail(self) -> None:
        raise ValueError("not like this")

    def compile_for_long(self, note: str) -> None:
        """As a compilation does: a child in a session of its own, ended on the way out."""
        child = subprocess.Popen(
            [sys.executable, "-c", "import time; time.sleep(3600)"], start_new_session=True
        )
        try:
            Path(note).write_text(f"{os.getpid()} {child.pid}")
            child.wait()
        finally:
            child.kill()
            child.wait()
