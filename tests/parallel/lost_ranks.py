"""Pairs of processes of which one is lost, for test_lost.py, which checks what the other does.

    python lost_ranks.py FOLDER CASES.json

All cases run at the same time. Each process is forked from this one, which has imported everything
but has created no group. Standard error goes to FOLDER/CASE-RANK.err, and the error that rank 0
raised to FOLDER/CASE.said. The exit statuses by case are printed as JSON.
"""

from __future__ import annotations

import ctypes
import datetime
import itertools
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from flashsmith import parallel
from flashsmith.errors import GroupError
from flashsmith.parallel import watch as module

# Calls after which rank 1 is lost, and seconds after which rank 0 hangs.
CALLS, LIMIT = 3, 60.0
libc = ctypes.CDLL(None)


class Planted(Exception):
    """What a rank's own code raises."""


class UnreachedMarks:
    """A GPU that gets nowhere any more; asked, it may not answer either."""

    answers = True

    def __init__(self, device: Any) -> None: ...

    def set(self, stream: Any) -> None: ...

    def reached(self) -> bool:
        if not self.answers:
            wait_for_ever()
        return False


class ReachedMarks(UnreachedMarks):
    """A GPU that has completed what it was asked."""

    def reached(self) -> bool:
        return True


def wait_for_ever() -> None:
    """As in a call of CUDA: the interpreter's lock is free, and no exception gets in."""
    while True:
        libc.pause()


def get_lost(how: str) -> None:
    """What becomes of rank 1 between two calls."""
    if how in ("killed", "stopped"):
        os.kill(os.getpid(), signal.SIGKILL if how == "killed" else signal.SIGSTOP)
    elif how == "ended":
        os._exit(0)
    elif how == "silent":
        time.sleep(10 * LIMIT)
    else:
        raise Planted(how)


def rank_of(case: dict[str, Any], rank: int, folder: Path) -> NoReturn:
    name, how, stuck = case["name"], case["how"], case.get("stuck", "")
    if stuck:
        module.MARKS["cpu"] = ReachedMarks if stuck == "elsewhere" else UnreachedMarks
        UnreachedMarks.answers = stuck != "asking"
    if stuck == "exit" and rank == 0:
        # As a library's own end, after Python's.
        libc.__cxa_atexit(libc.pause, None, None)
        # An interpreter that ends has no such thread.
        module.Watch.reason = lambda self, seconds: ""  # type: ignore[method-assign]
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(folder / f"{name}.store"), 2),
        rank=rank,
        world_size=2,
        timeout=datetime.timedelta(seconds=case["timeout"]),
    )
    try:
        for number in itertools.count():
            if number == CALLS and rank:
                get_lost(how)
            if number == CALLS and stuck in ("synchronize", "asking"):
                wait_for_ever()
            if number == CALLS and stuck == "elsewhere":
                # As in a collective of the caller's, longer than the watch would wait.
                time.sleep(case["timeout"] + module.Watch.GRACE + 2)
                os._exit(0)
            parallel.unshard(torch.zeros(1, 4))
    except GroupError as error:
        (folder / f"{name}.said").write_text(f"{type(error).__name__}: {error}")
        if stuck == "exit":
            raise
    os._exit(0)


def forked(case: dict[str, Any], rank: int, folder: Path) -> int:
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    err = os.open(folder / f"{case['name']}-{rank}.err", os.O_WRONLY | os.O_CREAT)
    os.dup2(err, 2)
    try:
        rank_of(case, rank, folder)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        if case.get("stuck") == "exit" and rank == 0:
            sys.exit(1)  # as an interpreter ends
        os._exit(1)


def main() -> None:
    folder, cases = Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text())
    torch.set_num_threads(1)
    pids = {case["name"]: [forked(case, rank, folder) for rank in range(2)] for case in cases}
    statuses: dict[str, int] = {}
    begin = time.monotonic()
    while len(statuses) < len(pids) and time.monotonic() - begin < LIMIT:
        time.sleep(0.1)
        for name, (zero, _) in pids.items():
            # Rank 1's end is left to be asked for: its parent may not look.
            if name not in statuses and (found := os.waitpid(zero, os.WNOHANG))[0]:
                statuses[name] = os.waitstatus_to_exitcode(found[1])
    for name, (zero, one) in pids.items():
        for pid in (one, *([] if name in statuses else [zero])):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    print(json.dumps(statuses))


if __name__ == "__main__":
    main()
