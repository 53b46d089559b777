"""A program that builds the stand-in library, and can kill itself at a given moment.

    python stand_in_build.py CSRC [--die-at N]

It prints every event of the build. With --die-at the process kills itself with SIGKILL just before
its N-th operation on the file system or on another process, as Python's audit hooks count them. If
there are fewer than N, it prints how many there were.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from stand_in_sources import CONFIGS

from flashsmith.builder import BuildEvent
from flashsmith.builder.library_build import build_from

_WATCHED = (
    "open",
    "os.",
    "shutil.",
    "subprocess.",
    "tempfile.",
    "fcntl.",
)


class Fate:
    """Counts what the process does, and ends it at its hour."""

    def __init__(self, die_at: int) -> None:
        self.die_at = die_at
        self.count = 0

    def __call__(self, event: str, arguments: tuple[object, ...]) -> None:
        if event.startswith(_WATCHED):
            self.count += 1
            if self.count == self.die_at:
                os.kill(os.getpid(), signal.SIGKILL)


def say(event: BuildEvent) -> None:
    print(event.stage, event.done, event.total, event.message, flush=True)


def main() -> None:
    csrc = Path(sys.argv[1])
    if "--die-at" in sys.argv:
        fate = Fate(int(sys.argv[sys.argv.index("--die-at") + 1]))
        sys.addaudithook(fate)
        library = build_from(csrc, CONFIGS, jobs=1)
        print(fate.count)
    else:
        library = build_from(csrc, CONFIGS, jobs=1, progress=say)
    print(library.path)


if __name__ == "__main__":
    main()
